"""Which page is whose. Pure numbers; the bytes are in `motet_runner.memory`."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt


class PageAllocator:
    """Hands out page numbers. Several holders may share a page: it is free when its last holder gives it back.

    The prefix cache is a holder that yields: a page that only the cache holds counts as free, and is taken from the
    cache if no other page is left. The page that has been only cached for longest goes first. Of the pages that one
    holder gives back together, later ones go before earlier ones.

    The page that was given back last is handed out first, because it is most likely still in a cache.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.on_cache_page_taken: Callable[[int], None] = lambda _: None
        """Called for each page that the cache has to yield, before the page is handed out again."""
        self._free = OrderedDict[int, None].fromkeys(range(capacity - 1, -1, -1))
        """In reverse order of their next use. Any page is found and put at either end without a look at the others."""
        self._holders = array("l", [0]) * capacity
        """Page → how many holders it has, without the prefix cache."""
        self._cached = bytearray(capacity)
        self._taken = bytearray(capacity)
        """1 for each page that is not in `_free`"""
        self._only_cached = OrderedDict[int, None]()
        """Pages that only the cache holds, in the order in which it yields them. The first is found without a look at
        those that are gone, which a plain dict would pass by each time."""
        self._repeated = 0

    @property
    def free(self) -> int:
        """How many pages `take` can give."""
        return len(self._free) + len(self._only_cached)

    @property
    def repeated(self) -> int:
        """How many pages sharing saves: the sum of all holders' pages minus the pages in use. The prefix cache does not
        count as a holder here."""
        return self._repeated

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one holder each. None, without any change, if too few pages are free."""
        if count > self.free:
            return None
        if count == 0:
            return []
        while len(self._free) < count:
            self._take_from_cache(next(iter(self._only_cached)))
        taken = [self._free.popitem()[0] for _ in range(count)]
        for page in taken:
            self._holders[page] = self._taken[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to pages that already have one."""
        for page in pages:
            if self._holders[page]:
                self._repeated += 1
            else:
                assert self._cached[page], f"page {page} is free"
                del self._only_cached[page]
            self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        """True if several holders, the cache included, have the page. Then none of them may write to it."""
        return self._holders[page] + self._cached[page] > 1

    def has_several_holders(self, page: int) -> bool:
        """True if it is in use more than once. The prefix cache does not count."""
        return self._holders[page] > 1

    def give(self, pages: Sequence[int]) -> None:
        """One holder gives these pages back."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                self._repeated -= 1
            elif self._cached[page]:
                self._only_cached[page] = None
            else:
                self._free[page] = None
                self._taken[page] = 0

    # -- the prefix cache ----------------------------------------------------------------------------------------------

    def only_cached(self, page: int) -> bool:
        """True if the prefix cache is the page's only holder."""
        return page in self._only_cached

    def cache(self, page: int) -> None:
        """The prefix cache becomes a holder of a page that already has one."""
        assert self._holders[page], f"page {page} has no holder that computed it"
        assert not self._cached[page], f"page {page} is in the cache already"
        self._cached[page] = True

    def uncache(self, page: int) -> None:
        """The prefix cache gives a page back."""
        assert self._cached[page], f"page {page} is not in the cache"
        self._cached[page] = False
        if page in self._only_cached:
            del self._only_cached[page]
            self._free[page] = None
            self._taken[page] = 0

    def most_valuable_cached(self) -> Iterable[int]:
        """The pages that only the cache holds, in reverse order of their eviction."""
        return reversed(self._only_cached)

    def _take_from_cache(self, page: int) -> None:
        self.on_cache_page_taken(page)
        self.uncache(page)

    # -- particular pages, which the device's budget chooses -----------------------------------------------------------

    @property
    def empty_pages(self) -> Collection[int]:
        """The free pages that the cache does not hold. The one that is handed out next is the last one."""
        return self._free.keys()

    def in_use(self) -> npt.NDArray[np.bool_]:
        """By page: whether it is not empty."""
        return np.frombuffer(self._taken, np.bool_).copy()

    def is_empty(self, page: int) -> bool:
        return not self._taken[page]

    def first_cached(self, count: int) -> list[int]:
        """The pages that the cache would yield next, at most `count`."""
        return list(islice(self._only_cached, count))

    def take_from_cache(self, pages: Iterable[int]) -> None:
        """Pages that only the cache holds become empty."""
        for page in pages:
            self._take_from_cache(page)

    def take_these(self, pages: Collection[int]) -> None:
        """One holder takes these empty pages."""
        self._withdraw(pages)
        for page in pages:
            self._holders[page] = 1

    def give_last(self, pages: Sequence[int]) -> None:
        """The only holder gives these pages back. They are handed out after all other free pages."""
        for page in pages:
            assert self._holders[page] == 1, f"page {page} has {self._holders[page]} holders"
            assert not self._cached[page], f"page {page} is in the cache"
            self._holders[page] = 0
        self._free_last(pages)

    def relocate(self, moves: Mapping[int, int]) -> None:
        """All holders of a page get another page instead, which must be empty or itself moved away. The prefix cache
        must be told separately."""
        if not moves:
            return
        moved = {new: (self._holders[old], self._cached[old]) for old, new in moves.items()}
        self._withdraw(moved.keys() - moves.keys())
        for old in moves:
            self._holders[old], self._cached[old] = 0, False
        for new, (holders, cached) in moved.items():
            self._holders[new], self._cached[new] = holders, cached
        self._only_cached = OrderedDict.fromkeys(moves.get(page, page) for page in self._only_cached)
        self._free_last([old for old in moves if old not in moved])

    def _withdraw(self, pages: Iterable[int]) -> None:
        """Remove these from the free pages."""
        for page in pages:
            assert page in self._free, f"page {page} is not empty"
            del self._free[page]
            self._taken[page] = 1

    def _free_last(self, pages: Sequence[int]) -> None:
        """These become free, and are handed out after all other free pages."""
        for page in reversed(pages):
            self._taken[page] = 0
            self._free[page] = None
            self._free.move_to_end(page, last=False)

    # -- recount -------------------------------------------------------------------------------------------------------

    def check(self, held: Iterable[Sequence[int]], cached: Collection[int] = ()) -> None:
        """Recount: every page is free, in the cache, or has exactly the holders in `held`. Raises AssertionError with
        the numbers."""
        counted = Counter(page for pages in held for page in pages)
        assert all(self._holders[page] == counted[page] for page in range(self.capacity)), (
            f"holders by page {self._holders}, counted {dict(counted)}"
        )
        marked = {page for page in range(self.capacity) if self._cached[page]}
        assert marked == set(cached), f"pages of the cache {sorted(cached)}, marked {sorted(marked)}"
        only_cached = {page for page in marked if not counted[page]}
        assert self._only_cached.keys() == only_cached, (
            f"pages without another holder than the cache {sorted(only_cached)}, listed {sorted(self._only_cached)}"
        )
        free = [page for page in range(self.capacity) if not self._holders[page] and not self._cached[page]]
        assert sorted(self._free) == free, (
            f"{self.capacity} pages, {len(self._free)} in the list of free pages, {len(free)} without a holder"
        )
        marked_empty = [page for page in range(self.capacity) if not self._taken[page]]
        assert marked_empty == free, f"pages that are marked as empty {marked_empty}, empty {free}"
        repeated = sum(count - 1 for count in counted.values())
        assert self._repeated == repeated, f"{self._repeated} pages counted as repeated, {repeated} are"
