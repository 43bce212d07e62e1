"""Slabs: a checked adapter as the engine keeps it on the device, in a file beside the checked bytes. A load is then a
read and a copy.

    magic, key, bytes of the run, scales or not, linears, parts | which linears it changes | parts | digest | the bytes

A run is mostly zeros if the adapter changes few linears, so only the parts with other bytes are in the file, in order,
each with checksums. The key says what the bytes depend on, and is the file's name, too. A file of another key, of
another length, or with another byte is never used: it is removed, the adapter is loaded from its checked bytes, and the
slab is written again. Nothing is flushed: what a crash of the machine leaves has another checksum.
"""

import errno
import fcntl
import itertools
import os
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from hashlib import blake2b, shake_256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motet_runner.adapters.cached_files import NOWAIT, note_read, open_cached
from motet_runner.adapters.layout import AdapterLayout, FileStamp, slab_key

MAX_SLABS = 2
"""Of one adapter: pools and versions that share the cache may have engines of different layouts."""
FREE_SHARE = 20
MAX_FREE_BYTES = 4 << 30
"""A slab is written only if one part of FREE_SHARE of the disk stays free, or this number of bytes."""
MAX_PART_BYTES = 1 << 20
"""A part has a checksum of its own, and may be copied to the device before the rest has been read."""
MAX_VERIFIED = 4096
"""Of how many slabs a process knows that they are right"""

_MAGIC = b"motet s1"
_HEAD = struct.Struct("<8s16sQ?II")
_PART = struct.Struct("<QQQQ")
_DIGEST_BYTES = 16
_BLOCK = 4096
"""Memory is given and disks are read in such blocks."""
_SHORTEST_GAP = 8
"""Blocks of zeros that are left out. Fewer are cheaper to read than another part."""

_WEIGHTS = np.frombuffer(shake_256(_MAGIC).digest(4096), np.uint64) | np.uint64(1)

Bytes = npt.NDArray[np.uint8]

ReadFile = Callable[[int, int, Bytes, int], int]
"""Gets an open file, the place where it begins to read, the memory, and flags. → the sum, as Part has it. Raises
OSError."""

_verified: OrderedDict[tuple[int, ...], None] = OrderedDict()
"""The states of the files that this process has read as a whole and found right"""


class SlabDamaged(Exception):
    """The file is not what was written for this adapter and this engine."""


class Part(NamedTuple):
    begin: int
    """In the run"""
    size: int
    sum: int
    """Of its words, modulo 2^64"""
    checksum: int

    @property
    def end(self) -> int:
        return self.begin + self.size


