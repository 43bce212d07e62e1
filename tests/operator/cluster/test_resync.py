"""What a list may change at once, and for what the API server is asked once more."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from motet.kube import Unreachable
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.denials import Denials
from motet_operator.cluster.kinds import ADAPTERS, PODS, Kind, Object
from motet_operator.cluster.resync import Resync
from motet_operator.metrics import ClusterMetrics
from tests.operator.cluster.objects import adapter, made, pod


class TwoFacedServer:
    """What it has cached need not be what it has stored."""

    def __init__(self) -> None:
        self.cached: dict[Kind, list[Object]] = {}
        self.stored: dict[Kind, list[Object]] = {}
        self.away = False
        self.asked: list[tuple[Kind, bool]] = []

    async def list(self, kind: Kind, namespace: str = "", *, fresh: bool = False, **_: Any) -> tuple[list[Object], int]:
        self.asked.append((kind, fresh))
        if fresh and self.away:
            raise Unreachable("no quorum")
        return list((self.stored if fresh else self.cached).get(kind, [])), 100

    def twice(self, kind: Kind) -> bool:
        """Whether the last round asked for what is stored."""
        asked, self.asked = self.asked, []
        return (kind, True) in asked


class Place:
    def __init__(self, server: TwoFacedServer) -> None:
        self.cache = Cache()
        self.metrics = ClusterMetrics(CollectorRegistry())
        self.resync = Resync(
            server,  # type: ignore[arg-type]
            self.cache,
            Denials(),
            self.metrics,
            ["pools"],
            seconds=300,
            changed=lambda: None,
            returned=lambda _: None,
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
