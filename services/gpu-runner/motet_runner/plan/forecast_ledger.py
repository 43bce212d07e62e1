"""Promises that do not keep pages from others: a sequence may join if the forecast of the largest need has room.

What a sequence is promised still says when it asks for more (S3-10). But a promise may always grow, and the sum of all
promises has no limit. If the forecast was wrong and pages are short, the newest sequence is parked (PU-15).
"""

from collections.abc import Callable, Collection, Iterable

from motet.domain import RequestId
from motet.ledger import Shortfall
from motet_runner.plan.forecast import Need, Prospect, largest_need, pages_of_longest_lives, sum_of_ends
from motet_runner.plan.page_ledger import PageLedger
from motet_runner.plan.pages import PageAllocator
from motet_runner.plan.presets import UNBOUNDED
from motet_runner.plan.sequence import Sequence


class ForecastLedger(PageLedger):
    """Each sequence is charged what it has of the largest need. Scheduler and supervisor are told these charges, so
    that their sums are the forecast."""

    by_forecast = True

    def __init__(
        self, pages: PageAllocator, pages_of_adapters: Callable[[], int], sequences: Iterable[Sequence]
    ) -> None:
        """`sequences`: all of the engine."""
        super().__init__(pages, pages_of_adapters)
        self._sequences = sequences

    def promise(self, key: RequestId, pages: int) -> Shortfall | None:
        self._write(key, pages)
        return None

    @property
    def promised(self) -> int:
        return sum(self.charges(self._sequences).values())

    @property
    def free_to_extend(self) -> int:
        return UNBOUNDED

    def why_not(
        self,
        sequence: Sequence,
        pages: int,
        at_hand: int = 0,
        /,
        *,
        pages_of_adapters: int,
    ) -> str:
        others = self._running(self._sequences)
        if not others:
            return ""
        limit = self.limit_beside(pages_of_adapters)
        all_of_them = (*others, sequence)
        need = 0
        if pages > at_hand and sum_of_ends(one.prospect for one in all_of_them) > limit:  # mostly it is not
            need = self._need(all_of_them).pages
        if need <= limit and sequence.is_spared:
            # Others make room for these, but they do not for each other: all of it must be there.
            limit = max(0, self.capacity - pages_of_adapters)
            need = pages_of_longest_lives([one.longest_life for one in all_of_them if one.is_spared])
        if need <= limit:
            return ""
        return f"{need} pages are expected to be needed with it, and {limit} can be given beside the adapters"

    @property
    def charges_all_whole(self) -> bool:
        return False

    def charges(self, sequences: Iterable[Sequence]) -> dict[RequestId, int]:
        running = self._running(sequences)
        return dict(zip((one.request for one in running), self._need(running).of_each, strict=True))

    def _need(self, sequences: Collection[Sequence]) -> Need:
        """What they need together: by this one figure they join, and it is what they are charged."""
        prospects = self._prospects(sequences)
        sure = self._prospects([one for one in sequences if one.prospect.surely_longest])
        return largest_need(prospects, at_least=pages_of_longest_lives(sure) if sure else 0)

    def _prospects(self, sequences: Collection[Sequence]) -> list[Prospect]:
        """Of several that hold a page, the one that most likely ends last pays for it: as long as the others need the
        page, somebody is still charged for it."""
        prospects = [one.prospect for one in sequences]
        if not self._pages.repeated:
            return prospects
        pages = [one.pages for one in sequences]
        paid: set[int] = set()
        for at in sorted(range(len(prospects)), key=lambda at: prospects[at].likely_left, reverse=True):
            paid_before = len(paid)
            paid.update(pages[at])
            prospects[at] = prospects[at]._replace(shared=len(pages[at]) - (len(paid) - paid_before))
        return prospects

    def _running(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        return [one for one in sequences if one.request in self]
