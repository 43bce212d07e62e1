"""Which terms, epochs and numbers of peers are accepted, and which are refused."""

import re
from math import inf, nan

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2, supervisor_pb2
from motet.errors import InvalidRequest, from_proto
from motet.rpc.finite_check import check_numbers, check_of
from motet.runner_info import Failure, RunnerRequest
from motet.terms import MAX_TERM, MAX_TERM_JUMP, check_epoch, check_leaders_term, check_term, is_term
from tests.support.hostile_messages import hostile

LARGEST = 2**64 - 1
TERMS = st.integers(0, LARGEST)


@given(st.integers(0, MAX_TERM), TERMS)
def test_a_term_far_above_the_highest_known_is_refused(highest: int, term: int) -> None:
    try:
        check_term(term, highest, "somebody")
    except InvalidRequest:
        assert term > highest + MAX_TERM_JUMP or term > MAX_TERM
    else:
        assert term <= highest + MAX_TERM_JUMP
        assert term < LARGEST, "there is always a higher one"


@given(TERMS)
def test_a_peer_that_knows_no_term_takes_only_the_leaders(term: int) -> None:
    try:
        check_leaders_term(term, 0, "the scheduler")
    except InvalidRequest:
        assert term > MAX_TERM
    with pytest.raises(InvalidRequest, match="the scheduler has term"):
        check_leaders_term(7 + MAX_TERM_JUMP + 1, 7, "the scheduler")


def test_a_thousand_false_terms_do_not_reach_the_highest_term() -> None:
    term = 1
    for _ in range(1000):
        with pytest.raises(InvalidRequest):
            check_term(term + MAX_TERM_JUMP + 1, term, "a liar")
        term += MAX_TERM_JUMP
        check_term(term, term - MAX_TERM_JUMP, "a liar")
    assert term < MAX_TERM


@pytest.mark.parametrize(
    ("text", "fits"),
    [("0", True), (str(MAX_TERM), True), (str(LARGEST), False), ("-1", False), ("", False), ("9" * 5000, False)],
)
def test_a_stored_term_counts_only_if_we_can_have_written_it(text: str, fits: bool) -> None:
    assert is_term(text) is fits


def test_the_largest_epoch_is_refused() -> None:
    assert check_epoch(3, "a") == 3
    with pytest.raises(InvalidRequest, match="epoch 4294967295 of request 'a'"):
        check_epoch(2**32 - 1, "a")
    with pytest.raises(InvalidRequest):
        RunnerRequest.from_proto(common_pb2.RunnerRequest(request="a", epoch=2**32 - 1))


WITH_NUMBERS = (
    *(scheduler_pb2.ServeUp, scheduler_pb2.ServeDown, scheduler_pb2.AttachUp, scheduler_pb2.AttachDown),
    *(scheduler_pb2.SyncUp, scheduler_pb2.SyncDown, supervisor_pb2.WatchUp, supervisor_pb2.WatchDown),
    *(supervisor_pb2.AdviseDown, runner_pb2.GenerateUp),
)
FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


@pytest.mark.parametrize("kind", WITH_NUMBERS, ids=lambda kind: kind.__name__)
def test_a_value_that_is_not_a_number_is_refused_by_its_name(kind: type) -> None:
    wrong = [message for message in hostile(kind, types=FLOATS) if re.search(r": (nan|-?inf)\b", str(message))]
    assert wrong
    for message in wrong:
        with pytest.raises(InvalidRequest, match=r"\.\w+ is (nan|-?inf): it must be a finite number"):
            check_numbers(message)


@pytest.mark.parametrize("factor", [1e308, -1.0, 0.0, 4.1])
def test_a_factor_that_no_pool_may_choose_is_refused_by_its_name(factor: float) -> None:
    for kind in (supervisor_pb2.WatchDown, supervisor_pb2.AdviseDown):
        with pytest.raises(InvalidRequest, match=r"Overcommit\.factor is .* from 1 to 4"):
            check_numbers(kind(overcommit={"factor": factor}))
        check_numbers(kind(overcommit={"factor": 4.0}))


@pytest.mark.parametrize("seconds", [-1.0, 1e300])
def test_a_time_that_cannot_be_is_refused_by_its_name(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=r"age_seconds is .* from 0 to"):
        check_numbers(scheduler_pb2.ServeUp(hello={"gateway": "g", "live": [{"request": "a", "age_seconds": seconds}]}))


def test_messages_without_numbers_are_not_checked() -> None:
    assert check_of(scheduler_pb2.CancelRequest.DESCRIPTOR) is None
    assert check_of(scheduler_pb2.Report.DESCRIPTOR) is not None
    assert check_of(runner_pb2.Step.DESCRIPTOR) is None, "one a token: whoever reads its figures looks at them"
    check_numbers(b"bytes")


@pytest.mark.parametrize("seconds", [nan, inf, -1.0])
def test_the_retry_time_of_a_failure_is_limited(seconds: float) -> None:
    failure = common_pb2.Failure(code="overloaded", retry_after_seconds=seconds)
    assert from_proto(failure).retry_after == Failure.from_proto(failure).retry_after == 0.0
