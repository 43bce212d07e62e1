"""What others are charged when a request goes."""

import pytest

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
