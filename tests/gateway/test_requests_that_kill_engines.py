"""A prompt that kills engines, with the real scheduler, real runner services and the real dispatcher: it ends with an
error after the second engine has died, and other requests have only a pause."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from motet.errors import RequestKillsEngines
from motet_gateway.dispatcher import Dispatcher
from motet_gateway.generation import EndReason
from motet_simulator.fake_engine import FakeEngine, SlowEngines, tokens_of
from tests.support.deadly_engine import DEADLY, DEADLY_ENGINE
from tests.support.in_process_runner import short_folder
from tests.support.in_process_services import until
from tests.support.in_process_system import InProcessSystem, in_process_system
from tests.support.real_dispatcher import SEED, Client, ask, dispatcher_of

LENGTH = 120


def start(dispatcher: Dispatcher, name: str, prompt: tuple[int, ...]) -> Client:
    return ask(dispatcher, name, prompt, max_tokens=LENGTH, tenant=f"tenant-{name}")


async def poison_among_neighbours(system: InProcessSystem, dispatcher: Dispatcher) -> None:
    neighbours = [start(dispatcher, f"n{n}", (n + 1, 2, 3)) for n in range(3)]
    await until(lambda: all(client.tokens for client in neighbours))
    poison = start(dispatcher, "poison", (1, DEADLY))
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
        client = start(dispatcher, "a", (1, 2, 3))
        await until(lambda: client.tokens)
        await system.runner("r1", engines := SlowEngines())
        await system.runners["r0"].stop()
        await until(lambda: client.placed_times == 2)
        assert dispatcher.choices["a"].generation.losses.engines_lost == 0
        engines.hurry()
        assert await client.over() is EndReason.LENGTH
        assert client.tokens == tokens_of((1, 2, 3), SEED, LENGTH)


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path
