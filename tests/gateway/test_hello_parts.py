"""What runs is told to a scheduler in parts, if it takes parts."""

import asyncio
from typing import Any

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.rpc.sessions import ENDED
from motet.transport import Network, ServerStream
from motet.transport.methods import SERVE
from tests.contract.networks import simulated
from tests.gateway.test_restarted_runners import BASE, RUNNER, SCHEDULER, dispatcher_at, exchange
from tests.support.real_dispatcher import ask

RUNNING = [f"r{number}" for number in range(7)]
PARTS = [["r0", "r1", "r2"], ["r3", "r4", "r5"], ["r6"]]


class Scheduler:
    """Places each request at once."""

    def __init__(self) -> None:
        self.takes_parts = True
        self.hellos: list[list[tuple[list[str], bool]]] = []
        """The parts of each hello: which requests, and whether others follow."""
        self._stream: Any = None

    async def serve(self, stream: ServerStream[scheduler_pb2.ServeDown, scheduler_pb2.ServeUp]) -> None:
        self._stream = stream
        await stream.accept()
        await exchange(stream, self._answer)

    def restart(self) -> None:
        self._stream.end_now(ENDED)

    def _answer(self, up: scheduler_pb2.ServeUp) -> scheduler_pb2.ServeDown | None:
        match up.WhichOneof("message"):
            case "hello":
                self.hellos.append([([one.request for one in up.hello.live], up.hello.live_follows)])
                welcome = common_pb2.Welcome(term=1, takes_parts=self.takes_parts)
                group = scheduler_pb2.CatalogGroup(group="default/demo", base_digest=BASE)
                catalog = scheduler_pb2.Catalog(term=1, revision=1, groups=[group])
                both = scheduler_pb2.ServeDown(welcome=welcome), scheduler_pb2.ServeDown(catalog=catalog)
                return scheduler_pb2.ServeDown(more=both)
            case "live":
                self.hellos[-1].append(([one.request for one in up.live.requests], up.live.more))
            case "enqueue":
                placed = scheduler_pb2.Placed(
                    term=1, request=up.enqueue.request, epoch=1, instance="r0", address=RUNNER, base_digest=BASE
                )
                return scheduler_pb2.ServeDown(placed=placed)
        return None


def test_a_gateway_tells_in_parts_what_runs_to_whom_takes_parts() -> None:
    simulated(_parts)


async def _parts(client: Network, server: Network, _: str) -> None:
    scheduler = Scheduler()
    async with (
        server.serving(SCHEDULER, {SERVE: scheduler.serve}, grace=0),
        dispatcher_at(SCHEDULER, client) as gateway,
    ):
        gateway.max_live_in_message = 3
        for name in RUNNING:
            ask(gateway, name, (1, 2, 3), max_tokens=1)
        await asyncio.sleep(1.0)
        in_parts = [(part, number < 2) for number, part in enumerate(PARTS)]
        scheduler.restart()
        await asyncio.sleep(2.0)
        assert scheduler.hellos == [[([], False)], in_parts]
        scheduler.takes_parts = False  # an earlier version takes over: it has heard only the first part
        scheduler.restart()
        await asyncio.sleep(4.0)
        assert scheduler.hellos[2:] == [in_parts, [(RUNNING, False)]]
