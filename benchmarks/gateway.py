"""Measures the gateway against a bare ASGI application that echoes a body of the same size.

The gateway is the real process. Fake services in another process answer over real gRPC: 16 tokens in 16 steps, and 16
requests share each step. The echo runs in a real uvicorn, too. This process sends the requests over open connections.

It also measures API keys, in this process: how long it takes to read the head of a request and to find the caller, with
one of ten thousand keys and without a key; and to refuse a key with a wrong secret, against a key that does not exist.
Also what it costs to turn a token into text, against the stream of the tokenizers library.

    python -m benchmarks.gateway [--requests 400] [--pairs 8] [--json]
"""

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import httptools
import psutil
import uvloop

from benchmarks.harness import ROOT, Pairs, Result, alternate, arguments, cpu_seconds, percentile, report
from motet import keys
from motet.clock import monotonic
from motet.keys import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message, Receive, Scope, Send

    from motet_gateway.identity.access import KeyAccess

CONNECTIONS = 16
TOKENS = 16
STEP_SECONDS = 0.002
PACED_REQUESTS_PER_SECOND = 200
CPU_BUDGET_US = 800
AUTH_BUDGET_US = 15
AUTH_KEYS, AUTH_REQUESTS, AUTH_TURNS = 10_000, 200, 50
REFUSED_BUDGET_US = 100
"""With this target, a gateway that receives 10,000 wrong keys a second still has time for other requests."""
MAX_REFUSED_DIFFERENCE = 0.1
"""The time to refuse a known key may differ from that for an unknown key by this share. A client cannot measure smaller
differences over a network."""
LATENCY_BUDGET_MS = 5
TEXT_TOKENS, TEXT_TURNS = 2_000, 20
READY_SECONDS = 60

BODY = {
    "model": "legal",
    "messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog, as ever."}],
    "max_tokens": TOKENS,
    "temperature": 0,
}
"""The fake runner repeats the prompt, which is longer than the answer may be. With `ignore_eos` the gateway would not
ask for an estimate."""


# ----------------------------------------------------------------------------------------------- the processes measured


