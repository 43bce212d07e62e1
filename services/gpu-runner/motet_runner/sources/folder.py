"""Adapters in folders: of this machine, or of a volume that tenants write to, where no link may lead out."""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from motet.errors import AdapterFetchFailed
from motet_runner.sources.failures import forbidden, missing, too_large
from motet_runner.sources.files import CONFIG, PICKLES, SMALL, WEIGHTS, not_there

Signature = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Confines:
    """Where folders may lie: below a volume of `volumes`, each by itself. None: anywhere on this machine."""

    volumes: Path | None = None

    def root_of(self, path: Path) -> Path | None:
        """The volume that a path lies on."""
        if self.volumes is None:
            return None
        try:
            inside = path.relative_to(self.volumes)
        except ValueError:
            inside = Path()
        if not inside.parts or ".." in path.parts:
            raise forbidden(
                f"{path} lies on no volume of this pool: name a claim of its adapterVolumes in "
                "source.persistentVolumeClaim."
            )
        return self.volumes / inside.parts[0]


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    path: Path
    root: Path | None = None
    """What it may not lead out of."""

    def open(self, name: str) -> int:
        """A file of it, for reading, as a descriptor. What was opened is what is looked at: no link can be swapped."""
        file = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if self.root is not None:
                real = Path(f"/proc/self/fd/{file}").readlink()
                if not real.is_relative_to(self.root.resolve()):
                    raise forbidden(f"{self.path / name} is a link that leads out of its volume.")
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise forbidden(f"{self.path / name} is not a file.")
        except BaseException:
            os.close(file)
            raise
        return file

    def look(self, max_bytes: int) -> Signature:
        """What its files look like from outside; raises AdapterFetchFailed if they cannot be an adapter."""
        if self.root is not None and not self.path.resolve().is_relative_to(self.root.resolve()):
            raise forbidden(f"{self.path} is a link that leads out of its volume.")  # whether there is anything or not
        if not self.path.is_dir():
            raise missing(f"there is no folder {self.path}.")
        entries = []
        for name, limit in ((CONFIG, SMALL), (WEIGHTS, max_bytes)):
            path = self.path / name
            try:
                file = self.open(name)
            except FileNotFoundError:
                raise self._lacks(name) from None
            except OSError as error:
                raise self._unreadable(path, error) from error
            try:
                status = os.fstat(file)
            finally:
                os.close(file)
            if status.st_size > limit:
                raise too_large(f"{path} is {status.st_size} bytes; at most {limit} are read.")
            entries.append((status.st_ino, status.st_mtime_ns, status.st_size, status.st_ctime_ns))
        return tuple(entries)

    def _lacks(self, name: str) -> AdapterFetchFailed:
        try:
            others = [path.name for path in self.path.iterdir() if path.suffix in PICKLES]
        except OSError:
            others = []
        return not_there(str(self.path), name, others)

    @staticmethod
    def _unreadable(path: Path, error: OSError) -> AdapterFetchFailed:
        if error.errno == errno.ELOOP:
            return forbidden(f"{path} is a link that leads to itself.")
        return missing(f"{path} cannot be read: {error.strerror}.")


def adapter_folder(path: Path, confines: Confines, revision: str = "") -> AdapterFolder:
    """The folder with the files: the one named, or the snapshot inside a hub's own layout (models--org--name)."""
    root = confines.root_of(path)
    if (path / CONFIG).exists():
        return AdapterFolder(path, root)
    return AdapterFolder(snapshot_in(path, revision, root) or path, root)


def snapshot_in(path: Path, revision: str, root: Path | None = None) -> Path | None:
    """Where a hub's own layout has a revision; None for a folder of another kind."""
    snapshots = path / "snapshots"
    if not snapshots.is_dir():
        return None
    wanted = revision or "main"
    if ".." in Path(wanted).parts:
        raise forbidden(f"the revision {revision!r} is no branch, tag or commit.")
    if (snapshots / wanted).is_dir():
        return snapshots / wanted
    try:
        with os.fdopen(AdapterFolder(path / "refs", root).open(wanted), "rb") as ref:
            return snapshots / Path(ref.read(100).decode().strip()).name
    except (OSError, UnicodeDecodeError):
        raise missing(f"{path} has no snapshot of the revision {wanted}.") from None
