"""Adapters that more requests use than one runner takes are loaded on more runners."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import Digest, InstanceName
from motet.runner_info import Failure, Tier
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters import replica_loads
from motet_scheduler.policy.adapters.replica_demand import ReplicaDemand, wanted_replicas
from motet_scheduler.policy.adapters.replica_loads import HOLDS_FOR, size_of
from motet_scheduler.policy.values import AdapterStage, Limits
from tests.scheduler.builders import GROUP, PIRATE, POET, SchedulerDriver, adapter, entry, pool

PLACES, FITS = 10, 8
"""Of a runner, and how many of them are in use at the target of 80 %."""


class Driver(SchedulerDriver):
    def __init__(self, runners: int = 3, *, slots: int = 4, **adapters: Any) -> None:
        super().__init__(unsubmitted_timeout=1e6, unlisted_timeout=1e6, headroom_one_in=0)
        self.loads: list[str] = []
        self.gateway()
        for number in range(runners):
            self.attach(f"r{number}", pages=1000, max_sequences=PLACES, adapter_slots=slots)
        self.state(adapter(**adapters))
        self.certify(instance=next(instance for instance, *_ in self.orders))
        self.count = 0

    def note(self, decided: list[effects.Effect]) -> list[effects.Effect]:
        super().note(decided)
        for one in self.of(effects.EnsureAdapter):
            if one.stage is AdapterStage.DEVICE:
                self.loads.append(one.instance)
        return decided

    def ask(self, count: int, **how: Any) -> list[str]:
        names = [f"q{self.count + number}" for number in range(count)]
        self.count += count
        for name in names:
            self.enqueue(name, **({"digest": PIRATE, "adapter": "default/pirate"} | how))
        return names

    def hold(self, *instances: str, tier: Tier = Tier.DEVICE) -> None:
        for instance in instances:
            runner = self.scheduler.runners[InstanceName(instance)]
            live = [entry(request, 2, epoch=epoch) for request, epoch in runner.entries]
            self.report(instance, *live, resident={PIRATE: tier})

    def look(self, seconds: float = 1.0) -> list[str]:
        self.loads.clear()
        self.wait(seconds)
        return list(self.loads)


def warm(count: int, **how: Any) -> Driver:
    """`count` requests use an adapter, which is loaded where they are."""
    driver = Driver(**how)
    driver.ask(count)
    driver.hold(*{driver.where(f"q{number}") for number in range(count)} - {""})
    return driver


def test_an_adapter_is_loaded_on_another_runner_before_the_first_is_full() -> None:
    driver = warm(FITS)
    assert driver.look() == []
    driver.ask(1)
    assert driver.look(0.3) == [], "it is looked at once a second"
    assert len({driver.where(f"q{number}") for number in range(FITS + 1)}) == 1
    (other,) = driver.look()
    assert other != driver.where("q0")
    assert driver.look() == [], "its load is awaited"
    driver.hold(other)
    assert driver.look(20) == [], "it is there"


def test_what_waits_counts_too() -> None:
    driver = Driver(2)
    for number in range(2 * PLACES - 4):
        driver.enqueue(f"base-{number}")
    driver.ask(4)
    (first,) = {driver.where(f"q{number}") for number in range(4)}
    driver.hold(first)
    assert driver.look() == []
    driver.ask(FITS - 4)
    assert driver.look() == []
    driver.ask(1)
    assert driver.look() == [{"r0": "r1", "r1": "r0"}[first]]


def test_each_look_loads_one_more_as_many_as_are_needed() -> None:
    driver = warm(PLACES, runners=5)
    driver.scheduler.queues[GROUP].adapters[PIRATE] += 2 * FITS - PLACES
    driver.scheduler.check = lambda: None  # type: ignore[method-assign]
    driver.scheduler.state.adapter_uses[PIRATE] += 100
    assert len(driver.look()) == 1
    assert driver.look() == []


def test_replicas_go_to_the_fullest_runner_with_room() -> None:
    driver = Driver(4)
    for number in range(2 * PLACES + 3):
        driver.enqueue(f"base-{number}")
    full, emptier, fuller = (driver.where(f"base-{number}") for number in (0, PLACES, 2 * PLACES))
    (holder,) = {"r0", "r1", "r2", "r3"} - {full, emptier, fuller}
    driver.hold(holder)
    for number in range(PLACES, 2 * PLACES - 1):
        driver.finish(f"base-{number}")
    assert emptier > fuller, "its name alone decides nothing"
    state = driver.scheduler.state
    driver.scheduler.check = lambda: None  # type: ignore[method-assign]
    state.queues[GROUP].adapters[PIRATE] += FITS + 1
    state.adapter_uses[PIRATE] += FITS + 1
    assert driver.look() == [fuller]


@pytest.mark.parametrize(("most", "loads"), [(1, 0), (2, 1), (3, 1), (0, 1)])
def test_max_replicas_is_the_bound(most: int, loads: int) -> None:
    driver = warm(FITS + 1, max_replicas=most)
    assert len(driver.look()) == loads


def test_runners_without_an_empty_slot_load_nothing() -> None:
    driver = warm(FITS + 1, slots=1)
    for instance in {"r0", "r1", "r2"} - {driver.where("q0")}:
        driver.report(instance, resident={POET: Tier.DEVICE})
    assert driver.look() == []


def test_runners_that_get_no_requests_load_nothing() -> None:
    driver = warm(FITS + 1, runners=5)
    able, refusing, emptied, leaving = sorted({"r0", "r1", "r2", "r3", "r4"} - {driver.where("q0")})
    driver.send(events.RunnerShuttingDown(InstanceName(leaving), "1", 1e6))
    driver.scheduler.runners[InstanceName(emptied)].emptied = True
    failure = Failure("adapter_unproved", "wrong results")
    driver.scheduler.runners[InstanceName(refusing)].refuse(PIRATE, "default/pirate", failure)
    driver.attach("x", pages=1000, max_sequences=PLACES, adapter_slots=4, base="sha256:other")
    assert driver.look() == [able]


def test_a_runner_that_leaves_is_no_replica() -> None:
    driver = warm(FITS + 1)
    (other,) = driver.look()
    driver.hold(other)
    driver.send(events.RunnerShuttingDown(InstanceName(other), "1", 1e6))
    (third,) = {"r0", "r1", "r2"} - {other, driver.where("q0")}
    assert driver.look() == [third]


@pytest.mark.parametrize("bound", ["MAX_ORDERED", "MAX_WANTED"])
def test_there_are_bounds(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_loads, bound, 0)
    assert warm(FITS + 1).look() == []


def test_a_group_has_the_bound_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_loads, "MAX_WANTED", 1)
    driver = warm(FITS + 1, runners=4)
    for number in range(2):
        driver.attach(f"x{number}", pages=1000, max_sequences=PLACES, adapter_slots=4, group="default/other")
    third = Digest("sha256:" + "c" * 64)
    driver.state(adapter(), adapter("poet"), adapter("third", group="default/other"))
    driver.certify("poet", POET, instance=next(instance for instance, ref, _ in driver.orders if ref.name == "poet"))
    driver.certify("third", third, instance="x0")
    driver.ask(FITS + 1, digest=POET, adapter="default/poet")
    driver.ask(FITS + 1, digest=third, adapter="default/third", group="default/other")
    driver.look()
    assert sorted(one.ref.name for one in driver.of(effects.EnsureAdapter)) == ["pirate", "third"]


def test_whose_source_is_gone_holds_up_no_other_adapter_with_the_same_bytes() -> None:
    driver = Driver(5)
    driver.state(adapter("gone"), adapter())
    driver.certify("gone", instance=next(instance for instance, ref, _ in driver.orders if ref.name == "gone"))
    driver.ask(FITS + 1)
    driver.hold(driver.where("q0"))
    asked = []
    for _ in range(3):
        (instance,) = driver.look()
        (order,) = driver.of(effects.EnsureAdapter)
        asked.append(order.ref.name)
        failure = Failure("adapter_fetch_failed", "its source is gone", retry_after=60.0)
        failed = {"stage": AdapterStage.NONE, "certificate": None, "ordered_stage": AdapterStage.DEVICE}
        driver.certify(order.ref.name, instance=instance, **failed, failure=failure)
    assert asked == ["pirate", "gone", "pirate"]


def test_each_group_loads_from_the_source_of_its_own_adapter() -> None:
    driver = Driver()
    driver.attach("x0", pages=1000, group="default/other", pool="default/other")
    driver.state(adapter("another", group="default/other"))
    driver.certify("another", instance="x0")
    driver.state(adapter("another", group="default/other"), adapter())
    driver.certify(instance=next(instance for instance, ref, _ in driver.orders if ref.name == "pirate"))
    serving = [one.spec.ref.name for one in driver.scheduler.adapters.that_serve(PIRATE)]
    assert serving == ["another", "pirate"]
    driver.ask(FITS + 1)
    driver.hold(driver.where("q0"))
    driver.look()
    assert [one.ref.name for one in driver.of(effects.EnsureAdapter)] == ["pirate"]


def test_a_runner_whose_load_failed_is_not_asked_again_soon() -> None:
    driver = warm(FITS + 1, runners=2)
    (other,) = driver.look()
    failure = Failure("adapter_error", "the disk is full", retry_after=45.0)
    driver.certify(
        instance=other, stage=AdapterStage.NONE, ordered_stage=AdapterStage.DEVICE, certificate=None, failure=failure
    )
    assert driver.look(40) == []
    assert driver.look(10) == [other]


def test_it_stays_wanted_for_a_while_when_the_demand_falls() -> None:
    driver = warm(FITS + 1)
    (other,) = driver.look()
    driver.hold(other)
    for number in range(FITS):
        driver.finish(f"q{number}")
    driver.hold(other, tier=Tier.DISK)  # another request needed its room
    assert driver.look() == [other]
    driver.hold(other)
    driver.look(HOLDS_FOR * driver.scheduler.config.growth_window)
    driver.hold(other, tier=Tier.DISK)
    assert driver.look() == []


def test_what_waits_for_its_quota_is_no_demand() -> None:
    driver = Driver()
    driver.state(adapter(), pools=(pool(limits=(("*", Limits(concurrency=2)),)),))
    driver.ask(5 * PLACES)
    driver.hold(driver.where("q0"))
    assert driver.look() == []


def test_what_a_runner_invents_is_no_demand() -> None:
    driver = warm(FITS + 1)
    (other,) = driver.look()
    driver.hold(other)
    live = [entry(name, 2, epoch=epoch) for name, epoch in driver.scheduler.runners[InstanceName(other)].entries]
    invented = [entry(f"i{number}", 2, digest=PIRATE) for number in range(PLACES)]
    driver.report(other, *live, *invented, resident={PIRATE: Tier.DEVICE})
    assert driver.scheduler.runners[InstanceName(other)].using(PIRATE) == PLACES
    assert driver.look() == []


def test_it_is_looked_at_while_adapters_are_used() -> None:
    driver = Driver()
    loads = replica_loads.ReplicaLoads(driver.scheduler.state)
    assert loads.next_due() > driver.clock() + 1e9
    driver.ask(1)
    assert loads.next_due() <= driver.clock()
    loads.tick()
    assert loads.next_due() == driver.clock() + driver.scheduler.config.capacity_every


def test_large_requests_fill_a_runner_sooner() -> None:
    driver = Driver()
    assert size_of([]) == 1
    runners = list(driver.scheduler.runners.values())
    assert size_of(runners) == FITS
    driver.enqueue("large", prompt=16 * 100, max_tokens=160, q80=160)
    assert size_of(runners) == 7


@pytest.mark.parametrize(
    ("requests", "high", "wanted"),
    [(0, 9, 0), (1, 9, 1), (8, 9, 1), (9, 9, 2), (16, 9, 2), (17, 9, 3), (17, 2, 2)],
)
def test_the_demand_is_bounded(requests: int, high: int, wanted: int) -> None:
    assert wanted_replicas(requests, FITS, maximum=high) == wanted


def test_what_was_needed_since_is_wanted_next() -> None:
    demand = ReplicaDemand(100.0)
    history = ((3, 0), (3, 60), (1, 110), (2, 120), (1, 161), (0, 170), (0, 262), (0, 363))
    assert [demand.note(needed, now) for needed, now in history] == [3, 3, 3, 3, 2, 2, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60))
def test_demand_rises_at_once_and_falls_when_less_was_enough_for_long(history: list[tuple[int, int]]) -> None:
    demand, now, hold = ReplicaDemand(100.0), 0.0, 100.0
    needs: list[tuple[float, int]] = []
    for needed, seconds in history:
        now += seconds
        needs.append((now, needed))
        before, wanted = demand.wanted, demand.note(needed, now)
        assert wanted >= needed
        assert wanted <= max(need for at, need in needs if at > now - 2 * hold - 40)
        if wanted < before:
            assert all(need < before for at, need in needs if at > now - hold)
