"""A gateway is cut off from a runner that the scheduler hears well."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import NamedTuple

from motet_gateway.dispatcher import Dispatcher
from motet_gateway.generation import EndReason
from motet_simulator.fake_engine import SlowEngines, tokens_of
from testbed.cut_link import CutLink
from tests.support.in_process_runner import InProcessRunner, short_folder
from tests.support.in_process_services import until
from tests.support.in_process_system import InProcessSystem, in_process_system
from tests.support.real_dispatcher import SEED, ask, dispatcher_of

PROMPT = (1, 2, 3)
TOKENS = 400
CONNECT_SECONDS = 4.0

NOTICED_SECONDS = 5.0
"""Three, on a busy machine."""

RETRY_SECONDS = 3.0
"""Half of one, on a busy machine: less than CONNECT_SECONDS."""


class CutOff(NamedTuple):
    system: InProcessSystem
    dispatcher: Dispatcher
    runner: InProcessRunner
    link: CutLink
    engines: SlowEngines


@asynccontextmanager
async def two_runners_and_a_link() -> AsyncIterator[CutOff]:
    """The gateway reaches the runner r0 over the link, and r1 is added later."""
    with short_folder() as folder:
        link, engines = CutLink(folder / "link.sock", f"unix:{folder}/r0.sock"), SlowEngines()
        async with (
            link.serving(),
            in_process_system(folder) as system,
            dispatcher_of(system, connect_seconds=CONNECT_SECONDS) as dispatcher,
        ):
            runner = await system.runner("r0", engines, address=link.address)
            await until(lambda: dispatcher.runners.streams and stream_of(dispatcher, link).link.connected)
            yield CutOff(system, dispatcher, runner, link, engines)


def stream_of(dispatcher: Dispatcher, link: CutLink):  # type: ignore[no-untyped-def]
    return dispatcher.runners.streams[link.address]


async def test_a_stream_goes_on_elsewhere_soon_after_its_runner_is_cut_off() -> None:
    async with two_runners_and_a_link() as (system, dispatcher, _, link, engines):
        client = ask(dispatcher, "a", PROMPT, max_tokens=TOKENS)
        await until(lambda: client.tokens)
        other = await system.runner("r1", engines)
        link.cut()
        began = monotonic()
        await until(lambda: other.service.accepted.holds("a", 2))
        assert monotonic() - began < NOTICED_SECONDS
        engines.hurry()
        assert await client.over() is EndReason.LENGTH
        assert (client.tokens, client.placed_times) == (tokens_of(PROMPT, SEED, TOKENS), 2)


async def test_what_is_placed_on_a_runner_that_is_cut_off_waits_there_only_for_the_next_attempt() -> None:
    async with two_runners_and_a_link() as (system, dispatcher, _, link, engines):
        engines.hurry()
        link.cut()
        await until(lambda: not stream_of(dispatcher, link).link.connected)
        await asyncio.sleep(CONNECT_SECONDS)
        began = monotonic()
        client = ask(dispatcher, "a", PROMPT, max_tokens=4)
        await until(lambda: client.placed_times, why="it is placed on the only runner")
        await system.runner("r1", engines)
        assert await client.over() is EndReason.LENGTH
        assert monotonic() - began < RETRY_SECONDS
        link.mend()
        await until(lambda: stream_of(dispatcher, link).link.connected)
