"""The real scheduler and supervisor services in this process, on Unix sockets, and an operator that talks to them.

async with control_plane(folder) as control:
    ...  # control.scheduler_address; control.scheduler.runners; await control.restart_scheduler()
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.event_record import record_of
from motet.leadership import LocalLeadership
from motet.rpc import Link
from motet.transport.methods import SYNC
from motet.transport.over_grpc import GrpcNetwork
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.event_failures import EventFailures
from motet_scheduler.leader_loop import lead
from motet_scheduler.leader_only import LeaderOnly
from motet_scheduler.metrics import Metrics as SchedulerMetrics
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.service import SchedulerService
from motet_scheduler.settings import Settings as SchedulerSettings
from motet_supervisor.metrics import Metrics as SupervisorMetrics
from motet_supervisor.service import SupervisorService
from motet_supervisor.settings import Settings as SupervisorSettings
from tests.common.waiting import until
from tests.support.surroundings import REAL

SCALE = 0.05

NEVER_LOST = {"unsubmitted_seconds": 1000, "unlisted_seconds": 1000}
"""Seconds (× 0.05) until a placement that no report lists counts as lost. All parts are in this process: on a busy
machine they are late, but nothing is lost."""


class RestartableService:
    """A service that can be killed and started again."""

    def __init__(self, run: Callable[[asyncio.Event], Any]) -> None:
        self._run = run
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        up = asyncio.Event()
        self._task = asyncio.create_task(self._run(up))
        waiting = asyncio.create_task(up.wait())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


class InProcessServices:
    def __init__(
        self, folder: Path, scheduler: SchedulerSettings, supervisor: SupervisorSettings, time_scale: float
    ) -> None:
        self.folder = folder
        self.scheduler_address = f"unix:{folder}/scheduler.sock"
        self.supervisor_address = f"unix:{folder}/supervisor.sock"
        self.scheduler_service: SchedulerService
        self.supervisor_service: SupervisorService
        self.supervisor_metrics = CollectorRegistry()
        self.scheduler_metrics = CollectorRegistry()
        self._scheduler_settings = scheduler
        self._supervisor_settings = supervisor
        self._scale = time_scale
        self.scheduler_part = RestartableService(self._run_scheduler)
        self.supervisor_part = RestartableService(self._run_supervisor)

    @property
    def scheduler(self) -> Scheduler:
        return self.scheduler_service.scheduler

    async def restart_scheduler(self) -> None:
        await self.scheduler_part.stop()
        await self.scheduler_part.start()

    async def _run_scheduler(self, up: asyncio.Event) -> None:
        with LocalLeadership(self.folder / "scheduler.term", REAL) as leadership:
            self.scheduler_metrics = CollectorRegistry()
            metrics = SchedulerMetrics(self.scheduler_metrics)
            front = LeaderOnly(lambda: "")

            def begin(failures: EventFailures) -> SchedulerService:
                self.scheduler_service = SchedulerService(
                    self._scheduler_settings.config(self._scale),
                    leadership=leadership,
                    metrics=metrics,
                    supervisor_address=self.supervisor_address,
                    catalog_file=CatalogFile(self.folder / "catalog.json", REAL.disk),
                    surroundings=REAL,
                    known_failures=failures,
                    record=record_of(self._scheduler_settings.record),
                )
                front.open(self.scheduler_service)
                return self.scheduler_service

            leading = asyncio.create_task(lead(leadership, begin, time_scale=self._scale))
            await asyncio.sleep(0)  # from here on the service exists
            try:
                async with GrpcNetwork().serving(self.scheduler_address, front.handlers, grace=0):
                    up.set()
                    await leading
            finally:
                leading.cancel()
                await asyncio.gather(leading, return_exceptions=True)

    async def _run_supervisor(self, up: asyncio.Event) -> None:
        self.supervisor_metrics = CollectorRegistry()
        service = SupervisorService(
            self._supervisor_settings.config(self._scale),
            metrics=SupervisorMetrics(self.supervisor_metrics),
            clock=REAL.clock,
            record=record_of(self._supervisor_settings.record),
        )
        self.supervisor_service = service

        async with GrpcNetwork().serving(self.supervisor_address, service.handlers, grace=0):
            up.set()
            await service.due_times.run()


class FakeOperator:
    """Declares a catalog and collects what the scheduler sends."""

    def __init__(self, scheduler: str) -> None:
        self.term = 0
        self.received: list[scheduler_pb2.SyncDown] = []
        self._snapshot = scheduler_pb2.CatalogSnapshot()
        self._drains: dict[str, scheduler_pb2.DrainRunner] = {}
        self.link: Link[scheduler_pb2.SyncUp, scheduler_pb2.SyncDown] = Link(
            "operator: scheduler",
            scheduler,
            SYNC,
            network=GrpcNetwork(),
            greet=lambda: [self._all_drains(), scheduler_pb2.SyncUp(term=self.term, snapshot=self._snapshot)],
            receive=self.received.append,
        )

    def state(self, *adapters: scheduler_pb2.AdapterEntry, replicas: int = 1, **of_the_pool: Any) -> None:
        pool = scheduler_pb2.PoolEntry(
            pool="default/demo",
            group="default/demo",
            served_name="demo",
            model_uri="file:///demo",
            replicas=replicas,
            tenants=["default"],
            **of_the_pool,
        )
        self._snapshot = scheduler_pb2.CatalogSnapshot(revision=1, pools=[pool], adapters=adapters)
        self.link.send(scheduler_pb2.SyncUp(term=self.term, snapshot=self._snapshot))

    def drain(self, runner: common_pb2.RunnerIdentity, seconds: float = 5.0) -> None:
        self._drains[runner.instance] = scheduler_pb2.DrainRunner(runner=runner, deadline_seconds=seconds)
        self.link.send(self._all_drains())

    def take_back(self, instance: str) -> None:
        """Take back the drain of a runner."""
        self._drains.pop(instance, None)
        self.link.send(self._all_drains())

    def _all_drains(self) -> scheduler_pb2.SyncUp:
        return scheduler_pb2.SyncUp(term=self.term, drains=scheduler_pb2.Drains(runners=self._drains.values()))

    def of(self, kind: str) -> list[Any]:
        return [getattr(down, kind) for down in self.received if down.WhichOneof("message") == kind]

    @property
    def desired(self) -> scheduler_pb2.DesiredCapacity | None:
        """The wanted number in the newest scaling advice."""
        return next(reversed(self.of("desired")), None)

    def adapter(self, name: str) -> scheduler_pb2.AdapterReport | None:
        """The newest report about an adapter."""
        return next((one for one in reversed(self.of("adapter")) if one.ref.name == name), None)


def adapter_entry(
    name: str, folder: Path, *, stamp: str = "1", min_replicas: int = 0, namespace: str = "default", generation: int = 1
) -> scheduler_pb2.AdapterEntry:
    return scheduler_pb2.AdapterEntry(
        ref=common_pb2.AdapterRef(namespace=namespace, name=name, generation=generation),
        group="default/demo",
        model_name=name,
        source=folder.as_uri(),
        content_stamp=stamp,
        min_replicas=min_replicas,
    )


@asynccontextmanager
async def control_plane(
    folder: Path,
    *,
    scheduler: SchedulerSettings | None = None,
    supervisor: SupervisorSettings | None = None,
    time_scale: float = SCALE,
    supervised: bool = True,
) -> AsyncIterator[InProcessServices]:
    scheduler = scheduler or SchedulerSettings()
    patient = {name: value for name, value in NEVER_LOST.items() if name not in scheduler.model_fields_set}
    scheduler = scheduler.model_copy(update=patient)
    control = InProcessServices(folder, scheduler, supervisor or SupervisorSettings(), time_scale)
    async with AsyncExitStack() as stack:
        if supervised:
            await control.supervisor_part.start()
        stack.push_async_callback(control.supervisor_part.stop)
        await control.scheduler_part.start()
        stack.push_async_callback(control.scheduler_part.stop)
        yield control


@asynccontextmanager
async def fake_operator(scheduler: str) -> AsyncIterator[FakeOperator]:
    operator = FakeOperator(scheduler)
    operator.state()
    task = asyncio.create_task(operator.link.run())
    try:
        await until(lambda: operator.link.connected)
        yield operator
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
