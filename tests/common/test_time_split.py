"""The parts of a request's time add up to it, whatever is marked."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.time_split import MAX_CLOCK_ERROR, PartSeconds, TimePart, TimeSplit

QUEUE, GENERATION, PENALTY, OVERHEAD = TimePart

seconds = st.floats(0, 1e3)
marks = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(TimePart)),
    st.tuples(st.just("got_token")),
    st.tuples(st.just("submitted")),
    st.tuples(st.just("told"), st.tuples(st.floats(-0.1, 1), st.floats(0, 1), st.floats(0, 1))),
)


@given(st.lists(st.tuples(seconds, marks)), seconds)
def test_the_parts_add_up_whatever_is_marked(steps, rest):
    began = now = submitted = 50.0
    split = TimeSplit(OVERHEAD, began)
    for later, (mark, *what) in steps:
        now += later
        if mark == "told":
            split.told(PartSeconds(*(share * (now - submitted) / 3 for share in what[0])), now)
        else:
            getattr(split, mark)(*what, now)
        submitted = now if mark == "submitted" else submitted
        assert sum(split.until(now)) == pytest.approx(now - began)
        assert min(split.until(now)) >= 0
    split.end(now + rest)
    assert sum(split.until(now + 1e6)) == pytest.approx(now + rest - began), "after its end no time passes"


def test_a_penalty_lasts_until_the_next_token():
    split = TimeSplit(GENERATION, 0)
    split.enter(PENALTY, 2)
    split.enter(QUEUE, 3)
    split.enter(GENERATION, 5)
    split.got_token(6)
    split.got_token(7)
    assert split.until(10) == PartSeconds(generation=6, penalty=4)


def test_what_a_runner_measured_replaces_the_marks_since_the_request_was_sent_there():
    split = TimeSplit(QUEUE, 0)
    split.submitted(1)
    split.enter(GENERATION, 5)
    split.told(PartSeconds(queue=2, generation=1.5), 5)
    assert split.until(7) == PartSeconds(queue=3, generation=3.5, overhead=0.5)
    split.told(PartSeconds(queue=2, generation=4.5), 8)
    assert split.until(8) == PartSeconds(queue=3, generation=4.5, overhead=0.5), "the last word counts"


@pytest.mark.parametrize("wrong", [nan, inf, -1.0, 4 * (1 + 2 * MAX_CLOCK_ERROR)])
@pytest.mark.parametrize("part", ["queue", "generation", "penalty"])
def test_a_runner_that_says_what_cannot_be_is_not_believed(part, wrong):
    split = TimeSplit(QUEUE, 0)
    split.submitted(1)
    split.told(PartSeconds(**{part: wrong}), 5)
    assert split.until(5) == PartSeconds(queue=5)


def test_a_mark_of_an_earlier_moment_takes_no_time_from_others():
    split = TimeSplit(QUEUE, 0)
    split.enter(GENERATION, 4)
    split.enter(OVERHEAD, 3)
    assert split.until(6) == PartSeconds(queue=4, overhead=2)


def test_a_copy_goes_on_by_itself():
    split = TimeSplit(OVERHEAD, 1)
    copies = [split.copy(), split.copy()]
    copies[0].enter(QUEUE, 3)
    assert [one.until(4) for one in (split, *copies)] == [
        PartSeconds(overhead=3), PartSeconds(overhead=2, queue=1), PartSeconds(overhead=3)
    ]  # fmt: skip
