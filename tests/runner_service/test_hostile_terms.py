"""A runner does not accept the largest possible term from anybody."""

import pytest

from motet.api.v1 import runner_pb2
from motet.errors import InvalidRequest
from motet_runner.accepted_requests import AcceptedRequests

LARGEST = 2**64 - 1


def test_a_submit_in_the_last_term_is_declined_and_the_scheduler_still_counts() -> None:
    book = AcceptedRequests()
    with pytest.raises(InvalidRequest, match="not possible"):
        book.check(runner_pb2.Submit(request="a", epoch=1, term=LARGEST))
    assert book.highest_term == 0
    assert book.accepts_term(3, greeting=True)
    assert book.highest_term == 3


def test_a_submit_of_an_epoch_that_makes_every_report_unreadable_is_declined() -> None:
    book = AcceptedRequests()
    with pytest.raises(InvalidRequest, match="the highest possible one"):
        book.check(runner_pb2.Submit(request="a", epoch=2**32 - 1, term=1))


def test_an_order_in_the_last_term_is_not_followed() -> None:
    book = AcceptedRequests()
    assert book.accepts_term(2**40, greeting=True), "the first that leads is believed"
    with pytest.raises(InvalidRequest):
        book.accepts_term(LARGEST, greeting=True)
    assert book.highest_term == 2**40
    assert book.accepts_term(2**40 + 1)
    assert not book.accepts_term(2**40)
