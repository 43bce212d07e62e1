"""The change limit: three changes at once, then one in each pause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.change_limit import AT_ONCE, ChangeLimiter

PAUSE = 10
steps = st.lists(st.integers(0, 25), max_size=200)
"""The time from one attempt to the next."""


def changes(limiter: ChangeLimiter[str], now: float, times: int, name: str = "a") -> int:
    """How many of `times` attempts may change at once."""
    made = 0
    for _ in range(times):
        if limiter.may_change(name, now):
            limiter.changed(name, now)
            made += 1
    return made


def test_three_changes_at_once_then_one_after_each_pause() -> None:
    limiter = ChangeLimiter[str](PAUSE)
    assert [changes(limiter, now, 5) for now in (0, 9, 10, 19, 20, 29, 30)] == [3, 0, 1, 0, 1, 0, 1]


@given(steps)
def test_never_more_than_three_changes_and_one_for_each_pause(waits: list[int]) -> None:
    limiter, now = ChangeLimiter[str](PAUSE), 0
    changed: list[int] = []
    for wait in waits:
        now += wait
        changed += [now] * changes(limiter, now, 1)
        limiter.expire(now)
    for number, since in enumerate(changed):
        for more, until in enumerate(changed[number:], 1):
            assert more <= AT_ONCE + (until - since) / PAUSE


@given(steps)
def test_a_waiting_change_may_happen_at_next_at_within_a_pause(waits: list[int]) -> None:
    limiter, now = ChangeLimiter[str](PAUSE), 0
    for wait in waits:
        now += wait
        while changes(limiter, now, 1):
            pass
        at = limiter.next_at("a")
        assert now < at <= now + PAUSE
        assert not limiter.may_change("a", at - 1)
        assert limiter.may_change("a", at)


@pytest.mark.parametrize(("quiet", "given_back"), [(9, 0), (10, 1), (20, 2), (29, 2), (30, 3), (1000, 3)])
def test_each_pause_without_a_change_allows_one_more(quiet: int, given_back: int) -> None:
    limiter = ChangeLimiter[str](PAUSE)
    assert changes(limiter, 0, 5) == AT_ONCE
    assert changes(limiter, quiet, 5) == given_back


def test_names_are_limited_separately() -> None:
    limiter = ChangeLimiter[str](PAUSE)
    assert changes(limiter, 0, 5, "a") == changes(limiter, 0, 5, "b") == AT_ONCE


@given(steps)
def test_a_pause_of_zero_limits_nothing(waits: list[int]) -> None:
    limiter, now = ChangeLimiter[str](0), 0
    for wait in waits:
        now += wait
        assert changes(limiter, now, 5) == 5
        limiter.expire(now)


def test_a_forced_change_counts_but_delays_by_at_most_one_pause() -> None:
    limiter = ChangeLimiter[str](PAUSE)
    for _ in range(50):
        limiter.changed("a", 0)
    limiter.expire(0)
    assert limiter.next_at("a") == PAUSE


def test_a_clock_set_back_delays_by_at_most_one_pause() -> None:
    limiter = ChangeLimiter[str](PAUSE)
    changes(limiter, 5000, 5)
    limiter.expire(100)
    assert [changes(limiter, now, 5) for now in (100, 109, 110)] == [0, 0, 1]


@given(steps)
def test_expire_changes_no_decision_while_the_clock_goes_forward(waits: list[int]) -> None:
    expired, kept, now = ChangeLimiter[str](PAUSE), ChangeLimiter[str](PAUSE), 0
    for wait in waits:
        now += wait
        assert changes(expired, now, 1) == changes(kept, now, 1)
        expired.expire(now)


def test_expired_names_take_no_memory() -> None:
    limiter = ChangeLimiter[str](PAUSE)
    for now in range(1000):
        limiter.changed(f"{now}", now)
        limiter.expire(now)
        assert len(limiter) <= PAUSE


def test_a_forgotten_name_is_like_a_new_one() -> None:
    limiter = ChangeLimiter[str](PAUSE)
    changes(limiter, 0, 5)
    limiter.forget("a")
    limiter.forget("never seen")
    assert changes(limiter, 0, 5) == AT_ONCE
