"""Revisions of adapters: checked before they serve, dropped when nothing needs them, kept where they are wanted."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest, InstanceName
from motet.runner_info import Failure, Tier
from motet_scheduler import conversion
from motet_scheduler.conversion import CatalogRevision
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.adapter import Adapter
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import AdapterReadiness, AdapterStage, GroupName, RevisionKey
from tests.scheduler.builders import GROUP, PIRATE, POET, SchedulerDriver, adapter, pool, ready, resident

REF = common_pb2.AdapterRef(namespace="default", name="pirate", generation=1)
SUSPENDED = ""
STAYS = Digest("sha256:" + "c" * 64)


def published(driver):
    return {one.model_name: one for one in driver.scheduler.catalog.adapters}


def checks(driver):
    return [effect for effect in driver.of(effects.EnsureAdapter) if effect.stage is AdapterStage.CERTIFIED]


def with_pirate(**how):
    driver = ready()
    driver.attach()
    driver.state(adapter(**how))
    driver.certify()
    return driver


def test_a_new_adapter_is_checked_by_one_runner_and_then_serves():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.state(adapter())
    (order,) = checks(driver)
    assert order.source == "file:///adapters/pirate"
    assert published(driver)["pirate"].state is AdapterReadiness.LOADING
    driver.certify(instance=order.instance)
    assert published(driver)["pirate"].digest == PIRATE
    assert published(driver)["pirate"].state is AdapterReadiness.COLD
    assert published(driver)["pirate"].rank == 8


def test_with_no_runner_up_the_check_waits_for_one():
    driver = ready()
    driver.state(adapter())
    assert not checks(driver)
    driver.attach()
    assert checks(driver)


def test_checks_are_spread_over_runners_and_few_at_a_time():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.state(*(adapter(f"a{n}") for n in range(20)))
    orders = checks(driver)
    assert len(orders) == 8
    assert {order.instance for order in orders} == {"r0", "r1"}


def checked_one_by_one(driver, orders):
    """The namespaces of all checks, in the order in which they are asked for, if each is answered before the next."""
    asked, waiting = [], list(orders)
    while waiting:
        order = waiting.pop(0)
        asked.append(order.ref.namespace)
        driver.certify(instance=order.instance, ref=order.ref, order=order.order)
        waiting += checks(driver)
    return asked


def test_namespaces_take_turns_to_be_checked_however_many_adapters_one_has():
    driver = ready()
    driver.attach()
    driver.state(*(adapter(f"a{n}", namespace="many") for n in range(30)), adapter("one", namespace="few"))
    assert "few" in checked_one_by_one(driver, checks(driver))[:2]


def test_a_namespace_that_comes_later_is_checked_next():
    driver = ready()
    driver.attach()
    many = [adapter(f"a{n}", namespace="many") for n in range(30)]
    driver.state(*many)
    (first, *rest) = checks(driver)
    driver.state(*many, *(adapter(f"b{n}", namespace=f"few {n % 2}") for n in range(4)))
    assert not checks(driver), "the runner is busy"
    driver.certify(instance="r0", ref=first.ref, order=first.order)
    asked = checked_one_by_one(driver, [*rest, *checks(driver)])
    assert asked[: len(rest)] == ["many"] * len(rest)
    assert sorted(asked[len(rest) :][:6]) == ["few 0"] * 2 + ["few 1"] * 2 + ["many"] * 2


def test_namespaces_that_come_all_the_time_keep_none_waiting():
    driver = ready()
    driver.attach()
    present = [adapter(f"z{n}", namespace="z") for n in range(30)]
    driver.state(*present)
    waiting, asked = checks(driver), []
    for n in range(20):
        order = waiting.pop(0)
        asked.append(order.ref.namespace)
        present = [*(adapter(f"{of}{n}", namespace=f"{of}{n}") for of in "ab"), *present]
        driver.state(*present)
        waiting += checks(driver)
        driver.certify(instance="r0", ref=order.ref, order=order.order)
        waiting += checks(driver)
    assert asked[4:].count("z") >= 3


def test_an_adapter_that_may_not_be_checked_yet_waits_for_one_time():
    """However often orders are given meanwhile: on a busy system, adapters move all the time."""
    driver = with_pirate(stamp="1")
    for stamp in "2345":
        driver.state(adapter(stamp=stamp))
        driver.certify()
    times = []
    for n in range(100):
        driver.clock.advance(0.01)
        driver.report(resident=resident(POET) if n % 2 else {})
        driver.scheduler.publisher.look()
        times.append(len(driver.scheduler.state.orders.times))
    assert times[-1] <= times[0], "each look notes the same time again"
    driver.clock.now = driver.scheduler.state.orders.next_due()
    assert checks(driver) == []
    while not checks(driver):
        driver.clock.now = max(driver.clock(), driver.scheduler.next_due())
        driver.send(events.Tick())
    assert driver.clock() <= 1000 + 31


def test_many_adapters_that_wait_for_a_check_look_at_no_runner_each():
    driver, looked_at = ready(), []

    class Watched(Runner):
        @property
        def takes_work(self):
            looked_at.append(self.instance)
            return True

    driver.attach("r0")
    driver.scheduler.runners["r0"].__class__ = Watched
    driver.state(*(adapter(f"a{n}") for n in range(40)))
    looked_at.clear()
    driver.wait(0.1)
    assert len(looked_at) < 10


def test_many_adapters_that_wait_while_all_runners_are_busy_cost_no_key_each(monkeypatch):
    driver, hashed, hash_of = ready(), [], RevisionKey.__hash__
    driver.attach("r0")
    driver.state(*(adapter(f"a{n}") for n in range(200)))
    assert len(checks(driver)) < 20, "the others wait"
    monkeypatch.setattr(RevisionKey, "__hash__", lambda key: hashed.append(key) or hash_of(key))
    driver.wait(0.1)
    assert 0 < len(hashed) < 60


def test_a_check_whose_runner_goes_is_given_to_another():
    driver = ready()
    driver.attach("r0")
    driver.state(adapter())
    driver.detach("r0")
    driver.attach("r1")
    assert [order.instance for order in checks(driver)] == ["r1"]


def test_an_unanswered_check_is_ordered_again():
    driver = ready(load_retry=10.0)
    driver.attach()
    driver.state(adapter())
    driver.wait(11)
    assert checks(driver)


def test_changed_bytes_serve_only_once_they_are_certified():
    driver = with_pirate()
    driver.state(adapter(stamp="2"))
    assert checks(driver)
    assert published(driver)["pirate"].digest == PIRATE
    driver.certify(digest=POET)
    assert published(driver)["pirate"].digest == POET


def test_a_failed_revision_never_takes_over_and_is_reported():
    driver = with_pirate()
    driver.state(adapter(stamp="2"))
    driver.certify(
        digest="", stage=AdapterStage.NONE, certificate=None, failure=Failure("adapter_incompatible", "no config")
    )
    report = driver.of(effects.ReportAdapter)[-1]
    assert (report.serving, report.failure.code) == (PIRATE, "adapter_incompatible")
    assert published(driver)["pirate"].digest == PIRATE
    driver.wait(60)
    assert not checks(driver), "the same bytes would fail again"


def test_a_failure_that_may_pass_is_tried_again_after_its_own_delay():
    driver = ready()
    driver.attach()
    driver.state(adapter())
    driver.certify(
        digest="", stage=AdapterStage.NONE, certificate=None, failure=Failure("adapter_fetch_failed", "away", 5.0)
    )
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    driver.wait(4)
    assert not checks(driver)
    driver.wait(2)
    assert checks(driver)


def test_bytes_that_change_during_their_check_are_checked_again():
    driver = ready()
    driver.attach()
    driver.state(adapter(stamp="1"))
    driver.state(adapter(stamp="2"))
    assert not checks(driver), "one at a time"
    driver.certify()
    assert published(driver)["pirate"].digest == ""
    assert checks(driver)
    driver.certify(digest=POET)
    assert published(driver)["pirate"].digest == POET


def test_an_answer_to_an_older_check_is_ignored_and_the_newer_revision_still_checked():
    driver = ready(load_retry=10.0)
    driver.attach()
    driver.state(adapter(stamp="1"))
    (first,) = checks(driver)
    driver.state(adapter(stamp="2"))
    driver.wait(11)
    (second,) = checks(driver)
    driver.certify(digest=PIRATE, order=first.order)
    assert driver.of(effects.IgnoreAnswer) == [effects.IgnoreAnswer("r0", first.ref, first.order)]
    assert published(driver)["pirate"].digest == ""
    driver.certify(digest=POET, order=second.order)
    assert published(driver)["pirate"].digest == POET


def test_an_answer_to_a_check_of_a_removed_adapter_says_nothing_about_one_of_the_same_name():
    driver = ready()
    driver.attach()
    driver.state(adapter(stamp="1"))
    (first,) = checks(driver)
    driver.state()
    driver.state(adapter(stamp="2"))
    driver.certify(order=first.order, failure=Failure("adapter_incompatible", "no config"))
    assert published(driver)["pirate"].state is AdapterReadiness.LOADING
    assert driver.of(effects.IgnoreAnswer)


def test_an_answer_to_a_predecessor_is_ignored():
    successor = SchedulerDriver(first_order=1000)
    successor.attach()
    successor.state(adapter())
    assert checks(successor)[0].order == 1000
    successor.certify(order=1)
    assert published(successor)["pirate"].digest == ""
    assert successor.of(effects.IgnoreAnswer)


def test_the_failure_of_an_older_load_says_nothing_about_the_newer_one():
    driver = with_pirate(min_replicas=1)
    (first,) = driver.of(effects.EnsureAdapter)
    driver.wait(11)
    (second,) = driver.of(effects.EnsureAdapter)
    fails = {"stage": AdapterStage.NONE, "failure": Failure("adapter_fetch_failed", "away", 1.0)}
    driver.certify(**fails, ordered_stage=AdapterStage.DEVICE, order=first.order)
    assert driver.of(effects.IgnoreAnswer)
    assert not driver.of(effects.EnsureAdapter)
    driver.certify(**fails, ordered_stage=AdapterStage.DEVICE, order=second.order)
    assert not driver.of(effects.IgnoreAnswer)
    driver.wait(1)
    assert driver.of(effects.EnsureAdapter), "this one failed"


@pytest.mark.parametrize(("retry_after", "pause"), [(30.0, 30.0), (0.0, 10.0)], ids=["says when", "does not say"])
def test_a_load_for_min_replicas_that_failed_is_ordered_again_only_after_a_pause(retry_after, pause):
    driver = with_pirate(min_replicas=1)
    for _ in range(3):
        assert loads(driver)
        failure = Failure("adapter_fetch_failed", "away", retry_after)
        driver.certify(stage=AdapterStage.NONE, failure=failure, ordered_stage=AdapterStage.DEVICE)
        assert not loads(driver)
        driver.wait(pause - 0.5)
        assert not loads(driver)
        driver.wait(0.5)


def test_a_load_that_failed_on_one_runner_is_ordered_on_another_at_once():
    driver = with_pirate(min_replicas=1)
    driver.attach("r1")
    failure = Failure("adapter_fetch_failed", "away", 30.0)
    driver.certify(stage=AdapterStage.NONE, failure=failure, ordered_stage=AdapterStage.DEVICE)
    assert [order.instance for order in driver.of(effects.EnsureAdapter)] == ["r1"]


def test_an_answer_that_comes_after_the_report_of_its_load_is_known():
    driver = with_pirate(min_replicas=1)
    driver.report(resident=resident(PIRATE))
    driver.certify(ordered_stage=AdapterStage.DEVICE)
    assert not driver.of(effects.IgnoreAnswer)
    driver.report()
    driver.wait(0.1)
    assert driver.of(effects.EnsureAdapter), "it was evicted: again at once"


def test_a_long_load_that_is_reported_is_not_ordered_again():
    driver = with_pirate(min_replicas=1)
    for _ in range(5):
        driver.wait(8)
        assert not driver.of(effects.EnsureAdapter)
        driver.certify(ordered_stage=AdapterStage.DEVICE, stage=AdapterStage.NONE, certificate=None)


def test_a_runner_of_an_earlier_version_repeats_no_number():
    driver = ready()
    driver.attach()
    driver.state(adapter(min_replicas=1))
    driver.certify(order=0, ordered_stage=AdapterStage.DEVICE)
    assert published(driver)["pirate"].digest == "", "about a load"
    driver.certify(order=0)
    assert published(driver)["pirate"].digest == PIRATE
    driver.certify(
        order=0,
        ordered_stage=AdapterStage.DEVICE,
        stage=AdapterStage.NONE,
        failure=Failure("adapter_fetch_failed", "away", 1.0),
    )
    assert not driver.of(effects.IgnoreAnswer)
    driver.wait(1)
    assert driver.of(effects.EnsureAdapter), "the load failed"


def test_a_report_of_a_load_does_not_answer_a_check():
    driver = with_pirate()
    driver.state(adapter(stamp="2"))
    driver.certify(digest=PIRATE, stage=AdapterStage.DEVICE, ordered_stage=AdapterStage.NONE)
    driver.certify(digest=PIRATE, stage=AdapterStage.DEVICE, ordered_stage=AdapterStage.DEVICE)
    driver.certify(digest=POET)
    assert published(driver)["pirate"].digest == POET


def test_the_operator_hears_of_both_revisions_while_requests_use_the_one_before():
    driver = with_pirate()
    driver.report(resident=resident(PIRATE))
    driver.enqueue("q", digest=PIRATE)
    changed = adapter(stamp="2")
    driver.state(replace(changed, revision=replace(changed.revision, source="file:///newer", source_revision="v2")))
    (report,) = driver.of(effects.ReportAdapter)
    assert (report.serving, report.source, report.checking) == (PIRATE, "file:///adapters/pirate", True)
    driver.certify(digest=POET)
    (report,) = driver.of(effects.ReportAdapter)
    assert (report.serving, report.source, report.source_revision) == (POET, "file:///newer", "v2")
    assert not report.checking
    assert report.replicas == (("r0", Tier.DEVICE, PIRATE),)
    assert report.state is AdapterReadiness.COLD, "what serves is nowhere yet"
    driver.finish("q")
    driver.report(resident=resident(POET))
    driver.wait(1.0)
    (report,) = driver.of(effects.ReportAdapter)
    assert report.replicas == (("r0", Tier.DEVICE, POET),)


def test_a_removed_adapter_is_dropped_at_once_when_nothing_uses_it():
    driver = with_pirate()
    driver.state()
    assert [(effect.instance, effect.digest) for effect in driver.of(effects.DropAdapter)] == [("r0", PIRATE)]
    assert not published(driver)


def test_adapters_that_are_removed_together_are_dropped_together():
    driver = ready()
    driver.attach()
    driver.state(adapter("pirate"), adapter("poet"), adapter("stays"))
    for name, digest in (("pirate", PIRATE), ("poet", POET), ("stays", STAYS)):
        driver.certify(name, digest)
    driver.state(adapter("stays"))
    assert [effect.digest for effect in driver.of(effects.DropAdapter)] == [PIRATE, POET]


def test_a_bound_that_changes_while_another_adapter_is_removed_is_sent_to_runners():
    driver = ready()
    driver.attach()
    driver.state(remote(max_bytes=1000), adapter("poet"))
    driver.certify()
    driver.certify("poet", POET)
    driver.state(remote(max_bytes=2000))
    driver.enqueue("a", digest=PIRATE)
    (load,) = [effect for effect in driver.of(effects.EnsureAdapter) if effect.stage is AdapterStage.DEVICE]
    assert load.max_bytes == 2000


def test_a_removed_adapter_in_use_is_dropped_when_its_last_request_ends():
    driver = with_pirate()
    driver.enqueue("a", digest=PIRATE)
    driver.state()
    assert not driver.of(effects.DropAdapter)
    driver.finish("a")
    assert driver.of(effects.DropAdapter)


def test_a_request_that_waits_keeps_its_revision_too():
    driver = with_pirate()
    driver.detach()
    driver.enqueue("a", digest=PIRATE)
    driver.state(adapter(stamp="2"))
    driver.attach(incarnation="2")
    assert driver.where("a") == "r0"
    assert driver.of(effects.EnsureAdapter)[0].source


def test_the_old_revision_is_dropped_once_the_new_one_serves():
    driver = with_pirate()
    driver.state(adapter(stamp="2"))
    driver.certify(digest=POET)
    assert [effect.digest for effect in driver.of(effects.DropAdapter)] == [PIRATE]


def test_two_names_for_the_same_bytes_keep_them_until_both_are_gone():
    driver = ready()
    driver.attach()
    driver.state(adapter(), adapter("twin"))
    driver.certify()
    driver.certify("twin", PIRATE)
    driver.state(adapter("twin"))
    assert not driver.of(effects.DropAdapter)
    driver.state()
    assert driver.of(effects.DropAdapter)


def test_resident_adapters_that_nothing_needs_are_dropped():
    driver = ready()
    driver.attach(resident=resident(PIRATE))
    assert [effect.digest for effect in driver.of(effects.DropAdapter)] == [PIRATE]


def test_before_the_operator_connects_no_adapter_is_dropped():
    driver = SchedulerDriver()
    driver.attach(resident=resident(PIRATE))
    assert not driver.of(effects.DropAdapter)


def test_min_replicas_are_kept_on_devices():
    driver = ready()
    for name in ("r0", "r1", "r2"):
        driver.attach(name)
    driver.state(adapter(min_replicas=2))
    driver.certify()
    loads = [effect for effect in driver.of(effects.EnsureAdapter) if effect.stage is AdapterStage.DEVICE]
    assert [effect.instance for effect in loads] == ["r0", "r1"]
    assert pins(driver) == [("r0", (PIRATE,)), ("r1", (PIRATE,))], "it leaves their devices and disks last"
    for name in ("r0", "r1"):
        driver.report(name, resident=resident(PIRATE))
    assert not driver.of(effects.EnsureAdapter)
    driver.detach("r1")
    driver.wait(0.1)
    assert [effect.instance for effect in driver.of(effects.EnsureAdapter)] == ["r2"]
    assert pins(driver) == [("r2", (PIRATE,))]


def pins(driver: SchedulerDriver) -> list[tuple[str, tuple[str, ...]]]:
    return [(effect.instance, effect.digests) for effect in driver.of(effects.PinAdapters)]


def test_pins_follow_min_replicas_up_and_down_while_the_adapter_is_resident():
    driver = ready()
    for name in ("r0", "r1", "r2"):
        driver.attach(name)
        assert pins(driver) == [(name, ())], "told after each Welcome: an earlier scheduler may have told another set"
    driver.state(adapter())
    driver.certify()
    for name in ("r1", "r2"):
        driver.report(name, resident=resident(PIRATE))
    driver.state(adapter(min_replicas=1))
    assert (pins(driver), driver.of(effects.EnsureAdapter)) == ([("r1", (PIRATE,))], []), "no load is needed"
    driver.state(adapter(min_replicas=3))
    assert pins(driver) == [("r0", (PIRATE,)), ("r2", (PIRATE,))]
    assert [order.instance for order in driver.of(effects.EnsureAdapter)] == ["r0"]
    kinds = [type(one) for one in driver.effects if isinstance(one, effects.PinAdapters | effects.EnsureAdapter)]
    assert kinds == [effects.PinAdapters, effects.PinAdapters, effects.EnsureAdapter], "the load finds its pin"
    driver.state(adapter(min_replicas=1))
    assert pins(driver) == [("r0", ()), ("r2", ())], "it is on r1's device"
    driver.state(adapter())
    assert pins(driver) == [("r1", ())]
    driver.wait(60)
    assert pins(driver) == []


def test_one_slot_of_a_runner_is_left_to_adapters_that_nobody_pins():
    bytes_of = {"pirate": PIRATE, "poet": POET, "bard": Digest("sha256:" + "c" * 64)}
    driver = ready()
    for name in ("r0", "r1"):
        driver.attach(name, adapter_slots=2)
    driver.state(*(adapter(name, min_replicas=1) for name in bytes_of))
    loads = []
    for (name, digest), checked_on in zip(bytes_of.items(), ("r0", "r1", "r0"), strict=True):
        driver.certify(name, digest, instance=checked_on)
        orders = driver.of(effects.EnsureAdapter)
        loads += [(one.instance, one.ref.name) for one in orders if one.stage is AdapterStage.DEVICE]
    assert loads == [("r0", "pirate"), ("r1", "poet")], "each request for another would evict the third"
    driver.report("r0", resident=resident(PIRATE))
    driver.report("r1", resident=resident(POET))
    driver.state(*(adapter(name, min_replicas=name != "poet") for name in bytes_of))
    assert pins(driver) == [("r1", (bytes_of["bard"],))]
    driver.attach("r2", adapter_slots=1)
    driver.state(*(adapter(name, min_replicas=1) for name in bytes_of))
    assert pins(driver) == [("r1", (POET,)), ("r2", (bytes_of["bard"],))], "one slot keeps what no request evicts"


def test_a_request_pins_nothing_on_the_runner_that_it_runs_on():
    driver = ready()
    for name in ("r0", "r1"):
        driver.attach(name)
    driver.state(adapter(min_replicas=1))
    driver.certify()
    assert pins(driver) == [("r0", (PIRATE,))]
    driver.report("r0", resident=resident(PIRATE))
    driver.attach("r2")
    driver.detach("r0")
    told = [("r0", ())]
    for number in range(20):
        driver.enqueue(f"q{number}", digest=PIRATE, tenant="default", max_tokens=800)
        told += pins(driver)
    assert {instance for instance, digests in told if digests} <= {"r1"}
    assert {driver.where(f"q{number}") for number in range(20)} >= {"r1", "r2"}


def test_a_manifest_that_moves_to_other_bytes_leaves_no_pin_at_the_old_ones():
    driver = ready()
    driver.attach("r0")
    driver.state(adapter(min_replicas=1), adapter("twin"))
    driver.certify("pirate")
    driver.certify("twin")
    driver.report("r0", resident=resident(PIRATE))
    driver.state(adapter(min_replicas=1, stamp="2"), adapter("twin"))
    driver.wait(60)
    driver.certify("pirate", POET)
    assert pins(driver) == [("r0", (POET,))]
    assert not driver.of(effects.DropAdapter), "another name serves the same bytes"


def test_a_runner_keeps_its_pins_until_a_scheduler_that_took_over_knows_the_adapters():
    driver = ready()
    driver.state(adapter(min_replicas=1))
    driver.attach("r0")
    assert pins(driver) == [], "nobody has told yet which digest it has"
    driver.certify()
    assert pins(driver) == [("r0", (PIRATE,))]
    driver.send(events.TermRaised())
    driver.wait(1)
    assert pins(driver) == [("r0", (PIRATE,))], "it has ignored what came under the lower term"
    driver.detach("r0")
    driver.attach("r0")
    assert pins(driver) == [("r0", (PIRATE,))]


def test_the_replicas_of_an_adapter_are_reported_when_they_change():
    driver = with_pirate()
    driver.report("r0", resident=resident(PIRATE, Tier.DEVICE))
    (report,) = driver.of(effects.ReportAdapter)
    assert report.replicas == (("r0", Tier.DEVICE, PIRATE),)
    assert report.state is AdapterReadiness.READY
    driver.report("r0", resident=resident(PIRATE, Tier.DEVICE))
    assert not driver.of(effects.ReportAdapter)


def test_an_operator_that_connects_gets_every_report():
    driver = with_pirate()
    driver.wait(0.1)
    driver.send(events.OperatorConnected())
    assert [type(effect) for effect in driver.effects] == [
        effects.ReportAdapter,
        effects.ReportDesiredReplicas,
        effects.ReportRunner,
    ]
    assert driver.of(effects.ReportDesiredReplicas)[0].replicas == 1


def test_a_delta_changes_only_what_it_names():
    driver = with_pirate()
    driver.send(events.CatalogUpdated(adapters=(adapter("poet"),)))
    assert set(published(driver)) == {"pirate", "poet"}
    driver.send(events.CatalogUpdated(removed_adapters=(adapter().ref,)))
    assert set(published(driver)) == {"poet"}


def remote(**how):
    """An adapter of a hub, as the operator states it."""
    key = {"source": "hf://org/pirate", "source_revision": "main", "credentials": "tenant-a/token"}
    key |= {"volume": "file:///volumes/shared", "folder": "tenant-a"}
    key |= {"requires_record": True, "refuses_mismatch": True}
    limits = {name: how.pop(name) for name in ("max_bytes", "min_replicas") if name in how}
    return adapter(revision=RevisionKey(**(key | how)), **limits)


def test_an_order_has_everything_that_reading_the_bytes_needs():
    driver = ready()
    driver.attach()
    driver.state(remote(max_bytes=1000, min_replicas=1))
    (check,) = checks(driver)
    driver.certify()
    (load,) = [effect for effect in driver.of(effects.EnsureAdapter) if effect.stage is AdapterStage.DEVICE]
    for order in (check, load):
        assert (order.source, order.source_revision) == ("hf://org/pirate", "main")
        assert (order.credentials, order.max_bytes) == ("tenant-a/token", 1000)
        assert (order.volume, order.folder) == ("file:///volumes/shared", "tenant-a")
        assert (order.requires_record, order.refuses_mismatch) == (True, True)


@pytest.mark.parametrize(
    "change",
    [
        *({"source_revision": "v2"}, {"expected_digest": POET}, {"credentials": "tenant-a/other"}),
        *({"source": "hf://org/b"}, {"folder": "b"}, {"requires_record": False}, {"refuses_mismatch": False}),
    ],
)
def test_a_changed_source_digest_credential_limit_or_demand_is_a_new_revision(change):
    driver = ready()
    driver.attach()
    driver.state(remote())
    driver.certify()
    driver.state(remote(**change))
    (check,) = checks(driver)
    assert check.source_revision == change.get("source_revision", "main")
    driver.state(remote())
    driver.certify()
    assert not checks(driver), "the first certified revision is wanted again"


def test_a_raised_bound_of_a_pool_lets_a_refused_adapter_be_checked_again():
    driver = ready()
    driver.attach()
    driver.state(remote(max_bytes=10))
    driver.certify(
        digest="", stage=AdapterStage.NONE, certificate=None, failure=Failure("adapter_fetch_failed", "too large")
    )
    driver.wait(60)
    assert not checks(driver)
    driver.state(remote(max_bytes=100))
    assert checks(driver)


def test_a_long_download_that_is_reported_is_not_ordered_again():
    driver = ready()
    driver.attach()
    driver.state(remote())
    for _ in range(5):
        driver.wait(8)
        assert not checks(driver)
        driver.certify(digest="", stage=AdapterStage.NONE, certificate=None)
    driver.certify()
    assert published(driver)["pirate"].digest == PIRATE


def test_a_stream_that_breaks_for_a_moment_moves_no_adapter():
    """The operator writes each report into a status: a report back and forth would cost two writes per adapter."""
    driver = with_pirate()
    driver.report(resident=resident(PIRATE))
    driver.detach()
    assert not driver.of(effects.ReportAdapter)
    driver.attach(resident=resident(PIRATE))
    assert not driver.of(effects.ReportAdapter)


def test_adapters_that_a_runner_has_lost_when_it_attaches_again_are_reported():
    driver = with_pirate()
    driver.report(resident=resident(PIRATE))
    driver.detach()
    driver.attach()
    (report,) = driver.of(effects.ReportAdapter)
    assert report.replicas == ()
    driver.report(resident=resident(PIRATE))
    driver.detach()
    driver.attach(incarnation="2")
    assert driver.of(effects.ReportAdapter)[-1].replicas == ()


def test_a_runner_that_stays_away_holds_no_adapter():
    driver = with_pirate()
    driver.report(resident=resident(PIRATE))
    driver.detach()
    driver.wait(driver.scheduler.config.forget_runner + 1)
    (report,) = driver.of(effects.ReportAdapter)
    assert report.replicas == ()


def test_a_new_scheduler_reports_an_adapter_only_after_a_runner_did():
    """The new scheduler has no saved state. The operator knows the old reports, and would take them all back."""
    successor = ready()
    successor.send(events.OperatorConnected())
    successor.state(adapter())
    assert not successor.of(effects.ReportAdapter)
    successor.attach(resident=resident(PIRATE))
    assert not successor.of(effects.ReportAdapter)
    successor.certify()
    (report,) = successor.of(effects.ReportAdapter)
    assert report.serving == PIRATE
    assert [tier for _, tier, _ in report.replicas] == [Tier.DEVICE]


def test_a_new_operator_hears_when_it_has_heard_all():
    successor = SchedulerDriver()
    successor.send(events.OperatorConnected())
    assert not told_all(successor), "the catalog is not known"
    successor.state(adapter())
    assert not told_all(successor), "its runner is not back"
    successor.attach(resident=resident(PIRATE))
    assert not told_all(successor), "the runner holds it, and has not been asked what it is"
    successor.certify()
    assert told_all(successor) == (GROUP,)
    assert not told_all(successor), "once"
    successor.send(events.OperatorConnected())
    assert told_all(successor), "but each operator"


def test_a_new_operator_hears_that_it_has_heard_all_group_by_group():
    other, asleep = GroupName("default/other"), GroupName("default/asleep")
    successor = SchedulerDriver()
    successor.send(events.OperatorConnected())
    successor.state(pools=(pool(), pool(pool="b", group=other), pool(pool="c", group=other, replicas=0)))
    assert not told_all(successor), "no runner is back"
    successor.attach()
    assert told_all(successor) == (GROUP,)
    successor.wait(successor.scheduler.config.report_patience + 0.1)
    assert successor.of(effects.ReportedAll) == [effects.ReportedAll((other,))], "one that stays away: only for a while"
    successor.state(pools=(pool(), pool(pool="d", group=asleep, replicas=0)))
    assert told_all(successor) == (asleep,), "a new one"
    successor.state(pools=(pool(), pool(pool="b", group=other)))
    assert told_all(successor) == (other,), "one that comes back"


def test_runners_that_never_came_withhold_nothing_from_a_later_operator():
    driver = ready()
    driver.state(adapter(), pools=(pool(replicas=3),))
    driver.wait(driver.scheduler.config.report_patience + 0.1)
    driver.send(events.OperatorConnected())
    assert told_all(driver) == (GROUP,)


def test_a_scheduler_that_waits_for_its_runners_has_not_told_all():
    saved = with_pirate().scheduler.catalog_to_save()
    successor = SchedulerDriver(saved=saved)
    successor.send(events.OperatorConnected())
    successor.state(adapter())
    assert not told_all(successor)
    successor.attach(resident=resident(PIRATE))
    assert told_all(successor)


def test_a_check_that_never_ends_withholds_from_a_new_operator_only_for_a_while():
    driver = ready(forget_runner=30.0)
    driver.attach()
    driver.state(adapter())
    driver.send(events.OperatorConnected())
    for _ in range(6):
        assert not told_all(driver)
        driver.certify(stage=AdapterStage.NONE, certificate=None)  # progress
        driver.wait(4.9)
    assert told_all(driver)
    assert not told_all(driver), "once"


def test_a_new_operator_waits_for_all_checks_as_long_as_they_are_answered_in_bounded_time():
    driver = ready(forget_runner=30.0)
    driver.attach()
    driver.state(*(adapter(f"a{each}") for each in range(10)))
    driver.send(events.OperatorConnected())
    for each in range(4):
        driver.wait(25.0)
        driver.certify(f"a{each}", "sha256:" + f"{each:064x}")
        assert not told_all(driver)
    driver.wait(19.0)
    assert not driver.of(effects.ReportedAll)
    driver.wait(1.0)
    assert driver.of(effects.ReportedAll), "two minutes after it connected"


def test_a_runner_makes_up_for_none_of_another_pool_nor_one_that_drains():
    successor = SchedulerDriver()
    successor.send(events.OperatorConnected())
    successor.state(pools=(pool(), pool(pool="default/more")))
    for instance in ("r0", "surge"):
        successor.attach(instance)
    assert not told_all(successor), "the other pool's is still away"
    successor.attach("r2", pool="default/more")
    identity = successor.scheduler.runners[InstanceName("r2")].identity
    successor.send(events.DrainsDeclared((events.DrainRequested(identity, 10.0),)))
    assert not told_all(successor), "it drains, and its successor is still away"
    successor.attach("r3", pool="default/more")
    assert told_all(successor) == (GROUP,)


@pytest.mark.parametrize("takes_none", ["drains", "is unhealthy"])
def test_an_adapter_that_no_runner_can_check_now_withholds_nothing_from_a_new_operator(takes_none):
    driver = ready()
    driver.attach()
    driver.state(adapter(), pools=(pool(replicas=0),))
    driver.send(events.OperatorConnected())
    identity = driver.scheduler.runners[InstanceName("r0")].identity
    if takes_none == "drains":
        driver.send(events.DrainsDeclared((events.DrainRequested(identity, 10.0),)))
    else:
        driver.send(events.RunnerUnhealthy(identity, "no heartbeat", hung=False))
    assert told_all(driver)


def told_all(driver):
    """The groups of which the operator is told at the next tick, after what pools need; None: of none."""
    driver.wait(0.1)
    return next((effect.groups for effect in driver.effects if isinstance(effect, effects.ReportedAll)), None)


def test_a_report_that_is_no_longer_true_is_sent_again():
    driver = ready()
    driver.attach()
    driver.state(adapter())
    driver.certify(
        digest="", stage=AdapterStage.NONE, certificate=None, failure=Failure("adapter_incompatible", "no config")
    )
    driver.state(adapter(stamp="2"))
    (report,) = driver.of(effects.ReportAdapter)
    assert report.failure is None
    driver.send(events.OperatorConnected())
    assert driver.of(effects.ReportAdapter) == [report]


@settings(
    deadline=None, max_examples=10, phases=[Phase.generate]
)  # Hypothesis needs minutes to shrink a hundred changes
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(("1", "2", "3", SUSPENDED)), st.sampled_from((0.0, 0.01, 0.3, 4.0))),
        min_size=100,
        max_size=100,
    ),
    last=st.sampled_from(("1", "2", "3")),
)
def test_row_15_an_adapter_that_flips_a_hundred_times_is_checked_three_times_and_once_in_ten_seconds(changes, last):
    driver = ready()
    driver.attach()
    ordered = []
    asked = None

    def note():
        nonlocal asked
        for _ in checks(driver):
            ordered.append(driver.clock())
            asked = stated

    for stated, seconds in (*changes, (last, 0.0)):
        driver.state(*([adapter(stamp=stated)] if stated else []))
        note()
        driver.wait(seconds)
        note()
        if asked is not None:
            driver.certify(digest=digest_of(asked))
            asked = None
            note()
    for begin, since in enumerate(ordered):
        for more, until in enumerate(ordered[begin:], 1):
            assert more <= 3 + (until - since) / 10 + 1e-6, ordered
    for _ in range(3):
        if asked is not None:
            driver.certify(digest=digest_of(asked))
            asked = None
        driver.wait(5)
        note()
    assert published(driver)["pirate"].digest == digest_of(last)
    assert driver.scheduler.adapters.by_name[adapter().ref.object].resolved


def digest_of(stamp):
    return Digest("sha256:" + stamp * 64)


def test_a_temporary_failure_is_retried_after_its_own_delay_each_time():
    driver = ready()
    driver.attach()
    driver.state(adapter())
    for _ in range(10):
        away = Failure("adapter_fetch_failed", "away", 1.0)
        driver.certify(digest="", stage=AdapterStage.NONE, certificate=None, failure=away)
        driver.wait(1)
        assert checks(driver)


def stated(*adapters, pools):
    snapshot = scheduler_pb2.CatalogSnapshot(pools=pools, adapters=adapters)
    return conversion.sync_event(scheduler_pb2.SyncUp(snapshot=snapshot))


def test_the_catalog_says_who_may_use_which_adapter_and_how_answers_are_read():
    driver = ready()
    driver.attach()
    own, others = (
        scheduler_pb2.ChatFormats(tool="mistral", reasoning="think"),
        scheduler_pb2.ChatFormats(tool="a newer one", request_templates=True),
    )
    entry = scheduler_pb2.AdapterEntry(ref=REF, group=GROUP, model_name="pirate", share=["acme", "zeta"], chat=own)
    classes = {"*": common_pb2.REQUEST_CLASS_BATCH, "acme": common_pb2.REQUEST_CLASS_INTERACTIVE}
    pool = scheduler_pb2.PoolEntry(pool=GROUP, tenants=["*"], max_classes=classes, chat=others)
    driver.send(stated(entry, pools=[pool]))
    published_catalog = conversion.catalog(driver.scheduler.catalog, CatalogRevision(1, 1)).catalog
    assert [list(one.share) for one in published_catalog.adapters] == [["acme", "zeta"]]
    assert [list(one.tenants) for one in published_catalog.groups] == [["*"]]
    assert [dict(one.max_classes) for one in published_catalog.groups] == [classes]
    assert [one.chat for one in (*published_catalog.adapters, *published_catalog.groups)] == [own, others]


def test_without_a_share_list_an_adapter_is_not_shared():
    driver = ready()
    driver.attach()
    entry = scheduler_pb2.AdapterEntry(ref=REF, group=GROUP, model_name="pirate")
    driver.send(stated(entry, pools=[scheduler_pb2.PoolEntry(pool=GROUP)]))
    published_catalog = conversion.catalog(driver.scheduler.catalog, CatalogRevision(1, 1)).catalog
    assert not published_catalog.adapters[0].share
    assert not published_catalog.groups[0].tenants


def test_a_changed_share_list_changes_no_revision_and_ends_no_request():
    driver = with_pirate(share=("acme",))
    driver.gateway()
    driver.enqueue("a", digest=PIRATE, tenant="acme")
    assert driver.where("a") == "r0"
    decided = driver.state(adapter(share=()))
    assert [type(effect) for effect in decided] == [effects.SaveCatalog, effects.PublishCatalog]
    assert published(driver)["pirate"].share == ()
    assert published(driver)["pirate"].digest == PIRATE
    driver.attach("r1")
    driver.detach("r0")
    driver.lose("a")
    assert driver.where("a") == "r1", (
        "a running request is placed again, also if its tenant may no longer use the adapter"
    )


def with_twins():
    """Two tenants have the same bytes, each from a source and with a Secret of its own."""
    driver = ready()
    driver.attach()
    specs = []
    for tenant in ("acme", "zeta"):
        key = RevisionKey(source=f"https://{tenant}.example/pirate/", credentials=f"{tenant}/token")
        specs.append(adapter(namespace=tenant, model_name=f"{tenant}-pirate", revision=key))
    driver.state(*specs)
    for spec in specs:
        driver.certify(ref=spec.ref)
    return driver, specs


def loads(driver):
    found = [effect for effect in driver.of(effects.EnsureAdapter) if effect.stage is AdapterStage.DEVICE]
    return [(effect.ref.namespace, effect.source, effect.credentials) for effect in found]


ACME, ZETA = ((tenant, f"https://{tenant}.example/pirate/", f"{tenant}/token") for tenant in ("acme", "zeta"))


def test_equal_bytes_of_two_tenants_are_ordered_from_the_source_of_whose_adapter_is_asked_for():
    driver, _ = with_twins()
    driver.enqueue("a", tenant="acme", digest=PIRATE, adapter="acme/pirate")
    assert loads(driver) == [ACME]
    driver.enqueue("b", tenant="zeta", digest=PIRATE, adapter="zeta/pirate")
    assert loads(driver) == [ZETA], "another one's order may fail where its own does not"
    driver.enqueue("c", tenant="zeta", digest=PIRATE, adapter="zeta/pirate")
    assert not loads(driver)


def test_a_load_that_fails_for_one_tenant_is_still_under_way_for_another():
    driver, specs = with_twins()
    driver.enqueue("a", tenant="acme", digest=PIRATE, adapter="acme/pirate")
    driver.enqueue("b", tenant="zeta", digest=PIRATE, adapter="zeta/pirate")
    failure = Failure("adapter_fetch_failed", "expired", 300.0, "CredentialsInvalid")
    driver.certify(ref=specs[0].ref, stage=AdapterStage.NONE, failure=failure, ordered_stage=AdapterStage.DEVICE)
    driver.enqueue("c", tenant="zeta", digest=PIRATE, adapter="zeta/pirate")
    assert not loads(driver)
    driver.enqueue("d", tenant="acme", digest=PIRATE, adapter="acme/pirate")
    assert loads(driver) == [ACME]


def test_a_revision_that_is_replaced_is_ordered_from_its_own_source_as_long_as_requests_use_it():
    driver, (_, zeta) = with_twins()
    driver.detach()
    driver.enqueue("a", tenant="acme", digest=PIRATE, adapter="acme/pirate")
    driver.state(zeta)
    driver.attach(incarnation="2")
    assert driver.where("a") == "r0"
    assert loads(driver) == [ACME]
    driver.finish("a")
    assert not driver.of(effects.DropAdapter), "another name serves the same bytes"


def test_a_request_whose_adapter_is_gone_is_not_served_from_another_tenants_source():
    driver, (_, zeta) = with_twins()
    driver.state(zeta)
    driver.enqueue("a", tenant="acme", digest=PIRATE, adapter="acme/pirate")
    assert [effect.failure.code for effect in driver.of(effects.SendRefused)] == ["model_not_found"]
    driver.enqueue("b", tenant="acme", digest=PIRATE)
    assert not driver.of(effects.SendRefused), "a gateway of an earlier version does not say whose adapter it is"


def test_runners_are_told_of_each_manifest_that_goes():
    driver, (acme, zeta) = with_twins()
    driver.attach("r1")
    driver.state(zeta)
    gone = [(effect.instance, effect.ref) for effect in driver.of(effects.ForgetManifest)]
    assert gone == [("r0", acme.ref), ("r1", acme.ref)]
    drop = conversion.runner_message(driver.of(effects.ForgetManifest)[0], 3).drop
    assert (drop.digest, drop.adapter.namespace, drop.term) == ("", "acme", 3)
    driver.state(zeta)
    assert not driver.of(effects.ForgetManifest)


def namespaces_of(driver: SchedulerDriver) -> dict[str, str]:
    said = conversion.catalog(driver.scheduler.catalog, CatalogRevision(1, 1)).catalog.namespaces
    return {namespace.name: namespace.uid for namespace in said}


def test_gateways_hear_which_namespaces_exist_whenever_they_change():
    driver = ready()
    driver.attach()
    assert namespaces_of(driver) == {}
    for uid in ("first", "second"):
        said = [scheduler_pb2.Namespace(name="acme", uid=uid), scheduler_pb2.Namespace(name="zeta", uid="z")]
        pools = [scheduler_pb2.PoolEntry(pool=GROUP)]
        snapshot = scheduler_pb2.CatalogSnapshot(pools=pools, namespaces=said)
        decided = driver.send(conversion.sync_event(scheduler_pb2.SyncUp(snapshot=snapshot)))
        assert {effects.SaveCatalog, effects.PublishCatalog} <= {type(effect) for effect in decided}
        assert namespaces_of(driver) == {"acme": uid, "zeta": "z"}
    driver.send(events.CatalogUpdated())
    assert namespaces_of(driver) == {"acme": "second", "zeta": "z"}, "a change says nothing about them"


def test_adapters_that_serve_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of one load among ten thousand adapters must not cost more than one among ten."""
    driver = with_pirate()
    driver.wait(1)
    looked = []
    monkeypatch.setattr(driver.scheduler, "check", lambda: None)
    monkeypatch.setattr(Adapter, "resolved", property(lambda self: looked.append(self) or True))
    driver.wait(5)
    driver.certify(order=999)
    assert looked == []
    driver.state(adapter(stamp="2"))
    assert looked, "another revision is to be checked"
