"""A runner starts again at its address before scheduler and gateway have heard that it ended."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet.rpc.packing import unpacked
from motet.transport import Network, ServerStream
from motet.transport.methods import GENERATE, SERVE
from motet_gateway.catalog import CurrentCatalog
from motet_gateway.dispatcher import Dispatcher
from motet_gateway.held_requests import HeldRequests
from motet_gateway.metrics import Metrics
from tests.contract.networks import simulated
from tests.support.real_dispatcher import ask

SCHEDULER, RUNNER = "server:1", "server:2"
BASE = "sha256:b"
TOKEN = 7


def test_only_placements_on_the_earlier_process_are_lost() -> None:
    simulated(_placed_before_the_runner_says_who_it_is)


async def _placed_before_the_runner_says_who_it_is(client: Network, server: Network, _: str) -> None:
    """Three placements wait for a stream to the address. One names the process that has ended, one the process that
    listens there now, and one comes from a scheduler that names none."""
    scheduler = Scheduler({"to the earlier": "1", "to this one": "2", "to either": ""})
    async with (
        server.serving(SCHEDULER, {SERVE: scheduler.serve}, grace=0),
        dispatcher_at(SCHEDULER, client) as gateway,
    ):
        asked = {name: ask(gateway, name, (1, 2, 3), max_tokens=1) for name in scheduler.placements}
        await asyncio.sleep(1.0)
        assert all(one.placed_times for one in asked.values())
        async with server.serving(RUNNER, {GENERATE: Runner("2").serve}, grace=0):
            await asyncio.sleep(1.0)
        lost = [(one.request, one.epoch, one.why) for one in scheduler.lost]
        assert lost == [("to the earlier", 1, "the runner was restarted")]
        tokens = {name: one.tokens for name, one in asked.items()}
        assert tokens == {"to the earlier": [], "to this one": [TOKEN], "to either": [TOKEN]}, (
            "what the new process makes of the lost placement is nobody's"
        )


def test_a_runner_that_would_ignore_a_grammar_is_left() -> None:
    """Mutation: only requests that come after its greeting leave it."""
    simulated(_placed_before_the_runner_says_what_it_knows)


async def _placed_before_the_runner_says_what_it_knows(client: Network, server: Network, _: str) -> None:
    scheduler = Scheduler({"with a grammar": "", "without": ""})
    async with (
        server.serving(SCHEDULER, {SERVE: scheduler.serve}, grace=0),
        dispatcher_at(SCHEDULER, client) as gateway,
    ):
        asked = runner_pb2.Sampling(max_tokens=1, ebnf="root ::= [a]")
        bound = ask(gateway, "with a grammar", (1, 2, 3), max_tokens=1, sampling=asked)
        free = ask(gateway, "without", (1, 2, 3), max_tokens=1)
        await asyncio.sleep(1.0)
        async with server.serving(RUNNER, {GENERATE: Runner("1").serve}, grace=0):
            await asyncio.sleep(1.0)
        assert [one.request for one in scheduler.lost] == ["with a grammar"]
        assert "do not know ebnf" in scheduler.lost[0].why
        assert (bound.tokens, free.tokens) == ([], [TOKEN])


class Scheduler:
    """Places each request at once on the process that it believes to be at the runner's address."""

    def __init__(self, placements: Mapping[str, str]) -> None:
        """`placements`: requests, each with an incarnation."""
        self.placements = placements
        self.lost: list[scheduler_pb2.Lost] = []

    async def serve(self, stream: ServerStream[scheduler_pb2.ServeDown, scheduler_pb2.ServeUp]) -> None:
        await stream.send(scheduler_pb2.ServeDown(welcome=common_pb2.Welcome(term=1)))
        group = scheduler_pb2.CatalogGroup(group="default/demo", base_digest=BASE)
        catalog = scheduler_pb2.Catalog(term=1, revision=1, groups=[group])
        await stream.send(scheduler_pb2.ServeDown(catalog=catalog))
        await exchange(stream, self._answer)

    def _answer(self, up: scheduler_pb2.ServeUp) -> scheduler_pb2.ServeDown | None:
        if up.HasField("lost"):
            self.lost.append(up.lost)
        if not up.HasField("enqueue"):
            return None
        placed = scheduler_pb2.Placed(
            term=1,
            request=up.enqueue.request,
            epoch=1,
            instance="r0",
            incarnation=self.placements[up.enqueue.request],
            address=RUNNER,
            base_digest=BASE,
        )
        return scheduler_pb2.ServeDown(placed=placed)


class Runner:
    """Answers whatever is submitted with one token."""

    def __init__(self, incarnation: str) -> None:
        self._identity = common_pb2.RunnerIdentity(instance="r0", incarnation=incarnation)

    async def serve(self, stream: ServerStream[bytes, runner_pb2.GenerateUp]) -> None:
        welcome = runner_pb2.GenerateDown(welcome=runner_pb2.GenerateWelcome(runner=self._identity))
        await stream.send(welcome.SerializeToString())
        await exchange(stream, self._answer)

    def _answer(self, up: runner_pb2.GenerateUp) -> bytes | None:
        if not up.HasField("submit"):
            return None
        down = runner_pb2.GenerateDown()
        down.step.sequences.add(
            request=up.submit.request,
            epoch=up.submit.epoch,
            tokens=[TOKEN],
            finish=common_pb2.FINISH_REASON_LENGTH,
        )
        return down.SerializeToString()


async def exchange(stream: ServerStream[Any, Any], answer: Callable[[Any], Any]) -> None:
    answers: asyncio.Queue[Any] = asyncio.Queue()

    def receive(packed: Any) -> None:
        for message in unpacked(packed):
            if (answered := answer(message)) is not None:
                answers.put_nowait(answered)

    sending = asyncio.create_task(stream.send_all(answers.get))
    try:
        await stream.receive_all(receive)
    finally:
        sending.cancel()


@asynccontextmanager
async def dispatcher_at(scheduler: str, network: Network) -> AsyncIterator[Dispatcher]:
    clock = asyncio.get_running_loop().time
    dispatcher = Dispatcher(
        "g",
        scheduler,
        CurrentCatalog(),
        Metrics(CollectorRegistry(), clock=clock),
        network=network,
        connect_seconds=30.0,
        held=HeldRequests(lambda: None, clock),
        clock=clock,
    )
    running = asyncio.create_task(dispatcher.run())
    try:
        await asyncio.sleep(1.0)
        assert dispatcher.catalog.known
        yield dispatcher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
