"""Takes the one file out of a layer that is a tar, as in a ModelPack: in place, so that both never lie on the disk.

A reader of its own: a library would follow sparse maps and links before one could refuse them. It reads headers alone,
of the POSIX form (ustar, pax) and those of GNU tar that need no extension."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAX_HEADER_BYTES = 64 << 10
"""The most bytes of an extended header."""

MAX_ENTRIES = 16

_BLOCK = 512
_CHUNK_BYTES = 1 << 20

_POSIX, _GNU = b"ustar\x0000", b"ustar  \0"
_REGULAR, _FOLDER, _EXTENDED, _GLOBAL = (b"0", b"\0"), b"5", b"x", b"g"

_OF_AN_ENTRY = (b"path", b"size")
_HARMLESS = re.compile(
    rb"mtime|atime|ctime|uid|gid|uname|gname|comment|hdrcharset|LIBARCHIVE\.(creationtime|xattr\..*)|"
    rb"SCHILY\.(dev|ino|nlink|fflags|acl\..*|xattr\..*)",
    re.DOTALL,
)
"""Keys that change neither a file's name nor its bytes. Others may, and are refused."""

_RECORD = re.compile(rb"([1-9][0-9]{0,5}) ([^=\n]+)=")
_OCTAL = re.compile(rb" *([0-7]+)[ \0]*")
_DECIMAL = re.compile(rb"[0-9]{1,19}")


class NotOneFile(Exception):
    """Says what is wrong, as the end of a sentence about the layer."""


class LargerThanLimit(Exception):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def unpack(path: Path, name: str, limit: int, on_checked: Callable[[int], None]) -> None:
    """Replace the tar at `path` by the file of this name in it, of at most `limit` bytes. Raises NotOneFile or
    LargerThanLimit, and leaves the tar as it is."""
    with path.open("r+b") as file:
        start, size = _place_of(file, name)
        if size > limit:
            raise LargerThanLimit(size)
        for at in range(0, size, _CHUNK_BYTES):
            file.seek(start + at)
            chunk = file.read(min(_CHUNK_BYTES, size - at))
            file.seek(at)
            file.write(chunk)
            on_checked(len(chunk))
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


def _place_of(file: BinaryIO, name: str) -> tuple[int, int]:
    found: _Entry | None = None
    for count, entry in enumerate(_entries(file), 1):
        if count >= MAX_ENTRIES:
            raise NotOneFile(f"has {MAX_ENTRIES} entries or more")
        if entry.kind == _FOLDER and not entry.size:
            continue
        if entry.kind not in _REGULAR:
            raise NotOneFile("has a link or another entry that is no file")
        if found is not None:
            raise NotOneFile("has several files")
        found = entry
    if found is None or found.name.removeprefix(b"./") != os.fsencode(name):
        raise NotOneFile(f"has no file {name}")
    return found.start, found.size


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: bytes
    name: bytes
    start: int
    """Of its bytes in the tar"""
    size: int

    @property
    def end(self) -> int:
        return self.start + -(-self.size // _BLOCK) * _BLOCK


def _entries(file: BinaryIO) -> Iterator[_Entry]:
    """The files, folders and others of a tar, up to its two empty blocks. All their bytes lie in it."""
    layer_size = os.fstat(file.fileno()).st_size
    more: dict[bytes, bytes] | None = None
    at, has_global = 0, False
    while (header := _block(file, at)) != bytes(_BLOCK):
        entry = _entry(header, at + _BLOCK, more or {})
        if entry.kind in (_EXTENDED, _GLOBAL):
            if entry.size > MAX_HEADER_BYTES:
                raise NotOneFile("has a header that is too long")
            if more is not None or (entry.kind == _GLOBAL and has_global):
                raise NotOneFile("is no whole tar")
            records = _records(_bytes(file, entry.start, entry.size))
            _check_keys(records, () if entry.kind == _GLOBAL else _OF_AN_ENTRY)
            if entry.kind == _GLOBAL:
                has_global = True
            else:
                more = records
        else:
            if entry.end > layer_size:
                raise NotOneFile("is no whole tar")
            more = None
            yield entry
        at = entry.end
    if more is not None or _block(file, at + _BLOCK) != bytes(_BLOCK):
        raise NotOneFile("is no whole tar")


def _entry(header: bytes, start: int, more: dict[bytes, bytes]) -> _Entry:
    """`more`: from the extended header before it"""
    form = header[257:265]
    plain = header[:148] + b" " * 8 + header[156:]
    if form not in (_POSIX, _GNU) or _number(header[148:156]) != sum(plain):
        raise NotOneFile("is no whole tar")
    name, prefix = (header[first:last].partition(b"\0")[0] for first, last in ((0, 100), (345, 500)))
    if prefix and form == _POSIX:
        name = prefix + b"/" + name
    size = _number(header[124:136])
    if b"size" in more:
        if not _DECIMAL.fullmatch(more[b"size"]):
            raise NotOneFile("is no whole tar")
        size = int(more[b"size"])
    return _Entry(header[156:157], more.get(b"path", name), start, size)


def _number(field: bytes) -> int:
    if field[0] == 0x80:  # as GNU tar writes what has too many digits
        return int.from_bytes(field[1:])
    digits = _OCTAL.fullmatch(field)
    if digits is None:
        raise NotOneFile("is no whole tar")
    return int(digits[1], 8)


def _records(body: bytes) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        found = _RECORD.match(body, at)
        end = at + int(found[1]) if found else 0
        if found is None or not found.end() < end <= len(body) or body[end - 1 : end] != b"\n" or found[2] in records:
            raise NotOneFile("is no whole tar")
        records[found[2]] = body[found.end() : end - 1]
        at = end
    return records


def _check_keys(records: dict[bytes, bytes], others: tuple[bytes, ...]) -> None:
    for key in records:
        if key not in others and not _HARMLESS.fullmatch(key):
            raise NotOneFile("has a link or another entry that is no file")


def _block(file: BinaryIO, at: int) -> bytes:
    return _bytes(file, at, _BLOCK)


def _bytes(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    body = file.read(size)
    if len(body) < size:
        raise NotOneFile("is no whole tar")
    return body
