"""`python -m motet_scheduler`: the scheduler's process."""

import asyncio

from prometheus_client import CollectorRegistry

from motet.api.v1 import scheduler_pb2_grpc
from motet.clock import every
from motet.health import Health
from motet.leadership import LocalLeadership
from motet.rpc import serving
from motet.service import read, run, run_until
from motet.settings import Addresses, ProcessSettings
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.metrics import Metrics
from motet_scheduler.service import SERVICE, SchedulerService
from motet_scheduler.settings import Settings

TICK_SECONDS = 0.1
"""How finely time is noticed, before the time scale: deadlines, settling, a declining runner's pause."""

SHORTEST_TICK = 0.02


def main() -> None:
    settings, process, addresses = read(Settings), read(ProcessSettings), read(Addresses)

    async def schedule(stop: asyncio.Event, registry: CollectorRegistry, health: Health) -> None:
        with LocalLeadership(process.data_dir / "scheduler.term") as leadership:
            service = SchedulerService(
                settings.policy(process.time_scale),
                leadership=leadership,
                metrics=Metrics(registry),
                supervisor_address=addresses.supervisor_address,
                catalog_file=CatalogFile(process.data_dir / "scheduler" / "catalog.json"),
            )
            tick = max(TICK_SECONDS * process.time_scale, SHORTEST_TICK)
            async with serving(
                addresses.scheduler_address,
                lambda server: scheduler_pb2_grpc.add_SchedulerServicer_to_server(service, server),
                names=[SERVICE],
                process=health,
            ):
                await run_until(stop, service.supervisor.run(), every(tick, service.tick, name="tick"))

    run("scheduler", process, schedule)


if __name__ == "__main__":
    main()
