"""The sums of a ledger are right after any changes in any order."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from motet.ledger import Ledger, Shortfall

keys = st.sampled_from("abcdef")
pages = st.integers(min_value=1, max_value=40)


class LedgerAndDict(RuleBasedStateMachine):
    """The ledger and a plain dictionary with the same promises."""

    @initialize(capacity=st.integers(min_value=0, max_value=100), overcommit=st.sampled_from([0.5, 1.0, 1.3]))
    def open(self, capacity: int, overcommit: float) -> None:
        self.ledger: Ledger[str] = Ledger(capacity, overcommit=overcommit)
        self.expected: dict[str, int] = {}
        self.forced = False

    @rule(key=keys, pages=pages)
    def promise(self, key: str, pages: int) -> None:
        growth = pages - self.expected.get(key, 0)
        free = self.ledger.free
        refused = self.ledger.promise(key, pages)
        if growth <= 0 or growth <= free:
            assert refused is None
            self.expected[key] = pages
        else:
            assert refused == Shortfall(wanted=growth, free=free)

    @rule(key=keys, pages=pages)
    def adopt(self, key: str, pages: int) -> None:
        self.ledger.adopt(key, pages)
        self.expected[key] = pages
        self.forced = self.forced or self.ledger.free < 0

    @rule(key=keys)
    def release(self, key: str) -> None:
        assert self.ledger.release(key) == self.expected.pop(key, 0)

    @rule(overcommit=st.sampled_from([0.5, 1.0, 2.0]))
    def change_the_factor(self, overcommit: float) -> None:
        self.ledger.overcommit = overcommit
        self.forced = self.forced or self.ledger.free < 0

    @rule()
    def clear(self) -> None:
        self.ledger.clear()
        self.expected.clear()

    @invariant()
    def the_entries_equal_the_dict(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert dict(self.ledger) == self.expected
        assert len(self.ledger) == len(self.expected)
        self.ledger.check()
        assert self.ledger.promised == sum(self.expected.values())

    @invariant()
    def only_adopted_promises_exceed_the_limit(self) -> None:
        if hasattr(self, "ledger") and not self.forced:
            assert self.ledger.promised <= self.ledger.limit


TestLedgerAndDict = LedgerAndDict.TestCase


def test_a_promise_that_does_not_fit_changes_nothing() -> None:
    ledger: Ledger[str] = Ledger(10)
    assert ledger.promise("a", 8) is None
    assert ledger.promise("b", 3) == Shortfall(wanted=3, free=2)
    assert "b" not in ledger
    assert ledger.promise("a", 11) == Shortfall(wanted=3, free=2)
    assert ledger.promise_of("a") == 8


def test_an_overfull_ledger_refuses_new_promises_but_lets_promises_shrink() -> None:
    ledger: Ledger[str] = Ledger(10)
    ledger.adopt("a", 15)
    assert ledger.free == -5
    assert ledger.promise("b", 1) == Shortfall(wanted=1, free=-5)
    assert ledger.promise("a", 12) is None
    ledger.release("a")
    assert ledger.promise("b", 10) is None


def test_a_promise_that_can_never_fit_is_recognised_at_once() -> None:
    ledger: Ledger[str] = Ledger(10, overcommit=1.5)
    assert ledger.fits_when_empty(15)
    assert not ledger.fits_when_empty(16)


@pytest.mark.parametrize("pages", [0, -1])
def test_a_promise_of_zero_pages_is_an_error(pages: int) -> None:
    ledger: Ledger[str] = Ledger(10)
    with pytest.raises(ValueError, match="at least one page"):
        ledger.promise("a", pages)


def test_a_drifted_total_is_reported_with_its_numbers() -> None:
    ledger: Ledger[str] = Ledger(10)
    ledger.promise("a", 3)
    ledger.total = 4
    with pytest.raises(AssertionError, match="ledger says 4 pages, its entries add up to 3"):
        ledger.check()
