"""A runner lists in parts what it has: what is not among them is known after the last one, and until a hello is whole,
nothing is placed there, and it counts as one that has yet to come."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.api.v1 import scheduler_pb2
from motet.domain import BASE, Digest, InstanceName
from motet.runner_info import Capacity, RunnerIdentity, RunnerRequest, SequenceState, Tier
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import AdapterStage, BaseModel
from tests.scheduler.builders import (
    GROUP,
    PIRATE,
    POET,
    SchedulerDriver,
    adapter,
    entry,
    pool,
    ready,
    resident,
)

IDENTITY = RunnerIdentity(instance="r0", incarnation="1", pool="default/demo", group=GROUP)
R0 = InstanceName("r0")


def attach(
    driver: SchedulerDriver,
    *live: RunnerRequest,
    instance: str = "r0",
    base: str = "sha256:base",
    resident: dict[Digest, Tier] | None = None,
    pages: int = 100,
) -> None:
    """Others follow."""
    driver.send(
        events.RunnerAttached(
            identity=RunnerIdentity(instance=instance, incarnation="1", pool="default/demo", group=GROUP),
            address=f"unix:/run/{instance}.sock",
            capacity=Capacity(pages=pages),
            base=BaseModel(digest=base, asset_digest="sha256:assets"),
            live=live,
            resident=resident or {},
            more=True,
        )
    )


def listed(
    driver: SchedulerDriver, *live: RunnerRequest, instance: str = "r0", more: bool = False
) -> list[effects.Effect]:
    return driver.send(events.RunnerListed(InstanceName(instance), "1", live, more))


def test_what_no_part_lists_is_missed_after_the_last_one():
    driver = ready(unsubmitted_timeout=2.0)
    driver.attach()
    for name in "abc":
        driver.enqueue(name)
    for _ in range(2):
        driver.report("r0", entry("a", 2), more=True)
        listed(driver, more=True)
        assert [name for name, _ in driver.ledger()] == ["a", "b", "c"]
        listed(driver, entry("b", 2))
        driver.clock.advance(2.5)
    assert [name for name, _ in driver.ledger()] == ["a", "b"]


def test_nothing_is_placed_on_a_runner_before_all_is_known_that_it_has():
    driver = ready()
    attach(driver, entry("a", 4), pages=9)
    driver.enqueue("b", max_tokens=16)
    assert driver.where("b") == ""
    listed(driver, entry("c", 4), more=True)
    assert driver.where("b") == ""
    listed(driver, entry("d", 1))
    assert driver.where("b") == "", "it needs two pages, and none is free"
    driver.ended("c")
    assert driver.where("b") == "r0"


def test_a_runner_that_does_not_end_its_hello_is_forgotten_and_its_requests_move():
    driver = ready(forget_runner=30.0)
    driver.attach()
    driver.enqueue("a")
    driver.attach("r1")
    driver.detach("r0")
    driver.clock.advance(20)
    for _ in range(4):  # each stream breaks off, and none is another beginning
        attach(driver)
        driver.clock.advance(5)
        assert R0 in driver.scheduler.runners
        listed(driver, more=True)
        driver.detach("r0")
    attach(driver)
    driver.clock.advance(5)
    driver.wait(5.1)
    assert driver.of(effects.EndRunnerStream) == [effects.EndRunnerStream(R0)]
    assert R0 not in driver.scheduler.runners
    assert driver.where("a") == "r1"
    attach(driver)
    listed(driver)
    driver.wait(31)
    assert driver.scheduler.runners[R0].attached, "it has told all, and is there"


def test_a_report_begins_anew_what_a_hello_has_not_ended():
    driver = ready()
    attach(driver, entry("a", 4))
    driver.report("r0", entry("b", 4))
    assert {name for name, _ in driver.ledger()} == {"a", "b"}
    driver.enqueue("c")
    assert driver.where("c") == "r0"


def test_a_part_that_nobody_waits_for_changes_nothing():
    driver = ready()
    driver.attach()
    listed(driver, entry("a", 4))
    assert not driver.ledger()


def test_a_runner_that_hung_is_well_when_no_part_has_work():
    driver = ready()
    driver.attach()
    driver.report("r0", steps=1)
    driver.send(events.RunnerUnhealthy(IDENTITY, "its engine hangs", hung=True))
    loading = {"state": SequenceState.LOADING}
    for last, well in (({}, False), (loading, True)):
        driver.report("r0", entry("a", 2, **loading), steps=1, more=True)
        listed(driver, entry("b", 2, **last))
        assert driver.scheduler.runners[R0].takes_work is well


def test_parts_are_read():
    one = {"request": "a", "epoch": 1, "promise": {"pages": 2}}
    up = scheduler_pb2.AttachUp(listed={"requests": [one], "more": True})
    event = conversion.attach_event(IDENTITY, up)
    assert isinstance(event, events.RunnerListed)
    assert [request.request for request in event.live] == ["a"]
    assert event.more
    report = conversion.attach_event(IDENTITY, scheduler_pb2.AttachUp(report={"live": [one], "live_follows": True}))
    assert isinstance(report, events.RunnerReported)
    assert report.more
    assert conversion.runner_attached(scheduler_pb2.RunnerHello(live=[one], live_follows=True)).more


def test_nothing_resumes_before_all_is_known_that_a_runner_has():
    driver = ready()
    driver.send(events.SupervisorConnected())
    attach(driver, entry("p", 40, parked=True), entry("x", 10))
    assert not driver.of(effects.AllowResume)
    driver.ended("x")
    assert not driver.of(effects.AllowResume)
    listed(driver, entry("y", 45), entry("z", 45))
    assert not driver.of(effects.AllowResume)
    ledger = driver.scheduler.runners[R0].ledger
    assert ledger.total <= ledger.limit
    driver.ended("y")
    assert driver.of(effects.AllowResume)


def test_nothing_resumes_before_a_report_has_told_who_pays_for_shared_pages():
    driver = ready()
    driver.send(events.SupervisorConnected())
    driver.attach(live=(entry("a", 60), entry("b", 40)))
    driver.report("r0", entry("a", 60, parked=True), more=True)
    assert not driver.of(effects.AllowResume)
    listed(driver, entry("b", 40))
    assert driver.of(effects.AllowResume)


def test_what_a_later_part_uses_is_not_dropped():
    driver = SchedulerDriver()
    driver.state()
    attach(driver, entry("x", 2), resident={PIRATE: Tier.DEVICE, POET: Tier.DEVICE})
    assert not driver.of(effects.DropAdapter)
    listed(driver, entry("old", 2, digest=PIRATE))
    assert [one.digest for one in driver.of(effects.DropAdapter)] == [POET]


def test_runners_that_have_not_told_all_are_missed_when_a_base_model_is_chosen():
    driver = SchedulerDriver()
    driver.state(pools=(pool(replicas=3),))
    attach(driver, entry("x", 2), base="sha256:a")
    attach(driver, entry("y", 2), instance="r1", base="sha256:a")
    driver.attach("r2", base="sha256:b")
    chosen = [driver.scheduler.state.bases.of(GROUP).model.digest]
    for instance in ("r0", "r1"):
        listed(driver, instance=instance)
        chosen.append(driver.scheduler.state.bases.of(GROUP).model.digest)
    assert chosen == ["", "", "sha256:a"]


def test_a_runner_keeps_what_it_was_told_to_keep_until_it_has_told_all():
    """A new scheduler waits for it as for one that has not come."""
    before = ready()
    before.attach()
    before.state(adapter(min_replicas=1))
    before.certify()
    before.report("r0", resident=resident(PIRATE))
    driver = SchedulerDriver(saved=before.scheduler.catalog_to_save(), first_order=1000)
    driver.gateway()
    driver.state(adapter(min_replicas=1))
    driver.attach("r1")
    attach(driver, entry("x", 2), resident=resident(PIRATE))
    orders = [*driver.effects, *driver.wait(0.1), *listed(driver, entry("y", 2))]
    loads = [one for one in orders if isinstance(one, effects.EnsureAdapter)]
    assert not [one for one in loads if one.stage is AdapterStage.DEVICE]
    pins = [(one.instance, one.digests) for one in orders if isinstance(one, effects.PinAdapters)]
    assert sorted(pins) == [("r0", (PIRATE,)), ("r1", ())]


@pytest.mark.parametrize("goes", [False, True], ids=["its stream is replaced", "it was away"])
def test_max_replicas_counts_a_runner_that_tells_what_it_has(goes):
    driver = ready()
    driver.attach()
    driver.state(adapter(max_replicas=1))
    driver.certify()
    driver.report("r0", resident=resident(PIRATE))
    driver.attach("r1", pages=1000)
    if goes:
        driver.detach()
    attach(driver, entry("x", 2), resident=resident(PIRATE))
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate")
    assert driver.where("a") in ("", "r0")
    listed(driver, entry("y", 2))
    assert driver.where("a") == "r0"


def test_what_is_unhealthy_before_it_has_told_all_keeps_no_request_waiting():
    driver = ready()
    driver.attach()
    driver.state(adapter(max_replicas=1))
    driver.certify()
    driver.report("r0", resident=resident(PIRATE))
    driver.attach("r1", pages=1000)
    driver.detach()
    attach(driver, entry("x", 2), resident=resident(PIRATE))
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate")
    driver.send(events.RunnerUnhealthy(IDENTITY, "it is silent", hung=False))
    assert driver.where("a") == "r1"


def test_a_runner_that_tells_what_it_has_is_not_empty():
    driver = ready()
    driver.send(events.DrainsDeclared((events.DrainRequested(RunnerIdentity(instance="r0"), 60.0),), 1))
    attach(driver)
    driver.wait(1)
    assert not driver.of(effects.ReportDrained)
    listed(driver, entry("x", 2))
    assert driver.of(effects.DrainRunner)
    driver.wait(1)
    assert not driver.of(effects.ReportDrained)


def test_nothing_moves_that_a_later_part_lists():
    """The parts are one report, and nobody heard the runner for a while before."""
    driver = ready(unlisted_timeout=2.0, unsubmitted_timeout=1.0)
    driver.attach()
    driver.attach("r1")
    driver.enqueue("a")
    here = driver.where("a")
    driver.report(here)
    driver.wait(1.5)
    driver.report(here)
    driver.clock.advance(5)
    driver.report(here, more=True)
    driver.wait(0.1)
    assert driver.where("a") == here
    listed(driver, entry("a", 2), instance=here)
    driver.wait(1)
    assert driver.where("a") == here


def test_a_runner_whose_hello_breaks_off_is_away():
    driver = ready()
    attach(driver, entry("x", 2))
    assert driver.scheduler.catalog_to_save().runners == ("r0",), "a successor waits for it"
    driver.detach()
    assert driver.scheduler.catalog_to_save().runners == ()
    driver.enqueue("a")
    driver.wait(driver.scheduler.config.forget_runner + 1)
    assert not driver.scheduler.runners


@dataclass(frozen=True)
class World:
    """Before r0 says hello, and with what."""

    known: str
    """Whether r0 was here before: no, it has gone, or its stream is replaced; or the scheduler is new."""
    supervised: bool
    drained: bool
    min_replicas: int
    max_replicas: int
    other: Digest | None
    """What r1 has on its device. None: there is no r1."""
    other_base: str
    held: frozenset[Digest]
    live: tuple[RunnerRequest, ...]
    waiting: tuple[Digest, ...]

    def driver(self) -> SchedulerDriver:
        driver = ready()
        driver.attach()
        self._state(driver)
        driver.certify()
        driver.report("r0", resident=resident(PIRATE))
        driver.enqueue("a")
        driver.enqueue("b", digest=PIRATE, adapter="default/pirate")
        if self.known == "new":
            driver = SchedulerDriver(saved=driver.scheduler.catalog_to_save(), now=driver.clock(), first_order=1000)
            driver.gateway()
            self._state(driver)
        elif self.known == "gone":
            driver.detach()
        if self.supervised:
            driver.send(events.SupervisorConnected())
        if self.other is not None:
            driver.attach("r1", pages=8, base=self.other_base, resident=resident(self.other))
        if self.drained:
            drains = (events.DrainRequested(RunnerIdentity(instance="r0"), 60.0),)
            driver.send(events.DrainsDeclared(drains, 1))
        for number, digest in enumerate(self.waiting):
            driver.enqueue(f"w{number}", digest=digest, adapter="default/pirate" if digest == PIRATE else "")
        return driver

    def _state(self, driver: SchedulerDriver) -> None:
        one = adapter(min_replicas=self.min_replicas, max_replicas=self.max_replicas)
        driver.state(one, pools=(pool(replicas=2 if self.other is not None else 1),))

    def hello(self, live: tuple[RunnerRequest, ...], *, more: bool) -> events.RunnerAttached:
        return events.RunnerAttached(
            identity=IDENTITY,
            address="unix:/run/r0.sock",
            capacity=Capacity(pages=24),
            base=BaseModel(digest="sha256:base", asset_digest="sha256:assets"),
            resident=dict.fromkeys(sorted(self.held), Tier.DEVICE),
            live=live,
            more=more,
        )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    digests = st.sampled_from([BASE, PIRATE, POET])
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f"]), unique=True, max_size=6))
    live = tuple(
        entry(name, draw(st.integers(1, 12)), parked=draw(st.booleans()), digest=draw(digests)) for name in names
    )
    return World(
        known=draw(st.sampled_from(["new", "gone", "replaced"])),
        supervised=draw(st.booleans()),
        drained=draw(st.booleans()),
        min_replicas=draw(st.integers(0, 2)),
        max_replicas=draw(st.integers(0, 2)),
        other=draw(st.sampled_from([None, PIRATE, POET])),
        other_base=draw(st.sampled_from(["sha256:base", "sha256:other"])),
        held=draw(st.frozensets(st.sampled_from([PIRATE, POET]))),
        live=live,
        waiting=tuple(draw(st.lists(digests, max_size=4))),
    )


def outcome(driver: SchedulerDriver) -> dict[str, object]:
    state = driver.scheduler.state
    return {
        "runners": {
            name: (
                *(
                    dict(one.ledger),
                    one.ledger.total,
                    one.parked,
                    one.orphaned,
                    one.adapters.tiers,
                    one.adapters.having,
                ),
                *(one.pinned, one.attached, one.takes_work, one.last_report_at, one.drain),
            )
            for name, one in state.runners.items()
        },
        "requests": {name: (one.placement, one.delivered) for name, one in state.requests.items()},
        "bases": state.bases.current,
        "retired": state.adapters.retired,
        "may place": state.may_place,
        "catalog": state.catalog,
        "reported": [one.last_report for one in state.adapters],
        "saved": driver.scheduler.catalog_to_save(),
    }


def told(decided: list[effects.Effect]) -> list[effects.Effect]:
    """Without what tells the state once more, which is part of the outcome."""
    return [one for one in decided if not isinstance(one, effects.PublishCatalog | effects.ReportAdapter)]


@given(worlds(), st.lists(st.integers(0, 6), max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_hello_in_parts_leads_to_what_it_leads_to_whole(world: World, cuts: list[int]):
    whole, in_parts = world.driver(), world.driver()
    expected = told(whole.send(world.hello(world.live, more=False)))
    ends = [*sorted(cuts), len(world.live)]
    first, *parts = [world.live[begin:end] for begin, end in pairwise([0, *ends])]
    decided = told(in_parts.send(world.hello(first, more=bool(parts))))
    for number, part in enumerate(parts, 1):
        decided += told(listed(in_parts, *part, more=number < len(parts)))
    assert decided == expected
    assert outcome(in_parts) == outcome(whole)
    for driver in (whole, in_parts):
        driver.report("r0", *world.live, resident=dict.fromkeys(sorted(world.held), Tier.DEVICE))
    assert told(in_parts.effects) == told(whole.effects)
    assert told(in_parts.wait(1)) == told(whole.wait(1))
    assert outcome(in_parts) == outcome(whole)
