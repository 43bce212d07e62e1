"""Who decides does not change with the order of a list, at a failover, or by a restore."""

from dataclasses import replace
from itertools import permutations

from motet_operator.reconcile import AdapterObject, PoolObject, reconcile
from tests.operator.builders import adapter, condition, name, pool, view


def deciding(*pools: PoolObject) -> str:
    (one,) = [status.name.name for status in reconcile(view(pools=list(pools))).pools if status.decides]
    return one


def holder(*adapters: AdapterObject, places: int | None = None) -> str:
    """Of adapters that want one name, or one place, the one that has it."""
    admission = {"maxAdapters": places} if places is not None else {}
    plan = reconcile(view(pools=[pool(admission=admission)], adapters=list(adapters)))
    (one,) = [each.name.name for each in plan.adapters if condition(each.conditions, "Accepted").holds]
    return one


def test_of_two_of_one_second_the_first_by_name_decides_in_any_order() -> None:
    pools = [pool(letter, group="g", model={"servedName": letter}) for letter in "bac"]
    assert {deciding(*order) for order in permutations(pools)} == {"a"}
    alike = [adapter(letter, modelName="law") for letter in "bac"]
    assert {holder(*order) for order in permutations(alike)} == {"a"}
    assert {holder(*order, places=1) for order in permutations(adapter(letter) for letter in "bac")} == {"a"}


def test_of_a_groups_pools_the_one_that_decides_comes_first_in_the_catalog() -> None:
    pools = [pool("a", group="g"), replace(pool("b", group="g"), decided=True)]
    assert [entry.pool for entry in reconcile(view(pools=pools)).catalog.pools] == [name("b"), name("a")]


def test_a_pool_that_comes_back_from_a_backup_does_not_decide_again() -> None:
    old, young = replace(pool("old", group="g"), age=1), replace(pool("young", group="g"), age=2)
    assert deciding(old, young) == "old"
    assert deciding(young) == "young"
    assert deciding(old, replace(young, decided=True)) == "young"
    # The backup has statuses, too: then the younger object is the one that was restored.
    assert deciding(replace(old, decided=True, age=3), replace(young, decided=True)) == "young"


def test_an_adapter_that_was_accepted_keeps_its_name_and_its_place() -> None:
    restored, stayed = adapter("a", age=1, modelName="law"), adapter("b", age=2, modelName="law")
    stayed = replace(stayed, decided=True)
    assert holder(restored, stayed) == "b"
    assert holder(adapter("a", age=1), replace(adapter("b", age=2), decided=True), places=1) == "b"
