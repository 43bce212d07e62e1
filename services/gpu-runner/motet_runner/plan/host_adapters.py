"""Which adapters the host's memory keeps for their next load, and where (PU-07).

An adapter that is read for the device is read into this memory, if it may stay there. Once it has left the device, its
next load copies these bytes, and reads nothing. Whatever its thread may still write to keeps its place: a load that was
given up has ended only when the worker says so. So the bytes never exceed the bound.

Those that few requests use leave first, as in the disk cache, and none leaves for one that fewer use. Adapters that
sequences wait for stay, and those that the platform wants resident (`minReplicas`) leave only for each other.
"""

from bisect import bisect, bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from motet.domain import Digest
from motet_runner.adapters.policy.frequency import Frequency
from motet_runner.plan.step_plan import HostCopy, LoadedContents

MAX_KEPT = 4096
"""How many adapters are kept at most. Each of them takes time when one is to leave, if all that may is too small."""

BLOCK_BYTES = 4096

IsPinned = Callable[[Digest], bool]


@dataclass(slots=True)
class _Kept:
    begin: int
    size: int
    contents: LoadedContents | None = None
    """None: it is on its way, or was given up."""
    loads: int = 0
    """The number of the load that reads it from the disk, or copies it to the device. 0: none"""
    turn: int = 0
    """The number of its last load"""
    rank: tuple[float, int, Digest] | None = None
    """Its entry in the order in which they leave"""


