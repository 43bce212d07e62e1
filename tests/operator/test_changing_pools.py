"""Pools whose spec changes all the time, from the operator's rounds to the pods that are made.

Decisions and writer are the real ones. The API server, with its controllers and a kubelet, is a stand-in.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from motet_operator.cluster.cache import Cache
from motet_operator.cluster.decision import Decider, SchedulerReports
from motet_operator.cluster.kinds import DEPLOYMENTS, NAMESPACES, PODS, POOLS, Object
from tests.operator.cluster import objects
from tests.support.fake_flaky_api import FakeFlakyApi, writer_to
from tests.support.in_process_services import until

FLIPS = 100
PAUSE = 2.0
POOL = ("pools", "demo")


class Kubelet(Mapping[str, Callable[[], str]]):
    """Why each pod is not ready: it starts for a moment."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._made: dict[str, float] = {}

    def new_pod(self, name: str, revision: str) -> Object:
        self._made[name] = time.monotonic()
        return objects.pod(name, revision, ready=False, uid=name)

    def __getitem__(self, name: str) -> Callable[[], str]:
        ready_at = self._made[name] + self._seconds
        return lambda: "starts" if time.monotonic() < ready_at else ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class FakeCluster:
    def __init__(self, *, drains: bool, pause: float = PAUSE) -> None:
        """`drains`: runners have nothing to do, and are drained at once."""
        self.wake = asyncio.Event()
        self.cache = Cache(lambda _: self.wake.set())
        self.api = FakeFlakyApi(self.cache, random.Random(1), failing=0.0, lost=0.0, lag=0.004)
        self.rounds = 0
        self._drains = drains
        self._kubelet = Kubelet(0.15)
        self._decider = Decider(["pools"], timedelta(seconds=60), 3, timedelta(seconds=pause))
        self._writer = writer_to(self.api, self.cache)

    def declare(self, rank: int, replicas: int) -> None:
        wanted = objects.pool(
            replicas=replicas, engine={"maxLoraRank": rank}, drainTimeoutSeconds=600, updateStrategy={"maxSurge": 1}
        )
        it = self.api.objects.get(POOLS, {}).get(POOL, wanted)
        metadata = it["metadata"] | {"generation": it["metadata"]["generation"] + 1}
        self.api.put(POOLS, it | {"metadata": metadata, "spec": wanted["spec"]})

    def ready(self) -> dict[str, int]:
        """Pods, by revision."""
        found: dict[str, int] = {}
        for pod in self.api.pods().values():
            if pod["status"]["conditions"][0]["status"] == "True":
                revision = pod["metadata"]["labels"]["motet.dev/revision"]
                found[revision] = found.get(revision, 0) + 1
        return found

    def is_all(self, replicas: int) -> bool:
        """`replicas` runners of what the pool says now, and nothing of anything else."""
        pool = self.api.objects[POOLS][POOL]
        status = pool.get("status") or {}
        deployments = [it["metadata"]["labels"]["motet.dev/revision"] for it in self.api.objects[DEPLOYMENTS].values()]
        return (
            status.get("observedGeneration") == pool["metadata"]["generation"]
            and self.ready() == {status["updateRevision"]: replicas}
            and len(self.api.pods()) == replicas
            and deployments == [status["updateRevision"]]
        )

    async def wait_until_all(self, replicas: int) -> None:
        try:
            await until(lambda: self.is_all(replicas))
        except AssertionError:
            pool = self.api.objects[POOLS][POOL]
            raise AssertionError(f"{self.ready()} of {list(self.api.pods())}, {pool.get('status')}") from None

    async def writes(self) -> None:
        await self._writer.run(4)

    async def run_rounds(self) -> None:
        drained: frozenset[str] = frozenset()
        while True:
            self.wake.clear()
            attached = frozenset(name for name in self.api.pods() if not self._kubelet[name]())
            reports = SchedulerReports(drained=drained, attached=attached)
            now = datetime.now(UTC).replace(microsecond=0)
            decision = self._decider.decide(self.cache.snapshot(), reports, objects.PLATFORM, now)
            self._writer.set_writes(decision.writes)
            self.rounds += 1
            if self._drains and (ordered := frozenset(drain.instance for drain in decision.drains)) != drained:
                drained = ordered
                self.wake.set()
            await asyncio.sleep(0.005)
            try:
                async with asyncio.timeout(decision.due):
                    await self.wake.wait()
            except TimeoutError:
                pass

    async def controllers(self) -> None:
        while True:
            self.api.look(self._kubelet, self._kubelet.new_pod)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def fake_cluster(**how: Any) -> AsyncIterator[FakeCluster]:
    """With a pool of three runners, all of them ready."""
    one = FakeCluster(**how)
    one.api.objects = {PODS: {}, DEPLOYMENTS: {}}
    one.api.put(NAMESPACES, objects.namespace("pools"), at_once=True)
    one.declare(8, 3)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in (one.writes(), one.run_rounds(), one.controllers())]
        await one.wait_until_all(3)
        yield one
        for task in tasks:
            task.cancel()


async def test_row_15_a_pool_whose_template_flips_a_hundred_times_starts_few_runners() -> None:
    async with fake_cluster(drains=True) as one:
        made, rounds, began = one.api.made, one.rounds, time.monotonic()
        one.api.written.clear()
        for flip in range(FLIPS):
            one.declare(16 if flip % 2 == 0 else 8, 3)
            await asyncio.sleep(0.05)
            assert sum(one.ready().values()) >= 3
        one.declare(16, 3)
        await one.wait_until_all(3)
        made, rounds, written = one.api.made - made, one.rounds - rounds, one.api.written
        # The operator's time has whole seconds.
        rollouts = int(3 + (time.monotonic() - began + 1) / PAUSE)
        print(f"{made} runners, at most {rollouts} rollouts, {rounds} rounds, {dict(written)}")
        # The next change ends a rollout whose first runner has not started; only the last goes to its end.
        assert made <= 2 * rollouts + 3
        assert written["Deployment"] + written["Pod"] <= 10 * rollouts
        assert written["ServingPool status"] <= rounds


async def test_row_15_replicas_that_flip_a_hundred_times_start_no_runner_while_the_others_have_work() -> None:
    async with fake_cluster(drains=False) as one:
        runners = set(one.api.pods())
        for flip in range(FLIPS):
            one.declare(8, 1 if flip % 2 == 0 else 3)
            await asyncio.sleep(0.01)
        one.declare(8, 3)
        await one.wait_until_all(3)
        assert set(one.api.pods()) == runners
        assert one.api.deleted == []
