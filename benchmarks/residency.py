"""Measures what the scheduler spends on residency: 60 runners, 1,000 adapters, and each runner loads one a second.

A runner has 32 adapters on its device and 32 on its disk. When it loads one, its oldest goes from the device to the
disk, and one leaves the disk. It reports once a second. Measured is CPU time, from the bytes of a report to those of
the messages for one operator and two gateways; no sockets.

The baseline is the same scheduler, but it tells each change at once: it builds the reports of all adapters and the
whole catalog again, and sends the reports that differ and the catalog.
"""

import random
import time
from collections import deque
from collections.abc import Iterator

from benchmarks.harness import Pairs, Result, alternate, percentile
from benchmarks.scheduler_catalog import ADAPTERS, CATALOG, digest_of, identity
from motet.api.v1 import common_pb2, scheduler_pb2
from motet.runner_info import Capacity
from motet_scheduler import conversion
from motet_scheduler.conversion import CatalogRevision
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.catalog import CatalogPublisher
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import Catalog, SchedulerConfig

RUNNERS, ON_DEVICE, ON_DISK, GATEWAYS, TICKS = 60, 32, 32, 2, 10
TARGET_CPU = 0.1
CAPACITY = Capacity(pages=1024, max_sequences=64, adapter_slots=ON_DEVICE)


class TellsAllAtOnce(CatalogPublisher):
    """The baseline."""

    def tell_changes(self, *, at_once: bool = False) -> None:  # noqa: ARG002
        state = self._state
        if not state.catalog_changed and not state.adapters.changed:
            return
        state.catalog_changed = False
        state.adapters.take_changed()
        self._to_report = dict.fromkeys(state.adapters.by_name, False)
        while self._to_report:
            self._report_some()
        entries = tuple(state.reports.entry(adapter, state.runners) for adapter in state.adapters)
        catalog = Catalog(groups=tuple(self._groups()), adapters=entries, namespaces=state.namespaces)
        if catalog != state.catalog:
            state.catalog = catalog
            state.emit(effects.PublishCatalog(catalog))


class Fleet:
    """A scheduler and the messages of its runners."""

    def __init__(self, *, tells_all_at_once: bool = False, runners: int = RUNNERS) -> None:
        self.sent = 0
        """Bytes to the operator and the gateways."""
        self._runners = runners
        self._now = 1000.0
        self._chance = random.Random(3)
        adapters = range(ADAPTERS)
        self._held = [deque(self._chance.sample(adapters, ON_DEVICE + ON_DISK)) for _ in range(runners)]
        """Of each runner, those on the device first, and in each part the newest first."""
        self.scheduler = Scheduler(SchedulerConfig(), now=self._now, saved=CATALOG)
        if tells_all_at_once:
            self.scheduler.publisher = TellsAllAtOnce(self.scheduler.state, self.scheduler.capacity)
        self._tell(events.CatalogReplaced(CATALOG.pools, tuple(one.spec for one in CATALOG.adapters)))
        for gateway in range(GATEWAYS):
            self._tell(events.GatewayConnected(f"g{gateway}", ()))
        for index in range(runners):
            self._tell(events.RunnerAttached(identity=identity(index), address=f"unix:r{index}", capacity=CAPACITY))

    def second(self) -> float:
        """CPU seconds of the next second."""
        reports = [self._load_one(index) for index in range(self._runners)]
        ticks = 0
        began = time.thread_time()
        for index, report in enumerate(reports):
            self._now += 1 / self._runners
            event = conversion.attach_event(identity(index), scheduler_pb2.AttachUp.FromString(report))
            assert event is not None
            self._tell(event)
            if (index + 1) * TICKS // self._runners > ticks:
                ticks += 1
                self._tell(events.Tick())
        return time.thread_time() - began

    def wait(self) -> None:
        """Until all that has changed is told."""
        self._now += 1.0
        self._tell(events.Tick())

    def _load_one(self, index: int) -> bytes:
        """The report of a runner after it has loaded another adapter."""
        held = self._held[index]
        held.pop()
        held.appendleft(self._chance.choice([one for one in range(ADAPTERS) if one not in held]))
        resident = [
            common_pb2.ResidentAdapter(
                digest=digest_of(adapter),
                tier=common_pb2.MEMORY_TIER_DEVICE if place < ON_DEVICE else common_pb2.MEMORY_TIER_DISK,
                bytes=1 << 20,
            )
            for place, adapter in enumerate(held)
        ]
        report = scheduler_pb2.Report(pages_free=CAPACITY.pages, resident=resident)
        return scheduler_pb2.AttachUp(report=report).SerializeToString()

    def _tell(self, event: events.Event) -> None:
        for effect in self.scheduler.handle(event, self._now):
            self.sent += sum(map(len, _messages_of(effect)))


def _messages_of(effect: effects.Effect) -> Iterator[bytes]:
    match effect:
        case effects.PublishCatalog():
            if effect.changes is not None:
                down = conversion.catalog_changes(
                    effect.catalog, effect.changes, CatalogRevision(1, 1), CatalogRevision(1, 2)
                )
            else:
                down = conversion.catalog(effect.catalog, CatalogRevision(1, 1))
            for _ in range(1 if effect.gateway else GATEWAYS):
                yield down.SerializeToString()
        case effects.ReportAdapter() | effects.ReportRunner() | effects.ReportDesiredReplicas():
            yield conversion.operator_message(effect).SerializeToString()
        case _:
            pass


async def measure(pairs: int) -> list[Result]:
    ours, baseline = Fleet(), Fleet(tells_all_at_once=True)

    async def second_of_ours() -> float:
        return ours.second()

    async def second_of_baseline() -> float:
        return baseline.second()

    both: Pairs = await alternate(second_of_baseline, second_of_ours, pairs=pairs)
    figure, before = percentile(both.b, 0.5), percentile(both.a, 0.5)
    print(f"residency of {ADAPTERS} adapters on {RUNNERS} runners: all told at once against the scheduler: {both}")
    print(f"bytes sent: {ours.sent / baseline.sent:.3f} of the baseline's")
    return [
        Result("catalog_cpu_1000", figure, "CPU s per s", f"<= {TARGET_CPU}", figure <= TARGET_CPU),
        Result("catalog_cpu_1000_all_at_once", before, "CPU s per s"),
        Result("catalog_cpu_gain", both.ratio, "x", baseline="everything told again at each change", pairs=both),
    ]
