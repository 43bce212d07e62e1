"""The promises of an engine's sequences, with shared pages charged once.

Sequences that share a page hold it within the promise of each. So there are fewer pages needed than were promised, even
when every sequence uses its whole promise. Sequences that share pages come and go as a whole: when one leaves, at least
as many promised pages go as are no longer shared. So what was promised always stays within the limit.
"""

from collections.abc import Callable

from motet.domain import RequestId
from motet.ledger import Ledger
from motet_runner.plan.pages import PageAllocator


class PageLedger(Ledger[RequestId]):
    """Its capacity is the device's. What may be promised is less while adapters are in use."""

    def __init__(self, pages: PageAllocator, pages_of_adapters: Callable[[], int]) -> None:
        """`pages_of_adapters`: those that KV cannot have now."""
        super().__init__(pages.capacity)
        self._pages = pages
        self._pages_of_adapters = pages_of_adapters

    @property
    def kv_pages(self) -> int:
        """The pages that KV can have now."""
        return max(0, self.capacity - self._pages_of_adapters())

    @property
    def limit(self) -> int:
        return self.limit_beside(self._pages_of_adapters())

    def limit_beside(self, pages_of_adapters: int) -> int:
        """What may be promised while adapters have `pages_of_adapters` pages."""
        return int(max(0, self.capacity - pages_of_adapters) * self.overcommit)

    @property
    def promised(self) -> int:
        return self.total - self._pages.repeated

    @property
    def free(self) -> int:
        return self.limit - self.promised
