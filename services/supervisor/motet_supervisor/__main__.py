"""`python -m motet_supervisor`: the supervisor's process."""

import asyncio

from motet.imports import without_collections

with without_collections():
    from prometheus_client import CollectorRegistry

    from motet.event_record import record_of
    from motet.health import Health
    from motet.read_settings import read
    from motet.service_main import run, run_until
    from motet.settings import Addresses, ProcessSettings
    from motet.surroundings import real_surroundings
    from motet_supervisor.metrics import Metrics
    from motet_supervisor.service import SupervisorService
    from motet_supervisor.settings import Settings


def main() -> None:
    settings, process, addresses = read(Settings), read(ProcessSettings), read(Addresses)
    surroundings = real_surroundings()

    async def supervise(stop: asyncio.Event, registry: CollectorRegistry, health: Health) -> None:
        service = SupervisorService(
            settings.config(process.time_scale),
            metrics=Metrics(registry),
            clock=surroundings.clock,
            record=record_of(settings.record),
        )
        async with surroundings.network.serving(addresses.supervisor_address, service.handlers, process=health):
            await run_until(stop, service.due_times.run())

    run("supervisor", process, supervise)


if __name__ == "__main__":
    main()
