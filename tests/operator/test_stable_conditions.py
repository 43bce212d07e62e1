"""Drains that are asked for and taken back, from the operator's rounds to the runner's readiness.

The operator's decisions, writer and stream, the scheduler's service and the runners' are the real ones, over gRPC. The
API server is a stand-in that fails half of the writes of pods.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from motet.health import Health
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.cluster_operator import MAX_IDLE_SECONDS
from motet_operator.cluster.decision import Decider, SchedulerReports
from motet_operator.cluster.kinds import DEPLOYMENTS, NAMESPACES, PODS, POOLS, Object
from motet_operator.cluster.object_parser import annotations_of
from motet_operator.sync import SchedulerSync
from motet_simulator.fake_engine import FakeEngine
from tests.operator.cluster import objects
from tests.support.fake_flaky_api import FakeFlakyApi, writer_to
from tests.support.fake_gateway import fake_gateway
from tests.support.in_process_runner import InProcessRunner, in_process_runner, short_folder
from tests.support.in_process_services import InProcessServices, control_plane, until
from tests.support.surroundings import REAL

FLIPS = 100
RUNNERS = ("r0", "r1", "r2")
POOL = {"drainTimeoutSeconds": 600, "updateStrategy": {"maxSurge": 1}}


@pytest.fixture
def folder() -> Any:
    with short_folder() as path:
        yield path


def home(it: Object) -> Object:
    """In the namespace of these runners."""
    return it | {"metadata": it["metadata"] | {"namespace": "default"}}


def new_pod(name: str, revision: str) -> Object:
    pod = objects.pod(name, revision, ready=name in RUNNERS, node=f"node-{name}", uid=name)
    return home(pod)


class InProcessOperator:
    """The cluster's operator without its watches and its Lease."""

    def __init__(self, scheduler: str, chance: random.Random, *, failing: float, lost: float) -> None:
        self.wake = asyncio.Event()
        self.cache = Cache(lambda _: self.wake.set())
        self.api = FakeFlakyApi(self.cache, chance, failing=failing, lost=lost)
        self.cordoned: frozenset[str] = frozenset()
        self.sync = SchedulerSync(scheduler, self.wake.set, surroundings=REAL)
        self._decider = Decider(["default"], timedelta(seconds=60))
        self._writer = writer_to(self.api, self.cache)

    def declare(self, replicas: int) -> None:
        pool = home(objects.pool(replicas=replicas, **POOL))
        before = self.api.objects.get(POOLS, {}).get(("default", "demo"), pool)
        self.api.put(POOLS, before | {"spec": pool["spec"]})

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writer.run(4))
            tasks.create_task(self.sync.run())
            tasks.create_task(self._rounds())

    async def _rounds(self) -> None:
        while True:
            self.wake.clear()
            snapshot = self.cache.snapshot()
            reports = SchedulerReports(
                drained=frozenset(self.sync.drained),
                attached=frozenset(self.sync.attached),
                known=dict(self.sync.adapter_reports),
            )
            now = datetime.now(UTC).replace(microsecond=0)
            decision = self._decider.decide(snapshot, reports, objects.PLATFORM, now, self.cordoned)
            self.sync.send_state(decision.plan.catalog, decision.drains, (name for _, name in snapshot[PODS]))
            self._writer.set_writes(decision.writes)
            await asyncio.sleep(0.005)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(decision.due or MAX_IDLE_SECONDS, MAX_IDLE_SECONDS)):
                    await self.wake.wait()


