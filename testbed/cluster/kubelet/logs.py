"""Serves `kubectl logs` over HTTPS, only for certificates of the cluster's authority."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from testbed.cluster.kubelet.container import Container

PORT = 10250

Find = Callable[[str, str, str], Container | None]
"""Finds a container by namespace, pod and container name."""


async def serve(address: str, certificate: Path, key: Path, authority: str, find: Find) -> web.AppRunner:
    async def logs(request: web.Request) -> web.StreamResponse:
        container = find(*(request.match_info[part] for part in ("namespace", "pod", "container")))
        if container is None:
            return web.Response(status=404, text="there is no such container here")
        previous = request.query.get("previous") == "true"
        number = container.seen.restarts - (1 if previous else 0)
        file = container.log(number)
        if number < 0 or not file.exists():
            name = container.seen.name
            return web.Response(
                status=400, text=f'previous terminated container "{name}" not found' if previous else ""
            )
        return await _send(request, file, container, follow=request.query.get("follow") == "true")

    application = web.Application()
    application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", logs)
    trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority)
    trust.verify_mode = ssl.CERT_REQUIRED
    trust.load_cert_chain(certificate, key)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, PORT, ssl_context=trust).start()
    return runner


async def _send(request: web.Request, file: Path, container: Container, *, follow: bool) -> web.StreamResponse:
    content = file.read_bytes()
    seen = len(content)
    if (tail := request.query.get("tailLines")) is not None:
        lines = content.splitlines(keepends=True)
        content = b"".join(lines[len(lines) - min(int(tail), len(lines)) :])
    if (limit := request.query.get("limitBytes")) is not None:
        content = content[: int(limit)]
    answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await answer.prepare(request)
    await answer.write(content)
    while follow:
        over = not container.running or file != container.log(container.seen.restarts)
        with file.open("rb") as log:
            log.seek(seen)
            more = log.read()
        seen += len(more)
        await answer.write(more)
        if over:
            break
        await asyncio.sleep(0.1)
    return answer
