"""The load of the scheduler's benchmarks: requests that wait for 1,000 adapters of 100 tenants."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from benchmarks.scheduler_catalog import ADAPTERS, CATALOG, GROUP, TENANTS, digest_of, identity
from motet.domain import InstanceName, RequestId, Tenant
from motet.prefix_hints import MAX_CACHED_HINTS, MAX_PROMPT_HINTS
from motet.runner_info import Capacity, RequestClass
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.catalog import SavedCatalog
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import Estimate, SchedulerConfig

QUEUED = 10_000
CAPACITY = Capacity(pages=1024, max_sequences=64, adapter_slots=32)
CHOICES, ONE_CALL_OF = 4, 20
GATEWAY = "g0"


def hints_of(adapter: int) -> tuple[int, ...]:
    """Of the first pages of a prompt: the system prompt of the adapter."""
    return tuple(range(adapter * MAX_PROMPT_HINTS, (adapter + 1) * MAX_PROMPT_HINTS))


def cached_on(runner: int) -> frozenset[int]:
    """What the prefix cache of a runner has: system prompts of the adapters that are asked for most, others on each."""
    first = runner * MAX_CACHED_HINTS // MAX_PROMPT_HINTS
    return frozenset(
        hint for adapter in range(first, first + MAX_CACHED_HINTS // MAX_PROMPT_HINTS) for hint in hints_of(adapter)
    )


class Arrivals:
    """The same requests for both sides. Zipf's law chooses the adapter; each tenant has ten adapters. As the service
    reads them, equal texts are one object."""

    def __init__(self, tenants: int = TENANTS) -> None:
        self._chance = random.Random(1)
        self._numbers = count()
        self._weights = [1 / (rank + 1) for rank in range(ADAPTERS)]
        self._tenants = [Tenant(f"tenant-{number}") for number in range(tenants)]
        self._digests = [digest_of(number) for number in range(ADAPTERS)]

    def __iter__(self) -> Iterator[events.Enqueued]:
        while True:
            for adapter in self._chance.choices(range(ADAPTERS), self._weights, k=1000):
                number = next(self._numbers)
                choices = CHOICES if self._chance.randrange(ONE_CALL_OF) == 0 else 1
                first = events.Enqueued(
                    gateway=GATEWAY,
                    request=RequestId(f"request-{number}"),
                    tenant=self._tenants[adapter % len(self._tenants)],
                    group=GROUP,
                    digest=self._digests[adapter],
                    request_class=self._chance.choice(list(RequestClass)),
                    prompt_tokens=self._chance.randrange(16, 512),
                    max_tokens=512,
                    estimate=Estimate(q80=self._chance.randrange(16, 256)),
                    choices=choices,
                    prefix_hints=hints_of(adapter),
                )
                yield first
                for choice in range(1, choices):
                    request = RequestId(f"request-{number}.{choice}")
                    yield replace(first, request=request, parent=first.request)


class ProductionScheduler:
    """The scheduler of production, of which each event is measured."""

    def __init__(
        self,
        runners: int,
        queued: int = QUEUED,
        *,
        tenants: int = TENANTS,
        capacity: Capacity = CAPACITY,
        catalog: SavedCatalog = CATALOG,
    ) -> None:
        self.placed = 0
        self._queued = queued
        self._now = 1000.0
        self._chance = random.Random(2)
        self._arrivals = iter(Arrivals(tenants))
        self._running: list[tuple[RequestId, int]] = []
        self.scheduler = Scheduler(SchedulerConfig(queue_limit=2 * queued), now=self._now, saved=catalog)
        for index in range(runners):
            self.tell(events.RunnerAttached(identity=identity(index), address=f"unix:r{index}", capacity=capacity))
            instance, incarnation = InstanceName(identity(index).instance), identity(index).incarnation
            self.tell(
                events.RunnerReported(instance=instance, incarnation=incarnation, cached_prefixes=cached_on(index))
            )
        self.fill()

    def decide(self) -> float:
        """Seconds that one decision took."""
        seconds = self.tell(self.finished())
        self.fill()
        return seconds

    @property
    def running(self) -> int:
        return len(self._running)

    def finished(self) -> events.RequestFinished:
        """The end of a random one of those that run."""
        running = self._running
        index = self._chance.randrange(len(running))
        running[index], running[-1] = running[-1], running[index]
        request, epoch = running.pop()
        return events.RequestFinished(GATEWAY, request, epoch)

    def fill(self) -> None:
        while self.lacks_requests:
            self.tell(self.next_arrival())

    @property
    def lacks_requests(self) -> bool:
        return self.scheduler.queued() < self._queued

    def next_arrival(self) -> events.Enqueued:
        return next(self._arrivals)

    def tell(self, event: events.Event) -> float:
        """Seconds that it took."""
        began = time.thread_time()
        decided = self.handle(event)
        seconds = time.thread_time() - began
        self.note(decided)
        return seconds

    def pass_time(self, seconds: float) -> None:
        self._now += seconds

    def handle(self, event: events.Event) -> list[effects.Effect]:
        self._now += 0.001
        return self.scheduler.handle(event, self._now)

    def note(self, decided: list[effects.Effect]) -> None:
        """Those that were placed run."""
        for effect in decided:
            if isinstance(effect, effects.SendPlaced):
                self.placed += 1
                self._running.append((effect.request, effect.epoch))
