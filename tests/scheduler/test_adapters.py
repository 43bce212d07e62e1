"""Revisions of adapters: checked before they serve, dropped when nothing needs them, kept where they are wanted."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest
from motet.runner_info import Failure, Tier
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import AdapterReadiness, AdapterStage, RevisionKey
from tests.scheduler.builders import GROUP, PIRATE, POET, SchedulerDriver, adapter, ready, resident

REF = common_pb2.AdapterRef(namespace="default", name="pirate", generation=1)
SUSPENDED = ""
STAYS = Digest("sha256:" + "c" * 64)


def published(told):
    return {one.model_name: one for one in told.scheduler.catalog.adapters}


def checks(told):
    return [effect for effect in told.of(effects.EnsureAdapter) if effect.stage is AdapterStage.CERTIFIED]


def with_pirate(**how):
    told = ready()
    told.attach()
    told.state(adapter(**how))
    told.certify()
    return told


def test_a_new_adapter_is_checked_by_one_runner_and_then_serves():
    told = ready()
    told.attach("r0")
    told.attach("r1")
    told.state(adapter())
    (order,) = checks(told)
    assert order.source == "file:///adapters/pirate"
    assert published(told)["pirate"].state is AdapterReadiness.LOADING
    told.certify(instance=order.instance)
    assert published(told)["pirate"].digest == PIRATE
    assert published(told)["pirate"].state is AdapterReadiness.COLD
    assert published(told)["pirate"].rank == 8


def test_with_no_runner_up_the_check_waits_for_one():
    told = ready()
    told.state(adapter())
    assert not checks(told)
    told.attach()
    assert checks(told)


def test_checks_are_spread_over_runners_and_few_at_a_time():
    told = ready()
    told.attach("r0")
    told.attach("r1")
    told.state(*(adapter(f"a{n}") for n in range(20)))
    orders = checks(told)
    assert len(orders) == 8
    assert {order.instance for order in orders} == {"r0", "r1"}


def test_a_check_whose_runner_goes_is_given_to_another():
    told = ready()
    told.attach("r0")
    told.state(adapter())
    told.detach("r0")
    told.attach("r1")
    assert [order.instance for order in checks(told)] == ["r1"]


def test_an_unanswered_check_is_ordered_again():
    told = ready(load_retry=10.0)
    told.attach()
    told.state(adapter())
    told.wait(11)
    assert checks(told)


def test_changed_bytes_serve_only_once_they_are_certified():
    told = with_pirate()
    told.state(adapter(stamp="2"))
    assert checks(told)
    assert published(told)["pirate"].digest == PIRATE
    told.certify(digest=POET)
    assert published(told)["pirate"].digest == POET


def test_a_failed_revision_never_takes_over_and_is_reported():
    told = with_pirate()
    told.state(adapter(stamp="2"))
    told.certify(
        digest="", stage=AdapterStage.NONE, certificate=None, failure=Failure("adapter_incompatible", "no config")
    )
    report = told.of(effects.ReportAdapter)[-1]
    assert (report.serving, report.failure.code) == (PIRATE, "adapter_incompatible")
    assert published(told)["pirate"].digest == PIRATE
    told.wait(60)
    assert not checks(told), "the same bytes would fail again"


def test_a_failure_that_may_pass_is_tried_again_after_its_own_delay():
    told = ready()
    told.attach()
    told.state(adapter())
    told.certify(
        digest="", stage=AdapterStage.NONE, certificate=None, failure=Failure("adapter_fetch_failed", "away", 5.0)
    )
    assert published(told)["pirate"].state is AdapterReadiness.FAILED
    told.wait(4)
    assert not checks(told)
    told.wait(2)
    assert checks(told)


def test_bytes_that_change_during_their_check_are_checked_again():
    told = ready()
    told.attach()
    told.state(adapter(stamp="1"))
    told.state(adapter(stamp="2"))
    assert not checks(told), "one at a time"
    told.certify()
    assert published(told)["pirate"].digest == ""
    assert checks(told)
    told.certify(digest=POET)
    assert published(told)["pirate"].digest == POET


def test_news_of_a_load_is_not_taken_for_the_answer_of_a_check():
    told = with_pirate()
    told.state(adapter(stamp="2"))
    told.certify(digest=PIRATE, stage=AdapterStage.DEVICE, answered_order=AdapterStage.NONE)
    told.certify(digest=PIRATE, stage=AdapterStage.DEVICE, answered_order=AdapterStage.DEVICE)
    told.certify(digest=POET)
    assert published(told)["pirate"].digest == POET


def test_a_removed_adapter_is_dropped_at_once_when_nothing_uses_it():
    told = with_pirate()
    told.state()
    assert [(effect.instance, effect.digest) for effect in told.of(effects.DropAdapter)] == [("r0", PIRATE)]
    assert not published(told)


def test_adapters_that_are_removed_together_are_dropped_together():
    told = ready()
    told.attach()
    told.state(adapter("pirate"), adapter("poet"), adapter("stays"))
    for name, digest in (("pirate", PIRATE), ("poet", POET), ("stays", STAYS)):
        told.certify(name, digest)
    told.state(adapter("stays"))
    assert [effect.digest for effect in told.of(effects.DropAdapter)] == [PIRATE, POET]


def test_a_bound_that_changes_while_another_adapter_is_removed_is_sent_to_runners():
    told = ready()
    told.attach()
    told.state(remote(max_bytes=1000), adapter("poet"))
    told.certify()
    told.certify("poet", POET)
    told.state(remote(max_bytes=2000))
    told.enqueue("a", digest=PIRATE)
    (load,) = [effect for effect in told.of(effects.EnsureAdapter) if effect.stage is AdapterStage.DEVICE]
    assert load.max_bytes == 2000


def test_a_removed_adapter_in_use_is_dropped_when_its_last_request_ends():
    told = with_pirate()
    told.enqueue("a", digest=PIRATE)
    told.state()
    assert not told.of(effects.DropAdapter)
    told.finish("a")
    assert told.of(effects.DropAdapter)


def test_a_request_that_waits_keeps_its_revision_too():
    told = with_pirate()
    told.detach()
    told.enqueue("a", digest=PIRATE)
    told.state(adapter(stamp="2"))
    told.attach(incarnation="2")
    assert told.where("a") == "r0"
    assert told.of(effects.EnsureAdapter)[0].source


def test_the_old_revision_is_dropped_once_the_new_one_serves():
    told = with_pirate()
    told.state(adapter(stamp="2"))
    told.certify(digest=POET)
    assert [effect.digest for effect in told.of(effects.DropAdapter)] == [PIRATE]


def test_two_names_for_the_same_bytes_keep_them_until_both_are_gone():
    told = ready()
    told.attach()
    told.state(adapter(), adapter("twin"))
    told.certify()
    told.certify("twin", PIRATE)
    told.state(adapter("twin"))
    assert not told.of(effects.DropAdapter)
    told.state()
    assert told.of(effects.DropAdapter)


def test_resident_adapters_that_nothing_needs_are_dropped():
    told = ready()
    told.attach(resident=(resident(PIRATE),))
    assert [effect.digest for effect in told.of(effects.DropAdapter)] == [PIRATE]


def test_before_the_operator_has_spoken_nothing_is_dropped():
    told = SchedulerDriver()
    told.attach(resident=(resident(PIRATE),))
    assert not told.of(effects.DropAdapter)


def test_min_replicas_are_kept_on_devices():
    told = ready()
    for name in ("r0", "r1", "r2"):
        told.attach(name)
    told.state(adapter(min_replicas=2))
    told.certify()
    loads = [effect for effect in told.of(effects.EnsureAdapter) if effect.stage is AdapterStage.DEVICE]
    assert [effect.instance for effect in loads] == ["r0", "r1"]
    for name in ("r0", "r1"):
        told.report(name, resident=(resident(PIRATE),))
    assert not told.of(effects.EnsureAdapter)
    told.detach("r1")
    told.wait(0.1)
    assert [effect.instance for effect in told.of(effects.EnsureAdapter)] == ["r2"]


def test_the_replicas_of_an_adapter_are_reported_when_they_change():
    told = with_pirate()
    told.report("r0", resident=(resident(PIRATE, Tier.DEVICE),))
    (report,) = told.of(effects.ReportAdapter)
    assert report.replicas == (("r0", Tier.DEVICE, PIRATE),)
    assert report.state is AdapterReadiness.READY
    told.report("r0", resident=(resident(PIRATE, Tier.DEVICE),))
    assert not told.of(effects.ReportAdapter)


def test_an_operator_that_connects_gets_every_report():
    told = with_pirate()
    told.wait(0.1)
    told.tell(events.OperatorConnected())
    assert [type(effect) for effect in told.effects] == [
        effects.ReportAdapter,
        effects.ReportDesiredReplicas,
        effects.ReportRunner,
    ]
    assert told.of(effects.ReportDesiredReplicas)[0].replicas == 1


def test_a_delta_changes_only_what_it_names():
    told = with_pirate()
    told.tell(events.CatalogUpdated(adapters=(adapter("poet"),)))
    assert set(published(told)) == {"pirate", "poet"}
    told.tell(events.CatalogUpdated(removed_adapters=(adapter().ref,)))
    assert set(published(told)) == {"poet"}


def remote(**how):
    """An adapter of a hub, as the operator states it."""
    key = {"source": "hf://org/pirate", "source_revision": "main", "credentials": "tenant-a/token"}
    key |= {"volume": "file:///volumes/shared", "folder": "tenant-a"}
    limits = {name: how.pop(name) for name in ("max_bytes", "min_replicas") if name in how}
    return adapter(revision=RevisionKey(**(key | how)), **limits)


def test_an_order_has_everything_that_reading_the_bytes_needs():
    told = ready()
    told.attach()
    told.state(remote(max_bytes=1000, min_replicas=1))
    (check,) = checks(told)
    told.certify()
    (load,) = [effect for effect in told.of(effects.EnsureAdapter) if effect.stage is AdapterStage.DEVICE]
    for order in (check, load):
        assert (order.source, order.source_revision) == ("hf://org/pirate", "main")
        assert (order.credentials, order.max_bytes) == ("tenant-a/token", 1000)
        assert (order.volume, order.folder) == ("file:///volumes/shared", "tenant-a")


@pytest.mark.parametrize(
    "change",
    [
        *({"source_revision": "v2"}, {"expected_digest": POET}, {"credentials": "tenant-a/other"}),
        *({"source": "hf://org/b"}, {"folder": "b"}),
    ],
)
def test_another_place_another_digest_another_key_or_other_bounds_are_a_new_revision(change):
    told = ready()
    told.attach()
    told.state(remote())
    told.certify()
    told.state(remote(**change))
    (check,) = checks(told)
    assert check.source_revision == change.get("source_revision", "main")
    told.state(remote())
    told.certify()
    assert not checks(told), "what was certified first is what is wanted again"


def test_a_raised_bound_of_a_pool_lets_a_refused_adapter_be_checked_again():
    told = ready()
    told.attach()
    told.state(remote(max_bytes=10))
    told.certify(
        digest="", stage=AdapterStage.NONE, certificate=None, failure=Failure("adapter_fetch_failed", "too large")
    )
    told.wait(60)
    assert not checks(told)
    told.state(remote(max_bytes=100))
    assert checks(told)


def test_a_long_download_that_is_reported_is_not_ordered_again():
    told = ready()
    told.attach()
    told.state(remote())
    for _ in range(5):
        told.wait(8)
        assert not checks(told)
        told.certify(digest="", stage=AdapterStage.NONE, certificate=None)
    told.certify()
    assert published(told)["pirate"].digest == PIRATE


def test_a_stream_that_breaks_for_a_moment_moves_no_adapter():
    """The operator writes what it is told: each word to and fro would be a write for each adapter there is."""
    told = with_pirate()
    told.report(resident=(resident(PIRATE),))
    told.detach()
    assert not told.of(effects.ReportAdapter)
    told.attach(resident=(resident(PIRATE),))
    assert not told.of(effects.ReportAdapter)


def test_adapters_that_a_runner_has_lost_when_it_attaches_again_are_reported():
    told = with_pirate()
    told.report(resident=(resident(PIRATE),))
    told.detach()
    told.attach()
    (report,) = told.of(effects.ReportAdapter)
    assert report.replicas == ()
    told.report(resident=(resident(PIRATE),))
    told.detach()
    told.attach(incarnation="2")
    assert told.of(effects.ReportAdapter)[-1].replicas == ()


def test_a_runner_that_does_not_come_back_is_no_place_any_more():
    told = with_pirate()
    told.report(resident=(resident(PIRATE),))
    told.detach()
    told.wait(told.scheduler.config.forget_runner + 1)
    (report,) = told.of(effects.ReportAdapter)
    assert report.replicas == ()


def test_a_successor_says_nothing_of_an_adapter_before_a_runner_has():
    """One that has no memory. The operator knows what the one before it has said, and would take all of it back."""
    heir = ready()
    heir.tell(events.OperatorConnected())
    heir.state(adapter())
    assert not heir.of(effects.ReportAdapter)
    heir.attach(resident=(resident(PIRATE),))
    assert not heir.of(effects.ReportAdapter)
    heir.certify()
    (report,) = heir.of(effects.ReportAdapter)
    assert report.serving == PIRATE
    assert [tier for _, tier, _ in report.replicas] == [Tier.DEVICE]


def test_a_report_that_is_no_longer_true_is_sent_again():
    told = ready()
    told.attach()
    told.state(adapter())
    told.certify(
        digest="", stage=AdapterStage.NONE, certificate=None, failure=Failure("adapter_incompatible", "no config")
    )
    told.state(adapter(stamp="2"))
    (report,) = told.of(effects.ReportAdapter)
    assert report.failure is None
    told.tell(events.OperatorConnected())
    assert told.of(effects.ReportAdapter) == [report]


@settings(deadline=None, max_examples=10, phases=[Phase.generate])  # a hundred changes shrink for minutes
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(("1", "2", "3", SUSPENDED)), st.sampled_from((0.0, 0.01, 0.3, 4.0))),
        min_size=100,
        max_size=100,
    ),
    last=st.sampled_from(("1", "2", "3")),
)
def test_row_15_an_adapter_that_flips_a_hundred_times_is_checked_three_times_and_once_in_ten_seconds(changes, last):
    told = ready()
    told.attach()
    ordered = []
    asked = None

    def note():
        nonlocal asked
        for _ in checks(told):
            ordered.append(told.clock())
            asked = stated

    for stated, seconds in (*changes, (last, 0.0)):
        told.state(*([adapter(stamp=stated)] if stated else []))
        note()
        told.wait(seconds)
        note()
        if asked is not None:
            told.certify(digest=digest_of(asked))
            asked = None
            note()
    for begin, since in enumerate(ordered):
        for more, until in enumerate(ordered[begin:], 1):
            assert more <= 3 + (until - since) / 10 + 1e-6, ordered
    for _ in range(3):
        if asked is not None:
            told.certify(digest=digest_of(asked))
            asked = None
        told.wait(5)
        note()
    assert published(told)["pirate"].digest == digest_of(last)
    assert told.scheduler.adapters.by_name[adapter().ref.object].resolved


def digest_of(stamp):
    return Digest("sha256:" + stamp * 64)


def test_a_failure_that_passes_is_tried_again_in_its_own_time_however_often_that_is():
    told = ready()
    told.attach()
    told.state(adapter())
    for _ in range(10):
        away = Failure("adapter_fetch_failed", "away", 1.0)
        told.certify(digest="", stage=AdapterStage.NONE, certificate=None, failure=away)
        told.wait(1)
        assert checks(told)


def stated(*adapters, pools):
    snapshot = scheduler_pb2.CatalogSnapshot(pools=pools, adapters=adapters)
    return conversion.sync_event(scheduler_pb2.SyncUp(snapshot=snapshot))


def test_the_catalog_says_who_may_use_which_adapter():
    told = ready()
    told.attach()
    entry = scheduler_pb2.AdapterEntry(ref=REF, group=GROUP, model_name="pirate", share=["acme", "zeta"])
    told.tell(stated(entry, pools=[scheduler_pb2.PoolEntry(pool=GROUP, tenants=["*"])]))
    said = conversion.catalog(told.scheduler.catalog, 1).catalog
    assert [list(one.share) for one in said.adapters] == [["acme", "zeta"]]
    assert [list(one.tenants) for one in said.groups] == [["*"]]


def test_without_a_share_list_an_adapter_is_not_shared():
    told = ready()
    told.attach()
    entry = scheduler_pb2.AdapterEntry(ref=REF, group=GROUP, model_name="pirate")
    told.tell(stated(entry, pools=[scheduler_pb2.PoolEntry(pool=GROUP)]))
    said = conversion.catalog(told.scheduler.catalog, 1).catalog
    assert not said.adapters[0].share
    assert not said.groups[0].tenants


def test_what_is_shared_or_not_changes_no_revision_and_ends_nothing():
    told = with_pirate(share=("acme",))
    told.gateway()
    told.enqueue("a", digest=PIRATE, tenant="acme")
    assert told.where("a") == "r0"
    decided = told.state(adapter(share=()))
    assert [type(effect) for effect in decided] == [effects.SaveCatalog, effects.PublishCatalog]
    assert published(told)["pirate"].share == ()
    assert published(told)["pirate"].digest == PIRATE
    told.attach("r1")
    told.detach("r0")
    told.lose("a")
    assert told.where("a") == "r1", "what runs is placed again, whoever may ask for it now"
