"""Takes the one file out of a layer that is a tar, as in a ModelPack: in place, so that both never lie on the disk.
Links and other names are refused."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

MAX_HEADER_BYTES = 64 << 10
"""The most bytes that are read at a time to find the file."""

MAX_ENTRIES = 16

_CHUNK_BYTES = 1 << 20


class NotOneFile(Exception):
    """Says what is wrong, as the end of a sentence about the layer."""


class _Headers(io.FileIO):
    """A header may claim that gigabytes of names follow, which would be read at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_HEADER_BYTES:
            raise NotOneFile("has a header that is too long")
        return super().read(size)


def unpack(path: Path, name: str, on_checked: Callable[[int], None]) -> None:
    """Replace the tar at `path` by the file of this name in it. Raises NotOneFile, and leaves the tar as it is."""
    start, size = _place_of(path, name)
    with path.open("r+b") as file:
        for at in range(0, size, _CHUNK_BYTES):
            file.seek(start + at)
            chunk = file.read(min(_CHUNK_BYTES, size - at))
            file.seek(at)
            file.write(chunk)
            on_checked(len(chunk))
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


def _place_of(path: Path, name: str) -> tuple[int, int]:
    found: tarfile.TarInfo | None = None
    try:
        with _Headers(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for _ in range(MAX_ENTRIES):
                entry = tar.next()
                if entry is None:
                    break
                if entry.isdir():
                    continue
                if not entry.isreg() or entry.issparse():
                    raise NotOneFile("has a link or another entry that is no file")
                if found is not None:
                    raise NotOneFile("has several files")
                found = entry
            else:
                raise NotOneFile(f"has {MAX_ENTRIES} entries or more")
    except (tarfile.TarError, RecursionError, ValueError, OverflowError):
        raise NotOneFile("is no whole tar") from None
    if found is None or found.name.removeprefix("./") != name or found.size < 0:
        raise NotOneFile(f"has no file {name}")
    return found.offset_data, found.size