async def serve_cluster() -> None:
    """Run the fake services until stdin ends."""
    from testbed.fake_services import fake_services

    async with fake_services() as cluster:
        cluster.add_adapter("legal")
        cluster.scheduler.max_model_length = 1 << 17
        cluster.scheduler.keeps_record = cluster.runners[0].keeps_record = cluster.predictor.keeps_record = False
        cluster.runners[0].step_seconds = STEP_SECONDS
        addresses = {"scheduler": cluster.scheduler.address, "predictor": cluster.predictor.address}
        print(json.dumps(addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def serve_echo(port: int) -> None:
    import uvicorn
    from starlette.types import Receive, Scope, Send

    async def echo(_: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(
        echo,
        port=port,
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=75,
    )
    await uvicorn.Server(config).serve()


@asynccontextmanager
async def child(*arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        env=os.environ | environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        await process.communicate()


@asynccontextmanager
async def services_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    """The process of the services that a gateway asks, and their addresses as settings of a gateway."""
    async with child("benchmarks.gateway", "--cluster") as cluster:
        assert cluster.stdout is not None
        addresses = json.loads(await cluster.stdout.readline())
        yield cluster, {f"MOTET_{name.upper()}_ADDRESS": addresses[name] for name in ("scheduler", "predictor")}


@asynccontextmanager
async def ready_gateway(**environment: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """The process and the port of a gateway that answers."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="motet-") as folder:
        own = {"MOTET_DATA_DIR": folder, "MOTET_GATEWAY_PORT": str(port)}
        async with child("motet_gateway", **environment, **own) as process:
            await until_ready(port)
            yield process, port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------------------------- the load


class BenchConnection:
    """A minimal HTTP/1.1 client. It costs little CPU time compared with the gateway."""

    def __init__(self, port: int, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        self._port = port
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: " + str(len(content)).encode() + b"\r\n\r\n" + content
        )

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self) -> bytes:
        self._writer.write(self._request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"the server answered {head[:60]!r}")
        if b"transfer-encoding: chunked" in head:
            return await self._reader.readuntil(b"\r\n0\r\n\r\n")
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connections(port: int, body: dict[str, object]) -> AsyncIterator[list[BenchConnection]]:
    opened: list[BenchConnection] = []
    try:
        for _ in range(CONNECTIONS):
            connection = BenchConnection(port, body)
            await connection.open()
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()


async def saturate(opened: list[BenchConnection], requests: int) -> None:
    """Send as fast as possible, one request after the other on each connection."""

    async def one(connection: BenchConnection) -> None:
        for _ in range(requests // len(opened)):
            await connection.ask()

    await asyncio.gather(*(one(connection) for connection in opened))


async def paced(port: int, seconds: float) -> list[float]:
    """The latencies of single-token requests that arrive evenly, each on a free connection."""
    body = BODY | {"max_tokens": 1}
    latencies: list[float] = []
    async with connections(port, body) as opened:
        free: asyncio.Queue[BenchConnection] = asyncio.Queue()
        for connection in opened:
            free.put_nowait(connection)

        async def one(due: float) -> None:
            connection = await free.get()
            await connection.ask()
            latencies.append(time.perf_counter() - due)
            free.put_nowait(connection)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(seconds * PACED_REQUESTS_PER_SECOND)):
                due = began + number / PACED_REQUESTS_PER_SECOND
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.create_task(one(due))
    return latencies


async def until_ready(port: int) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            try:
                async with connections(port, BODY) as opened:
                    await opened[0].ask()
            except (OSError, RuntimeError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)
            else:
                return


class CpuPerRequest:
    """Measures the microseconds of CPU time per request, of a process with its child processes."""

    def __init__(self, process: psutil.Process, opened: list[BenchConnection], requests: int) -> None:
        self._process = process
        self._opened = opened
        self._requests = requests // len(opened) * len(opened)

    async def __call__(self) -> float:
        before = self._seconds()
        await saturate(self._opened, self._requests)
        return (self._seconds() - before) / self._requests * 1e6

    def _seconds(self) -> float:
        return sum(cpu_seconds(one) for one in (self._process, *self._process.children(recursive=True)))


class Head:
    """Reads the head of a request as uvicorn does."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


class AuthenticationCost:
    """Measures the microseconds of CPU time per request in which a head is read and a caller is found or refused."""

    def __init__(self, access: "KeyAccess", key: keys.PresentedKey | None, send: "Send | None" = None) -> None:
        from prometheus_client import CollectorRegistry

        from motet_gateway.identity.authentication import Authentication
        from motet_gateway.metrics import Metrics
        from motet_gateway.middleware import RequestContext

        self._app = RequestContext(Authentication(_nothing, access, Metrics(CollectorRegistry(), clock=monotonic)))
        self._send = send or _unsent
        authorization = b"authorization: Bearer %s\r\n" % str(key).encode() if key is not None else b""
        self._head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8000\r\naccept: application/json\r\n"
            b"accept-encoding: gzip, deflate\r\nuser-agent: OpenAI/Python\r\ncontent-type: application/json\r\n"
            b"x-stainless-lang: python\r\nx-stainless-retry-count: 0\r\n" + authorization + b"content-length: 2\r\n\r\n"
        )

    async def __call__(self) -> float:
        before = time.process_time()
        for _ in range(AUTH_REQUESTS):
            head = Head()
            httptools.HttpRequestParser(head).feed_data(self._head)
            scope = {"type": "http", "path": "/v1/chat/completions", "headers": head.headers}
            await self._app(scope, _never, self._send)
        return (time.process_time() - before) / AUTH_REQUESTS * 1e6


async def _nothing(_scope: "Scope", _receive: "Receive", _send: "Send") -> None: ...


async def _never() -> "Message":
    raise RuntimeError("a body was read before the caller was known")


async def _unsent(message: "Message") -> None:
    raise RuntimeError(f"a valid key was refused: {message}")


async def _refused(message: "Message") -> None:
    if message.get("status", 401) != 401:
        raise RuntimeError(f"a wrong key was not refused: {message}")


class ManyKeys:
    """The keys that a gateway with many tenants reads."""

    def __init__(self) -> None:
        now = datetime.now(UTC)
        made = [keys.new_key() for _ in range(AUTH_KEYS)]
        scopes = frozenset({keys.KeyScope.USER})
        self.one = made[AUTH_KEYS // 2]
        self._keys = [ApiKey(id=m.id, tenant="acme", scopes=scopes, hash=m.hash, created=now) for m in made]

    async def read(self) -> list[ApiKey] | None:
        return self._keys

    def applied(self) -> None: ...

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None: ...

    async def close(self) -> None: ...


async def measure_keys(pairs: int) -> list[Result]:
    from motet_gateway.identity.access import KeyAccess
    from motet_gateway.identity.key_sources import NoKeys
    from motet_gateway.settings import Settings

    def none_are_gone(_: Mapping[str, str]) -> None: ...

    many = ManyKeys()
    guarded = KeyAccess(
        Settings(auth="keys"), many, gone=none_are_gone, clock=monotonic, today=lambda: datetime.now(UTC)
    )
    open_ = KeyAccess(Settings(), NoKeys(), gone=none_are_gone, clock=monotonic, today=lambda: datetime.now(UTC))
    for access in (guarded, open_):
        await access.begin()
    with_key, without = AuthenticationCost(guarded, many.one), AuthenticationCost(open_, None)
    wrong = AuthenticationCost(guarded, keys.PresentedKey(many.one.id, keys.new_key().secret), _refused)
    unknown = AuthenticationCost(guarded, keys.new_key(), _refused)
    for side in (with_key, without, wrong, unknown):
        await side()  # warm
    asked = await alternate(with_key, without, pairs=pairs, turns=AUTH_TURNS)
    print(f"reading a head and finding the caller, with a key against no key: {asked}")
    refused = await alternate(wrong, unknown, pairs=pairs, turns=AUTH_TURNS)
    print(f"refusing a key with a wrong secret against a key that does not exist: {refused}")
    more, cost, apart = asked.difference, percentile(refused.a, 0.5), abs(refused.ratio - 1)
    budget, cost_budget = f"≤ {AUTH_BUDGET_US}", f"≤ {REFUSED_BUDGET_US}"
    between = f"{1 - MAX_REFUSED_DIFFERENCE:g} … {1 + MAX_REFUSED_DIFFERENCE:g}"
    unknown_id = "an id that no key has"
    return [
        Result("gateway_auth_us", more, "µs", budget, more <= AUTH_BUDGET_US, "no key is needed", asked),
        Result("gateway_refused_us", cost, "µs", cost_budget, cost <= REFUSED_BUDGET_US),
        Result(
            "gateway_refused_known_id",
            refused.ratio,
            "×",
            between,
            apart <= MAX_REFUSED_DIFFERENCE,
            unknown_id,
            refused,
        ),
    ]


class TextCost:
    """Measures the microseconds per token that become text one by one."""

    def __init__(self, make: "Callable[[], Callable[[list[int]], str | None]]", tokens: list[int]) -> None:
        self._make = make
        self._tokens = tokens

    async def __call__(self) -> float:
        feed = self._make()
        before = time.process_time()
        for token in self._tokens:
            feed([token])
        return (time.process_time() - before) / len(self._tokens) * 1e6


async def measure_text(pairs: int) -> list[Result]:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    from motet_gateway.tokens.detokenizer import detokenizer
    from motet_gateway.tokens.token_bytes import TokenBytes

    tokenizer = Tokenizer.from_file(str(ROOT / "cli" / "motet_cli" / "bundled" / "model" / "tokenizer.json"))
    token_bytes = TokenBytes(tokenizer)
    tokens = tokenizer.encode("The quick brown fox ships the sea, naïvely. " * TEXT_TOKENS).ids[:TEXT_TOKENS]
    own = TextCost(lambda: detokenizer(token_bytes).feed, tokens)
    stream = TextCost(lambda: partial(DecodeStream([], skip_special_tokens=True).step, tokenizer), tokens)
    for side in (own, stream):
        await side()  # warm
    text = await alternate(own, stream, pairs=pairs, turns=TEXT_TURNS)
    print(f"a token becomes text, against the library's stream: {text}")
    return [Result("gateway_text_vs_stream", text.ratio, "×", "≤ 1", text.ratio <= 1, "tokenizers' DecodeStream", text)]


async def measure(requests: int, pairs: int) -> list[Result]:
    async with AsyncExitStack() as stack:
        cluster, addresses = await stack.enter_async_context(services_process())
        gateway, port = await stack.enter_async_context(ready_gateway(**addresses))
        echo_port = free_port()
        echo = await stack.enter_async_context(child("benchmarks.gateway", "--echo", str(echo_port)))
        await until_ready(echo_port)
        processes = [psutil.Process(process.pid) for process in (gateway, echo, cluster)]
        whole = await stack.enter_async_context(connections(port, BODY))
        streamed = await stack.enter_async_context(connections(port, BODY | {"stream": True}))
        echoed = await stack.enter_async_context(connections(echo_port, BODY))
        bare = CpuPerRequest(processes[1], echoed, requests)
        for opened in (whole, streamed, echoed):
            await saturate(opened, 10 * CONNECTIONS)  # warm
        plain = await alternate(CpuPerRequest(processes[0], whole, requests), bare, pairs=pairs, own=processes)
        print(f"whole answers, {TOKENS} tokens, against echo: {plain}")
        stream = await alternate(CpuPerRequest(processes[0], streamed, requests), bare, pairs=pairs, own=processes)
        print(f"streams of {TOKENS} events, against echo: {stream}")
        latencies = await paced(port, 5)
        return [*results(plain, stream, latencies), *await measure_keys(pairs), *await measure_text(pairs)]


def results(plain: Pairs, stream: Pairs, latencies: list[float]) -> list[Result]:
    cpu = percentile(plain.a, 0.5)
    echo = "an ASGI application that echoes"
    placed = percentile(latencies, 0.5) * 1e3
    budget = f"≤ {CPU_BUDGET_US}"
    return [
        Result("gateway_cpu_us", cpu, "µs", budget, cpu <= CPU_BUDGET_US),
        Result("gateway_overhead_cpu_us", plain.difference, "µs", budget, plain.difference <= CPU_BUDGET_US),
        Result("gateway_vs_echo", plain.ratio, "×", baseline=echo, pairs=plain),
        Result("gateway_stream_cpu_us", percentile(stream.a, 0.5), "µs", baseline=echo, pairs=stream),
        Result("echo_cpu_us", percentile(plain.b, 0.5), "µs"),
        Result("gateway_placed_p50_ms", placed, "ms", f"≤ {LATENCY_BUDGET_MS}", placed <= LATENCY_BUDGET_MS),
        Result("gateway_placed_p99_ms", percentile(latencies, 0.99) * 1e3, "ms"),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=400, help="requests per figure")
    parser.add_argument("--pairs", type=int, default=8, help="quiet pairs to measure")
    parser.add_argument("--cluster", action="store_true", help="run the fake services (the benchmark itself uses this)")
    parser.add_argument("--echo", type=int, metavar="PORT", help="run the echo (the benchmark itself uses this)")
    given = parser.parse_args()
    if given.cluster:
        uvloop.run(serve_cluster())
    elif given.echo:
        uvloop.run(serve_echo(given.echo))
    else:
        report("gateway", uvloop.run(measure(given.requests, given.pairs)), as_json=given.json)


if __name__ == "__main__":
    main()
