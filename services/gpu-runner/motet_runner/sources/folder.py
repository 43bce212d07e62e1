"""Adapters in folders of this machine, or of a volume that tenants write to. No link may lead out of a volume."""

import errno
import os
import stat
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from motet.errors import AdapterFetchFailed
from motet.sources import folder_of
from motet_runner.sources.fetch_errors import forbidden, missing, too_large
from motet_runner.sources.file_selection import CONFIG, PICKLES, missing_file, of_adapter

MAX_ENTRIES_READ = 1000
"""How many entries of a folder are read to find a hint, if a required file is missing."""

Signature = tuple["FileStat", ...]


@dataclass(frozen=True, slots=True)
class FolderUri:
    """A folder of this machine, or of a volume that is mounted there."""

    path: Path


def parse(uri: str, _: str) -> FolderUri:
    path = folder_of(uri)
    if path is None:
        raise AdapterFetchFailed(f"{uri} is not a folder of this machine. Write file:///absolute/path.")
    return FolderUri(path)


class FileStat(NamedTuple):
    """What is known about a file without reading it."""

    name: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, name: str, file: int) -> "FileStat":
        """The FileStat of an open file."""
        status = os.fstat(file)
        return cls(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class VolumeBounds:
    """Where folders may be. Each subfolder of `volumes` is one volume; None: anywhere on this machine."""

    volumes: Path | None = None

    def of(self, path: Path, volume: Path | None = None, folder: str = "") -> "FolderBounds | None":
        """The bounds of a path: its volume, or `folder` in that volume. Raises AdapterFetchFailed for a path
        outside."""
        if self.volumes is None and volume is None:
            return None
        for outer in (self.volumes, volume):
            if outer is not None and (".." in path.parts or path == outer or not path.is_relative_to(outer)):
                raise forbidden(
                    f"{path} is not on a volume of this pool. Name a claim of the pool's adapterVolumes in "
                    "source.persistentVolumeClaim."
                )
        volume = self.volume_of(path, volume)
        assert volume is not None
        if not folder:
            return FolderBounds(volume.resolve(), "its volume")
        bounds = FolderBounds(volume.resolve() / folder, f"the folder {folder} of its volume")
        if {"..", "/"} & {*Path(folder).parts} or not path.is_relative_to(volume / folder):
            raise forbidden(f"{path} is outside of {bounds.name}. Name a folder inside it.")
        return bounds

    def volume_of(self, path: Path, volume: Path | None = None) -> Path | None:
        """Where the volume of a path is mounted. None: the path is not known to be on a volume."""
        if volume is not None or self.volumes is None or not path.is_relative_to(self.volumes):
            return volume
        return self.volumes / Path(*path.relative_to(self.volumes).parts[:1])


@dataclass(frozen=True, slots=True)
class FolderBounds:
    """The folder that links must not lead out of."""

    root: Path
    """In the path of the volume, which the platform has mounted, links are resolved. Below the volume they are not:
    tenants write there, and their links must not change the bounds."""

    name: str

    def check(self, what: Path, real: Path) -> None:
        if not real.is_relative_to(self.root):
            raise forbidden(f"{what} is a link that leads out of {self.name}. Copy the files there instead.")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    path: Path
    bounds: FolderBounds | None = None

    def open(self, name: str) -> int:
        """Open a file of the folder for reading. The bounds are checked on the open file, so that no link can change
        between the check and the use."""
        path = f"{self.path}/{name}"  # a Path takes longer than to open the file
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except FileNotFoundError:
            if self.bounds is not None:  # so that no error reveals what exists outside
                self.bounds.check(Path(path), _real(Path(path)))
            raise
        try:
            if self.bounds is not None:
                self.bounds.check(Path(path), Path(f"/proc/self/fd/{file}").readlink())
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise forbidden(f"{path} is not a regular file. Replace it with one.")
        except BaseException:
            os.close(file)
            raise
        return file

    def stat_files(self, max_bytes: int) -> Signature:
        """Size, times and inode of each file. Raises AdapterFetchFailed if the files cannot be those of an adapter."""
        if self.bounds is not None:  # first, so that no error reveals what exists outside
            self.bounds.check(self.path, _real(self.path))
        try:
            found = self.path.is_dir()
        except OSError as error:
            raise self.unreadable(self.path, error) from error
        if not found:
            raise missing(f"There is no folder {self.path}. Correct the source.")
        entries = []
        for wanted in of_adapter(max_bytes):
            path = f"{self.path}/{wanted.name}"
            try:
                file = self.open(wanted.name)
            except FileNotFoundError:
                if not wanted.required:
                    continue
                raise self._missing(wanted.name) from None
            except OSError as error:
                raise self.unreadable(path, error) from error
            try:
                status = FileStat.of(wanted.name, file)
            finally:
                os.close(file)
            if status.size > wanted.limit:
                raise too_large(f"{path} has {status.size} bytes, but Motet reads at most {wanted.limit}.")
            entries.append(status)
        return tuple(entries)

    def _missing(self, name: str) -> AdapterFetchFailed:
        try:
            others = [path.name for path in islice(self.path.iterdir(), MAX_ENTRIES_READ) if path.suffix in PICKLES]
        except OSError:
            others = []
        return missing_file(str(self.path), name, others)

    @staticmethod
    def unreadable(path: Path | str, error: OSError) -> AdapterFetchFailed:
        if error.errno == errno.ELOOP:
            return forbidden(f"{path} is a link that leads to itself. Replace it with the file.")
        return missing(f"{path} can't be read: {error.strerror}.")


def adapter_folder(path: Path, bounds: FolderBounds | None, revision: str = "") -> AdapterFolder:
    """The folder with the files: `path`, or a snapshot in `path` if that is a hub's cache folder
    (models--org--name)."""
    if bounds is not None:
        bounds.check(path, _real(path))
    try:
        found = None if (path / CONFIG).exists() else snapshot_in(path, revision, bounds)
    except OSError as error:
        raise AdapterFolder.unreadable(path, error) from error
    return AdapterFolder(found or path, bounds)


def snapshot_in(path: Path, revision: str, bounds: FolderBounds | None = None) -> Path | None:
    """The snapshot of a revision in a hub's cache folder. None if `path` isn't such a folder."""
    snapshots, wanted = path / "snapshots", revision or "main"
    if bounds is not None:  # first, so that no error reveals what exists outside
        bounds.check(snapshots, _real(snapshots))
    if not snapshots.is_dir():
        return None
    if ".." in Path(wanted).parts:
        raise forbidden(f"The revision {revision!r} is not a branch, tag or commit. Correct source.revision.")
    if bounds is not None:
        bounds.check(snapshots / wanted, _real(snapshots / wanted))
    if (snapshots / wanted).is_dir():
        return snapshots / wanted
    try:
        with os.fdopen(AdapterFolder(path / "refs", bounds).open(wanted), "rb") as ref:
            return snapshots / Path(ref.read(100).decode().strip()).name
    except (OSError, UnicodeDecodeError):
        raise missing(f"{path} has no snapshot of the revision {wanted}. Correct the revision.") from None


def _real(path: Path) -> Path:
    """Where it leads. `Path.resolve` raises RuntimeError for a link that leads to itself."""
    return Path(os.path.realpath(path))
