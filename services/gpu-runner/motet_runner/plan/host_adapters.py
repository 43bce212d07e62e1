"""Which adapters the host's memory keeps for their next load, and where (PU-07).

An adapter that is read for the device is read into this memory, if it may stay there. Once it has left the device, its
next load copies these bytes, and reads nothing. Whatever its thread may still write to keeps its place: a load that was
given up has ended only when the worker says so. So the bytes never exceed the bound.

Those that few requests use leave first, as in the disk cache, and none leaves for one that fewer use. Adapters that
sequences wait for stay, and those that the platform wants resident (`minReplicas`) leave only for each other.
"""

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from motet.domain import Digest
from motet_runner.adapters.policy.frequency import Frequency
from motet_runner.plan.step_plan import HostCopy, LoadedContents

MAX_KEPT = 4096
"""How many adapters are kept at most: to choose which one leaves takes time for each."""

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


class HostAdapters:
    def __init__(self, size: int, *, adapters: int = 1) -> None:
        """`size`: of the memory, in bytes. `adapters`: about how many fit."""
        self.size = size
        self.adapters = 0
        """How many could be loaded without the disk"""
        self.bytes = 0
        """Of all that have a place, also of those on their way"""
        self._frequency = Frequency(min(adapters, MAX_KEPT))
        self._kept: OrderedDict[Digest, _Kept] = OrderedDict()
        """The one whose load is the longest ago comes first."""
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
        if self.size:
            self._frequency.used(digest)

    def begin(
        self, number: int, digest: Digest, size: int, *, awaited: AbstractSet[Digest], pinned: IsPinned
    ) -> tuple[HostCopy | None, list[Digest]]:
        """A load begins, of an adapter of `size` bytes. → where it is, or is to be read to; None if it is not kept.
        And those that have left for it. `awaited`: the adapters that sequences wait for."""
        kept = self._kept.get(digest)
        gone: list[Digest] = []
        if kept is None:
            size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
            begin, gone = self._make_room(size, self._less_used(digest, awaited, pinned))
            if begin is None:
                return None, gone
            self._take(begin, size)
            kept = self._kept[digest] = _Kept(begin, size)
        kept.loads = number
        self._kept.move_to_end(digest)
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
            del self._kept[digest]
            self._leaving[number] = kept

    def ended(self, number: int) -> None:
        """The thread of a load that was given up has ended."""
        kept = self._leaving.pop(number, None)
        if kept is not None:
            self._give(kept)

    def drop(self, digest: Digest) -> bool:
        """The adapter is gone, or what its slab holds is wrong. → whether it was kept. Not while it loads."""
        kept = self._kept.pop(digest, None)
        if kept is None:
            return False
        assert not kept.loads, digest
        self.adapters -= kept.contents is not None
        self._give(kept)
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
        assert len(self._kept) <= MAX_KEPT, len(self._kept)
        for digest, kept in self._kept.items():
            assert kept.loads == loading.get(digest, 0), (digest, kept)
            assert kept.loads or kept.contents is not None, (digest, kept)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _less_used(self, digest: Digest, awaited: AbstractSet[Digest], pinned: IsPinned) -> list[Digest]:
        """Those that may leave for this adapter, in this order"""
        last, most = pinned(digest), self._frequency.of(digest)
        others: list[Digest] = []
        kept: list[Digest] = []
        for one, place in self._kept.items():
            if not place.loads and one not in awaited:
                (kept if pinned(one) else others).append(one)
        others.sort(key=self._frequency.of)
        if last:
            return others + [one for one in sorted(kept, key=self._frequency.of) if self._frequency.of(one) <= most]
        return others[: bisect(others, most, key=self._frequency.of)]

    def _make_room(self, size: int, may_leave: list[Digest]) -> tuple[int | None, list[Digest]]:
        """Where there is a gap of `size` bytes, and those that have left for it. None, without any change, if there
        would be none."""
        if not 0 < size <= self.size or not self._would_fit(size, may_leave):
            return None, []
        gone: list[Digest] = []
        while (begin := self._gap(size)) is None or len(self._kept) >= MAX_KEPT:
            gone.append(may_leave[len(gone)])
            self.drop(gone[-1])
        return begin, gone

    def _would_fit(self, size: int, may_leave: list[Digest]) -> bool:
        if len(self._kept) - len(may_leave) >= MAX_KEPT:
            return False
        if self._gap(size) is not None:
            return True
        leaving = ((self._kept[one].begin, self._kept[one].size) for one in may_leave)
        largest = length = end = 0
        for begin, more in sorted([*self._free, *leaving]):
            length = length + more if begin == end else more
            end = begin + more
            largest = max(largest, length)
        return largest >= size

    def _gap(self, size: int) -> int | None:
        return next((begin for begin, length in self._free if length >= size), None)

    def _take(self, begin: int, size: int) -> None:
        place = next(index for index, (start, _) in enumerate(self._free) if start == begin)
        length = self._free.pop(place)[1]
        if length > size:
            self._free.insert(place, (begin + size, length - size))
        self.bytes += size

    def _give(self, kept: _Kept) -> None:
        begin, size = kept.begin, kept.size
        self.bytes -= size
        after = bisect(self._free, (begin, 0))
        if after < len(self._free) and self._free[after][0] == begin + size:
            size += self._free.pop(after)[1]
        if after and sum(self._free[after - 1]) == begin:
            before, length = self._free.pop(after - 1)
            begin, size = before, length + size
        insort(self._free, (begin, size))
