"""The objects of the manifest folder, and stamps of the adapter folders that they name.

An error never removes a valid object: a file that can no longer be read keeps its last valid objects.
"""

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from motet.processes.records import write_atomically
from motet.resources import (
    AdapterSource,
    LoRAAdapter,
    Manifest,
    ManifestPosition,
    Namespace,
    Problem,
    Secret,
    ServingPool,
    files_of,
    forbidden_changes,
)
from motet.resources.validation import read_file
from motet.sources import CLAIM, FOLDER

ObjectKey = tuple[str, str]

MISSING = "missing"
NEW_NS = 3_000_000_000
"""A file that changed less than this time ago is read again at the next look: the longest step of a clock is 2 s."""


@dataclass(frozen=True, slots=True)
class DeclaredObjects:
    """All objects that are declared now."""

    pools: tuple[Manifest, ...] = ()
    adapters: tuple[Manifest, ...] = ()
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kept:
    """An accepted object on disk. Without Secrets: they stay where their owner keeps them."""

    file: str
    line: int
    column: int
    resource: Annotated[LoRAAdapter | ServingPool | Namespace, Field(discriminator="kind")]


class _Stamp(NamedTuple):
    """Another one if the file has changed"""

    size: int
    inode: int
    modified_ns: int
    changed_ns: int
    """Also at a change of permissions"""

    @classmethod
    def of(cls, file: Path) -> "_Stamp | None":
        """None if it can't be known, or if the file may change again without another stamp: clocks of file systems make
        steps. To be taken before the file is read"""
        with suppress(OSError):
            now, status = time.time_ns(), file.stat()
            if now - max(status.st_mtime_ns, status.st_ctime_ns) >= NEW_NS:
                return cls(status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        return None


_KEPT = TypeAdapter(tuple[_Kept, ...])


class ManifestFolder:
    """Remembers the last valid version of each file, also for the next operator."""

    def __init__(self, path: Path, kept: Path) -> None:
        self.path = path
        self._kept = kept
        self._good: dict[Path, tuple[Manifest, ...]] = {}
        self._seen: dict[Path, _Stamp] = {}
        """Of the files in `_good` that are not to be read again: there may be thousands, and one changes"""
        self._accepted: dict[ObjectKey, Manifest] = {}

    def recall(self) -> DeclaredObjects:
        """Go on from what the last operator accepted of this folder."""
        self._good, self._seen, self._accepted = {}, {}, {}
        with suppress(OSError, ValidationError):
            for one in _KEPT.validate_json(self._kept.read_bytes()):
                file = Path(one.file)
                if self.path in (file, file.parent):
                    manifest = Manifest(one.resource, ManifestPosition(one.file, one.line, one.column))
                    self._accepted[manifest.key] = manifest
                    self._good[file] = (*self._good.get(file, ()), manifest)
        return _without_conflicts(self._accepted.values(), ())

    def _keep(self) -> None:
        kept = tuple(
            _Kept(one.place.file, one.place.line, one.place.column, one.resource)
            for one in self._accepted.values()
            if not isinstance(one.resource, Secret)
        )
        with suppress(OSError, ValueError):  # the disk is full, say: the next operator has what was accepted before
            write_atomically(self._kept, _KEPT.dump_json(kept, by_alias=True, exclude_none=True))

    def read(self) -> DeclaredObjects:
        found = self.look()
        self._keep()
        return found

    def look(self) -> DeclaredObjects:
        """As `read`, but keeps nothing for the next operator."""
        problems: list[Problem] = []
        try:
            files = files_of(self.path)
        except OSError as error:
            problems.append(Problem(ManifestPosition(str(self.path), 1, 1), f"cannot be read: {error.strerror}"))
            files = list(self._good)
        else:
            good: dict[Path, tuple[Manifest, ...]] = {}
            seen: dict[Path, _Stamp] = {}
            for path in files:
                known, stamp = self._good.get(path), _Stamp.of(path)
                if known is None or stamp is None or stamp != self._seen.get(path):
                    reading = read_file(path)
                    problems += reading.problems
                    if reading.problems:
                        stamp = None
                    else:
                        known = _with_known(known or (), reading.manifests)
                if known is not None:
                    good[path] = known
                if stamp is not None:
                    seen[path] = stamp
            self._good, self._seen = good, seen
        self._accepted = self._merge(files, problems)
        return _without_conflicts(self._accepted.values(), problems)

    def _merge(self, files: Iterable[Path], problems: list[Problem]) -> dict[ObjectKey, Manifest]:
        accepted: dict[ObjectKey, Manifest] = {}
        for path in files:
            for manifest in self._good.get(path, ()):
                kind, name = manifest.key
                first = accepted.setdefault(manifest.key, manifest)
                if first is not manifest:
                    problems.append(
                        Problem(
                            manifest.place,
                            f"is declared twice: first at {first.place}; remove one",
                            "",
                            f"{kind} {name}",
                        )
                    )
                    continue
                before = self._accepted.get(manifest.key)
                broken = forbidden_changes(before.resource, manifest.resource) if before is not None else []
                if before is not None and broken:
                    problems += [
                        Problem(manifest.place_of(path_), sentence, ".".join(path_), f"{kind} {name}")
                        for path_, sentence in broken
                    ]
                    accepted[manifest.key] = before
        return accepted


def _with_known(known: Iterable[Manifest], manifests: Iterable[Manifest]) -> tuple[Manifest, ...]:
    """What is declared as before stays the same object: rounds judge only what has changed."""
    before = {manifest.key: manifest.resource for manifest in known}
    return tuple(
        replace(one, resource=resource) if (resource := before.get(one.key)) == one.resource else one
        for one in manifests
    )


def _without_conflicts(manifests: Iterable[Manifest], problems: Iterable[Problem]) -> DeclaredObjects:
    pools, adapters = [], []
    namespaces: dict[str, Mapping[str, str]] = {}
    for manifest in manifests:
        match manifest.resource:
            case ServingPool():
                pools.append(manifest)
            case LoRAAdapter():
                adapters.append(manifest)
            case Namespace(metadata=metadata):
                namespaces[metadata.name] = metadata.labels
            case _:
                pass  # a Secret: only the fetch process reads it
    return DeclaredObjects(tuple(pools), tuple(adapters), namespaces, tuple(problems))


def absolute_uri(uri: str, *, manifest: str) -> str:
    """`file://` with a relative path starts at the manifest's folder; `file:///` is absolute. `pvc://` is a folder
    beside the manifest. Other URIs stay as they are."""
    if uri.startswith(FOLDER.prefix):
        return (Path(manifest).parent.absolute() / uri.removeprefix(FOLDER.prefix)).as_uri()
    if uri.startswith(CLAIM.prefix):
        return volume_folder(uri.removeprefix(CLAIM.prefix), manifest=manifest).as_uri()
    return uri


def volume_folder(path: str, *, manifest: str) -> Path:
    """The folder that replaces a claim's volume without a cluster: `volumes/CLAIM` beside the manifest."""
    return Path(manifest).parent.absolute() / "volumes" / path


def source_of(source: AdapterSource, *, manifest: str, sub_path: str | None = None) -> tuple[str, str]:
    """The adapter's source and its volume, as absolute URIs; the volume is empty if there is none."""
    claim = source.persistent_volume_claim
    if claim is not None:
        volume = volume_folder("/".join(filter(None, (claim.claim_name, sub_path))), manifest=manifest)
        return (volume / claim.path).as_uri(), volume.as_uri()
    assert source.address is not None
    return absolute_uri(source.address, manifest=manifest), ""


def stamp_of(folder: Path, counts: Callable[[str], bool] = lambda _: True) -> str:
    """A hash of names, sizes, times and inodes of the folder's files whose name counts. It changes when one does."""
    try:
        with os.scandir(folder) as entries:
            lines = sorted(_describe(entry) for entry in entries if counts(entry.name) and entry.is_file())
    except OSError:
        return MISSING
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def _describe(entry: "os.DirEntry[str]") -> str:
    found = entry.stat()
    return f"{entry.name} {found.st_size} {found.st_mtime_ns} {found.st_ino}"


MAX_WAIT = 100
"""How many times as long as a change has to rest one waits that never does."""


class Debouncer:
    """Passes a changed value on once it has stayed the same for a while, or has changed for long. The first value
    passes at once."""

    def __init__(self, quiet_seconds: float) -> None:
        self._quiet = quiet_seconds
        self._value: dict[object, str] = {}
        self._coming: dict[object, tuple[str, float, float]] = {}
        """Each with the times since when it is the same, and since when it is not the value that was passed on."""

    def __call__(self, key: object, value: str, now: float) -> str:
        settled = self._value.setdefault(key, value)
        if value == settled:
            self._coming.pop(key, None)
            return settled
        coming, rests_since, since = self._coming.get(key, (value, now, now))
        if coming != value:
            rests_since = now
        if now - rests_since < self._quiet and now - since < MAX_WAIT * self._quiet:
            self._coming[key] = (value, rests_since, since)
            return settled
        self._coming.pop(key, None)
        self._value[key] = value
        return value

    def next_look(self, poll_seconds: float, without: Collection[object] = ()) -> float:
        """In how many seconds to look again: soon while a change has to rest. `without`: for changes of these, a look
        is under way."""
        return self._quiet / 3 if any(key not in without for key in self._coming) else poll_seconds

    def forget(self, keep: Collection[object]) -> None:
        for key in self._value.keys() - set(keep):
            del self._value[key]
            self._coming.pop(key, None)
