"""Measures what the gateway's HTTP costs for a request and for a token of a stream, against uvicorn's own protocol.

Both get the same bytes of a request from a transport in memory and run the same ASGI application, which reads the body
and answers: with a whole body, or with a stream. Each token of a stream is a piece that our protocol writes without the
task of the stream; uvicorn's has no such way, so there the task sends it.

With `--before COMMIT` the baseline is the gateway's own protocol at that commit, if it was a class of uvicorn's then
(9237113 was the last one); each token is written in the way of that time.

    python -m benchmarks.http_protocol [--requests 300] [--tokens 2000] [--pairs 12] [--before COMMIT] [--json]
"""

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from benchmarks.harness import ROOT, Pairs, Result, alternate, arguments, percentile, report
from motet.clock import monotonic
from motet_gateway.direct_writes import offered
from motet_gateway.http.connection import HttpConnection
from motet_gateway.http.connection_limit import ConnectionLimit
from motet_gateway.metrics import Metrics
from motet_gateway.settings import Settings

GATEWAY = "services/gateway/motet_gateway"
BUDGET = 1.05
TURNS = 10
BODY = b'{"model": "legal", "messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}]}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8000\r\naccept: application/json\r\n"
    b"accept-encoding: gzip, deflate\r\nuser-agent: OpenAI/Python\r\ncontent-type: application/json\r\n"
    b"x-stainless-lang: python\r\nx-stainless-retry-count: 0\r\nauthorization: Bearer mt-0123456789\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY) + BODY
)
EVENT = b'data: {"id":"chatcmpl-0123456789","object":"chat.completion.chunk","choices":[{"delta":{"content":"x"}}]}\n\n'


class Transport(asyncio.Transport):
    """Takes all that is written."""

    def __init__(self) -> None:
        self.written = 0

    def write(self, data: Any) -> None:
        self.written += len(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 40000), "sockname": ("127.0.0.1", 8000)}.get(name, default)

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...


class App:
    """Answers each request and says when it has."""

    def __init__(self, tokens: int, writer: "Callable[[Scope], Any]") -> None:
        """`tokens`: of a stream; 0 for whole answers. `writer`: what writes a stream's pieces, if not the task."""
        self.answered = asyncio.Event()
        self.seconds = 0.0
        """CPU time of the last stream's tokens."""
        self._tokens = tokens
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            more = (await receive()).get("more_body", False)
        if self._tokens:
            await self._stream(scope, send)
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(EVENT))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": EVENT})
        self.answered.set()

    async def _stream(self, scope: Scope, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        piece: Message = {"type": "http.response.body", "body": EVENT, "more_body": True}
        writer = self._writer(scope)
        before = time.process_time()
        if writer is None:
            for _ in range(self._tokens):
                await send(piece)
        else:
            for _ in range(self._tokens):
                if writer.ready:
                    writer.write(EVENT)
        self.seconds = time.process_time() - before
        await send({"type": "http.response.body", "body": b""})


Protocol = Callable[..., Any]


class Side:
    """One protocol with one connection, which stays open."""

    def __init__(self, protocol: Protocol, app: App) -> None:
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False)
        config.load()
        self.app = app
        self._transport = Transport()
        self._connection = protocol(config=config, server_state=ServerState(), app_state={})
        self._connection.connection_made(self._transport)

    async def ask(self) -> None:
        self.app.answered.clear()
        self._connection.data_received(REQUEST)
        await self.app.answered.wait()


async def seconds_per_request(side: Side, requests: int) -> float:
    before = time.process_time()
    for _ in range(requests):
        await side.ask()
    return (time.process_time() - before) / requests


async def seconds_per_token(side: Side, tokens: int) -> float:
    await side.ask()
    return side.app.seconds / tokens


def loaded(commit: str, file: str, name: str) -> ModuleType:
    """A module of the gateway as it was."""
    source = subprocess.run(
        ["git", "show", f"{commit}:{GATEWAY}/{file}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    source = source.replace("from motet_gateway import direct_writes", "import direct_writes_before as direct_writes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


def nothing(_: Scope) -> None:
    """The task writes."""


async def measure(requests: int, tokens: int, pairs: int, before: str) -> list[Result]:
    settings = Settings()
    metrics, limit = Metrics(CollectorRegistry(), clock=monotonic), ConnectionLimit(100)
    own: Protocol = partial(HttpConnection, settings=settings, metrics=metrics, limit=limit)
    other: Protocol = HttpToolsProtocol
    writer: Callable[[Scope], Any] = nothing
    name, baseline = "uvicorn", "uvicorn's protocol with httptools"
    if before:
        writer = loaded(before, "direct_writes.py", "direct_writes_before").offered
        other = loaded(before, "connection.py", "connection_before").bounded(settings)
        name, baseline = "before", f"the gateway's protocol at {before}"

    async def compared(what: str, ours: Side, theirs: Side, one: Callable[[Side], Any]) -> Pairs:
        for side in (ours, theirs):
            await one(side)  # warm
        found = await alternate(lambda: one(ours), lambda: one(theirs), pairs=pairs, turns=TURNS)
        print(f"a {what}, ours against {baseline}: {found}")
        return found

    whole = Side(own, App(0, nothing)), Side(other, App(0, nothing))
    stream = Side(own, App(tokens, offered)), Side(other, App(tokens, writer))
    request = await compared("request", *whole, partial(seconds_per_request, requests=requests))
    token = await compared("token", *stream, partial(seconds_per_token, tokens=tokens))
    target = f"≤ {BUDGET}" if before else ""
    return [
        Result("http_request_us", percentile(request.a, 0.5) * 1e6, "µs"),
        Result("http_token_us", percentile(token.a, 0.5) * 1e6, "µs"),
        *(
            Result(
                f"http_{what}_vs_{name}",
                found.ratio,
                "×",
                target,
                found.ratio <= BUDGET if before else None,
                baseline,
                found,
            )
            for what, found in (("request", request), ("token", token))
        ),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=300, help="requests per figure")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens per figure")
    parser.add_argument("--pairs", type=int, default=12, help="quiet pairs to measure")
    parser.add_argument("--before", metavar="COMMIT", default="", help="compare with the gateway at this commit")
    given = parser.parse_args()
    report(
        "http_protocol",
        uvloop.run(measure(given.requests, given.tokens, given.pairs, given.before)),
        as_json=given.json,
    )


if __name__ == "__main__":
    main()
