"""What the policy knows about orders, waiting requests and cached folders."""

import re
from dataclasses import dataclass
from pathlib import Path

from motet.api.v1 import common_pb2
from motet.domain import Digest
from motet.sources import FOLDER, REGISTRY
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.digest_lease import DigestLease

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """An adapter that is to be fetched."""

    source: str
    revision: str = ""
    expected: str = ""
    credentials: str = ""
    """namespace/name of the Secret that opens the source."""

    namespace: str = ""
    """The namespace of the adapter."""

    volume: str = ""
    """URI of the volume that the source is on. Empty: the source is on no volume."""

    folder: str = ""
    """A folder of the volume: nothing outside of the folder is read. Empty: the whole volume may be read."""

    max_bytes: int = 0
    digest_verified: bool = True
    """True if the source is known to have the expected digest, so that cached files with this digest may be used."""

    @property
    def origin(self) -> tuple[str, ...]:
        """The source, its owner, and how it is opened: another origin is another fetch."""
        return (self.namespace, self.source, self.revision, self.credentials, *self._bounds)

    @property
    def place(self) -> tuple[str, ...]:
        """The source and its owner. Whoever has read files there may use them again by their digest, also when another
        revision is named now, or another Secret."""
        return (self.namespace, self.source, *self._bounds)

    @property
    def _bounds(self) -> tuple[str, ...]:
        return (self.folder,) if self.folder else ()  # within other bounds nothing has been read

    @property
    def key(self) -> tuple[object, ...]:
        """Orders with an equal key share one fetch."""
        return (self.origin, self.expected, self.max_bytes)

    @property
    def names_bytes(self) -> bool:
        """Whether the source has these bytes at all times: a digest is expected, or one commit or image is named."""
        is_image = self.source.startswith(REGISTRY.prefix) and "@sha256:" in self.source
        return bool(self.expected) or is_image or _COMMIT.fullmatch(self.revision) is not None

    @property
    def is_folder(self) -> bool:
        return self.source.startswith(f"{FOLDER.scheme}:")


@dataclass(frozen=True, slots=True)
class Order:
    """The scheduler wants an adapter for a manifest, fetched from the manifest's own source."""

    number: int
    ref: common_pb2.AdapterRef
    fetch: FetchRequest
    check: bool = True
    load: bool = False
    requires_record: bool = False
    """Refuse an adapter without recorded answers."""
    refuses_mismatch: bool = False
    """Refuse an adapter whose recorded answers are those of another model; else it is only warned about."""
    proved_builds: tuple[str, ...] = ()
    """That have proved these bytes: by `build_with`"""
    cached_only: bool = False
    """Only if the files are in the disk cache: another runner has asked their source in vain."""

    @property
    def manifest(self) -> str:
        return f"{self.ref.namespace}/{self.ref.name}"


@dataclass(frozen=True, slots=True)
class Held:
    """A folder of the disk cache with its lease: no process evicts it before the lease is released."""

    digest: Digest
    bytes: int
    inode: tuple[int, ...]
    """A later folder at the same place has another one."""

    lease: DigestLease
    """For the code that carries effects out."""

    certification: Certification | None = None
    """The check's result, if it still holds for these files, this base model and this engine."""

    stamp: object = None
    """The sizes, times and inodes of the source's files when the files were copied."""

    @property
    def folder(self) -> Path:
        return self.lease.folder


@dataclass(frozen=True, slots=True)
class Cached:
    """An adapter in the disk cache."""

    digest: Digest
    bytes: int = 0
    slabs: int = 0
    """How many of these bytes are slabs, which leave first."""


@dataclass(frozen=True, slots=True)
class CacheContents:
    by_last_use: tuple[Cached, ...] = ()
    """The adapters. The least recently used one comes first. None if there are neither too many nor too many bytes."""

    unfinished: int = 0
    """The bytes of other runners' fetches that run, and of adapters that are not listed."""

    partial: int = 0
    """The bytes of interrupted fetches, which leave after slabs."""

    wished: int = 0
    """The bytes for which other runners ask."""

    @property
    def bytes(self) -> int:
        return self.unfinished + self.partial + sum(one.bytes for one in self.by_last_use)
