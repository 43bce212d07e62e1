"""Adapters of requests that wait are loaded before these are placed."""

from collections.abc import Iterable
from math import inf
from typing import Any

import pytest

from motet.domain import Digest, InstanceName, ObjectName, RequestId
from motet.errors import AdapterError
from motet.runner_info import Failure, RequestClass, Tier
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters import prefetches
from motet_scheduler.policy.adapters.prefetches import AGAIN_AFTER, MAX_AHEAD, MAX_LOADS_AHEAD, next_requests
from motet_scheduler.policy.placement import PLACED_AT_ONCE
from motet_scheduler.policy.values import AdapterRef, AdapterStage, Limits, Promise
from tests.scheduler.builders import GROUP, PIRATE, SchedulerDriver, adapter, entry, pool, reserved

BUSY = 10_000
"""Tokens of an answer that goes on."""


def digest_of(name: str) -> Digest:
    return Digest(f"sha256:{name:0>64}")


class Driver(SchedulerDriver):
    """Its runners have one place each, which is taken."""

    def __init__(
        self,
        names: Iterable[str] = ("poet",),
        runners: Iterable[str] = ("r0", "r1"),
        *,
        slots: int = 8,
        adapters: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        """`adapters`: what all of them have."""
        super().__init__(unsubmitted_timeout=1e6, unlisted_timeout=1e6, **config)
        self.loads: list[tuple[str, str]] = []
        """To which runners which adapters were ordered."""
        self.gateway()
        for runner in runners:
            self.attach(runner, pages=1000, max_sequences=1, adapter_slots=slots)
            self.enqueue(f"on-{runner}", max_tokens=BUSY)
        self.state(*(adapter(name, **(adapters or {})) for name in names))
        for name in names:
            self.certify(name, digest_of(name), instance=self.checker_of(name))

    def checker_of(self, name: str) -> str:
        return next(instance for instance, ref, _ in self.orders if ref == ObjectName("default", name))

    def note(self, decided: list[effects.Effect]) -> list[effects.Effect]:
        super().note(decided)
        ordered = self.of(effects.EnsureAdapter)
        self.loads += [(one.instance, one.ref.name) for one in ordered if one.stage is AdapterStage.DEVICE]
        return decided

    def asks(self, *names: str, **how: Any) -> None:
        """A request waits for each of these adapters."""
        for name in names:
            self.enqueue(f"for-{name}", digest=digest_of(name), adapter=f"default/{name}", **how)

    def loaded(self, name: str, instance: str, *, failure: Failure | None = None) -> None:
        stage = AdapterStage.NONE if failure is not None else AdapterStage.DEVICE
        self.certify(
            name,
            digest_of(name),
            instance=instance,
            stage=stage,
            ordered_stage=AdapterStage.DEVICE,
            certificate=None,
            failure=failure,
        )
        if failure is None:
            runner = self.scheduler.runners[InstanceName(instance)]
            self.holds(instance, runner.adapters.tiers | {digest_of(name): Tier.DEVICE})

    def holds(self, instance: str, resident: dict[Digest, Tier]) -> None:
        self.report(instance, entry(f"on-{instance}", 2), resident=resident)

    def look(self, seconds: float = 1.0) -> list[tuple[str, str]]:
        """The loads since the last look."""
        self.wait(seconds)
        loads, self.loads = self.loads, []
        return loads


def test_the_adapter_of_a_request_that_waits_is_loaded_once() -> None:
    driver = Driver()
    driver.asks("poet")
    assert driver.where("for-poet") == "", "it has to wait"
    assert driver.loads == [], "it was loaded by a decision, not by a tick"
    assert driver.look() == [("r0", "poet")]
    for _ in range(8):
        assert driver.look() == [], "its load is awaited"
    driver.loaded("poet", "r0")
    for _ in range(40):
        assert driver.look() == [], "it is there"


def test_who_is_placed_where_its_adapter_loads_orders_no_second_load() -> None:
    driver = Driver(runners=("r0",))
    driver.asks("poet")
    assert driver.look() == [("r0", "poet")]
    driver.finish("on-r0")
    assert driver.where("for-poet") == "r0"
    assert driver.loads == []


def test_many_that_wait_for_one_adapter_load_it_once() -> None:
    """But for replicas, which are decided apart."""
    driver = Driver(capacity_every=1e6)
    driver.look()
    for number in range(50):
        driver.enqueue(f"q{number}", tenant=f"t{number}", digest=digest_of("poet"), adapter="default/poet")
    assert driver.look() == [("r0", "poet")]


def test_nothing_is_loaded_for_those_that_need_nothing() -> None:
    driver = Driver(("poet", "bard"))
    driver.enqueue("base")
    driver.holds("r1", {digest_of("poet"): Tier.DEVICE})
    driver.asks("poet")
    assert driver.scheduler.queued() == 2
    assert driver.look() == []


def test_nothing_is_loaded_for_those_that_are_placed_or_have_gone() -> None:
    driver = Driver(("poet", "bard"), ("r0",))
    driver.asks("poet", "bard")
    driver.cancel("for-poet")
    driver.finish("on-r0")
    assert driver.where("for-bard") == "r0"
    driver.loads.clear()
    assert driver.look() == []
    assert driver.scheduler.next_due() > driver.clock() + 0.5, "it is looked at although nothing waits"


def test_an_adapter_of_others_may_be_missing() -> None:
    """Who asks for one that is not known is refused by those who know that; nothing is loaded for it."""
    driver = Driver()
    driver.enqueue("lost", digest=PIRATE, adapter="default/pirate")
    assert driver.look() == []


def test_the_next_ones_to_be_placed_come_first_and_no_more_than_a_runner_may_load() -> None:
    names = [f"a{number}" for number in range(MAX_LOADS_AHEAD + 2)]
    driver = Driver(names, ("r0",))
    driver.asks(*reversed(names[1:]), request_class=RequestClass.BATCH)
    driver.asks(names[0])
    assert driver.look() == [("r0", names[0]), *(("r0", name) for name in names[:-MAX_LOADS_AHEAD:-1])]
    assert driver.look() == []
    driver.loaded(names[0], "r0")
    assert len(driver.look()) == 1, "another one may load now"


def test_few_of_those_that_wait_are_looked_at() -> None:
    names = [f"a{number}" for number in range(MAX_AHEAD + 1)]
    driver = Driver(names, ("r0",), slots=64)
    driver.asks(*names)
    for _ in range(len(names)):
        for instance, name in driver.look():
            driver.loaded(name, instance)
    resident = driver.scheduler.runners[InstanceName("r0")].adapters.having
    assert {name for name in names if digest_of(name) in resident} == {*names[:MAX_AHEAD]}


def test_the_loads_are_spread() -> None:
    driver = Driver(("a", "b", "c", "d"))
    driver.asks("a", "b", "c", "d")
    assert sorted(driver.look()) == [("r0", "a"), ("r0", "c"), ("r1", "b"), ("r1", "d")]


def test_a_runner_with_an_empty_slot_goes_first() -> None:
    driver = Driver(("poet",), slots=1)
    driver.holds("r0", {PIRATE: Tier.DEVICE})
    driver.holds("r1", {digest_of("a"): Tier.DISK, digest_of("b"): Tier.DISK})
    driver.asks("poet")
    assert driver.look() == [("r1", "poet")]


@pytest.mark.parametrize("tier", [Tier.NONE, Tier.DISK, Tier.HOST])
def test_without_an_empty_slot_it_comes_to_a_disk_if_it_is_not_there(tier: Tier) -> None:
    driver = Driver(("poet",), ("r0",), slots=1)
    driver.holds("r0", {PIRATE: Tier.DEVICE} | ({digest_of("poet"): tier} if tier is not Tier.NONE else {}))
    driver.asks("poet")
    assert driver.look() == ([("r0", "poet")] if tier is Tier.NONE else [])


def test_what_is_on_a_disk_comes_into_an_empty_slot() -> None:
    driver = Driver(("poet",), ("r0",))
    driver.holds("r0", {digest_of("poet"): Tier.DISK})
    driver.asks("poet")
    assert driver.look() == [("r0", "poet")]


def test_what_has_left_is_not_loaded_again_soon() -> None:
    driver = Driver()
    driver.asks("poet")
    assert driver.look() == [("r0", "poet")]
    driver.loaded("poet", "r0")
    driver.holds("r0", {digest_of("poet"): Tier.DISK})
    again = AGAIN_AFTER * driver.scheduler.config.load_retry
    assert driver.look(again - 2) == []
    assert driver.look(2) == [("r1", "poet")], "the one that holds least"


def test_a_load_that_failed_is_ordered_elsewhere_or_later() -> None:
    driver = Driver(runners=("r0",))
    driver.asks("poet")
    assert driver.look() == [("r0", "poet")]
    driver.loaded("poet", "r0", failure=Failure(AdapterError.mapping.code, "the disk is full", retry_after=45.0))
    again = AGAIN_AFTER * driver.scheduler.config.load_retry
    assert driver.look(again) == [], "the runner has said when it may be asked again"
    assert driver.look(15) == [("r0", "poet")]


def test_runners_that_get_no_requests_load_nothing() -> None:
    driver = Driver(runners=("r0", "r1", "r2", "r3", "r4"))
    state = driver.scheduler.state
    driver.detach("r0")
    driver.send(events.RunnerShuttingDown(InstanceName("r1"), "1", 1e6))
    state.runners[InstanceName("r2")].emptied = True
    driver.send(events.RequestParked(InstanceName("r3"), RequestId("on-r3"), 1, Promise(2)))
    driver.asks("poet")
    driver.loads.clear()
    assert driver.look() == [("r4", "poet")]


def test_a_runner_that_has_refused_it_or_the_request_loads_nothing() -> None:
    driver = Driver(runners=("r0", "r1", "r2"))
    failure = Failure("adapter_unproved", "wrong results")
    driver.scheduler.runners[InstanceName("r0")].refuse(digest_of("poet"), "default/poet", failure)
    driver.asks("poet")
    driver.scheduler.requests[RequestId("for-poet")].avoid = {"r1": inf}
    assert driver.look() == [("r2", "poet")]


def test_a_runner_of_another_base_model_loads_nothing() -> None:
    driver = Driver(runners=("r1",))
    driver.attach("r0", pages=1000, max_sequences=1, base="sha256:other")
    driver.enqueue("on-r0", max_tokens=BUSY)
    driver.asks("poet", base="sha256:base")
    assert driver.look() == [("r1", "poet")]


def test_a_runner_that_is_too_small_loads_nothing() -> None:
    driver = Driver(runners=("r1",))
    driver.attach("r0", pages=4, max_sequences=1)
    driver.enqueue("on-r0")
    driver.asks("poet", max_tokens=1000)
    assert driver.look() == [("r1", "poet")]


def test_the_runner_that_is_reserved_for_a_request_loads_its_adapter_and_no_other() -> None:
    driver = Driver((), runners=(), max_passed_over=1)
    for runner in ("r0", "r1"):
        driver.attach(runner, pages=100, max_sequences=8)
    driver.state(adapter("poet"), adapter("bard"))
    for name in ("poet", "bard"):
        driver.certify(name, digest_of(name), instance=driver.checker_of(name))
    for number in range(4):
        driver.enqueue(f"s{number}", max_tokens=600)
    driver.asks("poet", max_tokens=1500)
    for number in range(3):
        driver.enqueue(f"t{number}", tenant=f"t{number}", max_tokens=100)
    (place,) = reserved(driver)
    assert reserved(driver) == {place: "for-poet"}
    other = {"r0": "r1", "r1": "r0"}[place]
    driver.holds(place, dict.fromkeys(map(digest_of, "abc"), Tier.DISK))  # else it would be chosen in any case
    assert driver.look() == [(place, "poet")]
    driver.loaded("poet", place)
    driver.holds(other, dict.fromkeys(map(digest_of, "abcdef"), Tier.DISK))
    driver.asks("bard", max_tokens=1500, tenant="late")
    assert driver.look() == [(other, "bard")]


@pytest.mark.parametrize(
    ("most", "runners", "ordered"),
    [(1, ("r0", "r1"), []), (1, ("r0",), [("r0", "poet")]), (2, ("r0", "r1"), [("r0", "poet")])],
)
def test_max_replicas_leaves_a_choice(most: int, runners: tuple[str, ...], ordered: list[tuple[str, str]]) -> None:
    """The one runner that may serve it is the one with room first."""
    driver = Driver(runners=runners, adapters={"max_replicas": most})
    driver.asks("poet")
    assert driver.look() == ordered


def test_who_waits_for_its_quota_loads_nothing() -> None:
    driver = Driver(runners=("r0",))
    driver.state(adapter("poet"), pools=(pool(limits=(("*", Limits(concurrency=1)),)),))
    driver.enqueue("first", tenant="late")
    driver.asks("poet", tenant="late", request_class=RequestClass.BATCH)
    assert driver.scheduler.queued() == 1
    assert driver.look() == []


def test_it_is_looked_at_while_requests_wait() -> None:
    driver = Driver(positions_every=1e6, capacity_every=1e6, residency_pause=1e6)
    driver.wait(driver.scheduler.config.look_again)
    assert driver.scheduler.next_due() > driver.clock() + 1
    driver.asks("poet")
    again = driver.scheduler.config.look_again * 1.1
    assert driver.scheduler.next_due() <= driver.clock() + again
    driver.wait(again)
    assert driver.clock() < driver.scheduler.next_due() <= driver.clock() + again


def test_many_runners_are_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches, "MANY_RUNNERS", 1)
    driver = Driver(positions_every=1e6, capacity_every=1e6, residency_pause=1e6)
    driver.enqueue("first")
    driver.wait(1)
    driver.asks("poet")
    again = driver.scheduler.config.look_again
    assert driver.scheduler.next_due() >= driver.clock() + 2.9 * again
    assert driver.look(2.5 * again) == []
    assert driver.look(again) == [("r0", "poet")]


