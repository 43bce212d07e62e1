"""A proxy before the API server, with failures that a test sets."""

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from testbed.cluster.cluster import Cluster, write_kubeconfig
from testbed.cluster.network import API_PORT, CONTROL_PLANE

WRITES = ("POST", "PUT", "PATCH", "DELETE")
HOP_BY_HOP = ("transfer-encoding", "content-encoding", "content-length", "connection", "keep-alive")

Answer = tuple[int, dict[str, Any]]
"""An answer instead of the API server's: a status and a message."""


@dataclass(frozen=True)
class ProxiedRequest:
    """A request that was passed on."""

    at: float
    method: str
    path: str
    status: int


def status(code: int, reason: str, message: str = "as the test asked for") -> Answer:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


@dataclass
class ProxyFaults:
    """Nothing fails unless one of these is set. The proxy's own thread calls the functions."""

    down: bool = False
    """If true, a connection closes as soon as a request arrives on it."""

    silent: bool = False
    """Requests are not answered until this event."""

    answer: Callable[[str, str], Answer | None] = lambda method, path: None
    """Gives the proxy's own answer for a method and path; the API server does not get the request."""

    written: Callable[[ProxiedRequest], None] = lambda seen: None
    """Called after the API server has done a write, and before the client gets the answer."""

    event: Callable[[str, dict[str, Any]], bool] = lambda path, event: True
    """Whether an event is passed on, by the path of the watch and the event."""


@dataclass
class Proxy:
    faults: ProxyFaults
    kubeconfig: Path = Path()
    seen: list[ProxiedRequest] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None
    _watches: dict[web.StreamResponse, web.Request] = field(default_factory=dict)
    _muted: set[web.StreamResponse] = field(default_factory=set)

    def writes(self, *, since: float = 0.0, leases: bool = False) -> list[ProxiedRequest]:
        """Writes that were done, without those of the Lease."""
        return [
            one
            for one in list(self.seen)
            if one.method in WRITES and one.at >= since and one.status < 300 and (leases or "/leases" not in one.path)
        ]

    @property
    def watches(self) -> int:
        """Watches that are open and not muted."""
        return len(self._open() - self._muted)

    def _open(self) -> set[web.StreamResponse]:
        """Open watches. A watch of a client that has disconnected stays in `_watches` until its next event."""
        return {
            watch
            for watch, request in list(self._watches.items())
            if request.transport is not None and not request.transport.is_closing()
        }

    def mute_watches(self) -> None:
        """Watches that are open now stay open and send nothing more; new ones work."""
        self._muted |= set(self._watches)

    def say_on_watches(self, event: dict[str, Any], *, of: str = "", last: bool = False) -> int:
        """Send an event on every open watch whose path contains `of`; if `last`, nothing more follows. Returns the
        number of these watches."""

        async def say() -> int:
            watches = [watch for watch in self._open() if of in self._watches[watch].path]
            if last:
                self._muted.update(watches)
            for watch in watches:
                with suppress(ConnectionError):
                    await watch.write(json.dumps(event).encode() + b"\n")
            return len(watches)

        return self._call(say())

    def _call(self, coroutine: Any) -> Any:
        assert self.loop is not None
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(10)

    async def handle(self, session: aiohttp.ClientSession, upstream: str, request: web.Request) -> web.StreamResponse:
        faults, path = self.faults, request.path
        if faults.down:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        while faults.silent:
            await asyncio.sleep(0.05)
        if (answer := faults.answer(request.method, path)) is not None:
            return web.json_response(answer[1], status=answer[0])
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in (*HOP_BY_HOP, "host")}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with session.request(
            request.method, f"{upstream}{request.path_qs}", headers=headers, data=body or None, timeout=timeout
        ) as response:
            if request.query.get("watch") == "true":
                return await self._stream(request, response)
            data = await response.read()
            seen = ProxiedRequest(time.monotonic(), request.method, path, response.status)
            self.seen.append(seen)
            if seen.method in WRITES and seen.status < 300:
                faults.written(seen)
            kept = {name: value for name, value in response.headers.items() if name.lower() not in HOP_BY_HOP}
            return web.Response(body=data, status=response.status, headers=kept)

    async def _stream(self, request: web.Request, response: aiohttp.ClientResponse) -> web.StreamResponse:
        passed = web.StreamResponse(status=response.status, headers={"content-type": "application/json"})
        await passed.prepare(request)
        self._watches[passed] = request
        try:
            async for line in response.content:
                if self.faults.down:
                    assert request.transport is not None
                    request.transport.abort()
                    break
                while self.faults.silent:
                    await asyncio.sleep(0.05)
                if passed not in self._muted and self.faults.event(request.path, json.loads(line)):
                    await passed.write(line)
        except (ConnectionError, aiohttp.ClientError):
            pass
        finally:
            del self._watches[passed]
        return passed


@contextmanager
def proxy(cluster: Cluster, kubeconfig: Path, port: int = 6444) -> Iterator[Proxy]:
    """Run the proxy. Its `.kubeconfig` is like `kubeconfig`, but goes through the proxy."""
    made = Proxy(ProxyFaults())
    ours = yaml.safe_load(kubeconfig.read_text())
    made.kubeconfig = write_kubeconfig(
        kubeconfig.with_suffix(f".proxy-{port}.kubeconfig"),
        {"server": f"http://{CONTROL_PLANE}:{port}"},
        ours["users"][0]["user"],
    )
    trust = ssl.create_default_context(cadata=_authority(cluster))
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        made.loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(ssl=trust, limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=2**21, auto_decompress=True) as session:
            upstream = f"https://{CONTROL_PLANE}:{API_PORT}"

            async def handle(request: web.Request) -> web.StreamResponse:
                return await made.handle(session, upstream, request)

            runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, CONTROL_PLANE, port).start()
            started.set()
            await stop.wait()
            await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fault proxy", daemon=True)
    thread.start()
    assert started.wait(10), "the proxy did not start"
    try:
        yield made
    finally:
        assert made.loop is not None
        made.loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def _authority(cluster: Cluster) -> str:
    assert cluster.authority is not None
    return cluster.authority.pair.certificate.read_text()
