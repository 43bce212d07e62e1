"""One budget of device memory for KV pages and adapters: all of it is one pool of pages, as in S-LoRA's unified paging.

An adapter has a run, which is a number of contiguous pages. Runs are allocated from the high end and KV pages from the
low end. KV pages in the way of a new run are moved, and runs are compacted if no gap is large enough. The pages of an
adapter that no live sequence uses become KV pages when they are needed, and the other way round.

Of such adapters those leave first that few requests use, whose next load takes a short time, and that have many pages.
Those that requests wait for, which do not need them on the device now, leave after these, and pinned ones last.

By some presets the pages of a sequence are a run, too (S3-08). Such runs are allocated from the low end, and compacted
there (S3-12).

Pure: it computes numbers, and copies that the engine makes in order before the next model call. What an adapter leaves
in its pages stays there: whoever begins a page clears or fills it.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, ItemsView, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motet.domain import Digest
from motet_runner.adapters.policy.frequency import Frequency
from motet_runner.plan.page_copies import Copy, Tier
from motet_runner.plan.pages import PageAllocator

IsLive = Callable[[Digest], bool]
"""True if live sequences use an adapter: it may then be moved, but not evicted."""

_Owner = Digest | int
"""The adapter that has a run, or the first page of a sequence's run"""

_Marks = npt.NDArray[np.bool_]


class PageRun(NamedTuple):
    """The contiguous pages of one adapter or sequence."""

    start: int
    length: int

    @property
    def pages(self) -> range:
        return range(self.start, self.start + self.length)


@dataclass(frozen=True, slots=True)
class Grant:
    """A run, and the changes that it needs. An adapter's bytes are written after the copies."""

    run: PageRun
    evicted: tuple[Digest, ...]
    moved: Mapping[int, int]
    """KV page → the page to which it is moved: its holders, the prefix cache included, must be told."""
    copies: tuple[Copy, ...]


class _Arrangement(NamedTuple):
    """The places of all runs and pages after a grant."""

    run: PageRun
    starts: Mapping[_Owner, int]
    """Owner → where its run begins, for the others whose run is moved"""
    dropped: Sequence[int]
    moves: Mapping[int, int]
    """Old page → new page, of KV and of adapters"""


