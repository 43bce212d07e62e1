"""Measures one scheduling decision while 10,000 requests wait for 1,000 adapters of 100 tenants.

A decision follows the end of one request: the scheduler releases its promise and places the next request that fits. The
request that ends is a random one of those that run. Then a new request joins the queue, so that 10,000 always wait.
This is not measured. Only the policy is measured: no sockets, no messages.

Each adapter has a system prompt of its own, and each runner has those of 32 adapters in its prefix cache. One call of
twenty has four choices.

The baseline has the same requests, runners and rules, but scans the queue: at each decision it tries the requests in
order until no runner has enough free capacity for the smallest waiting request. It alternates with the scheduler in one
process. Both are measured by CPU time.

Then it measures a runner's report, and what follows from it, while each of 32 tenants waits for the one of 60 runners
that may serve its adapter (`placement.maxReplicas: 1`).

Then it counts how many requests run at once on 4 runners with 8 adapter slots each, of as many as have a place, once
many have been placed: fewer would if one that lacks a slot kept others back, for adapters that have one.

Then `residency` measures what the scheduler spends on adapters that come and go, and `scheduler_scale` what it spends
with more runners and requests.

    python -m benchmarks.scheduler [--decisions 2000] [--scans 200] [--pairs 6]
        [--many-runners 1000] [--many-queued 100000] [--json]
"""

import asyncio
import gc
import random
import time
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from statistics import fmean

from benchmarks import residency, scheduler_scale
from benchmarks.harness import Pairs, Result, alternate, arguments, percentile, report
from benchmarks.scheduler_catalog import CATALOG, GROUP, digest_of, identity
from benchmarks.scheduler_load import CAPACITY, QUEUED, Arrivals, ProductionScheduler, cached_on
from motet.domain import InstanceName, RequestId, Tenant
from motet.runner_info import RequestClass, RunnerRequest, Tier
from motet_scheduler.policy import events
from motet_scheduler.policy.requests import Placement, QueueKey, Request
from motet_scheduler.policy.runner_choice import Chosen, choose
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import SchedulerConfig

RUNNER_COUNTS = (3, 16)
TARGET_US, TARGET_P99_US = 80, 400
CONFIG = SchedulerConfig(queue_limit=2 * QUEUED)
FEW_SLOTS = replace(CAPACITY, pages=1 << 15, adapter_slots=8)
SLOT_RUNNERS = 4
DECISIONS_BEFORE = 4
"""For each decision that counts, this number come before: until then, requests run that came before all waited."""
LEAST_RUNNING = {1: 0.65, 16: 0.6, 100: 0.65}
"""By the number of tenants, the part of all places."""
LIMITED, LIMITED_RUNNERS, REPORT_ROUNDS, TARGET_REPORT_US = 32, 60, 10, 500


class BaselineScheduler:
    """The baseline. The queue is a sorted list, and each decision scans it from its beginning."""

    def __init__(self, runners: int) -> None:
        self.now = 1000.0
        self._chance = random.Random(2)
        self._arrivals = iter(Arrivals())
        self._sequence = count()
        self.runners = {
            InstanceName(f"r{index}"): Runner(identity(index), f"unix:r{index}", CAPACITY, 1.0)
            for index in range(runners)
        }
        for index, runner in enumerate(self.runners.values()):
            runner.cached_prefixes = cached_on(index)
        self.waiting: list[tuple[RequestClass, QueueKey, Request]] = []
        self.waiting_by_pages: Counter[int] = Counter()
        """Number of pages → how many waiting requests need it."""
        self._running: list[Request] = []
        self.fill()
        self.scan()
        self.fill()

    def decide(self) -> float:
        running = self._running
        index = self._chance.randrange(len(running))
        running[index], running[-1] = running[-1], running[index]
        ended = running.pop()
        began = time.thread_time()
        assert ended.placement is not None
        self.runners[ended.placement.instance].release_promise((ended.id, ended.epoch))
        self.scan()
        seconds = time.thread_time() - began
        self.fill()
        return seconds

    def scan(self) -> None:
        left = []
        for looked_at, entry in enumerate(self.waiting):
            if not self._has_capacity():
                left += self.waiting[looked_at:]
                break
            request = entry[2]
            outcome = choose(request, self.runners.values(), CONFIG, self.now)
            if not isinstance(outcome, Chosen):
                left.append(entry)
                continue
            self.waiting_by_pages[outcome.promise.pages] -= 1
            runner = outcome.runner
            request.epoch += 1
            request.placement = Placement(runner.instance, "1", request.epoch, self.now)
            runner.record_promise((request.id, request.epoch), outcome.promise.pages, request.digest, self.now)
            self._running.append(request)
        self.waiting = left

    def _has_capacity(self) -> bool:
        least = min(pages for pages, waiting in self.waiting_by_pages.items() if waiting)
        return any(one.has_capacity and one.ledger.free >= least for one in self.runners.values())

    def fill(self) -> None:
        while len(self.waiting) < QUEUED:
            self.now += 0.001
            event = next(self._arrivals)
            request = Request(
                id=event.request,
                gateway=event.gateway,
                tenant=event.tenant,
                group=event.group,
                digest=event.digest,
                request_class=event.request_class,
                prompt_tokens=event.prompt_tokens,
                max_tokens=event.max_tokens,
                estimate=event.estimate,
                asked_at=self.now,
                parent=event.parent,
                choices=event.choices,
                prefix_hints=event.prefix_hints,
                sequence=next(self._sequence),
            )
            self.waiting_by_pages[request.requirement_on(CAPACITY, CONFIG).promise.pages] += 1
            insort(self.waiting, (request.request_class, request.key, request), key=lambda entry: entry[:2])


