"""Adapters in folders: of this machine, or of a volume that tenants write to, where no link may lead out."""

import errno
import os
import stat
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import forbidden, missing, too_large
from motet_runner.sources.file_selection import CONFIG, PICKLES, not_there, of_adapter

LOOKED_AT = 1000
"""Files of a folder that lacks one, for a hint."""

Signature = tuple["FileStat", ...]


class FileStat(NamedTuple):
    """A file from outside."""

    name: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class VolumeBounds:
    """Where folders may lie: below a volume of `volumes`, each by itself. None: anywhere on this machine."""

    volumes: Path | None = None

    def of(self, path: Path, volume: Path | None = None, folder: str = "") -> "FolderBounds | None":
        """What holds for a path: it lies on a volume, and there in this folder, if one is named."""
        if self.volumes is None and volume is None:
            return None
        for outer in (self.volumes, volume):
            if outer is not None and (".." in path.parts or path == outer or not path.is_relative_to(outer)):
                raise forbidden(
                    f"{path} lies on no volume of this pool: name a claim of its adapterVolumes in "
                    "source.persistentVolumeClaim."
                )
        if volume is None:
            assert self.volumes is not None
            volume = self.volumes / path.relative_to(self.volumes).parts[0]
        if not folder:
            return FolderBounds(volume.resolve(), "its volume")
        bounds = FolderBounds(volume.resolve() / folder, f"the folder {folder} of its volume")
        if {"..", "/"} & {*Path(folder).parts} or not path.is_relative_to(volume / folder):
            raise forbidden(f"{path} lies outside of {bounds.name}.")
        return bounds


@dataclass(frozen=True, slots=True)
class FolderBounds:
    """What a folder may not lead out of."""

    root: Path
    """As it really is up to the volume, which the platform has put there. Below that as it is named: tenants write
    there, and whoever makes a link of it must not move the bounds."""

    name: str

    def check(self, what: Path, real: Path) -> None:
        if not real.is_relative_to(self.root):
            raise forbidden(f"{what} is a link that leads out of {self.name}.")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    path: Path
    bounds: FolderBounds | None = None

    def open(self, name: str) -> int:
        """A file of it, for reading, as a descriptor. What was opened is what is looked at: no link can be swapped."""
        try:
            file = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except FileNotFoundError:
            self._check(self.path / name, (self.path / name).resolve())  # whether there is anything outside is not told
            raise
        try:
            self._check(self.path / name, Path(f"/proc/self/fd/{file}").readlink())
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise forbidden(f"{self.path / name} is not a file.")
        except BaseException:
            os.close(file)
            raise
        return file

    def _check(self, what: Path, real: Path) -> None:
        if self.bounds is not None:
            self.bounds.check(what, real)

    def stat_files(self, max_bytes: int) -> Signature:
        """What its files look like from outside; raises AdapterFetchFailed if they cannot be an adapter."""
        self._check(self.path, self.path.resolve())  # whether there is anything or not
        if not self.path.is_dir():
            raise missing(f"there is no folder {self.path}.")
        entries = []
        for wanted in of_adapter(max_bytes):
            path = self.path / wanted.name
            try:
                file = self.open(wanted.name)
            except FileNotFoundError:
                if not wanted.required:
                    continue
                raise self._lacks(wanted.name) from None
            except OSError as error:
                raise self._unreadable(path, error) from error
            try:
                status = os.fstat(file)
            finally:
                os.close(file)
            if status.st_size > wanted.limit:
                raise too_large(f"{path} is {status.st_size} bytes; at most {wanted.limit} are read.")
            entries.append(FileStat(wanted.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
        return tuple(entries)

    def _lacks(self, name: str) -> AdapterFetchFailed:
        try:
            others = [path.name for path in islice(self.path.iterdir(), LOOKED_AT) if path.suffix in PICKLES]
        except OSError:
            others = []
        return not_there(str(self.path), name, others)

    @staticmethod
    def _unreadable(path: Path, error: OSError) -> AdapterFetchFailed:
        if error.errno == errno.ELOOP:
            return forbidden(f"{path} is a link that leads to itself.")
        return missing(f"{path} cannot be read: {error.strerror}.")


def adapter_folder(path: Path, bounds: FolderBounds | None, revision: str = "") -> AdapterFolder:
    """The folder with the files: the one named, or the snapshot inside a hub's own layout (models--org--name)."""
    if bounds is not None:
        bounds.check(path, path.resolve())
    if (path / CONFIG).exists():
        return AdapterFolder(path, bounds)
    return AdapterFolder(snapshot_in(path, revision, bounds) or path, bounds)


def snapshot_in(path: Path, revision: str, bounds: FolderBounds | None = None) -> Path | None:
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
        with os.fdopen(AdapterFolder(path / "refs", bounds).open(wanted), "rb") as ref:
            return snapshots / Path(ref.read(100).decode().strip()).name
    except (OSError, UnicodeDecodeError):
        raise missing(f"{path} has no snapshot of the revision {wanted}.") from None
