"""What others are charged when a request goes."""

from typing import Any

import pytest

from motet.domain import RequestId
from motet.runner_info import RunnerRequest
from motet.shared_pages import ReportedLedger


@pytest.mark.parametrize(("by_forecast", "left"), [(False, 7), (True, 3)])
def test_what_a_request_had_of_a_forecast_goes_with_it(by_forecast: bool, left: int) -> None:
    """Pages that it shared must be paid for by those that stay. What it had of a forecast nobody takes over."""
    ledger = ReportedLedger[str](100, by_forecast=by_forecast)
    ledger.record("a", 10, shared=6)
    ledger.record("b", 10, shared=7)
    ledger.release("a")
    assert ledger.promised == left
    ledger.check()


@pytest.mark.parametrize(("by_forecast", "charged"), [(False, 14), (True, 4)])
def test_a_larger_promise_keeps_no_more_of_a_forecast(by_forecast: bool, charged: int) -> None:
    """The promise doubles between two reports. What is charged by a forecast depends on it in no way."""
    ledger = ReportedLedger[str](100, by_forecast=by_forecast)
    ledger.record("a", 10)
    assert ledger.promised == 10, "no report knows it yet"
    ledger.record("a", 10, shared=6)
    ledger.record("a", 20)
    assert ledger.promised == charged
    ledger.check()


def test_a_request_may_be_charged_more_of_a_forecast_than_its_promise() -> None:
    """Else the sum would be smaller than the runner's: requests would be placed there, and declined."""
    entry = RunnerRequest(RequestId("a"), 1, 10, charged_pages=13)
    ledger = ReportedLedger[str](100, by_forecast=True)
    ledger.record("a", entry.pages, shared=entry.shared_pages)
    assert ledger.promised == 13
    exact = ReportedLedger[str](100)
    exact.record("a", entry.pages, shared=entry.shared_pages)
    assert exact.promised == 10, "elsewhere a promise is the most"


class Counted(dict[str, int]):
    looked_at = 0

    def items(self) -> Any:
        return map(self._count, super().items())

    def popitem(self) -> tuple[str, int]:
        return self._count(super().popitem())

    def _count(self, item: tuple[str, int]) -> tuple[str, int]:
        self.looked_at += 1
        return item


def test_a_runner_that_says_that_all_of_its_requests_share_pages_does_not_slow_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, shared = ReportedLedger[str](10_000), Counted()
    monkeypatch.setattr(ledger, "_shared", shared)
    for number in range(200):
        ledger.record(str(number), 5, shared=4)
    for number in range(200):
        ledger.release(str(number))
    assert not ledger.promised
    assert shared.looked_at < 1000, "each end looked at all others"
