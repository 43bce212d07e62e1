"""A prompt that kills engines, with the real scheduler, real runner services and the real dispatcher: it ends with an
error after the second engine has died, and other requests have only a pause."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, runner_pb2
from motet.domain import BASE
from motet.errors import MotetError, RequestKillsEngines
from motet_gateway.catalog import CurrentCatalog
from motet_gateway.dispatcher import Dispatcher, GenerationRequest
from motet_gateway.generation import EndReason
from motet_gateway.held_requests import HeldRequests
from motet_gateway.metrics import Metrics
from tests.common.waiting import PATIENCE_S
from tests.support.deadly_engine import DEADLY, DEADLY_ENGINE
from tests.support.fake_engine import FakeEngine, SlowEngines, tokens_of
from tests.support.in_process_runner import short_folder
from tests.support.in_process_services import until
from tests.support.in_process_system import InProcessSystem, in_process_system

SEED = 7
LENGTH = 120


class Client:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.placed_times = 0
        self._ended: asyncio.Future[EndReason | MotetError] = asyncio.get_running_loop().create_future()

    def placed(self) -> None:
        self.placed_times += 1

    def waiting(self, for_what: str) -> None: ...

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        self.tokens.extend(tokens)

    async def over(self) -> EndReason | MotetError:
        async with asyncio.timeout(PATIENCE_S):
            return await self._ended

    def end(self, how: EndReason | MotetError) -> None:
        self._ended.set_result(how)


@asynccontextmanager
async def dispatcher_of(system: InProcessSystem) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(
        "g-real",
        system.control.scheduler_address,
        CurrentCatalog(),
        Metrics(CollectorRegistry()),
        connect_seconds=PATIENCE_S,
        held=HeldRequests(lambda: None),
    )
    running = asyncio.create_task(dispatcher.run())
    try:
        await until(lambda: dispatcher._catalog.known)
        yield dispatcher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def ask(dispatcher: Dispatcher, name: str, prompt: tuple[int, ...], max_tokens: int = LENGTH) -> Client:
    client = Client()
    estimate = common_pb2.Estimate(q50=max_tokens, q80=max_tokens, q90=max_tokens, q95=max_tokens)
    dispatcher.start(
        GenerationRequest(
            request=name,
            tenant=f"tenant-{name}",
            group="default/demo",
            adapter="",
            adapter_digest=BASE,
            request_class=common_pb2.REQUEST_CLASS_STANDARD,
            prompt_ids=list(prompt),
            choice=0,
            sampling=runner_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True),
            seed=SEED,
            estimate=estimate,
            deadline_seconds=PATIENCE_S,
        ),
        client,
    )
    return client


async def poison_among_neighbours(system: InProcessSystem, dispatcher: Dispatcher) -> None:
    neighbours = [ask(dispatcher, f"n{n}", (n + 1, 2, 3)) for n in range(3)]
    await until(lambda: all(client.tokens for client in neighbours))
    poison = ask(dispatcher, "poison", (1, DEADLY))
    end = await poison.over()
    assert isinstance(end, RequestKillsEngines)
    assert poison.placed_times == 2
    for n, client in enumerate(neighbours):
        assert await client.over() is EndReason.LENGTH
        assert client.tokens == tokens_of((n + 1, 2, 3), SEED, LENGTH)
    died = [name for name, runner in system.runners.items() if runner.over]
    assert len(died) == 2, "the third runner never saw it"


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
async def test_a_prompt_that_kills_two_engines_is_ended_and_other_requests_continue(process: bool) -> None:
    how: dict[str, Any] = {"command": DEADLY_ENGINE} if process else {}
    engine = partial(FakeEngine, step_seconds=0.005, deadly=DEADLY)
    with short_folder() as folder:
        async with in_process_system(folder) as system, dispatcher_of(system) as dispatcher:
            for name in ("r0", "r1", "r2"):
                await system.runner(name, engine, **how)
            await poison_among_neighbours(system, dispatcher)


async def test_a_runner_that_disappears_makes_no_request_a_suspect(folder: Path) -> None:
    async with in_process_system(folder) as system, dispatcher_of(system) as dispatcher:
        await system.runner("r0", SlowEngines())
        client = ask(dispatcher, "a", (1, 2, 3))
        await until(lambda: client.tokens)
        await system.runner("r1", engines := SlowEngines())
        await system.runners["r0"].stop()
        await until(lambda: client.placed_times == 2)
        assert dispatcher._live["a"].generation.losses.engines_lost == 0
        engines.hurry()
        assert await client.over() is EndReason.LENGTH
        assert client.tokens == tokens_of((1, 2, 3), SEED, LENGTH)


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path
