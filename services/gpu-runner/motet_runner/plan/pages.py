"""Which page is whose. Pure numbers; the bytes are in `motet_runner.memory`."""

from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out page numbers; the last given back is the first handed out, because it is the warmest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None and nothing changed when there are not as many."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def give(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Recount: every page is free or held by exactly one; raises AssertionError with the numbers otherwise."""
        owned = [page for pages in held for page in pages]
        everything = sorted(owned + self._free)
        assert everything == list(range(self.capacity)), (
            f"{self.capacity} pages, {len(self._free)} free, {len(owned)} held, {len(set(everything))} different"
        )
