"""What promises that share pages are charged. Runner, scheduler and supervisor use this one rule. Pure arithmetic.

Sequences that begin alike hold the same pages, each within its own promise. A page is charged once, to the sequence
that came first. The runner knows who holds which page; its reports say what it charges to each request. The others know
only these numbers, and keep a `ReportedLedger`. Its sum is never smaller than the runner's:
- a promise is charged whole until a report says less, and at least one page;
- when a request goes, others may pay from then on for the pages that they shared with it. Nobody but the runner knows
  which, so others are charged that many pages more, until the next report.
"""

from collections.abc import Collection, Iterable
from typing import TypeVar

from motet.ledger import Ledger

Key = TypeVar("Key")


def charges(promises: Iterable[tuple[Key, int, Collection[int]]]) -> dict[Key, int]:
    """How many pages of its promise are charged to each sequence. `promises`: of each sequence, in the order in which
    they came, its promise and the numbers of the pages that it holds."""
    paid: set[int] = set()
    charged = {}
    for key, promise, pages in promises:
        charged[key] = promise - sum(page in paid for page in pages)
        paid.update(pages)
    return charged


class ReportedLedger(Ledger[Key]):
    def __init__(self, capacity: int, *, overcommit: float = 1.0, by_forecast: bool = False) -> None:
        """`by_forecast`: the charges are parts of a forecast, not of shared pages: nobody pays for those that go."""
        super().__init__(capacity, overcommit=overcommit)
        self._by_forecast = by_forecast
        self._shared: dict[Key, int] = {}
        """Pages of promises that others pay for, where there are any."""

    def record(self, key: Key, pages: int, *, shared: int | None = None) -> None:
        """A promise that was checked to fit, or that the runner has already made. By the runner's report, `shared` of
        its pages are not charged; more than all of them are if that is negative, as parts of a forecast may be. None:
        no report says it. Then a new promise is charged whole. Of a changed one as much stays shared as before, or as
        much charged if that is part of a forecast."""
        pages = max(1, pages)
        if self._by_forecast:
            charged = self.promise_of(key) or pages if shared is None else max(1, pages - shared)
        else:
            if shared is None:
                shared = self._shared.get(key, 0)
            if shared or self._shared:
                self._share(key, min(shared, pages - 1))
            charged = pages - self._shared.get(key, 0)
        if self._promises.get(key) != charged:
            self.adopt(key, charged)

    def release(self, key: Key) -> int:
        charged = super().release(key)
        self._share(key, 0)
        self.charge_others(charged)
        return charged

    def charge_others(self, pages: int) -> None:
        """A request that was charged these pages is gone: others may pay now for those that it shared with them."""
        if self._by_forecast:
            return
        while pages and self._shared:
            key, shared = self._shared.popitem()
            more = min(shared, pages)
            self._share(key, shared - more)
            self.adopt(key, self.promise_of(key) + more)
            pages -= more

    def check(self) -> None:
        super().check()
        assert all(key in self and shared > 0 for key, shared in self._shared.items()), "who is gone shares pages"

    def _share(self, key: Key, pages: int) -> None:
        if pages > 0:
            self._shared[key] = pages
        else:
            self._shared.pop(key, None)