class DeviceBudget:
    """Adapters hold their pages in `pages`, like sequences."""

    def __init__(
        self,
        pages: PageAllocator,
        *,
        max_adapters: int,
        kv_runs: Callable[[], Iterable[Sequence[int]]] = lambda: (),
        is_awaited: Callable[[Digest], bool] = lambda _: False,
        load_cost: Callable[[Digest], float] = lambda _: 1.0,
    ) -> None:
        """`kv_runs`: the pages of each sequence that has some, if they must stay contiguous. `is_awaited`: requests
        will need the adapter. `load_cost`: about how long its next load would take, in any unit."""
        self.pages = pages
        self.max_adapters = max_adapters
        self._frequency = Frequency(max_adapters)
        self._kv_runs = kv_runs
        self._is_awaited = is_awaited
        self._load_cost = load_cost
        self._runs: OrderedDict[Digest, PageRun] = OrderedDict()
        """The least recently used first: of those that are worth the same, it leaves first."""
        self._worth: dict[Digest, float] = {}
        """What each of these saves, for each page that it has. Known until a request uses it, or the cost of its next
        load changes: for one load, nobody computes it for all others."""
        self._pinned: set[Digest] = set()

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> list[Digest]:
        """The adapters on the device, the least recently used first."""
        return list(self._runs)

    @property
    def runs(self) -> ItemsView[Digest, PageRun]:
        """In the same order."""
        return self._runs.items()

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def run_of(self, adapter: Digest) -> PageRun:
        return self._runs[adapter]

    def could_grant(self, count: int, is_live: IsLive) -> bool:
        """True if a run fits, after evictions, into the pages and the number of adapters."""
        lacking, over = count - self.pages.free, len(self._runs) + 1 - self.max_adapters
        for adapter, run in self._runs.items():
            if lacking <= 0 and over <= 0:
                break
            if not is_live(adapter):
                lacking, over = lacking - run.length, over - 1
        return lacking <= 0 and over <= 0

    def check(self, held: Iterable[Sequence[int]], cached: Collection[int] = ()) -> None:
        """Recount: every page is free, an adapter's, in the prefix cache, or has exactly the holders in `held`. Raises
        AssertionError."""
        taken = [page for run in self._runs.values() for page in run.pages]
        assert len(taken) == len(set(taken)), f"two adapters share a page: {self._runs}"
        assert len(self._runs) <= self.max_adapters, f"{len(self._runs)} adapters, at most {self.max_adapters}"
        self.pages.check([*held, *(run.pages for run in self._runs.values())], cached)
        assert self._worth.keys() <= self._runs.keys(), "what has gone is worth something"
        for adapter, worth in self._worth.items():
            assert worth == self._worth_of(adapter), f"what {adapter} is worth has changed, and nobody has said so"

    # -- commands ----------------------------------------------------------------------------------------------------

    def used(self, adapter: Digest) -> None:
        """A request uses the adapter, which need not be on the device."""
        if self._frequency.used(adapter):
            self._worth.clear()
        else:
            self._worth.pop(adapter, None)

    def load_cost_changed(self, adapter: Digest) -> None:
        self._worth.pop(adapter, None)

    def use(self, adapter: Digest) -> None:
        """An iteration uses the adapter now."""
        self._runs.move_to_end(adapter)

    def pin(self, adapter: Digest, *, pinned: bool) -> None:
        """A pinned adapter is evicted after those that are not."""
        (self._pinned.add if pinned else self._pinned.discard)(adapter)

    def is_pinned(self, adapter: Digest) -> bool:
        return adapter in self._pinned

    def grant(self, adapter: Digest, count: int, is_live: IsLive, *, evict: bool = True) -> Grant | None:
        """A run of `count` pages for an adapter that is not on the device. None, without any change, if there is no
        room now.

        Empty pages are taken first, then pages that the prefix cache yields, then those of idle adapters. Without
        `evict` only empty pages are taken, and nothing is moved.
        """
        assert adapter not in self._runs, adapter
        assert count > 0, count
        over = max(0, len(self._runs) + 1 - self.max_adapters)
        # With enough pages and places, a run fits once others are moved together: nobody needs the order of all.
        idle = self._idle(is_live) if evict and (over or count > self.pages.free) else []
        for number in range(max(over, self._fewest(idle, count)), len(idle) + 1):
            arrangement = self._arrange(count, idle[:number], evict=evict)
            if arrangement is not None:
                return self._make(arrangement, tuple(idle[:number]), adapter=adapter)
        return None

    def lengthen(self, pages: Sequence[int], count: int, is_live: IsLive) -> Grant | None:
        """A run of `count` pages for a sequence. It begins with the contents of `pages`, which are the sequence's run
        so far, and may be none. None, without any change, if there is no room.

        The run grows in place if the pages after it are empty. Otherwise it is moved, and pages of idle adapters are
        taken if the others do not suffice.
        """
        assert count > len(pages), (count, pages)
        after = range(pages[-1] + 1, pages[0] + count) if pages else range(0)
        if after and after.stop <= self.pages.capacity and all(map(self.pages.is_empty, after)):
            self.pages.take_these(after)
            return Grant(PageRun(pages[0], count), (), {}, ())
        idle = self._idle(is_live)
        for number in range(self._fewest(idle, count - len(pages)), len(idle) + 1):
            arrangement = self._arrange(count, idle[:number], evict=True, kv=pages)
            if arrangement is not None:
                return self._make(arrangement, tuple(idle[:number]), kv=pages)
        return None

    def release(self, adapter: Digest) -> None:
        """The adapter leaves the device."""
        self._worth.pop(adapter, None)
        self.pages.give_last(self._runs.pop(adapter).pages)

    def reclaim(self, count: int, is_live: IsLive) -> list[Digest] | None:
        """Evict idle adapters until `count` pages are free. None, without any change, if they do not suffice."""
        evicted, free = [], self.pages.free
        for adapter in self._idle(is_live):
            if free >= count:
                break
            evicted.append(adapter)
            free += self._runs[adapter].length
        if free < count:
            return None
        for adapter in evicted:
            self.release(adapter)
        return evicted

    # -- inside ------------------------------------------------------------------------------------------------------

    def _idle(self, is_live: IsLive) -> list[Digest]:
        """In the order of eviction"""
        idle = [one for one in self._runs if not is_live(one)]
        for one in idle:
            if one not in self._worth:
                self._worth[one] = self._worth_of(one)
        idle.sort(key=self._worth.__getitem__)
        if self._pinned or any(map(self._is_awaited, idle)):  # mostly not, and this calls a function for each of them
            idle.sort(key=lambda one: (one in self._pinned, self._is_awaited(one)))
        return idle

    def _fewest(self, idle: Sequence[Digest], count: int) -> int:
        """How many of these leave at least for `count` pages: to look for a place with fewer would be in vain. One more
        than there are, if all do not suffice."""
        free = accumulate((self._runs[one].length for one in idle), initial=self.pages.free)
        return next((number for number, pages in enumerate(free) if pages >= count), len(idle) + 1)

    def _worth_of(self, adapter: Digest) -> float:
        return self._frequency.of(adapter) * self._load_cost(adapter) / self._runs[adapter].length

    def _arrange(
        self, count: int, evicted: Collection[Digest], *, evict: bool, kv: Sequence[int] | None = None
    ) -> _Arrangement | None:
        """`kv`: the run is for a sequence that has these pages now."""
        free = len(self.pages.empty_pages) + sum(self._runs[adapter].length for adapter in evicted) + len(kv or ())
        dropped = self.pages.first_cached(max(0, count - free)) if evict else []
        if free + len(dropped) < count:
            return None
        if not dropped and kv is None and (start := self._empty_place(count, evicted)) is not None:
            return _Arrangement(PageRun(start, count), {}, dropped, {})  # mostly: what follows would find the same
        runs = dict[_Owner, PageRun](self._runs.items())
        runs |= {pages[0]: PageRun(pages[0], len(pages)) for pages in self._kv_runs() if pages is not kv}
        held = self.pages.in_use()
        held[[*dropped, *(kv or ())]] = False
        _mark(held, runs.values(), marked=False)
        for adapter in evicted:
            del runs[adapter]
        starts = {owner: run.start for owner, run in runs.items()}
        lowest = kv is not None
        start = self._place(count, runs, starts, held, moves=evict, lowest=lowest)
        if start is None and evict:
            starts = _packed(runs, self.pages.capacity)
            start = self._place(count, runs, starts, held, moves=True, lowest=lowest)
        if start is None:
            return None
        run = PageRun(start, count)
        moves = _moves(run, runs, starts, held, kv or ())
        moved = {owner: start for owner, start in starts.items() if start != runs[owner].start}
        return _Arrangement(run, moved, dropped, moves)

    def _empty_place(self, count: int, evicted: Collection[Digest]) -> int | None:
        """The highest place where `count` pages are empty, once these adapters have gone"""
        held = self.pages.in_use()
        _mark(held, (self._runs[adapter] for adapter in evicted), marked=False)
        place = held.tobytes().rfind(bytes(count))  # zeros
        return None if place < 0 else place

    @staticmethod
    def _place(
        count: int,
        runs: Mapping[_Owner, PageRun],
        starts: Mapping[_Owner, int],
        held: _Marks,
        *,
        moves: bool,
        lowest: bool,
    ) -> int | None:
        """Where the run begins: the place with the fewest KV pages in the way, of equal ones the highest, or the
        `lowest`."""
        if count > len(held):
            return None
        blocked = np.zeros_like(held) if moves else held.copy()
        for owner, start in starts.items():
            blocked[start : start + runs[owner].length] = True
        in_the_way = np.where(_in_windows(blocked, count) > 0, len(held) + 1, _in_windows(held, count))
        start = int(in_the_way.argmin()) if lowest else len(in_the_way) - 1 - int(in_the_way[::-1].argmin())
        return start if in_the_way[start] <= len(held) else None

    def _make(
        self,
        arrangement: _Arrangement,
        evicted: tuple[Digest, ...],
        *,
        adapter: Digest | None = None,
        kv: Sequence[int] = (),
    ) -> Grant:
        run, starts, dropped, moves = arrangement
        moved = [(one, self._runs[one]) for one in starts if not isinstance(one, int)]
        of_adapters = {page for _, each in moved for page in each.pages}
        self.pages.take_from_cache(dropped)
        for one in evicted:
            self.release(one)
        targets = set(moves.values())
        copies = _copies(moves, next((page for page in self.pages.empty_pages if page not in targets), None))
        self.pages.relocate(moves)
        self.pages.take_these(run.pages[len(kv) :])
        for one, each in moved:
            self._runs[one] = PageRun(starts[one], each.length)
        if adapter is not None:
            self._runs[adapter] = run
        of_kv = {old: new for old, new in moves.items() if old not in of_adapters}
        return Grant(run, evicted, of_kv, tuple(copies))


