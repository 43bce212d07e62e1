"""A runner does not accept the largest possible term from anybody."""

import pytest

from motet.errors import InvalidRequest
from motet_runner.accepted_requests import AcceptedRequests

LARGEST = 2**64 - 1


def test_an_order_in_the_last_term_is_not_followed() -> None:
    book = AcceptedRequests()
    assert book.accepts_term(2**40, greeting=True), "the first that leads is believed"
    with pytest.raises(InvalidRequest):
        book.accepts_term(LARGEST, greeting=True)
    assert book.highest_term == 2**40
    assert book.accepts_term(2**40 + 1)
    assert not book.accepts_term(2**40)
