"""Which page is whose. Pure numbers; the bytes are in `motet_runner.memory`."""

from collections import Counter
from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out page numbers. Several holders may share a page: it is free when the last one gives it back.

    The page that was given back last is handed out first, because it is the warmest.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._holders = [0] * capacity
        """Holders by page."""

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one holder each. None, and nothing is changed, if there are not as many free pages."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to pages that have one already."""
        for page in pages:
            assert self._holders[page], f"page {page} is free"
            self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        """Whether several holders have it. Then none of them may write to it."""
        return self._holders[page] > 1

    def give(self, pages: Sequence[int]) -> None:
        """One holder gives these pages back."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Recount: every page is free, or has exactly the holders in `held`. Raises AssertionError with the numbers."""
        counted = Counter(page for pages in held for page in pages)
        assert all(self._holders[page] == counted[page] for page in range(self.capacity)), (
            f"holders by page {self._holders}, counted {dict(counted)}"
        )
        free = [page for page in range(self.capacity) if not self._holders[page]]
        assert sorted(self._free) == free, (
            f"{self.capacity} pages, {len(self._free)} in the list of free pages, {len(free)} without a holder"
        )
