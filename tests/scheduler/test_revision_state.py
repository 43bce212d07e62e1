"""One revision of an adapter: the table of its standings, and who may be asked."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import InstanceName
from motet.errors import AdapterUnproved
from motet.runner_info import Failure
from motet_scheduler.policy.adapters import revision_state
from motet_scheduler.policy.adapters.revision_state import (
    MAX_REFUSED_BY,
    TABLE,
    Finding,
    RevisionState,
    Standing,
    is_refusal,
)

WRONG = Failure.of(AdapterUnproved("Its results are wrong.", reason="ProofFailed"))
NO_EFFECT = Failure.of(AdapterUnproved("It moves no logit.", reason="NoEffect"))
AWAY = Failure("adapter_fetch_failed", "away", 5.0)
FINAL = Failure("adapter_incompatible", "no config")
STARTS = [(InstanceName(f"r{number}"), "1") for number in range(4)]
R0, R1, *_ = STARTS


def test_the_table_is_the_one_that_the_module_shows():
    shown = re.findall(
        r"^    ([A-Z]+) +([A-Z]+) +([A-Z]+) +([A-Z]+) +([A-Z]+) +([A-Z]+)$", revision_state.__doc__ or "", re.MULTILINE
    )
    assert {row[0]: list(row[1:]) for row in shown} == {
        before.name: [after[finding].name for finding in Finding] for before, after in TABLE.items()
    }
    assert len(shown) == len(Standing)


def after(*happened) -> RevisionState:
    state = RevisionState()
    for one in happened:
        state = one(state)
    return state


def asked(start=R0, order=1):
    return lambda state: state.ask(order, start, 10.0)


def certified(start=R0):
    return lambda state: state.certified(start)


def unproved(start=R0):
    return lambda state: state.unproved(start)


def refused(start=R0, failure=WRONG):
    return lambda state: state.refused(start, failure)


def failed(failure, start=R0):
    return lambda state: state.failed(start, failure, 10.0)


def nobody_left(state):
    return state.nobody_left()


@pytest.mark.parametrize(
    ("happened", "standing", "failure"),
    [
        ((), Standing.WANTED, None),
        ((nobody_left,), Standing.WANTED, None),
        ((asked(), refused()), Standing.WANTED, None),
        ((asked(), refused(), nobody_left), Standing.REFUSED, WRONG),
        ((asked(), refused(), nobody_left, asked(R1)), Standing.REFUSED, WRONG),
        ((asked(), refused(), nobody_left, asked(R1), certified(R1)), Standing.PROVED, None),
        ((asked(), failed(AWAY)), Standing.FAILED, AWAY),
        ((asked(), failed(AWAY), asked(), refused()), Standing.WANTED, None),
        ((asked(), failed(AWAY), asked(), refused(), nobody_left), Standing.REFUSED, WRONG),
        ((asked(), certified(), refused(R1)), Standing.DOUBTED, None),
        ((asked(), certified(), refused(R1), asked(), failed(FINAL)), Standing.DOUBTED, None),
        ((asked(), certified(), refused(R1), asked(), certified()), Standing.PROVED, None),
        ((asked(), certified(), refused(R1), refused(failure=NO_EFFECT), nobody_left), Standing.REFUSED, NO_EFFECT),
        ((certified(), nobody_left), Standing.PROVED, None),
        ((certified(), refused(R1), certified(), nobody_left), Standing.REFUSED, WRONG),
    ],
)
def test_what_follows(happened, standing, failure):
    state = after(*happened)
    assert (state.standing, state.failure) == (standing, failure)


def test_after_a_failure_that_passes_it_is_asked_again_later_also_if_that_order_is_lost():
    state = after(asked(), failed(AWAY))
    assert not state.may_be_asked(14.0)
    assert state.may_be_asked(15.0)
    assert state.ask(2, R0, 15.0).unanswered().may_be_asked(15.0)
    assert not after(asked(), failed(FINAL)).may_be_asked(1e9)


def test_of_what_serves_a_runner_that_cannot_check_it_is_not_asked_again_until_it_restarts():
    state = after(certified(), refused(R1), asked(), failed(FINAL))
    assert not state.is_open(R0)
    assert state.without(R0).is_open(R0)
    later = after(certified(), refused(R1), asked(), failed(AWAY))
    assert not later.may_be_asked(14.0)
    assert later.may_be_asked(15.0)
    assert later.is_open(R0)


def test_a_silent_runner_may_answer_late_and_goes_on_if_it_works():
    state = after(asked()).overdue()
    assert state.may_be_asked(11.0)
    (silent,) = state.silent
    works = state.works(silent, 12.0, 0, 60.0)
    assert (works.asked, works.silent) == (silent._replace(since=12.0, heard=12.0), ())
    another = state.ask(2, R1, 12.0)
    later = another.works(silent, 13.0, 0, 60.0)
    assert (later.asked, later.silent) == (another.asked, (silent._replace(heard=13.0),)), "another one is asked by now"
    assert another.certified(R0).serves
    assert after(asked(), RevisionState.overdue, asked(R1), refused()).silent == ()


def test_to_be_at_work_counts_for_ever_only_with_more_bytes():
    state = after(asked())
    for now in (20.0, 60.0, 69.0):
        state = state.works(state.asked, now, 0, 60.0)
        assert state.asked.since == now
    assert state.works(state.asked, 70.0, 0, 60.0).asked.since == 69.0
    state = state.works(state.asked, 100.0, 1, 60.0)
    assert state.asked.since == 100.0
    assert state.works(state.asked, 159.0, 1, 60.0).asked.since == 159.0
    assert state.works(state.asked, 160.0, 1, 60.0).asked.since == 100.0
    silent = state.overdue()
    later = silent.works(silent.silent[0], 161.0, 1, 60.0)
    assert (later.asked, later.silent) == (None, (silent.silent[0]._replace(heard=161.0),)), "nobody believes it again"


def test_who_proves_nothing_says_nothing_against_a_refusal():
    state = after(asked(), refused(), asked(R1), unproved(R1))
    assert (state.standing, state.is_open(R1)) == (Standing.WANTED, False)
    assert state.nobody_left().failure == WRONG
    assert after(certified(R1), refused(), asked(R1), unproved(R1)).standing is Standing.DOUBTED


def test_who_proves_nothing_may_tell_again_once_nobody_is_left_that_has_refused():
    state = after(asked(), refused(), asked(R1), unproved(R1), nobody_left)
    gone = state.without(STARTS[2])
    assert (gone, gone.is_open(R1)) == (state, False)
    left = state.without(R0)
    assert left.may_be_asked(10.0)
    assert left.is_open(R1)
    assert left.failure == WRONG, "it does not serve yet"
    assert left.certified(R1).serves


def test_no_more_runners_are_asked_than_are_remembered():
    state = RevisionState()
    for number in range(MAX_REFUSED_BY):
        start = (InstanceName(f"r{number}"), "1")
        assert state.is_open(start)
        state = state.ask(number, start, 0.0).refused(start, WRONG)
    assert not state.is_open((InstanceName("another"), "1"))
    assert state.without(R0).is_open((InstanceName("another"), "1")), "one of them has gone"


def test_what_moves_nothing_is_refused_by_the_first_unless_it_serves():
    assert is_refusal(WRONG, serves=False)
    assert not is_refusal(NO_EFFECT, serves=False)
    assert is_refusal(NO_EFFECT, serves=True)
    assert not is_refusal(FINAL, serves=True)


starts = st.sampled_from(STARTS)
happenings = st.lists(
    st.one_of(
        starts.map(asked),
        starts.map(certified),
        starts.map(unproved),
        st.builds(refused, starts, st.sampled_from([WRONG, NO_EFFECT])),
        st.builds(failed, st.sampled_from([AWAY, FINAL]), starts),
        st.just(nobody_left),
        st.just(RevisionState.overdue),
        st.just(RevisionState.unanswered),
        st.just(RevisionState.wanted_anew),
        starts.map(lambda start: lambda state: state.without(start)),
    )
)


@given(happenings)
def test_whatever_happens_what_is_said_is_consistent(happened):
    state = RevisionState()
    for one in happened:
        before, state = state, one(state)
        assert state.ended == (state.failure is not None), "a failure is told of what has ended, and only of that"
        assert len({refusal.runner for refusal in state.refusals}) == len(state.refusals)
        if before.serves and not state.serves:
            assert one is nobody_left, "what serves ends only once nobody is left to ask"
            assert before.refusals
        if state.standing is Standing.DOUBTED or state.standing is Standing.WANTED:
            assert state.asked is not None or state.may_be_asked(1e9), "somebody is asked, or may be"