class HostAdapters:
    def __init__(self, size: int, *, adapters: int = 1) -> None:
        """`size`: of the memory, in bytes. `adapters`: about how many fit."""
        self.size = size
        self.adapters = 0
        """How many could be loaded without the disk"""
        self.bytes = 0
        """Of all that have a place, also of those on their way"""
        self._frequency = Frequency(min(adapters, MAX_KEPT))
        self._kept: dict[Digest, _Kept] = {}
        self._ranks: list[tuple[float, int, Digest]] = []
        """How often each was used, and the number of its last load: those that leave first come first."""
        self._leaving: dict[int, _Kept] = {}
        """Loads whose threads may still write, though nobody waits for them: number → their places"""
        self._free = [(0, size)] if size else []
        """Where each gap begins, and how many bytes it has"""

    def holds(self, digest: Digest) -> bool:
        """True if the adapter's next load needs no disk."""
        kept = self._kept.get(digest)
        return kept is not None and kept.contents is not None

    def used(self, digest: Digest) -> None:
        """A request uses the adapter."""
        if not self.size:
            return
        of_all = self._frequency.used(digest)
        for one in [*self._kept] if of_all else (digest,):
            if (kept := self._kept.get(one)) is not None:
                self._rank(one, kept)

    def begin(
        self, number: int, digest: Digest, size: int, *, awaited: AbstractSet[Digest], pinned: IsPinned
    ) -> tuple[HostCopy | None, list[Digest]]:
        """A load begins, of an adapter of `size` bytes. → where it is, or is to be read to; None if it is not kept.
        And those that have left for it. `awaited`: the adapters that sequences wait for."""
        kept = self._kept.get(digest)
        gone: list[Digest] = []
        if kept is None:
            size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
            begin, gone = self._make_room(size, self._may_leave(digest, awaited, pinned))
            if begin is None:
                return None, gone
            self._take(begin, size)
            kept = self._kept[digest] = _Kept(begin, size)
        kept.loads = kept.turn = number
        self._rank(digest, kept)
        return HostCopy(kept.begin, kept.contents), gone

    def arrived(self, digest: Digest, contents: LoadedContents | None) -> None:
        """Its load has ended. `contents`: what its place holds now; None: its place could not be used."""
        kept = self._kept.get(digest)
        if kept is None:
            return
        kept.loads = 0
        if kept.contents is None and contents is not None:
            kept.contents = contents
            self.adapters += 1
        elif contents is None:
            self.drop(digest)

    def given_up(self, digest: Digest) -> None:
        """Its load has failed, or is given up."""
        kept = self._kept.get(digest)
        if kept is None or not kept.loads:
            return
        number, kept.loads = kept.loads, 0
        if kept.contents is None:
            self._leaving[number] = self._leave(digest)

    def ended(self, number: int) -> None:
        """The thread of a load that was given up has ended."""
        kept = self._leaving.pop(number, None)
        if kept is not None:
            self._free_place(kept)

    def drop(self, digest: Digest) -> bool:
        """The adapter is gone, or what its slab holds is wrong. → whether it was kept. Not while it loads."""
        if digest not in self._kept:
            return False
        kept = self._leave(digest)
        assert not kept.loads, digest
        self.adapters -= kept.contents is not None
        self._free_place(kept)
        return kept.contents is not None

    def check(self, loading: dict[Digest, int]) -> None:
        """Recount. Raises AssertionError."""
        places = [*self._kept.values(), *self._leaving.values()]
        assert sum(one.size for one in places) == self.bytes <= self.size, (places, self.bytes, self.size)
        assert sum(one.contents is not None for one in self._kept.values()) == self.adapters, places
        spans = sorted([*((one.begin, one.size) for one in places), *self._free])
        end = 0
        for begin, size in spans:
            assert begin == end, spans
            assert size > 0, spans
            end = begin + size
        assert end == self.size, spans
        for begin, size in self._free:
            assert all(begin + size != other for other, _ in self._free), self._free
        assert self._ranks == sorted(self._ranks), self._ranks
        assert {digest for _, _, digest in self._ranks} == self._kept.keys(), (self._ranks, self._kept)
        assert len(self._kept) <= MAX_KEPT, len(self._kept)
        for digest, kept in self._kept.items():
            assert kept.loads == loading.get(digest, 0), (digest, kept)
            assert kept.loads or kept.contents is not None, (digest, kept)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _may_leave(self, digest: Digest, awaited: AbstractSet[Digest], pinned: IsPinned) -> Iterator[Digest]:
        """Those that may leave for this adapter, in this order"""
        last, most = pinned(digest), self._frequency.of(digest)
        for leaves_last in (False, True) if last else (False,):
            for uses, _, one in self._ranks:
                if uses > most and last is leaves_last:
                    break
                if pinned(one) is leaves_last and not self._kept[one].loads and one not in awaited:
                    yield one

    def _make_room(self, size: int, may_leave: Iterator[Digest]) -> tuple[int | None, list[Digest]]:
        """Where there is a gap of `size` bytes, and those that have left for it. None, without any change, if there
        would be none."""
        if not 0 < size <= self.size:
            return None, []
        free, gone = [*self._free], list[Digest]()
        begin = next((begin for begin, length in free if length >= size), None)
        while begin is None or len(self._kept) - len(gone) >= MAX_KEPT:
            if (one := next(may_leave, None)) is None:
                return None, []
            gone.append(one)
            start, length = _give(free, self._kept[one])
            if begin is None or start <= begin < start + length:
                begin = start if length >= size else None
        for one in gone:
            self.drop(one)
        return begin, gone

    def _free_place(self, kept: _Kept) -> None:
        _give(self._free, kept)
        self.bytes -= kept.size

    def _take(self, begin: int, size: int) -> None:
        place = bisect(self._free, (begin, 0))
        length = self._free.pop(place)[1]
        if length > size:
            self._free.insert(place, (begin + size, length - size))
        self.bytes += size

    def _rank(self, digest: Digest, kept: _Kept) -> None:
        """By its uses, and by its last load"""
        if kept.rank is not None:
            del self._ranks[bisect_left(self._ranks, kept.rank)]
        kept.rank = self._frequency.of(digest), kept.turn, digest
        insort(self._ranks, kept.rank)

    def _leave(self, digest: Digest) -> _Kept:
        kept = self._kept.pop(digest)
        assert kept.rank is not None
        del self._ranks[bisect_left(self._ranks, kept.rank)]
        return kept


def _give(free: list[tuple[int, int]], kept: _Kept) -> tuple[int, int]:
    """→ the gap that its place is part of now"""
    begin, size = kept.begin, kept.size
    after = bisect(free, (begin, 0))
    if after < len(free) and free[after][0] == begin + size:
        size += free.pop(after)[1]
    if after and sum(free[after - 1]) == begin:
        begin, length = free.pop(after - 1)
        size += length
    insort(free, (begin, size))
    return begin, size
