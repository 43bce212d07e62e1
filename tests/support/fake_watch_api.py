"""An API server over HTTP, with lists and watches. It accepts every write, and remembers only the path."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from motet_operator.cluster.kinds import WATCHED, Kind, Object

Watch = asyncio.Queue[Object]
"""The events that this watch has yet to send."""


@dataclass
class FakeWatchApi:
    objects: dict[Kind, list[Object]] = field(default_factory=dict)
    version: int = 100
    """The resourceVersion of every list."""

    written: list[str] = field(default_factory=list)
    """The paths of all writes, in order."""

    url: str = ""
    _watches: dict[Watch, str] = field(default_factory=dict)

    def paths(self, *, but: Collection[Watch] = ()) -> set[str]:
        """The paths of all open watches, except `but`."""
        return {path for watch, path in self._watches.items() if watch not in but}

    def say(self, event: Object, *, of: str = "") -> set[Watch]:
        """Send the event on every open watch whose path contains `of`. Returns these watches."""
        watches = {watch for watch, path in self._watches.items() if of in path}
        for watch in watches:
            watch.put_nowait(event)
        return watches

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for this server."""
        names = {"cluster": "it", "user": "me"}
        path.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "it", "cluster": {"server": self.url}}],
                    "users": [{"name": "me", "user": {"token": "secret"}}],
                    "contexts": [{"name": "here", "context": names}],
                    "current-context": "here",
                }
            )
        )
        return path

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if (known := _discovery(request.path)) is not None:
            return web.json_response(known)
        if request.method == "PATCH":
            self.written.append(request.path)
            return web.Response(body=await request.read(), content_type="application/json")
        kind = next(kind for kind in WATCHED if request.path.endswith(f"/{kind.plural}"))
        if request.query.get("watch") == "true":
            return await self._watch(request)
        return web.json_response(
            {"metadata": {"resourceVersion": str(self.version)}, "items": self.objects.get(kind, [])}
        )

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        response, events = web.StreamResponse(), Watch()
        await response.prepare(request)
        self._watches[events] = request.path
        try:
            while True:
                await response.write(json.dumps(await events.get()).encode() + b"\n")
        except ConnectionError:
            return response
        finally:
            del self._watches[events]


def _discovery(path: str) -> dict[str, Any] | None:
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        versions = {kind.group: {"groupVersion": kind.api_version, "version": kind.version} for kind in WATCHED}
        groups = ((group, version) for group, version in versions.items() if group)
        return {"groups": [{"name": name, "versions": [one], "preferredVersion": one} for name, one in groups]}
    found = [kind for kind in WATCHED if kind.path().rpartition("/")[0] == path]
    return {"resources": [_resource(kind) for kind in found]} if found else None


def _resource(kind: Kind) -> dict[str, Any]:
    return {
        "name": kind.plural,
        "singularName": kind.name.lower(),
        "kind": kind.name,
        "namespaced": kind.namespaced,
        "verbs": ["get", "list", "watch", "patch"],
    }