class Slab:
    """A context manager that holds a slab open. Raises FileNotFoundError if there is none, and SlabDamaged."""

    def __init__(
        self,
        adapter: AdapterLayout,
        run_bytes: int,
        linears: Collection[str],
        *,
        only_cached: bool = False,
        file: int | None = None,
    ) -> None:
        """`linears`: all that an adapter may change, in the engine's order. `only_cached`: raise BlockingIOError, or
        another OSError, where a read would wait for the disk. `file`: it is open already, and has another name"""
        self._opened = file
        self._only_cached = only_cached
        self._flags = NOWAIT if only_cached else 0
        self._adapter = adapter
        self._run_bytes = run_bytes
        self._linears = linears
        self.parts: tuple[Part, ...] = ()
        self.changed: frozenset[str] = frozenset()
        """The linears that the adapter changes"""
        self.scales = False

    def __enter__(self) -> "Slab":
        path = f"{self._adapter.path.rpartition('/')[0]}/{self._adapter.slab}"
        if self._opened is not None:
            self._file = self._opened
        else:
            self._file = open_cached(path) if self._only_cached else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_head()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, part: Part, at: int, run: Bytes, read_file: ReadFile | None = None) -> None:
        """Read a part, which begins at this place of the file, into its place in the run."""
        if read_file is not None and self._known:
            if read_file(self._file, at, run[part.begin : part.end], self._flags) != part.sum:
                raise SlabDamaged
            return
        self._fill(run[part.begin : part.end].data, at)
        self.compare(part, run)

    def read_some(self, into: Bytes, at: int) -> None:
        """Read a piece of a part, which begins at this place of the file. `compare` says whether the part is right."""
        self._fill(into.data, at)

    def compare(self, part: Part, run: Bytes) -> None:
        found = run[part.begin : part.end]
        right = _sum(found) == part.sum if self._known else _checksum(found) == part.checksum
        if not right:
            raise SlabDamaged

    def check(self, run: Bytes, changed: frozenset[str], *, scales: bool) -> None:
        """Raises SlabDamaged if a load would give another run than this one."""
        end, right = 0, (self.changed, self.scales) == (changed, scales)
        for part, at in self.places():
            found = np.empty(part.size, np.uint8)
            self._fill(found.data, at)
            self.compare(part, run)
            right = right and np.array_equal(found, run[part.begin : part.end]) and not run[end : part.begin].any()
            end = part.end
        if not right or run[end:].any():
            raise SlabDamaged

    def verified(self) -> None:
        """All parts were read. Until somebody writes to the file, only their sums are compared: that finds what a disk
        does to them."""
        if not self._only_cached:
            note_read(self._adapter.path, self._file)
        if not self._known:
            _note_right(self._state)

    def places(self) -> Iterator[tuple[Part, int]]:
        """Each part, and where in the file it begins"""
        at = self._begin
        for part in self.parts:
            yield part, at
            at += part.size

    def _read_head(self) -> None:
        most = _HEAD.size + len(self._linears) // 8 + 1 + _PART.size * (self._run_bytes // _BLOCK + 1) + _DIGEST_BYTES
        status = os.fstat(self._file)
        size = status.st_size
        self._state = _state_of(status)
        self._known = self._state in _verified
        begin = self._beginning(min(most, 2 * _BLOCK))
        if len(begin) < _HEAD.size:
            raise SlabDamaged
        magic, key, run_bytes, self.scales, linears, count = _HEAD.unpack_from(begin)
        expected = (_MAGIC, slab_key(self._adapter.slab), self._run_bytes, len(self._linears))
        marks = _HEAD.size + (linears + 7) // 8
        end = marks + count * _PART.size
        if (magic, key, run_bytes, linears) != expected or end + _DIGEST_BYTES > most:
            raise SlabDamaged
        head = begin if len(begin) >= end + _DIGEST_BYTES else self._beginning(end + _DIGEST_BYTES)
        if _digest(head[:end]) != head[end : end + _DIGEST_BYTES]:
            raise SlabDamaged
        changes = np.unpackbits(np.frombuffer(head[_HEAD.size : marks], np.uint8), count=linears)
        self.changed = frozenset(itertools.compress(self._linears, changes))
        self.parts = tuple(Part(*one) for one in _PART.iter_unpack(head[marks:end]))
        self._begin = end + _DIGEST_BYTES
        ends = [0, *(part.end for part in self.parts)]
        ordered = all(before <= part.begin for before, part in zip(ends, self.parts, strict=False))
        if not ordered or ends[-1] > run_bytes or self._begin + sum(part.size for part in self.parts) != size:
            raise SlabDamaged

    def _beginning(self, size: int) -> bytes:
        begin = bytearray(size)
        return bytes(begin[: os.preadv(self._file, [begin], 0, self._flags)])

    def _fill(self, into: memoryview, at: int) -> None:
        while into:
            count = os.preadv(self._file, [into], at, self._flags)
            if not count:
                raise SlabDamaged
            at, into = at + count, into[count:]