def _mark(marks: _Marks, runs: Iterable[PageRun], *, marked: bool = True) -> None:
    for start, length in runs:
        marks[start : start + length] = marked


def _in_windows(marks: _Marks, count: int) -> npt.NDArray[np.int64]:
    """For each place where `count` pages may begin: how many of the pages are marked."""
    until = np.concatenate(([0], np.cumsum(marks, dtype=np.int64)))
    return until[count:] - until[:-count]


def _packed(runs: Mapping[_Owner, PageRun], capacity: int) -> dict[_Owner, int]:
    """The starts of all runs when they are compacted in their order: adapters at the high end, sequences at the low
    one."""
    starts: dict[_Owner, int] = {}
    begin, end = 0, capacity
    in_order = sorted(runs.items(), key=lambda each: each[1].start)
    for owner, run in in_order:
        if isinstance(owner, int):
            starts[owner] = begin
            begin += run.length
    for owner, run in reversed(in_order):
        if not isinstance(owner, int):
            end -= run.length
            starts[owner] = end
    return starts


def _moves(
    new: PageRun, runs: Mapping[_Owner, PageRun], starts: Mapping[_Owner, int], held: _Marks, kv: Sequence[int]
) -> dict[int, int]:
    """Old page → new page, for everything that is moved. `kv`: pages that become the beginning of the new run."""
    of_runs = np.zeros(len(held), dtype=np.bool_)
    for start, count in (new, *((start, runs[owner].length) for owner, start in starts.items())):
        of_runs[start : start + count] = True
    in_the_way = np.flatnonzero(held & of_runs)
    others = np.flatnonzero(~held & ~of_runs)[: len(in_the_way)]
    moves = dict(zip(in_the_way.tolist(), others.tolist(), strict=True))
    for owner, start in starts.items():
        run = runs[owner]
        if start != run.start:
            moves |= {page: page - run.start + start for page in run.pages}
    return moves | {page: to for page, to in zip(kv, new.pages, strict=False) if page != to}


def _copies(moves: Mapping[int, int], spare: int | None) -> list[Copy]:
    """Copies that make all moves and never overwrite a page that is still to be copied. `spare`: a free page that is no
    target, if there is one."""
    pending = dict(moves)
    source_of = {new: old for old, new in moves.items()}
    copies = []
    ready = [old for old, new in pending.items() if new not in pending]
    while pending:
        if not ready:
            # Only cycles are left: one page of each is copied to a scratch page. One exists: a new run has at least one
            # page that is free or has become free.
            if spare is None:
                spare = next(old for old in moves if old not in pending and old not in source_of)
            old, new = pending.popitem()
            copies.append(Copy(Tier.DEVICE, (old,), Tier.DEVICE, (spare,)))
            pending[spare], source_of[new] = new, spare
            ready = [source_of[old]]
        copies.append(Copy(Tier.DEVICE, tuple(ready), Tier.DEVICE, tuple(pending[old] for old in ready)))
        for old in ready:
            del pending[old]
        ready = [source_of[page] for page in ready if source_of.get(page) in pending]
    return copies
