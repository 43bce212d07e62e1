"""The weights of tenants: who says them, and what counts where nobody does."""

import pytest

from motet.api.v1 import scheduler_pb2
from motet.shares import MAX_WEIGHT
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.tenant_weights import TenantWeights
from motet_scheduler.policy.values import GroupName
from tests.scheduler.builders import GROUP, SchedulerDriver, pool, ready


def test_a_tenant_has_its_own_weight_or_that_of_every_other_or_1() -> None:
    weights = TenantWeights()
    assert weights.of(GROUP, "acme") == 1
    weights.state([pool(weights=(("*", 2), ("acme", 5)))])
    assert [weights.of(GROUP, tenant) for tenant in ("acme", "initech")] == [5, 2]
    weights.state([pool(weights=(("acme", 5),))])
    assert [weights.of(GROUP, tenant) for tenant in ("acme", "initech")] == [5, 1]
    assert weights.of(GroupName("default/other"), "acme") == 1


def test_a_change_of_weights_is_told_from_none() -> None:
    weights = TenantWeights()
    assert not weights.state([pool()])
    assert weights.state([pool(weights=(("acme", 5),))])
    assert not weights.state([pool(weights=(("acme", 5),)), pool(pool="default/more", weights=(("acme", 5),))])
    assert weights.state([pool()])


def test_the_operator_says_weights_and_a_successor_knows_them() -> None:
    driver = ready()
    driver.state(pools=(pool(weights=(("acme", 5),)),))
    assert driver.scheduler.state.weights.of(GROUP, "acme") == 5
    successor = SchedulerDriver(saved=driver.scheduler.catalog_to_save())
    assert successor.scheduler.state.weights.of(GROUP, "acme") == 5
    driver.state(pools=(pool(),))
    assert driver.scheduler.state.weights.of(GROUP, "acme") == 1


@pytest.mark.parametrize(("said", "counts"), [(0, 1), (1, 1), (7, 7), (2**32 - 1, MAX_WEIGHT)])
def test_a_weight_of_a_peer_is_bounded(said: int, counts: int) -> None:
    entry = scheduler_pb2.PoolEntry(pool="default/demo", weights={"acme": said})
    heard = conversion.sync_event(scheduler_pb2.SyncUp(snapshot=scheduler_pb2.CatalogSnapshot(pools=[entry])))
    assert isinstance(heard, events.CatalogReplaced)
    assert heard.pools[0].weights == (("acme", counts),)


def test_a_placement_says_the_weight_of_its_tenant() -> None:
    driver = ready()
    driver.attach()
    driver.state(pools=(pool(weights=(("acme", 5),)),))
    driver.enqueue("a")
    driver.enqueue("b", tenant="initech")
    said = [conversion.place(placed, 1).placed.weight for placed in driver.of(effects.SendPlaced)]
    assert said == [1]
    driver.enqueue("c")
    said = [conversion.place(placed, 1).placed.weight for placed in driver.of(effects.SendPlaced)]
    assert said == [5]
