"""Servers over TLS from which adapters and models are fetched, and the ways in which they can fail.

async with web_server(tmp_path) as web:
    web.put("/pirate/", folder)
    web.faults["/pirate/adapter_model.safetensors"] = BrokenConnection(after=1000)
    ...  # web.url("/pirate/"), web.asked
"""

import asyncio
import hashlib
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from testbed.cluster.certificates import ClusterAuthority

CHUNK = 4096
Server = TypeVar("Server")


@dataclass
class ReceivedRequest:
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class BrokenConnection:
    """The connection breaks after `after` bytes of the file, `times` times; then `then` is called."""

    after: int
    times: int = 1
    then: Callable[[], object] | None = None


@dataclass
class SlowBody:
    """The file comes very slowly, a few bytes at a time."""

    every: float = 0.05
    bytes: int = 1


@dataclass
class ErrorStatus:
    """The server answers with a status instead of the file, `times` times."""

    status: int
    times: int = 1_000_000
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass
class GzipBody:
    """The server answers with these bytes and calls them gzip."""

    body: bytes


@dataclass
class EndlessBody:
    """The answer never ends and names no length."""

    status: int = 200


@dataclass
class ShortBody:
    """Every answer is shorter than its Content-Length."""

    missing: int = 10


Fault = BrokenConnection | SlowBody | ErrorStatus | GzipBody | EndlessBody | ShortBody


class WebServer:
    """Serves files by path, with ranges and entity tags."""

    def __init__(self, ca_file: Path) -> None:
        self.ca_file = ca_file
        self.base = ""
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, Fault] = {}
        self.authorization = ""
        """The Authorization header that every request must have."""

        self.private: dict[str, str] = {}
        """The Authorization header that requests need whose path contains the key: {"/org/name/": "Bearer x"}."""

        self.asked: list[ReceivedRequest] = []
        self.sent = 0
        self.open = 0
        """How many answers are being sent now."""

    def url(self, path: str) -> str:
        return self.base + path

    def put(self, at: str, folder: Path) -> str:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.files[at + path.relative_to(folder).as_posix()] = path.read_bytes()
        return self.url(at)

    def asked_for(self, name: str) -> list[ReceivedRequest]:
        return [one for one in self.asked if one.path.endswith(name)]

    def wanted(self, name: str) -> list[ReceivedRequest]:
        """Those that asked for its bytes, and not only whether it has changed."""
        return [one for one in self.asked_for(name) if "if-none-match" not in one.headers]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(
            ReceivedRequest(request.method, request.path, {k.lower(): v for k, v in request.headers.items()})
        )
        wanted = [self.authorization, *(header for part, header in self.private.items() if part in f"{request.path}/")]
        if any(one and one != request.headers.get("authorization") for one in wanted):
            return self.unauthorized()
        self.open += 1
        try:
            return await self.serve(request, request.path)
        finally:
            self.open -= 1

    def unauthorized(self) -> web.StreamResponse:
        return web.Response(status=401, text="who are you?")

    async def serve(self, request: web.Request, path: str, headers: dict[str, str] | None = None) -> web.StreamResponse:
        fault = self.faults.get(path)
        if isinstance(fault, ErrorStatus) and fault.times > 0:
            fault.times -= 1
            return web.Response(status=fault.status, headers=dict(fault.headers), body=fault.body)
        body = self.files.get(path)
        if body is None:
            return web.Response(status=404)
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        if request.headers.get("if-none-match") == etag:
            return web.Response(status=304, headers={"ETag": etag})
        response = web.StreamResponse(headers={"ETag": etag, **(headers or {})})
        start = self._start(request, body, etag)
        if start is None:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(body)}"})
        if start:
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        if isinstance(fault, GzipBody):
            response.headers["Content-Encoding"] = "gzip"
            body = fault.body
        if not isinstance(fault, EndlessBody):
            response.content_length = len(body) - start
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        await self._write(request, response, body[start:], fault)
        return response

    @staticmethod
    def _start(request: web.Request, body: bytes, etag: str) -> int | None:
        wanted = request.headers.get("range", "")
        if not wanted or request.headers.get("if-range", etag) != etag:
            return 0
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        return start if start < len(body) else None

    async def _write(
        self, request: web.Request, response: web.StreamResponse, body: bytes, fault: Fault | None
    ) -> None:
        stop = len(body)
        if isinstance(fault, BrokenConnection) and fault.times > 0:
            fault.times -= 1
            stop = min(stop, fault.after)
        if isinstance(fault, ShortBody):
            stop -= fault.missing
        if isinstance(fault, SlowBody):
            for at in range(0, len(body), fault.bytes):
                await response.write(body[at : at + fault.bytes])
                await asyncio.sleep(fault.every)
        if isinstance(fault, EndlessBody):
            await self._write_on(response)
        for at in range(0, stop, CHUNK):
            piece = body[at : min(at + CHUNK, stop)]
            await response.write(piece)
            self.sent += len(piece)
        if stop < len(body):
            await asyncio.sleep(0.05)  # what was written is sent before the connection closes
            assert request.transport is not None
            request.transport.abort()
            if isinstance(fault, BrokenConnection) and fault.then is not None:
                fault.then()

    async def endless(self, request: web.Request, status: int) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await self._write_on(response)
        return response

    async def _write_on(self, response: web.StreamResponse) -> None:
        while True:
            await response.write(bytes(CHUNK * 16))
            self.sent += CHUNK * 16
            await asyncio.sleep(0)


