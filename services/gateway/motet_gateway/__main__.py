"""`python -m motet_gateway`: the gateway as a process."""

import asyncio
import gc

from motet.imports import without_collections

with without_collections():
    import structlog
    import uvloop
    from prometheus_client import CollectorRegistry

    from motet.health import Health
    from motet.read_settings import read
    from motet.service_main import run
    from motet.settings import Addresses, Database, ProcessSettings
    from motet.surroundings import real_surroundings
    from motet.task_group import end
    from motet_gateway.app import build_app
    from motet_gateway.gateway import Gateway
    from motet_gateway.identity.access import source_of
    from motet_gateway.metrics import Metrics
    from motet_gateway.server import LAST_SECONDS, HttpServer, listening
    from motet_gateway.settings import Settings

log = structlog.get_logger(__name__)

COLLECT_AFTER = 20_000
"""How many objects more than before the garbage collector looks at together. A request has some hundred."""
END_SECONDS = 10.0
"""How long the streams to other services and the key store may take to close, before they are cancelled once more."""


def main() -> None:
    settings, process, addresses = read(Settings), read(ProcessSettings), read(Addresses)
    database, surroundings = read(Database), real_surroundings()

    async def serve(stop: asyncio.Event, registry: CollectorRegistry, health: Health) -> None:
        with listening(settings) as bound:
            metrics = Metrics(registry, names=process.metrics_names, clock=surroundings.clock)
            keys = source_of(settings, process, database, surroundings.clock)
            gateway = Gateway(settings, process, addresses, metrics, keys=keys, surroundings=surroundings)
            await gateway.access.begin()
            server = HttpServer(
                build_app(gateway, registry), settings, metrics, grace=settings.drain_seconds + LAST_SECONDS
            )
            async with asyncio.TaskGroup() as tasks:
                links = tasks.create_task(gateway.run(), name="gateway")
                http = tasks.create_task(server.serve(sockets=[bound]), name="http")
                # Objects made at start-up live as long as the process, so the collector can skip them.
                gc.collect()
                gc.freeze()
                # Requests leave it nothing, and those under way are many objects that it would look at in vain.
                gc.set_threshold(COLLECT_AFTER)
                host, port = bound.getsockname()[:2]
                log.info("listening", host=host, port=port, gateway=gateway.name)
                health.add_readiness_check(
                    lambda: "" if gateway.catalog.known else "the scheduler has not sent the list of models yet"
                )
                health.add_readiness_check(gateway.access.unready_reason)
                health.set_ready(True)
                await stop.wait()
                server.should_exit = True  # accept no new connections
                await gateway.drain()
                await http
                await end(links, patience_seconds=END_SECONDS)

    run("gateway", process, serve, loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    main()
