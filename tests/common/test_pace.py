"""The start limit: three starts at once, then one in each pause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.start_limit import AT_ONCE, StartLimiter

PAUSE = 10
steps = st.lists(st.integers(0, 25), max_size=200)
"""The time from one attempt to the next."""


def begins(paced: StartLimiter[str], now: float, times: int, name: str = "a") -> int:
    """The times of so many attempts."""
    begun = 0
    for _ in range(times):
        if paced.may_begin(name, now):
            paced.begun(name, now)
            begun += 1
    return begun


def test_three_begin_at_once_and_one_after_each_pause() -> None:
    paced = StartLimiter[str](PAUSE)
    assert [begins(paced, now, 5) for now in (0, 9, 10, 19, 20, 29, 30)] == [3, 0, 1, 0, 1, 0, 1]


@given(steps)
def test_there_are_never_more_than_three_starts_and_one_in_each_pause(waits: list[int]) -> None:
    paced, now = StartLimiter[str](PAUSE), 0
    began: list[int] = []
    for wait in waits:
        now += wait
        began += [now] * begins(paced, now, 1)
        paced.expire(now)
    for number, since in enumerate(began):
        for more, until in enumerate(began[number:], 1):
            assert more <= AT_ONCE + (until - since) / PAUSE


@given(steps)
def test_a_start_that_waits_happens_at_the_given_time_within_a_pause(waits: list[int]) -> None:
    paced, now = StartLimiter[str](PAUSE), 0
    for wait in waits:
        now += wait
        while begins(paced, now, 1):
            pass
        at = paced.next_at("a")
        assert now < at <= now + PAUSE
        assert not paced.may_begin("a", at - 1)
        assert paced.may_begin("a", at)


@pytest.mark.parametrize(("quiet", "given_back"), [(9, 0), (10, 1), (20, 2), (29, 2), (30, 3), (1000, 3)])
def test_each_quiet_pause_gives_one_back_and_three_give_all(quiet: int, given_back: int) -> None:
    paced = StartLimiter[str](PAUSE)
    assert begins(paced, 0, 5) == AT_ONCE
    assert begins(paced, quiet, 5) == given_back


def test_each_name_is_paced_by_itself() -> None:
    paced = StartLimiter[str](PAUSE)
    assert begins(paced, 0, 5, "a") == begins(paced, 0, 5, "b") == AT_ONCE


@given(steps)
def test_without_a_pause_everything_begins_at_once(waits: list[int]) -> None:
    paced, now = StartLimiter[str](0), 0
    for wait in waits:
        now += wait
        assert begins(paced, now, 5) == 5
        paced.expire(now)


def test_an_unlimited_start_counts_and_delays_others_for_at_most_one_pause() -> None:
    paced = StartLimiter[str](PAUSE)
    for _ in range(50):
        paced.begun("a", 0)
    paced.expire(0)
    assert paced.next_at("a") == PAUSE


def test_a_clock_that_is_set_back_holds_up_for_one_pause_at_most() -> None:
    paced = StartLimiter[str](PAUSE)
    begins(paced, 5000, 5)
    paced.expire(100)
    assert [begins(paced, now, 5) for now in (100, 109, 110)] == [0, 0, 1]


@given(steps)
def test_tidying_up_changes_nothing_while_the_clock_goes_forward(waits: list[int]) -> None:
    tidied, left_alone, now = StartLimiter[str](PAUSE), StartLimiter[str](PAUSE), 0
    for wait in waits:
        now += wait
        assert begins(tidied, now, 1) == begins(left_alone, now, 1)
        tidied.expire(now)


def test_expired_names_take_no_memory() -> None:
    paced = StartLimiter[str](PAUSE)
    for now in range(1000):
        paced.begun(f"{now}", now)
        paced.expire(now)
        assert len(paced) <= PAUSE


def test_an_expired_name_starts_like_a_new_one() -> None:
    paced = StartLimiter[str](PAUSE)
    begins(paced, 0, 5)
    paced.forget("a")
    paced.forget("never seen")
    assert begins(paced, 0, 5) == AT_ONCE
