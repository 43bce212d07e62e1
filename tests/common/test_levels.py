"""Levels of many runners, as metrics show them."""

from prometheus_client import CollectorRegistry, Gauge

from motet.levels import LevelsByInstance


def levels_of(*names: str) -> tuple[LevelsByInstance, list[Gauge], CollectorRegistry]:
    registry = CollectorRegistry()
    gauges = [Gauge(name, name, ["instance"], registry=registry) for name in names]
    return LevelsByInstance(*gauges), gauges, registry


def shown(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {(one.name, one.labels["instance"]): one.value for family in registry.collect() for one in family.samples}


def test_each_runner_has_its_levels_until_it_is_gone() -> None:
    levels, _, registry = levels_of("pages", "parked")
    levels.show([("a", (4, 1)), ("b", (5, 0))])
    assert shown(registry) == {("pages", "a"): 4, ("parked", "a"): 1, ("pages", "b"): 5, ("parked", "b"): 0}
    levels.show([("b", (5, 2)), ("c", (0, 0))])
    assert shown(registry) == {("pages", "b"): 5, ("parked", "b"): 2, ("pages", "c"): 0, ("parked", "c"): 0}
    levels.show([("a", (4, 1))])
    assert shown(registry) == {("pages", "a"): 4, ("parked", "a"): 1}


def test_levels_that_stay_cost_nothing() -> None:
    levels, (gauge,), registry = levels_of("pages")
    levels.show([("a", (4,)), ("b", (5,))])
    for instance in ("a", "b"):
        gauge.labels(instance).set(9)
    levels.show([("a", (4,)), ("b", (6,))])
    assert shown(registry) == {("pages", "a"): 9, ("pages", "b"): 6}
