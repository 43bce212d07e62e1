"""What is sent: the files of an adapter, with the sums by which stores and registries know them."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from motet.digest import CHUNK_BYTES, ContentDigest
from motet.domain import Digest
from motet.errors import SetupError
from motet_runner.sources.file_selection import CONFIG
from motet_runner.sources.folder import AdapterFolder, adapter_folder


@dataclass(frozen=True, slots=True)
class Blob:
    name: str
    size: int
    sha256: str
    """Its hex digits"""
    chunks: Callable[[], Iterable[bytes]]
    """Reads it once more from its start."""

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}"


def blob_of(name: str, body: bytes) -> Blob:
    return Blob(name, len(body), hashlib.sha256(body).hexdigest(), lambda: [body])


def blobs_of(path: Path, digest: Digest, max_bytes: int) -> list[Blob]:
    """The files that the digest covers. The configuration is last: without it nothing is an adapter. Raises SetupError
    if the folder no longer has these files."""
    folder = adapter_folder(path, None)
    content = ContentDigest()
    blobs = []
    for found in sorted(folder.stat_files(max_bytes)):
        own = hashlib.sha256()
        content.begin(found.name, found.size)
        for chunk in _chunks(folder, found.name, found.size):
            own.update(chunk)
            content.update(chunk)
        blobs.append(Blob(found.name, found.size, own.hexdigest(), partial(_chunks, folder, found.name, found.size)))
    if content.digest() != digest:
        raise changed(path)
    return sorted(blobs, key=lambda blob: blob.name == CONFIG)


def changed(path: Path | str) -> SetupError:
    return SetupError(f"{path} changes while it is pushed. Push it again once it is saved.")


def _chunks(folder: AdapterFolder, name: str, size: int) -> Iterator[bytes]:
    """Raises SetupError if the file has another size."""
    left = size
    with os.fdopen(folder.open(name), "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                break
            yield chunk
    if left:
        raise changed(folder.path)