@contextmanager
def frozen() -> Iterator[None]:
    """The garbage collector does not scan the objects that exist now."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class GcCounter:
    """Counts the decisions that the garbage collector interrupted."""

    def __init__(self) -> None:
        self.happened = False

    def __call__(self, _phase: str, _info: dict[str, int]) -> None:
        self.happened = True


def microseconds(side: ProductionScheduler | BaselineScheduler, decisions: int) -> list[tuple[float, bool]]:
    """The microseconds of each decision, and whether the garbage collector ran in it."""
    collections = GcCounter()
    gc.callbacks.append(collections)
    try:
        figures = []
        for _ in range(decisions):
            collections.happened = False
            figures.append((side.decide() * 1e6, collections.happened))
        return figures
    finally:
        gc.callbacks.remove(collections)


def p99(figures: list[tuple[float, bool]]) -> float:
    return percentile([value for value, _ in figures], 0.99)


async def against_the_scan(
    ours: ProductionScheduler, scan: BaselineScheduler, decisions: int, scans: int, pairs: int
) -> Pairs:
    async def median_of_ours() -> float:
        return percentile([value for value, _ in microseconds(ours, decisions)], 0.5)

    async def median_of_scan() -> float:
        return percentile([value for value, _ in microseconds(scan, scans)], 0.5)

    return await alternate(median_of_scan, median_of_ours, pairs=pairs)


async def measure(decisions: int, scans: int, pairs: int, many_runners: int, many_queued: int) -> list[Result]:
    results = []
    for runners in RUNNER_COUNTS:
        ours, scan = ProductionScheduler(runners), BaselineScheduler(runners)
        microseconds(ours, decisions)
        both = await against_the_scan(ours, scan, decisions, scans, pairs)
        figure, baseline = percentile(both.b, 0.5), percentile(both.a, 0.5)
        before = ours.placed
        plain = microseconds(ours, decisions)
        placed = (ours.placed - before) / decisions
        with frozen():
            cold = microseconds(ours, decisions)
        tail = p99(plain)
        slow = [collected for value, collected in plain if value >= tail]
        values = [value for value, _ in plain]
        print(f"{runners} runners: a fair scan of the queue against the scheduler: {both}")
        print(
            f"{runners} runners: {placed:.2f} requests placed a decision, in {fmean(values):.0f} us on average, "
            f"p50 {percentile(values, 0.5):.0f}, p90 {percentile(values, 0.9):.0f}: either the first request of the "
            "queue fits, or the oldest request of every tenant is tried on every runner"
        )
        print(
            f"{runners} runners: p99 {tail:.0f} us; the garbage collector ran in {sum(slow)} of the "
            f"{len(slow)} slowest decisions, at worst {max(values):.0f} us; "
            f"with gc.freeze p99 {p99(cold):.0f} us, at worst {max(v for v, _ in cold):.0f} us"
        )
        suffix = "" if runners == RUNNER_COUNTS[0] else f"_{runners}_runners"
        results += [
            Result(f"scheduler_decision_us{suffix}", figure, "us", f"<= {TARGET_US} us", figure <= TARGET_US),
            Result(f"scheduler_fair_scan_us{suffix}", baseline, "us"),
            Result(f"scheduler_gain{suffix}", both.ratio, "x", baseline="a fair scan", pairs=both),
            Result(f"scheduler_decision_p99_us{suffix}", tail, "us", f"<= {TARGET_P99_US} us", tail <= TARGET_P99_US),
        ]
    results += [running_at_once(tenants, decisions, least) for tenants, least in LEAST_RUNNING.items()]
    results += [report_with_limits(REPORT_ROUNDS), *await residency.measure(pairs)]
    scale = await scheduler_scale.measure(pairs, decisions, many_queued=many_queued, many_runners=many_runners)
    return [*results, *scale]


def report_with_limits(rounds: int) -> Result:
    """One report of each of 60 runners in turn. Those that have a limited adapter have a full batch."""
    adapters = [replace(one, spec=replace(one.spec, max_replicas=1)) for one in CATALOG.adapters[:LIMITED]]
    scheduler = Scheduler(CONFIG, now=0.0, saved=replace(CATALOG, adapters=tuple(adapters)))
    reports = []
    for index in range(LIMITED_RUNNERS):
        full = index < LIMITED
        live = (RunnerRequest(request=RequestId(f"running-{index}"), epoch=1, pages=1, gateway="another"),) * full
        resident = {digest_of(index): Tier.DEVICE} if full else {}
        capacity = replace(CAPACITY, max_sequences=1) if full else CAPACITY
        instance = InstanceName(identity(index).instance)
        attached = events.RunnerAttached(
            identity=identity(index), address="", capacity=capacity, live=live, resident=resident
        )
        scheduler.handle(attached, 0.0)
        reports.append(
            events.RunnerReported(
                instance=instance, incarnation=identity(index).incarnation, live=live, resident=resident
            )
        )
        if full:
            asked = events.Enqueued(
                gateway="g0",
                request=RequestId(f"waiting-{index}"),
                tenant=Tenant(f"tenant-{index}"),
                group=GROUP,
                digest=digest_of(index),
                adapter=str(adapters[index].spec.ref.object),
                request_class=RequestClass.STANDARD,
                prompt_tokens=16,
                max_tokens=16,
            )
            scheduler.handle(asked, 0.0)
    assert scheduler.queued() == LIMITED
    figures = []
    for now in range(1, rounds + 1):
        for one in reports:
            began = time.thread_time()
            scheduler.handle(one, float(now))
            figures.append((time.thread_time() - began) * 1e6)
    assert scheduler.queued() == LIMITED
    figure = percentile(figures, 0.5)
    return Result("scheduler_limited_report_us", figure, "us", f"<= {TARGET_REPORT_US} us", figure <= TARGET_REPORT_US)


def running_at_once(tenants: int, decisions: int, least: float, queued: int = QUEUED) -> Result:
    side = ProductionScheduler(SLOT_RUNNERS, queued, tenants=tenants, capacity=FEW_SLOTS)
    running = []
    for _ in range((1 + DECISIONS_BEFORE) * decisions):
        side.decide()
        running.append(side.running)
    mean, places = fmean(running[-decisions:]), SLOT_RUNNERS * FEW_SLOTS.max_sequences
    print(f"{tenants} tenants: {mean:.0f} requests run at once, and {places} have a place")
    value = mean / places
    name = f"running_at_once_{tenants}_tenants"
    return Result(name, value, "", f">= {least:g}", value >= least, counted=True, settings={"decisions": decisions})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--decisions", type=int, default=2000, help="decisions of the scheduler per figure")
    parser.add_argument("--scans", type=int, default=200, help="decisions of the baseline per figure")
    parser.add_argument("--pairs", type=int, default=6, help="quiet pairs to measure")
    parser.add_argument("--many-runners", type=int, default=scheduler_scale.MANY_RUNNERS, help="of growth_runners")
    parser.add_argument(
        "--many-queued", type=int, default=scheduler_scale.MANY_QUEUED, help="of growth_queued and longest_event_ms"
    )
    given = parser.parse_args()
    sizes = given.decisions, given.scans, given.pairs, given.many_runners, given.many_queued
    report("scheduler", asyncio.run(measure(*sizes)), as_json=given.json)


if __name__ == "__main__":
    main()
