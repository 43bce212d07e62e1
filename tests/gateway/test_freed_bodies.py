"""What a request held is free as soon as it is refused or its client has gone: the garbage collector is off."""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

import orjson
import pytest

from motet.errors import InvalidRequest, RateLimited
from motet_gateway.tokens.text_model import ModelTokenizer
from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, eventually, serve

BYTES = 400_000
"""Of each body."""
TIMES = 2
LONG = "voices " * (BYTES // 7)
HELLO = [{"role": "user", "content": "Hello voices"}]
SCHEMA = {"type": "array", "uniqueItems": True}
"""No grammar can count."""
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}

ANSWERING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HELLO},
    "/v1/completions": {"model": "tiny", "prompt": "Hello voices"},
    "/v1/messages": {"model": "tiny", "messages": HELLO, "max_tokens": 5},
    "/v1/responses": {"model": "tiny", "input": "Hello voices"},
    "/generate": {"inputs": "Hello voices"},
    "/invocations": {"model": "tiny", "prompt": "Hello voices"},
}
COUNTING: dict[str, dict[str, Any]] = {
    "/tokenize": {"model": "tiny", "prompt": "Hello voices"},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": HELLO},
}
BODIES = ANSWERING | COUNTING
SCHEMAS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"response_format": {"type": "json_schema", "json_schema": FORM}},
    "/v1/completions": {"guided_json": SCHEMA},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/v1/responses": {"text": {"format": FORM}},
    "/invocations": {"guided_json": SCHEMA},
}
SOME = [
    path if path in ("/v1/chat/completions", "/generate", "/tokenize") else pytest.param(path, marks=pytest.mark.soak)
    for path in BODIES
]
"""Of what ends before a route has read its body, `make test` tries an answer that may stream, one that has parts of
its own, and a count."""

Ask = Callable[[], Awaitable[object]]


def body_of(path: str, **more: object) -> bytes:
    return orjson.dumps(BODIES[path] | {"nobody_knows_this": LONG} | more)


def with_prompt(path: str, text: str) -> bytes:
    (field,) = BODIES[path].keys() & {"messages", "prompt", "input", "inputs"}
    prompt = [{"role": "user", "content": text}] if field == "messages" else text
    return orjson.dumps(BODIES[path] | {field: prompt})


def request(path: str, body: bytes, *, missing: int = 0, more: str = "") -> bytes:
    """`missing`: how many more bytes it promises. `more`: headers."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(body) + missing}\r\n\r\n".encode() + body


class Client:
    """Keeps nothing of what it sends."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._port = int(served.url.rpartition(":")[2])

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(
        self,
        path: str,
        body: bytes,
        *,
        missing: int = 0,
        patience: float | None = None,
        begun: Callable[[], object] = lambda: None,
    ) -> int:
        """→ the status; 0: it has hung up after `patience`. `begun` is called once the headers have come."""
        reader, writer = await self.connected()
        writer.write(request(path, body, missing=missing, more="connection: close\r\n"))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    head = await reader.readuntil(b"\r\n\r\n")
                    begun()
                    await reader.read()
                    return int(head.split(maxsplit=2)[1])
            return 0
        finally:
            writer.transport.abort()

    async def keeps_nothing(self, ask: Ask) -> None:
        await self._answered(ask)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(TIMES):
            await self._answered(ask)
        await eventually(lambda: tracemalloc.get_traced_memory()[0] - before < BYTES)  # the server sees who hangs up

    async def _answered(self, ask: Ask) -> None:
        await ask()
        gateway, tasks = self.served.gateway, self.served.server.server_state.tasks
        await eventually(lambda: not tasks and not gateway.dispatcher.live)
        for _ in range(10):  # transports close, and tasks end
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


@asynccontextmanager
async def client_of(cluster: FakeServices, **settings: Any) -> AsyncIterator[Client]:
    cluster.scheduler.keeps_record = cluster.predictor.keeps_record = cluster.runners[0].keeps_record = False
    async with serve(cluster, **settings) as served:
        yield Client(served)


async def check(client: Client, path: str, body: bytes, status: int, **how: Any) -> None:
    async def ask() -> None:
        assert await client.ask(path, body, **how) == status

    await client.keeps_nothing(ask)


@pytest.mark.parametrize("path", BODIES)
async def test_what_the_gateway_refuses(cluster: FakeServices, path: str) -> None:
    async with client_of(cluster) as client:
        await check(client, path, body_of(path)[:-1], 400)
        await check(client, path, body_of(path, model="nobody"), 404)
        for wrong in ("prompt", "messages", "input", "inputs"):
            if wrong in BODIES[path]:
                await check(client, path, body_of(path, **{wrong: 5}), 400)
        if "messages" in BODIES[path]:
            await check(client, path, body_of(path, messages=[{"role": "forbidden", "content": "x"}]), 400)
        if path in ANSWERING:
            await check(client, path, with_prompt(path, LONG), 400)
            await check(client, path, body_of(path, adapter_source="nowhere", use_beam_search=True), 400)
        if path in SCHEMAS:
            await check(client, path, body_of(path, **SCHEMAS[path]), 400)


