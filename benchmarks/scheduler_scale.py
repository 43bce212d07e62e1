"""What a decision costs with 1,000 runners or 100,000 queued requests, whole lives, and the longest event.

All by CPU time. `growth_runners` and `growth_queued` are ratios of medians, in pairs. `lives_per_s`: of each life the
bytes of the gateway's messages are read, and all that is decided is written, for gateways and runners; 10,000 others
always wait. `longest_event_ms` is the longest of all events while 100,000 wait, and 10,000 of one tenant that has as
many adapters: decisions, ticks, a gateway that goes, comes back and enqueues all of them again, a runner that goes and
comes back, also as a new process, the largest runner that a pool may have, of which the bytes of the messages are read,
and the cancellation of everything. Collections of garbage count as events.
"""

import gc
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.harness import Result, alternate, percentile
from benchmarks.scheduler_catalog import ADAPTERS, GROUP, digest_of, identity, with_tenant_of_many
from benchmarks.scheduler_load import CAPACITY, GATEWAY, QUEUED, ProductionScheduler
from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import InstanceName, RequestId, Tenant
from motet.runner_info import MAX_LISTED_AT_ONCE, RequestClass, RunnerIdentity
from motet_scheduler import conversion
from motet_scheduler.garbage import full_collections_put_off
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.requests import Placement, Request
from motet_scheduler.policy.values import Estimate, SchedulerConfig

RUNNERS, MANY_RUNNERS, MANY_QUEUED = 16, 1_000, 100_000
MANY, ADAPTERS_ONE_IN = "tenant-with-many-adapters", 10
"""It has one adapter for this number of requests of others, and a request for each."""
LARGEST = 4096
"""`maxConcurrentSequences` of a pool, at most."""
MOST_OF_RUNNERS, MOST_OF_QUEUED, LEAST_LIVES, MOST_MS = 1.5, 1.3, 5_000, 10.0
TERM = 1
WRITTEN_CLASSES = {
    RequestClass.INTERACTIVE: common_pb2.REQUEST_CLASS_INTERACTIVE,
    RequestClass.STANDARD: common_pb2.REQUEST_CLASS_STANDARD,
    RequestClass.BATCH: common_pb2.REQUEST_CLASS_BATCH,
}
WRITTEN: dict[type[effects.Effect], Callable[[Any], Any]] = {
    effects.SendPlaced: lambda it: conversion.place(it, TERM),
    effects.SendRefused: lambda it: conversion.refuse(it, TERM),
    effects.SendPosition: conversion.position,
    **dict.fromkeys(
        (effects.ExpectRequest, effects.EnsureAdapter, effects.DropAdapter, effects.CancelAtRunner),
        lambda it: conversion.runner_message(it, TERM),
    ),
}


async def growth(
    name: str, most: float, sides: tuple[ProductionScheduler, ProductionScheduler], pairs: int, decisions: int
) -> Result:
    def median_of(side: ProductionScheduler) -> Callable[[], Awaitable[float]]:
        async def median() -> float:
            return percentile([side.decide() for _ in range(decisions)], 0.5)

        return median

    small, large = sides
    for side in sides:
        for _ in range(decisions):
            side.decide()
    both = await alternate(median_of(large), median_of(small), pairs=pairs)
    return Result(name, both.ratio, "x", f"<= {most} x", both.ratio <= most, pairs=both)


def enqueue_message(event: events.Enqueued) -> bytes:
    it = scheduler_pb2.Enqueue(
        request=event.request,
        tenant=event.tenant,
        group=event.group,
        adapter_digest=event.digest,
        request_class=WRITTEN_CLASSES[event.request_class],
        prompt_tokens=event.prompt_tokens,
        max_tokens=event.max_tokens,
        estimate=common_pb2.Estimate(q80=event.estimate.q80),
        choices=event.choices,
        parent=event.parent or "",
        prefix_hashes=event.prefix_hints,
    )
    return scheduler_pb2.ServeUp(enqueue=it).SerializeToString()