def write_slab(
    adapter: AdapterLayout,
    run: Bytes,
    linears: Collection[str],
    changed: frozenset[str],
    *,
    scales: bool,
    check: Callable[[int], None] = os.close,
) -> int:
    """The bytes of the new file. `check` gets it open before it is in its place, and closes it. Raises OSError, or what
    `check` raises; then there is no file, or an earlier one."""
    folder = os.open(adapter.file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        used = os.fstat(folder).st_mtime_ns
        # If the folder is replaced meanwhile, the slab goes with the old one: it may be made of what was found damaged.
        if FileStamp.of_status(os.stat(adapter.file.name, dir_fd=folder)) != adapter.stamp:
            raise FileNotFoundError(f"{adapter.file} has changed")
        check_room(folder, len(run))
        draft = f".{adapter.slab}-{secrets.token_hex(8)}"
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
        try:
            with os.fdopen(file, "wb", buffering=0) as opened:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = 0
                for part in _contents(adapter, run, linears, changed, scales=scales):
                    left = memoryview(part).cast("B")
                    size += len(left)
                    while left:
                        left = left[opened.write(left) :]
                check(os.open(draft, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder))
                written = os.fstat(file)
            os.rename(draft, adapter.slab, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise
        _remove_surplus(folder, adapter.slab)
        os.utime(folder, ns=(used, used))  # the order of eviction: to write a slab is no use
        with suppress(OSError):
            _note_written(written, os.stat(adapter.slab, dir_fd=folder))
        return size
    finally:
        os.close(folder)


def is_slab(name: str) -> bool:
    """Also a draft"""
    return name.startswith(("slab-", ".slab-"))


def check_room(folder: int | Path, size: int) -> None:
    """Raises OSError if the folder's disk would be too full with `size` bytes more."""
    disk = os.statvfs(folder)
    free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if free - size < min(whole // FREE_SHARE, MAX_FREE_BYTES):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def remove_damaged(adapter: AdapterLayout) -> bool:
    """Only the slab of this layout: others in the folder are for other engines. False: the disk takes no writes."""
    try:
        _path_of(adapter).unlink(missing_ok=True)
    except OSError:
        return False
    return True


def remove_slabs(folder: Path) -> int:
    """Returns the bytes of those that have gone. Raises OSError."""
    used = folder.stat().st_mtime_ns
    gone = 0
    try:
        for slab, size in size_of_slabs(folder).items():
            slab.unlink(missing_ok=True)
            gone += size
    finally:
        if gone:
            os.utime(folder, ns=(used, used))  # the order of eviction stays
    return gone


def remove_drafts(folder: Path) -> None:
    """Those whose process has ended: it has locked the others."""
    for path in folder.glob(".slab-*"):
        with suppress(OSError):
            file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


def size_of_slabs(folder: Path) -> dict[Path, int]:
    """The slabs in an adapter's folder, also for other engines"""
    found = {}
    for entry in os.scandir(folder):
        if is_slab(entry.name):
            with suppress(FileNotFoundError):
                found[Path(entry.path)] = entry.stat().st_size
    return found


def _contents(
    adapter: AdapterLayout, run: Bytes, linears: Collection[str], changed: frozenset[str], *, scales: bool
) -> Iterator[bytes | memoryview]:
    parts = list(_parts_of(run))
    marks = np.packbits(np.array([one in changed for one in linears], bool)).tobytes()
    head = _HEAD.pack(_MAGIC, slab_key(adapter.slab), len(run), scales, len(linears), len(parts))
    head += marks + b"".join(_PART.pack(*part) for part in parts)
    yield head + _digest(head)
    for part in parts:
        yield run[part.begin : part.end].data


def _parts_of(run: Bytes) -> Iterator[Part]:
    """All but the longer stretches of zeros, cut into parts."""
    places = np.flatnonzero(np.bitwise_or.reduceat(run, np.arange(0, len(run), _BLOCK)))
    if not len(places):
        return
    gaps = np.flatnonzero(np.diff(places) > _SHORTEST_GAP)
    firsts = [places[0], *places[gaps + 1]]
    lasts = [*places[gaps], places[-1]]
    for first, last in zip(firsts, lasts, strict=True):
        end = min(len(run), (int(last) + 1) * _BLOCK)
        for begin in range(int(first) * _BLOCK, end, MAX_PART_BYTES):
            part = run[begin : min(end, begin + MAX_PART_BYTES)]
            yield Part(begin, len(part), _sum(part), _checksum(part))


def _remove_surplus(folder: int, new: str) -> None:
    """Slabs beyond this one and the newest of the others"""
    found: list[tuple[float, str]] = []
    for name in os.listdir(folder):
        if is_slab(name) and not name.startswith(".") and name != new:
            with suppress(FileNotFoundError):
                found.append((os.stat(name, dir_fd=folder).st_mtime, name))
    for _, name in sorted(found, reverse=True)[MAX_SLABS - 1 :]:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    # The kernel notes the time of each write as ctime, which nobody can set.
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _note_right(state: tuple[int, ...]) -> None:
    _verified[state] = None
    if len(_verified) > MAX_VERIFIED:
        _verified.popitem(last=False)


def _note_written(written: os.stat_result, named: os.stat_result) -> None:
    """The file that was written has its name now, which is a change of it, too. Somebody may have replaced it."""
    if _state_of(written)[:-1] == _state_of(named)[:-1]:
        _note_right(_state_of(named))


def _path_of(adapter: AdapterLayout) -> Path:
    return adapter.file.with_name(adapter.slab)


def _sum(part: Bytes) -> int:
    words = len(part) // 8 * 8
    found = int(part[:words].view(np.uint64).sum(dtype=np.uint64))
    if words < len(part):  # mostly not, and a sum of nothing takes as long as one of many bytes
        found += int(part[words:].sum(dtype=np.uint64))
    return found % (1 << 64)


def _checksum(part: Bytes) -> int:
    """Any other byte, and nearly any other order of them, gives another number. A common checksum of this length takes
    several times as long as to read the part: here each 4 KiB are multiplied by fixed odd numbers, modulo 2^64."""
    rows = len(part) // _WEIGHTS.nbytes
    whole, rest = np.split(part, [rows * _WEIGHTS.nbytes])
    words = whole.view(np.uint64).reshape(rows, len(_WEIGHTS))
    found = blake2b(np.einsum("ij,j->i", words, _WEIGHTS).tobytes(), digest_size=8)
    found.update(rest.data)
    return int.from_bytes(found.digest(), "little")


def _digest(head: bytes) -> bytes:
    return blake2b(head, digest_size=_DIGEST_BYTES).digest()
