"""The promises of an engine's sequences, with shared pages charged once.

Sequences that share a page hold it within the promise of each. So there are fewer pages needed than were promised, even
when every sequence uses its whole promise. Sequences that share pages come and go as a whole: when one leaves, at least
as many promised pages go as are no longer shared. So what was promised always stays within the limit.
"""

from motet.domain import RequestId
from motet.ledger import Ledger
from motet_runner.plan.pages import PageAllocator


class PageLedger(Ledger[RequestId]):
    def __init__(self, pages: PageAllocator) -> None:
        super().__init__(pages.capacity)
        self._pages = pages

    @property
    def promised(self) -> int:
        return self._total - self._pages.repeated

    @property
    def free(self) -> int:
        return self.limit - self.promised
