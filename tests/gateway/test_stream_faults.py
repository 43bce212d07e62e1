"""Each client's stream ends with an error or with the reason why the answer has ended, whatever breaks: a client that
hears neither would take half an answer for a whole one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import anthropic
import httpx2
import openai
import pytest

from motet.errors import AdapterFetchFailed
from testbed.cut_connection import Cut, CutConnection
from testbed.fake_services import FakeServices, fake_services
from tests.gateway.conftest import Served, eventually, serve

Heard = Callable[[], None]
"""Called with each event of a stream."""
Client = Callable[[str, Heard], Awaitable[str | None]]
"""Asks a gateway for a streamed answer. Returns why it has ended, as the client sees it."""

TOKENS, SAID = 200, "one two three"
ENDLESS = {"ignore_eos": True}
ERRORS = (openai.APIError, anthropic.APIError, httpx2.TransportError)


async def completion(url: str, heard: Heard, *, chat: bool = False) -> str | None:
    reason = None
    said = {"messages": [{"role": "user", "content": SAID}]} if chat else {"prompt": SAID}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        api = client.chat.completions if chat else client.completions
        asked = {"model": "tiny", "max_tokens": TOKENS, "stream": True, "extra_body": ENDLESS}
        async for chunk in await api.create(**said, **asked):
            heard()
            reason = chunk.choices[0].finish_reason or reason
    return reason


async def response(url: str, heard: Heard) -> str | None:
    reason = None
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="tiny", input=SAID, max_output_tokens=TOKENS, extra_body=ENDLESS) as stream,
    ):
        async for event in stream:
            heard()
            if event.type == "response.incomplete":
                details = event.response.incomplete_details
                reason = None if details is None else details.reason
    return reason


async def message(url: str, heard: Heard) -> str | None:
    said = {"role": "user", "content": SAID}
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="tiny", max_tokens=TOKENS, messages=[said], extra_body=ENDLESS) as stream,
    ):
        async for _ in stream:
            heard()
        return (await stream.get_final_message()).stop_reason


CLIENTS = {"chat": partial(completion, chat=True), "completion": completion, "response": response, "message": message}
ENDS = {"chat": "length", "completion": "length", "response": "max_output_tokens", "message": "max_tokens"}


@pytest.fixture(params=list(CLIENTS))
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def nothing() -> None:
    pass


async def fails(client: str, url: str, heard: Heard = nothing) -> None:
    with pytest.raises(ERRORS):
        await CLIENTS[client](url, heard)


AT_ONCE = {"hold_seconds": 0.02, "keep_alive_seconds": 0.02}
"""A stream begins, and what has passed its deadline ends, soon."""


async def fails_at_its_deadline(client: str, served: Served, after: Callable[[], object]) -> None:
    failing = asyncio.create_task(fails(client, served.url))
    await eventually(after)
    assert not failing.done()
    while not failing.done():  # its last token may come only now, and begins the deadline anew
        served.pass_the_deadline()
        await asyncio.sleep(0.05)
    await failing


async def test_an_undisturbed_stream_says_why_it_has_ended(served: Served, client: str) -> None:
    assert await CLIENTS[client](served.url, nothing) == ENDS[client]


@asynccontextmanager
async def cut_connection(served: Served, cut: Cut) -> AsyncIterator[str]:
    async with CutConnection(served.url, cut).serving() as connection:
        yield connection.url


def after(end: bytes, more: int = 0) -> Callable[[bytes], int | None]:
    """Where the fifth event, or the first of such ends, is out, and a number of bytes more."""

    def place(seen: bytes) -> int | None:
        at = -1
        for _ in range(5 if end == b"\n\n" else 1):
            if (at := seen.find(end, at + 1)) < 0:
                return None
        there = at + len(end) + more
        return there if there <= len(seen) else None

    return place


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_connection_that_breaks_is_an_error(cluster: FakeServices, client: str, reset: bool) -> None:
    cluster.runners[0].step_seconds = 0.002
    async with serve(cluster) as served:
        for at in (
            lambda _: 0,
            after(b"HTTP/1.1 200"),
            after(b"\r\n\r\n"),
            after(b"\n\n"),
            after(b"\n\n", 20),
        ):  # before and within the headers; before, between and within events
            async with cut_connection(served, Cut(at, reset=reset)) as url:
                await fails(client, url)


@pytest.mark.parametrize("tokens", [0, 5], ids=["before its first token", "in the middle"])
async def test_a_runner_that_dies_without_another_one_is_an_error(
    cluster: FakeServices, client: str, tokens: int
) -> None:
    runner = cluster.runners[0]
    runner.dies_after = tokens
    async with serve(cluster, **AT_ONCE) as served:
        await fails_at_its_deadline(client, served, lambda: runner.stack is None)


async def test_a_runner_that_dies_beside_another_one_is_not_seen(client: str) -> None:
    async with fake_services(runners=2) as cluster, serve(cluster) as served:
        first, second = cluster.runners
        first.dies_after = TOKENS // 4
        assert await CLIENTS[client](served.url, nothing) == ENDS[client]
        assert first.submits
        assert second.submits


async def test_a_request_that_fails_in_the_middle_is_an_error(served: Served, client: str) -> None:
    served.cluster.runners[0].fails_after = (10, AdapterFetchFailed("gone").to_proto())
    await fails(client, served.url)


async def test_a_runner_that_says_nothing_is_an_error(cluster: FakeServices, client: str) -> None:
    cluster.runners[0].silent = True
    async with serve(cluster, **AT_ONCE) as served:
        await fails_at_its_deadline(client, served, lambda: cluster.runners[0].submits)


async def test_a_gateway_that_stops_is_an_error(cluster: FakeServices, client: str) -> None:
    cluster.runners[0].step_seconds = 0.05
    draining: list[asyncio.Task[None]] = []
    async with serve(cluster, drain_seconds=0.1) as served:

        def stop() -> None:
            if not draining:
                draining.append(asyncio.create_task(served.gateway.drain()))

        await fails(client, served.url, stop)
        assert draining
        with suppress(asyncio.CancelledError):
            await draining[0]