class HubServer(WebServer):
    """Serves what the hub's own client asks for: a repository's listing, and its files at a commit."""

    def __init__(self, ca_file: Path) -> None:
        super().__init__(ca_file)
        self.commits: dict[str, str] = {}
        """By repository and revision, such as org/name@main."""

        self.gated = False
        self.hides = False
        """Whether it answers 401 for a missing file, as the public hub does for a request without a token."""

        self.wrong_sum = False
        self.claims: dict[str, int] = {}
        """The sizes that the listing claims, by file name, also if they are wrong."""

    def publish(self, repository: str, folder: Path, *, revision: str = "main") -> str:
        content = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
        commit = hashlib.sha1(content + revision.encode()).hexdigest()
        self.commits[f"{repository}@{revision}"] = self.commits[f"{repository}@{commit}"] = commit
        self.put(f"/{repository}/resolve/{commit}/", folder)
        return commit

    def unauthorized(self) -> web.StreamResponse:
        headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"} if self.gated else {}
        return web.Response(status=403 if self.gated else 401, headers=headers)

    async def serve(self, request: web.Request, path: str, headers: dict[str, str] | None = None) -> web.StreamResponse:
        if path.startswith("/api/models/"):
            fault = self.faults.get(path)
            if isinstance(fault, ErrorStatus):
                return web.Response(status=fault.status, headers=dict(fault.headers), body=fault.body)
            if isinstance(fault, EndlessBody):
                return await self.endless(request, fault.status)
            return self._listing(path.removeprefix("/api/models/"))
        if "/resolve/" in path and path not in self.files:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        commit = path.partition("/resolve/")[2].partition("/")[0]
        body = self.files.get(path, b"")
        more = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(body))}
        return await super().serve(request, path, more)

    def _listing(self, path: str) -> web.StreamResponse:
        repository, _, revision = path.partition("/revision/")
        if not any(name.startswith(f"{repository}@") for name in self.commits):
            return web.Response(status=401 if self.hides else 404, headers={"X-Error-Code": "RepoNotFound"})
        commit = self.commits.get(f"{repository}@{revision}")
        if commit is None:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        root = f"/{repository}/resolve/{commit}/"
        siblings = []
        for name, body in self.files.items():
            if name.startswith(root):
                entry: dict[str, object] = {"rfilename": name.removeprefix(root)}
                entry["size"] = self.claims.get(name.removeprefix(root), len(body))
                if name.endswith(".safetensors"):
                    found = hashlib.sha256(b"another" if self.wrong_sum else body).hexdigest()
                    entry["lfs"] = {"sha256": found, "size": len(body), "pointerSize": 100}
                siblings.append(entry)
        return web.json_response({"id": repository, "sha": commit, "siblings": siblings, "private": False})