@pytest.mark.parametrize("path", SOME)
async def test_bodies_that_are_too_large(cluster: FakeServices, path: str) -> None:
    async with client_of(cluster, max_body_bytes=BYTES, max_counted_bytes=BYTES) as client:
        await check(client, path, body_of(path), 413)


@pytest.mark.parametrize("path", SOME)
async def test_bodies_that_do_not_arrive_in_time(cluster: FakeServices, path: str) -> None:
    async with client_of(cluster, body_seconds=0.1) as client:
        await check(client, path, body_of(path), 408, missing=1)


@pytest.mark.parametrize("path", BODIES)
async def test_crashes(cluster: FakeServices, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("no tokens come of it")

    monkeypatch.setattr(ModelTokenizer, "encode", fail)
    async with client_of(cluster) as client:
        await check(client, path, body_of(path), 500)


@pytest.mark.parametrize("path", ANSWERING)
async def test_what_scheduler_and_runner_refuse(cluster: FakeServices, path: str) -> None:
    async with client_of(cluster) as client:
        cluster.runners[0].declines = [InvalidRequest("not here").to_proto()] * 100
        await check(client, path, body_of(path), 400)
        cluster.scheduler.refuses = RateLimited("Tenant default is over its limit.", retry_after=3.2).to_proto()
        await check(client, path, body_of(path), 429)


@pytest.mark.parametrize("path", ANSWERING)
async def test_answers_that_make_no_progress(cluster: FakeServices, path: str) -> None:
    cluster.runners[0].silent = True
    async with client_of(cluster, hold_seconds=0.02, deadline_seconds=0.1) as client:
        await check(client, path, body_of(path), 504)
    if path != "/generate":
        async with client_of(cluster, hold_seconds=0.02, keep_alive_seconds=0.02) as client:
            begun = client.served.pass_the_deadline
            await check(client, path, body_of(path, stream=True), 200, begun=begun)  # the error comes in the stream


@pytest.mark.parametrize("path", ANSWERING)
async def test_clients_that_hang_up(cluster: FakeServices, path: str) -> None:
    async with client_of(cluster, hold_seconds=0.02) as client:
        cluster.runners[0].silent = True
        await check(client, path, body_of(path), 0, missing=1, patience=0.1)
        for stream in (False, True):
            await check(client, path, body_of(path, stream=stream), 0, patience=0.1)


async def test_connections_that_end_while_requests_wait_behind_others(cluster: FakeServices) -> None:
    path, size = "/v1/completions", 40_000  # the gateway reads on, so that it sees who hangs up
    both = request(path, orjson.dumps(BODIES[path])) + request(path, body_of(path)[:size], missing=1)
    async with client_of(cluster) as client:
        cluster.runners[0].silent = True

        async def ask() -> None:
            for _ in range(BYTES // size):
                _, writer = await client.connected()
                writer.write(both)
                await asyncio.sleep(0.02)
                writer.transport.abort()

        await client.keeps_nothing(ask)


async def test_idle_connections_hold_nothing_of_their_last_request(cluster: FakeServices) -> None:
    path, kept = "/v1/completions", list[asyncio.StreamWriter]()
    async with client_of(cluster) as client:

        async def ask() -> None:
            reader, writer = await client.connected()
            kept.append(writer)
            writer.write(request(path, body_of(path, model="nobody")))
            await reader.readuntil(b"}}")

        await client.keeps_nothing(ask)
        for writer in kept:
            writer.close()


async def test_idle_connections_hold_nothing_of_their_last_head(cluster: FakeServices) -> None:
    kept, head = list[asyncio.StreamWriter](), f"host: localhost\r\nx-long: {LONG[:30_000]}\r\n"
    async with client_of(cluster) as client:

        async def ask() -> None:
            for upgrade in (False, True):
                for _ in range(5):
                    reader, writer = await client.connected()
                    kept.append(writer)
                    asks = "connection: upgrade\r\nupgrade: h2c\r\n" if upgrade else ""
                    writer.write(f"GET /health HTTP/1.1\r\n{head}{asks}\r\n".encode())
                    await reader.readuntil(b"200 OK")

        await client.keeps_nothing(ask)
        for writer in kept:
            writer.close()


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_answered(cluster: FakeServices, path: str) -> None:
    async with client_of(cluster) as client:
        for stream in (False, True):
            await check(client, path, body_of(path, stream=stream), 200)
