"""A server over TLS that takes files: as an object store does, and below /v2/ as an OCI registry does.

async with upload_server(tmp_path) as server:
    server.scripted["PUT adapter_model.safetensors"] = [BREAK, web.Response(status=503)]
    ...  # server.files, server.asked
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from tests.support.s3_server import failed
from tests.support.source_servers import WebServer, running

BREAK = "break"
ENDLESS = "endless"
Scripted = web.Response | str

SUM = "x-amz-meta-motet-sha256"


class UploadServer(WebServer):
    def __init__(self, ca_file: Path) -> None:
        super().__init__(ca_file)
        self.scripted: dict[str, list[Scripted]] = {}
        """By method and last part of the path: the answers that come first. The last one stays."""
        self.uploads_at = ""
        """Where a registry takes blobs, if not at this server."""
        self.sums: dict[str, str] = {}

    def came(self, method: str, name: str) -> int:
        return sum(one.method == method and one.path.endswith(f"/{name}") for one in self.asked)

    async def serve(self, request: web.Request, path: str, headers: dict[str, str] | None = None) -> web.StreamResponse:
        script = self.scripted.get(f"{request.method} {path.rpartition('/')[2]}", [])
        if script:
            answer = script.pop(0) if len(script) > 1 else script[0]
            if answer == BREAK:
                await request.content.read(1000)
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(0)
                return web.Response(status=500)
            if answer == ENDLESS:
                return await self.endless(request, 400)
            if isinstance(answer, web.Response) and answer.status != 100:  # 100: the usual answer
                return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
        body = await request.read()
        if path.startswith("/v2/"):
            return self._as_a_registry(request, path, body)
        return self._as_a_store(request, path, body)

    def _as_a_store(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        if request.method == "PUT":
            assert request.headers["x-amz-content-sha256"] == hashlib.sha256(body).hexdigest()
            self.files[path], self.sums[path] = body, request.headers[SUM]
            return web.Response()
        if path not in self.files:
            return failed(404, "NoSuchKey")
        more = {SUM: self.sums[path], "Content-Range": f"bytes 0-0/{len(self.files[path])}"}
        return web.Response(status=206, body=self.files[path][:1], headers=more)

    def _as_a_registry(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        if request.method == "POST":
            return web.Response(status=202, headers={"Location": f"{self.uploads_at}{path}1?state=a%2Fb"})
        if request.method == "PUT":
            digest = request.query.get("digest")
            if digest is not None:
                assert digest == f"sha256:{hashlib.sha256(body).hexdigest()}"
                path = f"{path.partition('uploads/')[0]}{digest}"
            self.files[path] = body
            return web.Response(status=201)
        if path not in self.files:
            return web.Response(status=404)
        return web.Response(body=self.files[path])


@asynccontextmanager
async def upload_server(folder: Path, host: str = "127.0.0.1") -> AsyncIterator[UploadServer]:
    async with running(folder / f"upload-{host}", UploadServer, host) as server:
        assert isinstance(server, UploadServer)
        yield server