def test_with_very_many_runners_few_requests_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches, "MAX_COMPARED", 3)
    driver = Driver(("a", "b", "c"))
    driver.asks("a", "b", "c")
    assert driver.look() == [("r0", "a"), ("r1", "b")]
    assert driver.look() == [("r0", "c")]


def test_the_second_ones_of_all_tenants_go_before_the_third_one_of_any() -> None:
    names = [f"{tenant}{number}" for tenant in "xyz" for number in range(5)]
    driver = Driver((), ("r0",))
    for name in names:
        driver.enqueue(name, tenant=name[0], request_class=RequestClass.BATCH)
    driver.enqueue("first")
    queue = driver.scheduler.queues[GROUP]
    assert [one.id for one in next_requests(queue, 7)] == ["first", "x0", "y0", "z0", "x1", "y1", "z1"]
    assert len(next_requests(queue, 100)) == 16
    driver.enqueue("w0", tenant="w", request_class=RequestClass.BATCH)
    assert [one.id for one in next_requests(queue, 7)] == ["first", "x0", "y0", "z0", "w0", "x1", "y1"]


def test_those_that_wait_for_any_runner_are_looked_at_beside_many_that_wait_for_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetches, "MAX_LINES", 1)
    driver = Driver(("a", "b", "poet"), ("r0",), adapters={"max_replicas": 1})
    driver.state(*(adapter(name, max_replicas=1) for name in "ab"), adapter("poet"))
    driver.holds("r0", dict.fromkeys(map(digest_of, "ab"), Tier.DEVICE))
    driver.asks("a", "b", "poet")
    ahead = [one.id for one in next_requests(driver.scheduler.queues[GROUP], MAX_AHEAD)]
    assert ahead == ["for-a", "for-poet"]


