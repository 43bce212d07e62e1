"""Earlier revisions leave the disk cache after what nobody names, and before what serves."""

import shutil
from typing import Any

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest
from motet.errors import AdapterFetchFailed
from motet_runner.adapters.policy import effects
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.policy.kept_revisions import MAX_KEPT, MAX_MANIFESTS, KeptRevisions
from motet_runner.adapters.policy.values import FetchRequest, Order
from tests.runner_service.test_disk_limit import Told, contents, digest, evictions, held
from tests.runner_service.test_registry import RegistrySetup


class Revised(Told):
    """What a runner with room for some adapters is told of their revisions"""

    def serves(self, number: int, name: str = "desk", namespace: str = "acme") -> list[Any]:
        """Revision `number` of this adapter is ordered, and checked."""
        ref = common_pb2.AdapterRef(namespace=namespace, name=name)
        request = FetchRequest(source=f"https://{namespace}/{name}/", namespace=namespace, expected=digest(number))
        (find,) = self.tell(self.policy.order, Order(number, ref, request))
        return self.tell(self.policy.answered, find.number, held(number))

    def replaced(self, number: int, name: str = "desk", namespace: str = "acme") -> None:
        self.tell(self.policy.drop, digest(number), f"{namespace}/{name}")

    def leave(self, *by_last_use: int) -> list[Digest]:
        """What leaves until one is left, in this order."""
        done = self.serves(99, "newest")
        (listing,) = [one for one in done if isinstance(one, effects.ListCache)]
        return evictions(self, listing, contents(*by_last_use, 99))


def full(room: int = 1) -> Revised:
    return Revised(CacheLimits(room))


def settled(told: Revised, done: list[Any]) -> None:
    (listing,) = [one for one in done if isinstance(one, effects.ListCache)]
    told.tell(told.policy.answered, listing.number, contents())


def with_revisions(told: Revised, *numbers: int, name: str = "desk", namespace: str = "acme") -> None:
    for before, number in zip((0, *numbers), numbers, strict=False):
        settled(told, told.serves(number, name, namespace))
        if before:
            told.replaced(before, name, namespace)


def test_earlier_revisions_leave_after_what_nobody_names_and_before_what_serves() -> None:
    told = full()
    with_revisions(told, 1, 2, 3, 4)
    with_revisions(told, 9, name="quiet")
    # 1 is older than the last three, nobody has ever named 8; 9 serves, and was used longest ago.
    assert told.leave(9, 2, 3, 1, 8, 4) == [digest(one) for one in (1, 8, 2, 3, 9, 4)]


def test_a_runner_that_was_not_asked_for_the_newest_one_keeps_those_before() -> None:
    told = full()
    settled(told, told.serves(1))
    told.replaced(1)
    assert told.leave(1, 8) == [digest(8), digest(1)]
    told = full()
    told.replaced(1)  # as of another runner of the same disk cache
    assert told.leave(1, 8) == [digest(8), digest(1)]


def test_a_tenant_that_makes_revisions_without_end_gains_no_room_over_others() -> None:
    told = full(4)
    with_revisions(told, 1, 2, namespace="few")
    with_revisions(told, *range(10, 30), namespace="many")
    with_revisions(told, 30, 31, 32, name="another", namespace="many")
    gone = told.leave(1, 2, *range(10, 33))
    assert gone[-4:] == [digest(one) for one in (28, 30, 1, 31)], (
        "of the tenant with few, the only one is among the last"
    )
    assert {*map(digest, (1, 2, *range(10, 33)))} - {*gone} == {*map(digest, (2, 29, 32))}, "what serves stays"


def test_once_its_manifest_has_gone_nobody_names_a_revision() -> None:
    told = full()
    with_revisions(told, 1, 2)
    with_revisions(told, 3, 4, name="other")
    told.tell(told.policy.drop, digest(2), "")
    told.tell(told.policy.manifest_gone, "acme/desk")
    assert told.leave(3, 4, 1, 2) == [digest(one) for one in (1, 2, 3, 4)]


def test_what_one_name_has_replaced_serves_under_another() -> None:
    told = full()
    with_revisions(told, 1, 2)
    settled(told, told.serves(1, "other"))
    with_revisions(told, 4, 5, name="third")
    assert told.leave(1, 2, 4, 5) == [digest(one) for one in (4, 1, 2, 5)]


def test_a_revision_that_serves_again_is_the_newest() -> None:
    kept = KeptRevisions()
    for number in (1, 2, 3, 1, 4):
        kept.serves("acme/desk", digest(number))
    assert kept.of("acme/desk") == (digest(4), digest(1), digest(3))
    kept.replaced("acme/desk", digest(4))
    assert kept.of("acme/desk") == ("", digest(4), digest(1))
    kept.serves("acme/desk", digest(2))
    assert kept.of("acme/desk") == (digest(2), digest(4), digest(1))


@pytest.mark.parametrize("how", ["serves", "replaced"])
def test_what_is_remembered_is_bounded(how: str) -> None:
    kept = KeptRevisions()
    for number in range(MAX_MANIFESTS + 10):
        getattr(kept, how)(f"acme/a{number}", digest(number))
        getattr(kept, how)("acme/many", digest(10**6 + number))
    assert len(kept.of("acme/many")) <= MAX_KEPT
    assert kept.of("acme/a9") == ()
    assert len(kept) == MAX_MANIFESTS
    assert kept.named <= MAX_KEPT * MAX_MANIFESTS


async def test_what_another_runner_could_not_get_from_its_source_comes_from_the_disk_cache_alone(tmp_path) -> None:
    setup = RegistrySetup(tmp_path, capacity=9)
    first = await setup.ensure(1)
    setup.adapters.drop(first.digest, "default/a1")
    setup.checks = 0
    other = await setup.ensure(2)
    shutil.rmtree(tmp_path / "a1")
    order = scheduler_pb2.EnsureAdapter(
        adapter=common_pb2.AdapterRef(namespace="default", name="a1"),
        source=(tmp_path / "a1").as_uri(),
        expected_digest=first.digest,
        stage=common_pb2.ADAPTER_STAGE_CERTIFIED,
        cached_only=True,
    )
    assert (await setup.settled(setup.adapters.ensure(order))).digest == first.digest
    order.source = (tmp_path / "a2").as_uri()
    with pytest.raises(AdapterFetchFailed, match=f"does not have the files of {first.digest}"):
        await setup.settled(setup.adapters.ensure(order))
    order.source, order.expected_digest, order.cached_only = (tmp_path / "a2").as_uri(), other.digest, False
    assert (await setup.settled(setup.adapters.ensure(order))).digest == other.digest
    setup.adapters.close()
