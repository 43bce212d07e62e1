"""What a list may change at once, and for what the API server is asked once more."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from motet.kube import Unreachable
from motet_operator.cluster.api import Refused
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.denials import Denials
from motet_operator.cluster.kinds import ADAPTERS, BUDGETS, DEPLOYMENTS, PODS, POOLS, Kind, Object, key_of
from motet_operator.cluster.resync import Resync
from motet_operator.metrics import ClusterMetrics
from tests.common.waiting import until
from tests.operator.cluster.objects import adapter, made, pod


class TwoFacedServer:
    """What it has cached need not be what it has stored."""

    def __init__(self) -> None:
        self.cached: dict[Kind, list[Object]] = {}
        self.stored: dict[Kind, list[Object]] = {}
        self.away = False
        self.asked: list[tuple[Kind, bool]] = []
        self.refuses: dict[tuple[Kind, str], int] = {}
        """Kinds and namespaces, by the status of the answer."""

    async def list(self, kind: Kind, namespace: str = "", *, fresh: bool = False, **_: Any) -> tuple[list[Object], int]:
        self.asked.append((kind, fresh))
        if status := self.refuses.get((kind, namespace)):
            raise Refused("list", kind, namespace, status=status, message="no")
        if fresh and self.away:
            raise Unreachable("no quorum")
        found = (self.stored if fresh else self.cached).get(kind, [])
        return [it for it in found if namespace in ("", key_of(it)[0])], 100

    def twice(self, kind: Kind) -> bool:
        """Whether the last round asked for what is stored."""
        asked, self.asked = self.asked, []
        return (kind, True) in asked


class Place:
    def __init__(self, server: TwoFacedServer, seconds: float = 300) -> None:
        self.cache = Cache()
        self.metrics = ClusterMetrics(CollectorRegistry())
        self.denials = Denials()
        self.unwatchable: list[str] = []
        self.resync = Resync(
            server,  # type: ignore[arg-type]
            self.cache,
            self.denials,
            self.metrics,
            ["pools", "others"],
            seconds=seconds,
            time_scale=0.01,
            changed=lambda: None,
            returned=lambda _: None,
            unwatchable=self.unwatchable.append,
        )


def adapters(number: int) -> list[Object]:
    return [adapter(f"adapter-{each}") for each in range(number)]


async def knows(server: TwoFacedServer, kind: Kind, objects: list[Object]) -> Place:
    place = Place(server)
    server.cached[kind] = server.stored[kind] = objects
    assert await place.resync.once()
    server.asked.clear()
    return place


@pytest.mark.parametrize("left", [0, 50, 79])
async def test_a_list_that_lacks_much_is_not_believed_while_more_is_stored(left: int) -> None:
    server = TwoFacedServer()
    place = await knows(server, ADAPTERS, adapters(100))
    server.cached[ADAPTERS] = adapters(left)
    assert await place.resync.once()
    assert place.cache.count(ADAPTERS) == 100
    assert server.twice(ADAPTERS)


async def test_what_is_stored_is_believed() -> None:
    server = TwoFacedServer()
    place = await knows(server, ADAPTERS, adapters(100))
    server.cached[ADAPTERS] = server.stored[ADAPTERS] = []
    assert await place.resync.once()
    assert place.cache.count(ADAPTERS) == 0


@pytest.mark.parametrize(("known", "left"), [(100, 80), (5, 0)])
async def test_what_little_is_missing_is_gone_at_once(known: int, left: int) -> None:
    server = TwoFacedServer()
    place = await knows(server, ADAPTERS, adapters(known))
    server.cached[ADAPTERS] = server.stored[ADAPTERS] = adapters(left)
    assert await place.resync.once()
    assert not server.twice(ADAPTERS)
    assert place.cache.count(ADAPTERS) == left


async def test_nothing_goes_while_the_second_question_has_no_answer() -> None:
    server = TwoFacedServer()
    place = await knows(server, ADAPTERS, adapters(100))
    server.cached[ADAPTERS], server.away = [], True
    assert not await place.resync.once()  # it is asked again soon
    assert place.cache.count(ADAPTERS) == 100


async def test_a_share_is_of_what_the_list_is_about() -> None:
    """Another namespace with many pods does not make few of those that are here."""
    server = TwoFacedServer()
    place = await knows(server, PODS, [pod(f"here-{each}", "1") for each in range(10)])
    for each in range(1000):
        place.cache.put(PODS, made(PODS, f"there-{each}", "elsewhere"))
    server.cached[PODS] = []
    assert await place.resync.once()
    assert server.twice(PODS)
    assert (place.cache.count(PODS, "pools"), place.cache.count(PODS)) == (10, 1010)


@pytest.mark.parametrize("status", [403, 404, 503])
@pytest.mark.parametrize("kind", [DEPLOYMENTS, PODS])
async def test_a_namespace_that_cannot_be_seen_stops_itself_and_nobody_else(kind: Kind, status: int) -> None:
    server = TwoFacedServer()
    server.refuses[kind, "others"] = status
    place = Place(server)
    assert not await place.resync.once()
    assert place.resync.listed.is_set()
    assert place.resync.unseen == {"others"}
    assert ("others" in place.denials.standing().places) == (status == 403)
    # It is answered, and will be for long. Whoever is only away for a moment is waited for.
    assert bool(place.resync.waiting_for()) == (status == 503)
    server.refuses.clear()
    assert await place.resync.once()
    assert place.resync.unseen == frozenset()
    assert place.denials.standing().places == {}


async def test_a_namespace_that_may_not_be_seen_any_more_is_not_known_any_more() -> None:
    server = TwoFacedServer()
    place = await knows(server, PODS, [pod("one", "1")])
    assert place.resync.unseen == frozenset()
    server.refuses[PODS, "pools"] = 403
    await place.resync.once()
    assert place.resync.unseen == {"pools"}
    assert place.cache.count(PODS) == 1  # nothing is gone because it was not shown
    assert place.unwatchable == ["/api/v1/namespaces/pools/pods"]


async def test_budgets_that_may_not_be_seen_are_told_and_stop_nothing() -> None:
    server = TwoFacedServer()
    server.refuses[BUDGETS, "pools"] = 403
    place = Place(server)
    await place.resync.once()
    assert place.resync.listed.is_set()
    assert place.resync.unseen == frozenset()
    assert place.denials.standing().places.keys() == {"pools"}


@pytest.mark.parametrize("kind", [ADAPTERS, POOLS])
async def test_without_our_own_kinds_nothing_is_done(kind: Kind) -> None:
    server = TwoFacedServer()
    server.refuses[kind, ""] = 404
    place = Place(server)
    await place.resync.once()
    assert not place.resync.listed.is_set()
    assert kind.plural in place.resync.waiting_for()
    assert place.unwatchable == [kind.path()]


async def test_what_cannot_be_listed_is_asked_for_again_and_the_rest_is_not() -> None:
    server = TwoFacedServer()
    server.refuses[PODS, "others"] = 403
    place = Place(server)
    task = asyncio.create_task(place.resync.run())
    await until(lambda: len(server.asked) > 20)
    assert sum(kind is ADAPTERS for kind, _ in server.asked) == 1
    place.resync.hurry()
    await until(lambda: sum(kind is ADAPTERS for kind, _ in server.asked) == 2)
    del server.refuses[PODS, "others"]
    await until(lambda: not place.resync.unseen)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_everything_is_listed_in_time_also_while_something_cannot_be() -> None:
    server = TwoFacedServer()
    server.refuses[PODS, "others"] = 403
    place = Place(server, seconds=3)
    task = asyncio.create_task(place.resync.run())
    await until(lambda: sum(kind is ADAPTERS for kind, _ in server.asked) == 3)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
