"""The condition `TenantsApplied` of a pool that grants something, in a group where another pool decides."""

from dataclasses import replace

from motet_operator.reconcile import reconcile
from tests.operator.builders import condition, pool, view

DECIDES = {"default": {"concurrency": 8}, "overrides": [{"namespace": "a"}, {"namespace": "b"}]}


def conditions(of_decider, of_other) -> dict[str, tuple]:
    """By pool. None: it says nothing of tenants."""
    pools = [
        replace(
            pool(name, group="g", model={"servedName": "m"}, **({"tenants": tenants} if tenants is not None else {})),
            age=age,
        )
        for age, (name, tenants) in enumerate((("old", of_decider), ("young", of_other)))
    ]
    return {status.name.name: status.conditions for status in reconcile(view(pools=pools)).pools}


def test_a_pool_whose_grants_do_not_count_says_which_pools_do():
    for of_decider, of_other in ((DECIDES, {"default": {"concurrency": 9}}), (None, DECIDES)):
        found = conditions(of_decider, of_other)
        said = condition(found["young"], "TenantsApplied")
        assert (said.status, said.reason) == ("False", "OtherPoolDecides")
        assert "that of pool default/old counts for group default/g and differs" in said.message
        assert "TenantsApplied" not in {one.type for one in found["old"]}


def test_the_same_grants_in_another_order_are_no_difference():
    found = conditions(DECIDES, {**DECIDES, "overrides": DECIDES["overrides"][::-1]})
    assert condition(found["young"], "TenantsApplied").status == "True"


def test_a_pool_that_grants_nothing_has_no_such_condition():
    found = conditions(DECIDES, None)
    assert "TenantsApplied" not in {one.type for of_pool in found.values() for one in of_pool}
