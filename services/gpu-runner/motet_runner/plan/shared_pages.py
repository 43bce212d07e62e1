"""Who pays for pages that several sequences hold: of these the one that most likely ends last. As long as the others
need a page, somebody is still charged for it. Pure.

Who shares a page shares all pages before it. So nothing is looked at behind the first page that nobody shares, and what
is paid of a sequence's pages are its first ones.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

Pages = Sequence[int]


class Payers:
    """Of some sequences."""

    def __init__(
        self, pages: Sequence[Pages], likely_left: Callable[[int], float], is_shared: Callable[[int], bool]
    ) -> None:
        """`pages`: of each sequence, and `likely_left` how many tokens it probably still gets, by its place.
        `is_shared`: whether several hold a page."""
        self.shared = [0] * len(pages)
        """How many of each one's pages others pay for."""
        self._pages = pages
        sharing = [at for at, held in enumerate(pages) if held and is_shared(held[0])]
        self._likely_left = {at: likely_left(at) for at in sharing}
        self._payer: dict[int, int] = {}
        for at in sorted(sharing, key=self._likely_left.__getitem__, reverse=True):
            held = pages[at]
            self.shared[at] = paid = bisect_left(held, True, key=self._is_unpaid)
            if paid < len(held) and is_shared(held[paid]):
                self._payer.update(dict.fromkeys(takewhile(is_shared, held[paid:]), at))

    def _is_unpaid(self, page: int) -> bool:
        return page not in self._payer

    def shared_with(self, pages: Collection[int], likely_left: float, of: Callable[[int], float]) -> list[int]:
        """The same with one more, which came last and holds these pages. `of`: what is likely left of the others."""
        shared, places = [*self.shared, 0], range(len(self._pages))
        for number, page in enumerate(pages):
            payer = self._payer.get(page)
            if payer is None:  # at most one holds it, and if another page that one holds follows, the same one
                payer = next((at for at in places if self._pages[at][number : number + 1] == [page]), None)
                if payer is None:
                    break
                places = range(payer, payer + 1)
            shared[payer if likely_left > of(payer) else -1] += 1
        return shared