class ApiServer(WebServer):
    """Serves Secrets as an API server does, to a token of its own."""

    TOKEN = "e30.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6bW90ZXQtcG9vbHM6bW90ZXQtcnVubmVyIn0.x"

    def __init__(self, ca_file: Path) -> None:
        super().__init__(ca_file)
        self.secrets: dict[str, dict[str, str]] = {}
        self.granted: set[str] = set()
        self.authorization = f"Bearer {self.TOKEN}"

    def account(self, folder: Path) -> Path:
        """Write the folder of a service account, as in a pod."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "token").write_text(self.TOKEN)
        (folder / "ca.crt").write_bytes(self.ca_file.read_bytes())
        return folder

    async def serve(self, request: web.Request, path: str, headers: dict[str, str] | None = None) -> web.StreamResponse:
        _, _, _, _, namespace, _, name = path.split("/")
        reference = f"{namespace}/{name}"
        if reference not in self.granted:
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        if reference not in self.secrets:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        return web.json_response({"kind": "Secret", "data": self.secrets[reference]})


@asynccontextmanager
async def running(folder: Path, make: Callable[[Path], WebServer], host: str = "127.0.0.1") -> AsyncIterator[WebServer]:
    folder.mkdir(parents=True, exist_ok=True)
    authority = ClusterAuthority(folder, f"authority-of-{folder.name}")
    pair = authority.serving(f"server-{host}", [host, "localhost"])
    server = make(authority.pair.certificate)
    trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trust.load_cert_chain(pair.certificate, pair.key)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application, shutdown_timeout=0, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0, ssl_context=trust)
        await site.start()
        port = runner.addresses[0][1]
        server.base = f"https://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def web_server(folder: Path, host: str = "127.0.0.1") -> AsyncIterator[WebServer]:
    async with running(folder / f"web-{host}", WebServer, host) as server:
        yield server


@asynccontextmanager
async def hub_server(folder: Path, host: str = "127.0.0.1") -> AsyncIterator[HubServer]:
    async with running(folder / "hub", HubServer, host) as server:
        assert isinstance(server, HubServer)
        yield server


@asynccontextmanager
async def api_server(folder: Path) -> AsyncIterator[ApiServer]:
    async with running(folder / "api", ApiServer) as server:
        assert isinstance(server, ApiServer)
        yield server


class ProxyServer:
    """Connects to the host that it is asked for, which it looks up in `names`, and records what it was asked for."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[str] = []
        self.headers: list[str] = []
        self.names: dict[str, str] = {}
        self.answer = "200 OK"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            try:
                first, _, rest = (await reader.readuntil(b"\r\n\r\n")).decode().partition("\r\n")
                self.asked.append(first.split(" ")[1])
                self.headers.append(rest)
                writer.write(f"HTTP/1.1 {self.answer}\r\n\r\n".encode())
                if self.answer.startswith("200"):
                    host, _, port = self.asked[-1].rpartition(":")
                    other, back = await asyncio.open_connection(self.names.get(host, host), int(port))
                    await asyncio.gather(_pass_on(reader, back), _pass_on(other, writer))
            finally:
                writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def proxy_server() -> AsyncIterator[ProxyServer]:
    proxy = ProxyServer()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()


@contextmanager
def in_a_thread(context: AbstractAsyncContextManager[Server]) -> Iterator[Server]:
    """Run a server in a thread, for tests that are not asynchronous."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
