"""`python -m motet_gateway`: the gateway as a process."""

import asyncio
import sys

import structlog
import uvloop
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from motet.errors import SetupError
from motet.service import SETUP_FAILED, run
from motet.settings import Addresses, ProcessSettings
from motet_gateway.app import build_app
from motet_gateway.gateway import Gateway
from motet_gateway.metrics import Metrics
from motet_gateway.server import LAST_SECONDS, HttpServer, listening
from motet_gateway.settings import Settings

log = structlog.get_logger(__name__)


async def serve(stop: asyncio.Event, registry: CollectorRegistry) -> None:
    """Serve until `stop`; then let running answers end."""
    settings, process = _own_settings(), ProcessSettings()
    with listening(settings) as bound:
        gateway = Gateway(settings, process, Addresses(), Metrics(registry))
        server = HttpServer(build_app(gateway, registry), grace=settings.drain_seconds + LAST_SECONDS)
        async with asyncio.TaskGroup() as tasks:
            links = tasks.create_task(gateway.run(), name="gateway")
            http = tasks.create_task(server.serve(sockets=[bound]), name="http")
            host, port = bound.getsockname()[:2]
            log.info("listening", host=host, port=port, gateway=gateway.name)
            await stop.wait()
            server.should_exit = True  # no new connections from here
            await gateway.drain()
            await http
            links.cancel()


def _own_settings() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = f"MOTET_GATEWAY_{str(first['loc'][0]).upper()}"
        raise SetupError(f"{name}: {first['msg']}, not {first['input']!r}") from None


def main() -> None:
    try:
        process = ProcessSettings()
    except ValidationError as error:
        print(f"gateway: {error}", file=sys.stderr)  # noqa: T201 - the last line a person sees
        sys.exit(SETUP_FAILED)
    run("gateway", process, serve, loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    main()
