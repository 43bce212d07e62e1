"""/health, /version and /ping, and on a machine of one's own /metrics: for machines that look after machines."""

import asyncio
from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from motet.rpc import socket_path
from motet_gateway.exposition import exposition, scrape_all
from motet_gateway.gateway import Gateway
from motet_gateway.routes.json import json_response


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

    endpoints = {"/health": health, "/ping": ping, "/version": version_}
    if folder := gateway.settings.metrics_dir:  # elsewhere the names of tenants are not for everybody who may ask

        @router.get("/metrics")
        async def metrics() -> Response:
            others = await scrape_all(folder, but=own_socket)
            content = await asyncio.to_thread(exposition, registry, others)
            return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})

        endpoints["/metrics"] = metrics

    # Load generators look with HEAD first. Said apart, so that each operation keeps an id of its own in the schema.
    for path, endpoint in endpoints.items():
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return router
