"""Which runners hold which adapters: told in changes, and not more often than it is of use."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.domain import Digest, InstanceName
from motet.runner_info import Tier
from motet_gateway.catalog import Catalog
from motet_scheduler import conversion
from motet_scheduler.conversion import CatalogRevision
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.adapter import Revision
from motet_scheduler.policy.adapters.reports import AdapterReports
from motet_scheduler.policy.adapters.table import MAX_RESIDENT
from motet_scheduler.policy.catalog import MAX_REPORTED, SavedAdapter, SavedCatalog
from motet_scheduler.policy.values import AdapterReadiness, AdapterStage
from tests.scheduler.builders import GROUP, SchedulerDriver, adapter, pool, ready, resident

NAMES = tuple(f"a{n}" for n in range(5))
RUNNERS = ("r0", "r1")
PAUSE = 1.0


def digest_of(name: str) -> Digest:
    return Digest(f"sha256:{int(name[1:]):064}")


def certified(*names: str) -> SchedulerDriver:
    driver = ready(residency_pause=PAUSE)
    driver.attach()
    driver.state(*map(adapter, names))
    orders = driver.of(effects.EnsureAdapter)
    while orders:
        name = orders.pop().ref.name
        driver.certify(name, digest_of(name))
        orders += driver.of(effects.EnsureAdapter)
    return driver


def holding(driver: SchedulerDriver, *names: str) -> list[effects.Effect]:
    return driver.report(resident={digest_of(name): Tier.DEVICE for name in names})


def states(driver: SchedulerDriver) -> dict[str, AdapterReadiness]:
    assert driver.scheduler.catalog is not None
    return {one.model_name: one.state for one in driver.scheduler.catalog.adapters}


def test_the_first_change_is_told_at_once_and_the_next_ones_together_after_the_pause():
    driver = certified("a0", "a1", "a2")
    holding(driver, "a0")
    assert [one.ref.name for one in driver.of(effects.ReportAdapter)] == ["a0"]
    assert driver.of(effects.PublishCatalog)
    for names in (("a1",), ("a1", "a2"), ("a2",)):
        driver.wait(PAUSE / 5)
        holding(driver, *names)
        assert not driver.of(effects.ReportAdapter)
        assert not driver.of(effects.PublishCatalog)
    driver.wait(PAUSE)
    assert [one.ref.name for one in driver.of(effects.ReportAdapter)] == ["a0", "a2"], "a1 came and went"
    (publish,) = driver.of(effects.PublishCatalog)
    assert [one.model_name for one in publish.changes.adapters] == ["a0", "a2"]
    assert states(driver) == {
        "a0": AdapterReadiness.COLD,
        "a1": AdapterReadiness.COLD,
        "a2": AdapterReadiness.READY,
    }


def test_of_many_adapters_each_event_tells_an_operator_of_some_and_all_are_told_once():
    """Also those that have come to a runner meanwhile."""
    many, at_once = 3 * MAX_REPORTED, 2 * MAX_REPORTED
    spec = [adapter(f"a{n}") for n in range(many)]
    served = [Revision(key=replace(one.revision, group=GROUP), digest=digest_of(one.ref.name)) for one in spec]
    adapters = tuple(SavedAdapter(spec=one, serving=it) for one, it in zip(spec, served, strict=True))
    driver = SchedulerDriver(saved=SavedCatalog(pools=(pool(),), adapters=adapters))
    driver.attach(resident={digest_of("a0"): Tier.DEVICE})
    told = [len(driver.of(effects.ReportAdapter))]
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        told.append(len(driver.of(effects.ReportAdapter)))
    assert sum(told) == many
    driver.send(events.OperatorConnected())
    heard = [one.ref.name for one in driver.of(effects.ReportAdapter)]
    told.append(len(heard))
    holding(driver, f"a{many - 1}")
    while True:
        heard += [one.ref.name for one in driver.of(effects.ReportAdapter)]
        told.append(len(driver.of(effects.ReportAdapter)))
        if not driver.scheduler.more_to_try:
            break
        driver.send(events.TryMore())
    assert sorted(heard) == sorted(one.ref.name for one in spec)
    assert max(told) <= at_once


def taken_over(many: int) -> SchedulerDriver:
    """From a scheduler with one runner, which is not back, and as many adapters. A new operator is connected."""
    spec = [adapter(f"a{n}") for n in range(many)]
    served = [Revision(key=replace(one.revision, group=GROUP), digest=digest_of(one.ref.name)) for one in spec]
    adapters = tuple(SavedAdapter(spec=one, serving=it) for one, it in zip(spec, served, strict=True))
    driver = SchedulerDriver(saved=SavedCatalog(pools=(pool(),), adapters=adapters, runners=("r0",)))
    driver.send(events.OperatorConnected())
    driver.state(*spec)
    assert not told_in_parts(driver)
    return driver


def told_in_parts(driver: SchedulerDriver) -> list[effects.Effect]:
    """What this event and the `TryMore`s tell an operator about adapters: not too much at once."""
    told: list[effects.Effect] = []
    while True:
        reports = driver.of(effects.ReportAdapter)
        assert len(reports) <= MAX_REPORTED
        told += [*reports, *driver.of(effects.ReportedAll)]
        if not driver.scheduler.more_to_try:
            return told
        driver.send(events.TryMore())


def test_a_new_operator_hears_in_parts_of_those_that_no_runner_has_and_then_that_it_has_heard_all():
    driver = taken_over(many := 3 * MAX_REPORTED)
    driver.wait(driver.scheduler.config.report_patience + 0.1)
    *told, last = told_in_parts(driver)
    assert sorted(one.ref.name for one in told) == sorted(f"a{n}" for n in range(many))
    assert last == effects.ReportedAll((GROUP,))


def test_other_changes_are_told_at_once_and_take_residency_with_them():
    driver = certified("a0", "a1")
    holding(driver, "a0")
    holding(driver, "a1")
    assert not driver.of(effects.PublishCatalog)
    driver.state(adapter("a0"))
    (publish,) = driver.of(effects.PublishCatalog)
    assert [one.model_name for one in publish.changes.adapters] == ["a0"]
    assert [ref.name for ref in publish.changes.removed] == ["a1"]
    driver.detach()
    assert not driver.of(effects.ReportAdapter), "a stream that breaks for a moment moves no adapter"
    assert driver.of(effects.PublishCatalog)[0].catalog.groups[0].runners == ()


def test_a_runner_that_is_away_has_no_adapters_ready_for_gateways():
    driver = certified("a0")
    holding(driver, "a0")
    assert states(driver) == {"a0": AdapterReadiness.READY}
    driver.detach()
    assert states(driver) == {"a0": AdapterReadiness.COLD}
    driver.attach(resident=resident(digest_of("a0")))
    assert states(driver) == {"a0": AdapterReadiness.READY}


def test_a_runner_tells_between_two_reports_where_one_adapter_is_now():
    driver = certified("a0", "a1")
    holding(driver, "a0")
    driver.wait(PAUSE)
    moved = {"order": 0, "ordered_stage": AdapterStage.NONE, "certificate": None}
    driver.certify("a1", digest_of("a1"), stage=AdapterStage.DEVICE, **moved)
    driver.wait(PAUSE)
    driver.certify("a0", digest_of("a0"), **moved)
    driver.wait(PAUSE)
    assert states(driver) == {"a0": AdapterReadiness.COLD, "a1": AdapterReadiness.READY}
    runner = driver.scheduler.runners["r0"]
    assert runner.adapters.tiers == {digest_of("a0"): Tier.DISK, digest_of("a1"): Tier.DEVICE}
    assert runner.adapters.having == {digest_of("a1")}
    driver.certify("a7", digest_of("a7"), stage=AdapterStage.DEVICE, **moved)
    assert len(runner.adapters.tiers) == 2, "nobody serves it: the next report says what else is there"
    holding(driver, "a0")
    driver.wait(PAUSE)
    assert states(driver) == {"a0": AdapterReadiness.READY, "a1": AdapterReadiness.COLD}, "a report lists all"


def test_changes_say_the_same_as_reports_that_list_all():
    chance = random.Random(7)
    names = [f"a{number}" for number in range(6)]
    whole, changes = certified(*names), certified(*names)
    held: dict[Digest, Tier] = {}
    for _ in range(200):
        before = dict(held)
        for name in chance.sample(names, 2):
            tier = chance.choice((None, Tier.DISK, Tier.DEVICE))
            if tier is None:
                held.pop(digest_of(name), None)
            else:
                held[digest_of(name)] = tier
        whole.report(resident=dict(held))
        now = {digest: tier for digest, tier in held.items() if before.get(digest) is not tier}
        gone = tuple(digest for digest in before if digest not in held)
        changes.send(events.ResidencyChanged(InstanceName("r0"), "1", gone, now))
        assert changes.scheduler.runners["r0"].adapters.tiers == whole.scheduler.runners["r0"].adapters.tiers == held
        assert changes.scheduler.runners["r0"].adapters.having == whole.scheduler.runners["r0"].adapters.having
        changes.send(events.RunnerReported(instance=InstanceName("r0"), incarnation="1"))
        assert changes.scheduler.runners["r0"].adapters.tiers == held, "a report without a list changes nothing"
        for driver in (whole, changes):
            driver.wait(PAUSE)
        assert states(changes) == states(whole)


def test_changes_of_a_process_that_has_ended_or_without_end_are_not_taken():
    driver = certified("a0")
    late = events.ResidencyChanged(InstanceName("r0"), "0", (), {digest_of("a0"): Tier.DEVICE})
    driver.send(late)
    assert not driver.scheduler.runners["r0"].adapters.tiers
    names = [digest_of(f"a{number + 1}") for number in range(MAX_RESIDENT + 10)]
    driver.send(events.ResidencyChanged(InstanceName("r0"), "1", (), dict.fromkeys(names, Tier.DISK)))
    assert len(driver.scheduler.runners["r0"].adapters.tiers) == MAX_RESIDENT
    driver.send(events.ResidencyChanged(InstanceName("r0"), "1", (names[0],), {digest_of("a0"): Tier.DEVICE}))
    assert states(driver) == {"a0": AdapterReadiness.READY}


def test_a_load_is_over_when_its_runner_tells_that_the_adapter_has_come():
    driver = certified("a0")
    driver.state(adapter("a0", min_replicas=1))
    (order,) = driver.of(effects.EnsureAdapter)
    assert order.stage is AdapterStage.DEVICE
    news = {"order": 0, "ordered_stage": AdapterStage.NONE, "certificate": None}
    driver.certify("a0", digest_of("a0"), stage=AdapterStage.DEVICE, **news)
    driver.certify("a0", digest_of("a0"), **news)
    assert [one.stage for one in driver.of(effects.EnsureAdapter)] == [AdapterStage.DEVICE], "it is ordered again"


def test_what_does_not_change_is_not_built_again(monkeypatch: pytest.MonkeyPatch):
    """A flip cost more the more adapters there were."""
    driver = certified(*(f"a{n}" for n in range(100)))
    built: Counter[str] = Counter()
    for kind in ("report", "entry"):
        build = getattr(AdapterReports, kind)

        def counted(self, one, *rest, kind=kind, build=build):
            built[kind] += 1
            return build(self, one, *rest)

        monkeypatch.setattr(AdapterReports, kind, counted)
    for n in range(10):
        driver.wait(PAUSE)
        holding(driver, f"a{n}")
    assert built == {"report": 19, "entry": 19}, "the one that came, and the one that went"


def test_new_namespaces_and_a_first_catalog_are_told_as_a_whole():
    driver = SchedulerDriver()
    driver.gateway()
    driver.attach()
    driver.state()
    assert [one.changes for one in driver.of(effects.PublishCatalog)] == [None]


class Told:
    """A gateway and an operator that hear everything that is told."""

    def __init__(self) -> None:
        self.revision = CatalogRevision(1, 0)
        self.catalog: Catalog | None = None
        self.reports: dict[str, effects.ReportAdapter] = {}

    def hear(self, decided: list[effects.Effect]) -> None:
        for effect in decided:
            if isinstance(effect, effects.ReportAdapter):
                self.reports[effect.ref.name] = effect
            elif isinstance(effect, effects.PublishCatalog):
                before, self.revision = self.revision, CatalogRevision(1, self.revision.number + 1)
                if effect.changes is None:
                    self.catalog = Catalog.of(conversion.catalog(effect.catalog, self.revision).catalog)
                else:
                    message = conversion.catalog_changes(effect.catalog, effect.changes, before, self.revision)
                    assert self.catalog is not None
                    self.catalog = self.catalog.changed(message.catalog_changes)


chosen = st.lists(st.sampled_from(NAMES), unique=True)
steps = st.one_of(
    st.tuples(
        st.just("state"),
        st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from("12")), unique_by=lambda one: one[0]),
    ),
    st.tuples(st.just("report"), st.sampled_from(RUNNERS), chosen, st.sampled_from(Tier)),
    st.tuples(st.sampled_from(("attach", "restart", "detach")), st.sampled_from(RUNNERS)),
    st.tuples(st.just("wait"), st.sampled_from((0.1, 1.0, 40.0))),
    st.tuples(st.just("answer")),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(steps, max_size=30))
def test_all_changes_together_are_the_catalog_and_the_reports_of_now(story):
    driver, told = SchedulerDriver(residency_pause=PAUSE), Told()
    incarnations = dict.fromkeys(RUNNERS, 1)
    orders: list[effects.EnsureAdapter] = []

    def hear() -> None:
        told.hear(driver.effects)
        orders.extend(driver.of(effects.EnsureAdapter))

    driver.gateway()
    driver.state()
    hear()
    for kind, *how in story:
        match kind, how:
            case "state", [stated]:
                driver.state(*(adapter(name, stamp=stamp) for name, stamp in stated))
            case "report", [runner, names, tier]:
                found = {digest_of(name): tier for name in names}
                driver.report(runner, resident=found, incarnation=str(incarnations[runner]))
            case "restart", [runner]:
                incarnations[runner] += 1
                driver.attach(runner, incarnation=str(incarnations[runner]))
            case "attach", [runner]:
                driver.attach(runner, incarnation=str(incarnations[runner]))
            case "detach", [runner]:
                driver.detach(runner, str(incarnations[runner]))
            case "wait", [seconds]:
                driver.wait(seconds)
            case "answer", []:
                for order in [orders.pop(0) for _ in orders[:3]]:
                    driver.certify(
                        order.ref.name, digest_of(order.ref.name), instance=order.instance, order=order.order
                    )
                    hear()
                continue
        hear()
    driver.wait(10.1)  # from here on nobody waits for runners of before the start
    hear()
    state = driver.scheduler.state
    for one in state.adapters:
        assert one.last_report is None or told.reports[one.spec.ref.name] == one.last_report == state.reports.report(
            one
        )
        if one.serving is not None:
            held = {
                runner.instance: runner.adapters.tiers[one.serving.digest]
                for runner in state.runners.values()
                if one.serving.digest in runner.adapters.tiers
            }
            assert {instance: tier for instance, tier, _ in one.last_report.replicas} == held
    now = tuple(state.reports.entry(one, state.runners) for one in state.adapters)
    assert set(driver.scheduler.catalog.adapters) == set(now)
    whole = Catalog.of(conversion.catalog(driver.scheduler.catalog, told.revision).catalog)
    assert told.catalog == whole
    assert whole.groups[0].group == GROUP == pool().group


def test_a_new_operator_hears_that_it_has_heard_all_after_the_last_change_and_although_more_always_come():
    driver = certified("a0", "a1")
    driver.send(events.OperatorConnected())
    holding(driver, "a0")
    holding(driver, "a1")
    driver.wait(PAUSE / 10)
    kinds = [type(one) for one in driver.effects if isinstance(one, effects.ReportAdapter | effects.ReportedAll)]
    assert kinds == [effects.ReportAdapter, effects.ReportAdapter, effects.ReportedAll]
