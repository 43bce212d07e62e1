"""The promises of an engine's sequences, with shared pages charged once.

Sequences that share a page hold it within the promise of each. So fewer pages are needed than were promised, even if
every sequence uses its whole promise. Sequences that share pages come and go as a whole: a leaving sequence frees at
least as many promised pages as become unshared. So the promises always stay within the limit.
"""

from collections.abc import Callable, Iterable

from motet.domain import RequestId
from motet.ledger import Ledger
from motet.shared_pages import charges
from motet_runner.plan.pages import PageAllocator
from motet_runner.plan.sequence import Sequence


class PageLedger(Ledger[RequestId]):
    """Its capacity is the device's. Less may be promised while adapters are in use."""

    by_forecast = False
    """Whether charges are parts of a forecast, and promises keep no pages from others."""

    def __init__(self, pages: PageAllocator, pages_of_adapters: Callable[[], int]) -> None:
        """`pages_of_adapters`: how many pages KV cannot get now."""
        super().__init__(pages.capacity)
        self._pages = pages
        self._pages_of_adapters = pages_of_adapters

    @property
    def kv_pages(self) -> int:
        """How many pages KV can get now."""
        return max(0, self.capacity - self._pages_of_adapters())

    @property
    def limit(self) -> int:
        return self.limit_beside(self._pages_of_adapters())

    def limit_beside(self, pages_of_adapters: int) -> int:
        """How many pages may be promised while adapters have `pages_of_adapters`."""
        return int(max(0, self.capacity - pages_of_adapters) * self.overcommit)

    @property
    def promised(self) -> int:
        return self.total - self._pages.repeated

    @property
    def free(self) -> int:
        return self.limit - self.promised

    @property
    def free_to_extend(self) -> int:
        """By how many pages the promise of a running sequence may grow."""
        return self.free

    def why_not(
        self,
        _sequence: Sequence,
        pages: int,
        _at_hand: int = 0,
        /,
        *,
        pages_of_adapters: int,
    ) -> str:
        """Why a sequence cannot be promised `pages` now, while adapters have `pages_of_adapters`; empty if it can.
        `_at_hand`: how many pages it can take if the scheduler lets it come back. If they are enough, a forecast is not
        asked again."""
        free = self.limit_beside(pages_of_adapters) - self.promised
        if pages <= free:
            return ""
        return f"{pages} pages were promised and {max(0, free)} can be given beside the adapters in use"

    def sequences_changed(self) -> None:
        """Sequences with promises have more tokens, other promises or other pages, or begin anew: what was found out
        about them does not hold any more."""

    @property
    def charges_all_whole(self) -> bool:
        """True if each sequence is charged its whole promise."""
        return not self._pages.repeated

    def charges(self, sequences: Iterable[Sequence]) -> dict[RequestId, int]:
        """How many pages each of these sequences, given by arrival, is charged if it has a promise."""
        return charges((one.request, one.promise, one.pages) for one in sequences if one.request in self)
