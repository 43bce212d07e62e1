"""/health, /ping and /version for probes, and /metrics."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from motet.errors import NotFound
from motet.keys import KeyScope
from motet.transport.over_grpc import socket_path
from motet_gateway.exposition import exposition, scrape_all
from motet_gateway.gateway import Gateway
from motet_gateway.identity.caller import caller_of
from motet_gateway.routes.json_response import json_response


def probe_routes(gateway: Gateway, registry: CollectorRegistry) -> APIRouter:
    router = APIRouter(tags=["probes"])
    own_socket = socket_path(gateway.process.metrics_address)
    running = version("motet")

    @router.get("/health")
    async def health() -> Response:
        """200 when a request could be answered: at least one group has a runner."""
        return Response(status_code=200 if gateway.healthy else 503)

    @router.get("/ping")
    async def ping() -> Response:
        """The same, under the name that SageMaker's probes use."""
        return await health()

    @router.get("/version")
    async def version_() -> Response:
        """200 as soon as the gateway listens."""
        return json_response({"version": running})

    endpoints: dict[str, Callable[..., Awaitable[Response]]] = {"/health": health, "/ping": ping, "/version": version_}
    folder = gateway.settings.metrics_dir

    async def metrics(request: Request) -> Response:
        """The gateway's own figures, and on a machine of one's own those of everybody."""
        caller = caller_of(request.scope)
        if folder is None and not caller.key_id:  # not for everyone
            raise NotFound("This gateway shows metrics only with an API key.")
        caller.needs(KeyScope.MONITOR)
        others = await scrape_all(folder, but=own_socket) if folder is not None else {}
        content = await asyncio.to_thread(exposition, registry, others)
        return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})

    router.get("/metrics", include_in_schema=False)(metrics)
    endpoints["/metrics"] = metrics

    # Load generators send HEAD first. Separate routes, so that each operation has its own id in the schema.
    for path, endpoint in endpoints.items():
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return router