class InProcessCluster:
    def __init__(self, control: InProcessServices, operator: InProcessOperator) -> None:
        self.control, self.operator = control, operator
        self.runners: dict[str, InProcessRunner] = {}
        self.health = {name: Health() for name in RUNNERS}

    def differences(self) -> dict[str, str]:
        """What is not as it should be when nothing is to drain."""
        found = {name: why for name, health in self.health.items() if (why := health.unready_reason())}
        for name, pod in self.operator.api.pods().items():
            if marks := annotations_of(pod):
                found[f"pod {name}"] = str(marks)
            if name not in RUNNERS:
                found[f"pod {name}"] = "not gone"
        for name in RUNNERS:
            known = self.control.scheduler.runners.get(name)  # type: ignore[call-overload]
            if known is None or not known.takes_work:
                found[f"{name} in the scheduler"] = "takes no work"
        return found

    async def look(self) -> None:
        while True:
            why = {name: health.unready_reason for name, health in self.health.items()}
            self.operator.api.look(why, new_pod)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def in_process_cluster(
    folder: Any, chance: random.Random, *, failing: float, lost: float
) -> AsyncIterator[InProcessCluster]:
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(control_plane(folder))
        operator = InProcessOperator(control.scheduler_address, chance, failing=failing, lost=lost)
        one = InProcessCluster(control, operator)
        for name in RUNNERS:
            one.runners[name] = await stack.enter_async_context(
                in_process_runner(
                    folder,
                    instance=name,
                    scheduler=control.scheduler_address,
                    supervisor=control.supervisor_address,
                    health=one.health[name],
                    engine=lambda: FakeEngine(step_seconds=0.04, max_sequences=2),
                )
            )
        api = operator.api
        api.put(NAMESPACES, objects.namespace("default"), at_once=True)
        operator.declare(3)
        (status,) = (
            Decider(["default"], timedelta(0))
            .decide(
                objects.snapshot(home(objects.pool(replicas=3, **POOL))),
                SchedulerReports(),
                objects.PLATFORM,
                datetime.now(UTC),
            )
            .plan.pools
        )
        api.put(DEPLOYMENTS, home(objects.deployment(status.revision, 3)), at_once=True)
        for name in RUNNERS:
            api.put(PODS, new_pod(name, status.revision), at_once=True)
        tasks = [asyncio.create_task(operator.run()), asyncio.create_task(one.look())]
        try:
            await until(lambda: not one.differences(), why="every runner is ready at first")
            yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_after_a_hundred_flips_with_half_of_the_pod_patches_failing_every_runner_is_ready(folder: Any) -> None:
    chance = random.Random(25)
    async with in_process_cluster(folder, chance, failing=0.5, lost=0.3) as one:
        operator, api = one.operator, one.operator.api
        incarnations = {name: runner.service.identity.incarnation for name, runner in one.runners.items()}
        drained: set[str] = set()
        async with fake_gateway("g0", scheduler=one.control.scheduler_address) as gateway:
            # Every runner has work for a minute, so that no drain is over before it is taken back.
            for number in range(2 * len(RUNNERS)):
                gateway.start(f"long {number}", prompt=(number,), max_tokens=1500)
            await until(lambda: all(asked.tokens for asked in gateway.live()))
            for flip in range(FLIPS):
                operator.declare(chance.choice((1, 2, 3)))
                operator.cordoned = frozenset({f"node-{chance.choice(RUNNERS)}"} if chance.random() < 0.2 else ())
                operator.wake.set()
                if flip == FLIPS // 2:
                    await one.control.restart_scheduler()
                await asyncio.sleep(chance.uniform(0, 0.06))
                drained |= {name for name, runner in one.runners.items() if runner.service.draining}
            operator.declare(3)
            operator.cordoned = frozenset()
            operator.wake.set()
            try:
                await until(lambda: not one.differences())
            except AssertionError:
                raise AssertionError(f"still so: {one.differences()}") from None
            assert not set(api.deleted) & set(RUNNERS), "a runner with work was taken away"
            assert drained, "nobody ever drained: this shows nothing"
            assert api.failed >= 10
            assert api.done >= 10
            for asked in gateway.live():
                gateway.cancel(asked.request)
            answers = [gateway.ask(f"short {number}", prompt=(number,), max_tokens=8) for number in range(6)]
            assert [len(tokens) for tokens in await asyncio.gather(*answers)] == [8] * 6
            new = [gateway.asked[f"short {number}"] for number in range(6)]
            assert {instance for asked in new for _, instance in asked.placements} == set(RUNNERS)
        assert {name: runner.service.identity.incarnation for name, runner in one.runners.items()} == incarnations
        print(f"{api.failed} writes of pods failed, {api.done} did not; drained at times: {sorted(drained)}")


async def test_a_drain_whose_annotation_is_never_written_does_not_begin(folder: Any) -> None:
    async with in_process_cluster(folder, random.Random(1), failing=1.0, lost=0.0) as one:
        one.operator.declare(1)
        one.operator.wake.set()
        await until(lambda: one.operator.api.failed >= 6)
        assert not any(runner.service.draining for runner in one.runners.values())
        assert all(not health.unready_reason() for health in one.health.values())
