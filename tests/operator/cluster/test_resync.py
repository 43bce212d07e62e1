"""What a list may change at once, and for what the API server is asked once more."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from motet.kube import Unreachable
from motet_operator.cluster.api import ApiRefused
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.kinds import (
    ADAPTERS,
    BUDGETS,
    DECLARED_KINDS,
    DEPLOYMENTS,
    OWNED_KINDS,
    PODS,
    POOLS,
    Kind,
    Object,
    key_of,
)
from motet_operator.cluster.obstacles import ObstacleLog
from motet_operator.cluster.resync import LAST_RETRY_SECONDS, Resync
from motet_operator.metrics import ClusterMetrics
from tests.common.virtual_time import in_virtual_time
from tests.common.waiting import until
from tests.operator.cluster.objects import adapter, deployment, made, pod, pool


class CachingServer:
    """An API server whose cache may differ from its store."""

    def __init__(self) -> None:
        self.cached: dict[Kind, list[Object]] = {}
        self.stored: dict[Kind, list[Object]] = {}
        self.away = False
        self.version, self.lag = 100, 0
        """The version of the store, and how far the cache is behind."""
        self.asked: list[tuple[Kind, bool]] = []
        self.on_list: Callable[[Kind], None] = lambda _: None
        self.refuses: dict[tuple[Kind, str], int] = {}
        """Kinds and namespaces, by the status of the answer."""

    async def list(self, kind: Kind, namespace: str = "", *, fresh: bool = False, **_: Any) -> tuple[list[Object], int]:
        self.asked.append((kind, fresh))
        self.on_list(kind)
        if status := self.refuses.get((kind, namespace)):
            raise ApiRefused("list", kind, namespace, status=status, message="no")
        if fresh and self.away:
            raise Unreachable("no quorum")
        found = (self.stored if fresh else self.cached).get(kind, [])
        return [it for it in found if namespace in ("", key_of(it)[0])], self.version - (0 if fresh else self.lag)

    async def newest(self, kind: Kind, namespace: str = "") -> int:
        return (await self.list(kind, namespace, fresh=True))[1]

    def asked_for_stored(self, kind: Kind) -> bool:
        """Whether the last round read from the store."""
        asked, self.asked = self.asked, []
        return (kind, True) in asked


class ResyncSetup:
    def __init__(self, server: CachingServer, seconds: float = 300) -> None:
        self.cache = Cache()
        self.registry = CollectorRegistry()
        self.metrics = ClusterMetrics(self.registry)
        self.obstacle_log = ObstacleLog()
        self.unwatchable: list[str] = []
        self.watched_anew: list[Kind] = []
        self.resync = Resync(
            server,  # type: ignore[arg-type]
            self.cache,
            self.obstacle_log,
            self.metrics,
            ["pools", "others"],
            seconds=seconds,
            time_scale=0.01,
            changed=lambda: None,
            restart_watch=self.watched_anew.append,
            unwatchable=self.unwatchable.append,
        )

    def rewinds(self, kind: Kind) -> float:
        return self.registry.get_sample_value("motet_kubernetes_store_rewinds_total", {"resource": kind.plural}) or 0.0


def adapters(number: int) -> list[Object]:
    return [adapter(f"adapter-{each}") for each in range(number)]


@asynccontextmanager
async def running(setup: ResyncSetup) -> AsyncIterator[None]:
    task = asyncio.create_task(setup.resync.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def knows(server: CachingServer, kind: Kind, objects: list[Object], seconds: float = 300) -> ResyncSetup:
    setup = ResyncSetup(server, seconds)
    server.cached[kind] = server.stored[kind] = objects
    assert await setup.resync.once()
    server.asked.clear()
    return setup


@pytest.mark.parametrize("left", [0, 50, 79])
async def test_a_list_that_lacks_many_objects_is_not_trusted_while_more_are_stored(left: int) -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, adapters(100))
    server.cached[ADAPTERS] = adapters(left)
    assert await setup.resync.once()
    assert setup.cache.count(ADAPTERS) == 100
    assert server.asked_for_stored(ADAPTERS)


async def test_a_list_of_the_store_is_trusted() -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, adapters(100))
    server.cached[ADAPTERS] = server.stored[ADAPTERS] = []
    assert await setup.resync.once()
    assert setup.cache.count(ADAPTERS) == 0


@pytest.mark.parametrize(("known", "left"), [(100, 80), (5, 0)])
async def test_a_few_missing_objects_are_removed_at_once(known: int, left: int) -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, adapters(known))
    server.cached[ADAPTERS] = server.stored[ADAPTERS] = adapters(left)
    assert await setup.resync.once()
    assert not server.asked_for_stored(ADAPTERS)
    assert setup.cache.count(ADAPTERS) == left


async def test_no_object_is_removed_before_the_second_list_answers() -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, adapters(100))
    server.cached[ADAPTERS], server.away = [], True
    assert not await setup.resync.once()  # it is asked again soon
    assert setup.cache.count(ADAPTERS) == 100


async def test_a_share_of_lost_objects_counts_only_the_listed_namespace() -> None:
    """Another namespace with many pods does not make few of those that are here."""
    server = CachingServer()
    setup = await knows(server, PODS, [pod(f"here-{each}", "1") for each in range(10)])
    for each in range(1000):
        setup.cache.put(PODS, made(PODS, f"there-{each}", "elsewhere"))
    server.cached[PODS] = []
    assert await setup.resync.once()
    assert server.asked_for_stored(PODS)
    assert (setup.cache.count(PODS, "pools"), setup.cache.count(PODS)) == (10, 1010)


@pytest.mark.parametrize("status", [403, 404, 503])
@pytest.mark.parametrize("kind", [DEPLOYMENTS, PODS])
async def test_an_unreadable_namespace_stops_only_itself(kind: Kind, status: int) -> None:
    server = CachingServer()
    server.refuses[kind, "others"] = status
    setup = ResyncSetup(server)
    assert not await setup.resync.once()
    assert setup.resync.listed.is_set()
    assert setup.resync.unseen == {"others"}
    assert ("others" in setup.obstacle_log.standing().forbidden_namespaces) == (status == 403)
    # It is answered, and will be for long. Whoever is only away for a moment is waited for.
    assert bool(setup.resync.waiting_for()) == (status == 503)
    server.refuses.clear()
    assert await setup.resync.once()
    assert setup.resync.unseen == frozenset()
    assert setup.obstacle_log.standing().forbidden_namespaces == {}


async def test_a_namespace_without_permission_is_forgotten() -> None:
    server = CachingServer()
    setup = await knows(server, PODS, [pod("one", "1")])
    assert setup.resync.unseen == frozenset()
    server.refuses[PODS, "pools"] = 403
    await setup.resync.once()
    assert setup.resync.unseen == {"pools"}
    assert setup.cache.count(PODS) == 1  # nothing is gone because it was not shown
    assert setup.unwatchable == ["/api/v1/namespaces/pools/pods"]


async def test_unreadable_disruption_budgets_are_reported_and_stop_nothing() -> None:
    server = CachingServer()
    server.refuses[BUDGETS, "pools"] = 403
    setup = ResyncSetup(server)
    await setup.resync.once()
    assert setup.resync.listed.is_set()
    assert setup.resync.unseen == frozenset()
    assert setup.obstacle_log.standing().forbidden_namespaces.keys() == {"pools"}


OLD, NEW = adapter("one", version=50), adapter("one", version=90)


async def test_a_restored_store_replaces_the_cache() -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, [NEW, adapter("made-since", version=95)])
    setup.cache.remove(ADAPTERS, adapter("deleted-since", version=96))
    server.cached[ADAPTERS] = server.stored[ADAPTERS] = [OLD, adapter("deleted-since", version=40)]
    server.version = 60
    assert await setup.resync.once()
    assert setup.cache.snapshot()[ADAPTERS] == {key_of(it): it for it in server.stored[ADAPTERS]}
    assert ADAPTERS in setup.watched_anew
    assert setup.rewinds(ADAPTERS) == 1
    setup.watched_anew.clear()
    assert await setup.resync.once()
    assert (setup.watched_anew, setup.rewinds(ADAPTERS)) == ([], 1)  # it was told of once
    assert setup.cache.put(ADAPTERS, adapter("one", version=61))


async def test_a_restored_store_with_high_versions_is_recognised_by_its_objects() -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, [NEW])
    server.cached[ADAPTERS] = server.stored[ADAPTERS] = [OLD]
    server.version = 200
    assert await setup.resync.once()
    assert setup.cache.get(ADAPTERS, key_of(OLD)) == OLD
    assert setup.rewinds(ADAPTERS) == 1


async def test_a_lagging_server_is_not_taken_for_a_restored_one() -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, [NEW])
    setup.cache.put(ADAPTERS, adapter("one", version=120))
    server.version, server.lag = 130, 20
    server.cached[ADAPTERS], server.stored[ADAPTERS] = [NEW], [adapter("one", version=120)]
    assert await setup.resync.once()
    assert server.asked_for_stored(ADAPTERS)
    assert setup.cache.get(ADAPTERS, key_of(NEW)) == adapter("one", version=120)
    assert setup.rewinds(ADAPTERS) == 0


async def test_after_a_restore_each_namespace_is_replaced() -> None:
    server = CachingServer()
    here, there = (made(PODS, "one", namespace, version=90) for namespace in ("pools", "others"))
    setup = await knows(server, PODS, [here, there])
    before = [made(PODS, "one", namespace, version=50) for namespace in ("pools", "others")]
    server.cached[PODS] = server.stored[PODS] = before
    server.version = 60
    assert await setup.resync.once()
    assert setup.cache.snapshot()[PODS] == {key_of(it): it for it in before}


async def test_a_cache_that_mixes_two_states_of_the_store_is_not_used() -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, [NEW])
    server.cached[ADAPTERS] = server.stored[ADAPTERS] = [OLD]
    server.version = 60
    assert setup.resync.of_one_state
    states: list[bool] = []
    for each in setup.resync.scopes:
        await setup.resync.list_one(*each)
        states.append(setup.resync.of_one_state)
    assert states == [*[False] * (len(states) - 1), True]
    assert await setup.resync.once()
    assert setup.resync.of_one_state  # it was told of once


async def test_a_reopened_watch_checks_whether_the_store_was_restored() -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, [NEW], seconds=30_000)
    everything = len(DECLARED_KINDS) + 2 * len(OWNED_KINDS)
    async with running(setup):
        await until(lambda: len(server.asked) == everything)
        server.cached[ADAPTERS] = server.stored[ADAPTERS] = [OLD]
        setup.resync.watch_opened(ADAPTERS.path(), since=100)
        setup.resync.watch_opened(PODS.path("pools"), since=90)
        await until(lambda: len(server.asked) == everything + 2)
        assert server.asked[-2:] == [(ADAPTERS, True), (PODS, True)]  # it is the same: nothing more
        server.version = 60
        setup.resync.watch_opened(PODS.path("pools"), since=100)
        await until(lambda: setup.cache.get(ADAPTERS, key_of(OLD)) == OLD)


async def test_the_check_for_a_restore_is_repeated_until_it_is_answered() -> None:
    server = CachingServer()
    setup = await knows(server, ADAPTERS, [NEW], seconds=30_000)
    everything = len(DECLARED_KINDS) + 2 * len(OWNED_KINDS)
    async with running(setup):
        await until(lambda: len(server.asked) == everything)
        server.refuses[PODS, "pools"] = 500
        setup.resync.watch_opened(PODS.path("pools"), since=100)
        await until(lambda: len(server.asked) > everything + 1)
        server.cached[ADAPTERS] = server.stored[ADAPTERS] = [OLD]
        server.version = 60
        setup.resync.watch_opened(PODS.path("pools"), since=100)
        await until(lambda: setup.cache.get(ADAPTERS, key_of(OLD)) == OLD)


async def test_a_watch_from_a_version_beyond_the_restored_store_is_reopened() -> None:
    """Bookmarks carry it far ahead of every object that was seen."""
    server = CachingServer()
    setup = await knows(server, ADAPTERS, [NEW], seconds=30_000)
    async with running(setup):
        server.version = 150
        setup.resync.watch_opened(ADAPTERS.path(), since=200)
        await until(lambda: ADAPTERS in setup.watched_anew)
    assert setup.cache.get(ADAPTERS, key_of(NEW)) == NEW


@pytest.mark.parametrize("kind", [ADAPTERS, POOLS])
async def test_without_our_own_kinds_nothing_is_done(kind: Kind) -> None:
    server = CachingServer()
    server.refuses[kind, ""] = 404
    setup = ResyncSetup(server)
    await setup.resync.once()
    assert not setup.resync.listed.is_set()
    assert kind.plural in setup.resync.waiting_for()
    assert setup.unwatchable == [kind.path()]


async def test_only_failed_lists_are_repeated() -> None:
    server = CachingServer()
    server.refuses[PODS, "others"] = 403
    setup = ResyncSetup(server)
    task = asyncio.create_task(setup.resync.run())
    await until(lambda: len(server.asked) > 20)
    assert sum(kind is ADAPTERS for kind, _ in server.asked) == 1
    setup.resync.request_now()
    await until(lambda: sum(kind is ADAPTERS for kind, _ in server.asked) == 2)
    del server.refuses[PODS, "others"]
    await until(lambda: not setup.resync.unseen)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@in_virtual_time
async def test_one_failing_list_does_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own retries wait longer and longer, up to five rounds here."""
    clock = asyncio.get_running_loop().time
    monkeypatch.setattr("motet_operator.cluster.resync.monotonic", clock)
    server = CachingServer()
    server.refuses[PODS, "others"] = 403
    setup = ResyncSetup(server, seconds=LAST_RETRY_SECONDS / 5)
    listed: list[float] = []
    server.on_list = lambda kind: listed.append(clock()) if kind is ADAPTERS else None
    async with running(setup):
        await until(lambda: len(listed) > 20)
    of_a_round = LAST_RETRY_SECONDS / 5 * 0.01
    assert all(later - earlier <= of_a_round * 1.1 for earlier, later in pairwise(listed))


async def test_a_pool_that_goes_while_all_is_listed_is_never_known_without_its_deployment() -> None:
    class DeletingServer(CachingServer):
        """It deletes the pool and its Deployment after the first list of either."""

        async def list(self, kind: Kind, namespace: str = "", **how: Any) -> tuple[list[Object], int]:
            answer = await super().list(kind, namespace, **how)
            if answer[0]:
                self.stored.clear()
            return answer

    server = DeletingServer()
    server.stored = {POOLS: [pool()], DEPLOYMENTS: [deployment("r1", 1)]}
    setup = ResyncSetup(server)
    assert await setup.resync.once()
    known = setup.cache.snapshot()
    assert (len(known[POOLS]), len(known[DEPLOYMENTS])) == (0, 1), "else a Deployment would be missed, and made again"
