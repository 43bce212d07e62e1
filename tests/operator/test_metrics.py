"""The conditions of pools and adapters as metrics: what an alert finds, and how many there may be."""

from typing import Any

from prometheus_client import CollectorRegistry

from motet_operator.metrics import ClusterMetrics
from tests.operator.cluster.objects import adapter, pool


def with_conditions(it: dict[str, Any], **conditions: str) -> dict[str, Any]:
    stated = [{"type": type_, "status": status} for type_, status in conditions.items()]
    return it | {"status": {"conditions": stated}}


def shown(most: int, *objects: dict[str, Any], kind: str = "ServingPool") -> dict[tuple[str, str, str], float]:
    """Values by namespace, name and type."""
    registry = CollectorRegistry()
    ClusterMetrics(registry).object_conditions.follow(kind, most, lambda: objects)
    (family,) = [one for one in registry.collect() if one.name == "motet_object_condition"]
    assert {sample.labels["kind"] for sample in family.samples} <= {kind}
    return {
        (sample.labels["namespace"], sample.labels["name"], sample.labels["type"]): sample.value
        for sample in family.samples
    }


def test_a_condition_is_1_only_while_it_is_true_and_stalled_is_always_there() -> None:
    found = shown(9, with_conditions(pool(), Ready="False", Available="True", ScalingActive="Unknown"))
    assert found == {
        ("pools", "demo", "Reconciling"): 0,
        ("pools", "demo", "Stalled"): 0,
        ("pools", "demo", "Ready"): 0,
        ("pools", "demo", "Available"): 1,
        ("pools", "demo", "ScalingActive"): 0,
    }
    assert shown(9, with_conditions(pool(), Stalled="True"))["pools", "demo", "Stalled"] == 1


def test_no_more_objects_are_named_than_the_limit_and_stalled_ones_first() -> None:
    objects = [with_conditions(adapter(f"a{number}"), Ready="True") for number in range(9)]
    objects[7] = with_conditions(adapter("a7"), Stalled="True")
    named = {name for _, name, _ in shown(3, *objects, kind="LoRAAdapter")}
    assert named == {"a7", "a0", "a1"}
    assert shown(0, *objects, kind="LoRAAdapter") == {}


def test_a_status_that_nobody_understands_hides_no_other() -> None:
    odd = pool("odd") | {"status": {"conditions": [{"status": "True"}, {"type": "Odd"}]}}
    found = shown(9, odd, pool("new"), with_conditions(pool("fine"), Ready="True"))
    assert found["pools", "fine", "Ready"] == 1
    assert found["pools", "odd", "Odd"] == 0
    assert found["pools", "new", "Stalled"] == 0
