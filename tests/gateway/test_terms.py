"""A gateway keeps the highest term that it has received, but never accepts the largest possible one."""

import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import scheduler_pb2
from motet.errors import InvalidRequest
from motet_gateway.catalog import CurrentCatalog
from motet_gateway.dispatcher import Dispatcher
from motet_gateway.held_requests import HeldRequests
from motet_gateway.metrics import Metrics

LARGEST = 2**64 - 1


def welcome(term: int) -> scheduler_pb2.ServeDown:
    return scheduler_pb2.ServeDown(welcome={"term": term})


@pytest.mark.parametrize(
    "poison",
    [welcome(LARGEST), scheduler_pb2.ServeDown(placed=scheduler_pb2.Placed(request="a", epoch=1, term=LARGEST))],
)
@pytest.mark.parametrize("known", [0, 5])
async def test_a_message_in_the_last_term_does_not_block_later_schedulers(
    known: int, poison: scheduler_pb2.ServeDown
) -> None:
    dispatcher = Dispatcher(
        "g0",
        "unix:/nowhere",
        CurrentCatalog(),
        Metrics(CollectorRegistry()),
        connect_seconds=1,
        held=HeldRequests(lambda: None),
    )
    if known:
        dispatcher._from_scheduler(welcome(known))
    with pytest.raises(InvalidRequest, match="not possible"):
        dispatcher._from_scheduler(poison)
    dispatcher._from_scheduler(welcome(known + 1))
    (hello, *_) = dispatcher._hello()
    assert hello.hello.highest_term == known + 1