def lives_per_s(lives: int, queued: int) -> Result:
    """As in the service, no collection of all garbage comes by itself."""
    side, seconds = ProductionScheduler(RUNNERS, queued), 0.0

    def hear(message: bytes) -> None:
        nonlocal seconds
        began = time.thread_time()
        event = conversion.serve_event(GATEWAY, scheduler_pb2.ServeUp.FromString(message))
        assert event is not None
        decided = side.handle(event)
        for effect in decided:
            if (write := WRITTEN.get(type(effect))) is not None:
                write(effect).SerializeToString()
        seconds += time.thread_time() - began
        side.note(decided)

    with full_collections_put_off():
        for _ in range(lives):
            ended = side.finished()
            done = scheduler_pb2.Finished(request=ended.request, epoch=ended.epoch, output_tokens=64)
            hear(scheduler_pb2.ServeUp(finished=done).SerializeToString())
            while side.lacks_requests:
                hear(enqueue_message(side.next_arrival()))
    figure = lives / seconds
    return Result("lives_per_s", figure, "1/s", f">= {LEAST_LIVES}", figure >= LEAST_LIVES)


class Events:
    """The longest of each kind, in milliseconds."""

    def __init__(self, side: ProductionScheduler) -> None:
        self._side = side
        self.longest: defaultdict[str, float] = defaultdict(float)
        self._began = 0.0

    def tell(self, event: events.Event) -> None:
        self._note(type(event).__name__, self._side.tell(event))
        while self._side.scheduler.more_to_try:
            self._note("TryMore", self._side.tell(events.TryMore()))

    def _note(self, kind: str, seconds: float) -> None:
        self.longest[kind] = max(self.longest[kind], 1000 * seconds)

    def hear(self, runner: RunnerIdentity, message: bytes) -> None:
        """Of a runner."""
        began = time.thread_time()
        up = scheduler_pb2.AttachUp.FromString(message)
        hello = up.HasField("hello")
        event = conversion.runner_attached(up.hello) if hello else conversion.attach_event(runner, up)
        assert event is not None
        self._note(f"{type(event).__name__} of the largest", time.thread_time() - began + self._side.tell(event))

    @contextmanager
    def collections(self) -> Iterator[None]:
        """Count those of garbage, too."""

        def collected(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                self._began = time.thread_time()
            else:
                self._note(f"collection of generation {info['generation']}", time.thread_time() - self._began)

        gc.callbacks.append(collected)
        try:
            yield
        finally:
            gc.callbacks.remove(collected)


def as_asked(request: Request, now: float) -> events.Enqueued:
    """As its gateway enqueues it at another scheduler."""
    return events.Enqueued(
        gateway=GATEWAY,
        request=request.id,
        tenant=request.tenant,
        group=request.group,
        digest=request.digest,
        request_class=request.request_class,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        estimate=request.estimate,
        age=now - request.asked_at,
        parent=request.parent,
        choices=request.choices,
        prefix_hints=request.prefix_hints,
    )


def as_it_runs(request: Request, placement: Placement, now: float) -> events.LiveRequest:
    return events.LiveRequest(
        request=request.id,
        epoch=placement.epoch,
        instance=placement.instance,
        incarnation=placement.incarnation,
        promise=request.promise_on(CAPACITY, SchedulerConfig()),
        tenant=request.tenant,
        group=request.group,
        digest=request.digest,
        request_class=request.request_class,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        age=now - request.asked_at,
        estimate=request.estimate,
    )


def largest_runner(runner: RunnerIdentity) -> Iterator[bytes]:
    """Its hello and two reports, each in as many parts as it sends."""
    live = [
        common_pb2.RunnerRequest(
            request=f"large-{number}",
            epoch=1,
            promise=common_pb2.Promise(pages=4),
            pages_used=2,
            state=common_pb2.SEQUENCE_STATE_DECODE,
            prompt_tokens=20,
            output_tokens=10,
            max_tokens=64,
            adapter_digest=digest_of(number % 32),
            gateway=GATEWAY,
        )
        for number in range(LARGEST)
    ]
    first, *others = (live[begin : begin + MAX_LISTED_AT_ONCE] for begin in range(0, LARGEST, MAX_LISTED_AT_ONCE))
    capacity = common_pb2.Capacity(pages=8 * LARGEST, max_sequences=LARGEST, adapter_slots=32)
    begins: list[dict[str, Any]] = [
        {"hello": {"identity": runner.to_proto(), "capacity": capacity, "live": first, "live_follows": True}},
        *[{"report": {"live": first, "live_follows": True, "residency_told": True, "steps": n}} for n in (1, 2)],
    ]
    for one in begins:
        yield scheduler_pb2.AttachUp(**one).SerializeToString()
        for number, part in enumerate(others, 1):
            listed = scheduler_pb2.ListedRequests(requests=part, more=number < len(others))
            yield scheduler_pb2.AttachUp(listed=listed).SerializeToString()


def one_for_each(adapters: Iterable[int]) -> Iterator[events.Enqueued]:
    for adapter in adapters:
        yield events.Enqueued(
            gateway=GATEWAY,
            request=RequestId(f"many-{adapter}"),
            tenant=Tenant(MANY),
            group=GROUP,
            digest=digest_of(adapter),
            request_class=RequestClass.STANDARD,
            prompt_tokens=64,
            max_tokens=512,
            estimate=Estimate(q80=64 + adapter % 64),
        )


def longest_event_ms(queued: int, decisions: int) -> Result:
    adapters = range(ADAPTERS, ADAPTERS + queued // ADAPTERS_ONE_IN)
    side = ProductionScheduler(RUNNERS, queued, catalog=with_tenant_of_many(MANY, adapters))
    told, scheduler = Events(side), side.scheduler
    with full_collections_put_off(), told.collections():
        for asked in one_for_each(adapters):
            told.tell(asked)
        for number in range(decisions):
            told.tell(side.finished())
            told.tell(side.next_arrival())
            if not number % 10:
                side.pass_time(0.02)
                told.tell(events.Tick())
        gone, runner = InstanceName(identity(0).instance), identity(0)
        told.tell(events.RunnerDetached(gone, runner.incarnation))
        for process in (runner, replace(runner, incarnation="its next process")):
            told.tell(events.RunnerAttached(identity=process, address="unix:r0", capacity=CAPACITY))
        large = replace(identity(RUNNERS), pool="default/large", group="default/large")
        for message in list(largest_runner(large)):
            told.hear(large, message)
        now, requests = scheduler.state.now, list(scheduler.requests.values())
        waiting = [as_asked(one, now) for one in requests if one.placement is None]
        live = [as_it_runs(one, one.placement, now) for one in requests if one.placement is not None]
        del requests
        gc.freeze()  # these lists are the benchmark's: a scheduler has none of a hundred thousand young objects
        told.tell(events.GatewayDisconnected(GATEWAY))
        told.tell(events.GatewayConnected(GATEWAY, tuple(live)))
        for event in waiting:
            told.tell(event)
        names = list(scheduler.requests)
        gc.freeze()
        for one in names:
            told.tell(events.CancelRequested(GATEWAY, one))
        gc.unfreeze()
    for kind, longest in sorted(told.longest.items(), key=lambda one: -one[1]):
        print(f"{kind}: {longest:.1f} ms at most")
    figure = max(told.longest.values())
    return Result("longest_event_ms", figure, "ms", f"<= {MOST_MS:g} ms", figure <= MOST_MS)


async def measure(
    pairs: int,
    decisions: int,
    *,
    queued: int = QUEUED,
    many_queued: int = MANY_QUEUED,
    many_runners: int = MANY_RUNNERS,
) -> list[Result]:
    base = ProductionScheduler(RUNNERS, queued)
    grown = (
        ("growth_runners", MOST_OF_RUNNERS, ProductionScheduler(many_runners, queued)),
        ("growth_queued", MOST_OF_QUEUED, ProductionScheduler(RUNNERS, many_queued)),
    )
    return [
        *[await growth(name, most, (base, large), pairs, decisions // 4) for name, most, large in grown],
        lives_per_s(decisions, queued),
        longest_event_ms(many_queued, decisions),
    ]
