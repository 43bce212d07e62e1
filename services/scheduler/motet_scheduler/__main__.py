"""`python -m motet_scheduler`: the scheduler's process."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from motet.imports import without_collections

with without_collections():
    import uvloop
    from prometheus_client import CollectorRegistry

    from motet.event_record import record_of
    from motet.health import Health
    from motet.kube import KubeApi
    from motet.leadership import Candidacy, LocalLeadership
    from motet.lease import Election
    from motet.read_settings import read
    from motet.service_main import run, run_until
    from motet.settings import Addresses, LeaseSettings, ProcessSettings
    from motet.surroundings import Surroundings, real_surroundings
    from motet_scheduler import leader_loop
    from motet_scheduler.catalog_file import CatalogFile
    from motet_scheduler.garbage import collect_garbage, known_to
    from motet_scheduler.leader_only import LeaderOnly
    from motet_scheduler.metrics import Metrics
    from motet_scheduler.service import SchedulerService
    from motet_scheduler.settings import Settings


def main() -> None:
    settings, process, addresses, lease = read(Settings), read(ProcessSettings), read(Addresses), read(LeaseSettings)
    surroundings = real_surroundings()
    record = record_of(settings.record)

    async def schedule(stop: asyncio.Event, registry: CollectorRegistry, health: Health) -> None:
        metrics = Metrics(registry)
        async with candidacy(lease, process, addresses.scheduler_address, surroundings) as leadership:
            front = LeaderOnly(lambda: leadership.leader_address)

            async with surroundings.network.serving(
                settings.listen or addresses.scheduler_address,
                front.handlers,
                process=health,
                grace=0,  # streams never end by themselves, so waiting for them would only delay the next leader
            ):
                leading: deque[SchedulerService] = deque(maxlen=1)
                await run_until(
                    stop,
                    leader_loop.run_when_leading(
                        settings.config(process.time_scale),
                        front,
                        leadership=leadership,
                        metrics=metrics,
                        supervisor_address=addresses.supervisor_address,
                        catalog_file=catalog_file(lease, process, surroundings),
                        surroundings=surroundings,
                        time_scale=process.time_scale,
                        record=record,
                        on_begin=leading.append,
                    ),
                    collect_garbage(lambda: sum(known_to(one.scheduler) for one in leading)),
                )

    run("scheduler", process, schedule, loop_factory=uvloop.new_event_loop)


def catalog_file(lease: LeaseSettings, process: ProcessSettings, surroundings: Surroundings) -> CatalogFile | None:
    """Where the last catalog is saved. None in a cluster: each pod has a disk of its own, so its file would be from the
    time when that pod led, and the other pods do not have it."""
    path = process.data_dir / "scheduler" / "catalog.json"
    return None if lease.name else CatalogFile(path, surroundings.disk)


@asynccontextmanager
async def candidacy(
    lease: LeaseSettings, process: ProcessSettings, address: str, surroundings: Surroundings
) -> AsyncIterator[Candidacy]:
    """In a cluster, elect a leader by Lease; on one machine this process always leads."""
    if not lease.name:
        with LocalLeadership(process.data_dir / "scheduler.term", surroundings) as alone:
            yield alone
        return
    async with (
        KubeApi(lease.kubeconfig, "MOTET_LEASE_KUBECONFIG") as api,
        Election(api, lease, address=address, time_scale=process.time_scale, surroundings=surroundings) as election,
    ):
        yield election


if __name__ == "__main__":
    main()