def test_nothing_is_loaded_before_placing_is_safe() -> None:
    saved = Driver().scheduler.catalog_to_save()
    late = SchedulerDriver(saved=saved, startup_wait=60.0, positions_every=1e6, residency_pause=1e6)
    late.gateway()
    late.attach("r0")
    late.enqueue("late", digest=digest_of("poet"), adapter="default/poet")
    late.wait(1)
    assert late.of(effects.EnsureAdapter) == []
    assert late.scheduler.next_due() > late.clock() + 10, "it is looked at"


def test_nothing_is_loaded_ahead_for_those_that_are_placed_next() -> None:
    """Of many that fit at once, each event places some."""
    names = [f"a{number}" for number in range(PLACED_AT_ONCE + 4)]
    driver = Driver(names, ("r0",))
    driver.asks(*names)
    driver.attach("r1", pages=1000, max_sequences=64, adapter_slots=64)
    assert driver.scheduler.queued() == 4
    loads = driver.look()
    assert driver.scheduler.queued() == 0
    assert not [name for instance, name in loads if instance == "r0"]


@pytest.mark.parametrize("why", ["drains", "refuses"])
def test_a_runner_that_does_not_serve_it_may_have_it(why: str) -> None:
    driver = Driver()
    driver.holds("r0", {digest_of("poet"): Tier.DEVICE})
    if why == "drains":
        driver.send(events.RunnerShuttingDown(InstanceName("r0"), "1", 1e6))
    else:
        failure = Failure("adapter_unproved", "wrong results")
        driver.scheduler.runners[InstanceName("r0")].refuse(digest_of("poet"), "default/poet", failure)
    driver.asks("poet")
    assert driver.look() == [("r1", "poet")]


def test_it_is_told_in_the_timeline() -> None:
    driver = Driver(runners=("r0",))
    driver.asks("poet")
    driver.look()
    story = driver.scheduler.timelines.story(RequestId("for-poet"))
    assert story is not None
    assert "its adapter is loaded on runner r0, where it may be placed next" in [entry.detail for entry in story]


def test_groups_have_loads_of_their_own() -> None:
    """Each by its own requests, on its own runners."""
    other = "default/other"
    driver = Driver(runners=("r0",))
    driver.attach("x0", group=other, pool=other, pages=1000, max_sequences=1)
    driver.enqueue("on-x0", group=other, max_tokens=BUSY)
    driver.holds("x0", {digest_of("poet"): Tier.DEVICE})
    driver.asks("poet", group=GROUP)
    assert driver.look() == [("r0", "poet")]
    assert AdapterRef("default", "poet", 1).object in {ref for _, ref, _ in driver.orders}
