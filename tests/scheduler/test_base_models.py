"""A group changes its base model: no request crosses from one base model to the other."""

import orjson
import pytest
from pydantic import TypeAdapter

from motet.api.v1 import scheduler_pb2
from motet.domain import Digest, InstanceName, ObjectName
from motet.runner_info import Failure
from motet_scheduler import conversion
from motet_scheduler.conversion import CatalogRevision
from motet_scheduler.policy import effects, events, placement
from motet_scheduler.policy.catalog import SavedCatalog
from motet_scheduler.policy.replaced_bases import REFUSED_AT_ONCE
from motet_scheduler.policy.values import AdapterReadiness, AdapterStage, Certificate
from tests.scheduler.builders import PIRATE, SchedulerDriver, adapter, entry, pool, ready, reserved

OLD = "sha256:old"
NEW = "sha256:new"


def drain(driver: SchedulerDriver, *instances: str) -> None:
    driver.send(
        events.DrainsDeclared(
            tuple(
                events.DrainRequested(driver.scheduler.runners[InstanceName(one)].identity, 30.0) for one in instances
            )
        )
    )


def refused(driver: SchedulerDriver) -> dict[str, str]:
    return {effect.request: effect.failure.code for effect in driver.of(effects.SendRefused)}


def changing(**config) -> SchedulerDriver:
    """One runner of each base model; by all other rules the new one is preferred."""
    driver = ready(**config)
    driver.attach("a", base=OLD)
    driver.attach("b", base=NEW)
    return driver


def test_a_request_is_placed_only_on_its_base_model():
    driver = changing()
    for number in range(4):
        driver.enqueue(f"old{number}", base=OLD)
        driver.enqueue(f"new{number}", base=NEW)
    assert {driver.where(f"old{number}") for number in range(4)} == {"a"}
    assert {driver.where(f"new{number}") for number in range(4)} == {"b"}


def test_a_placement_names_its_base_model():
    driver = changing()
    driver.enqueue("r", base=OLD)
    assert [placed.base for placed in driver.of(effects.SendPlaced)] == [OLD]


@pytest.mark.parametrize("said", [OLD, ""], ids=["its gateway says its base model", "an older gateway does not"])
def test_a_stream_that_loses_its_runner_waits_for_its_own_base_model(said):
    driver = ready()
    driver.attach("a", base=OLD)
    driver.enqueue("r", base=said)
    driver.attach("b", base=NEW)
    driver.detach("a")
    driver.lose("r", delivered=5)
    driver.wait(5)
    assert driver.where("r") == ""
    driver.attach("a2", base=OLD)
    assert driver.where("r") == "a2"


@pytest.mark.parametrize("said", [OLD, ""], ids=["its gateway says its base model", "an older gateway does not"])
def test_a_stream_that_a_new_scheduler_finds_stays_on_its_base_model(said):
    driver = ready()
    driver.attach("a", base=OLD)
    driver.attach("b", base=NEW)
    driver.gateway("g0", driver.live("r", instance="a", base=said))
    driver.lose("r", delivered=5)
    driver.wait(5)
    assert driver.where("r") == "a", "and not on the other one, which it need not avoid"


def test_a_gateway_that_connects_says_the_base_model_of_what_runs():
    live = scheduler_pb2.LiveRequest(request="r", epoch=1, base_digest=OLD)
    (event,) = conversion.gateway_connected(scheduler_pb2.GatewayHello(gateway="g0", live=[live])).live
    assert event.base == OLD


def test_capacity_of_another_base_model_is_not_taken_for_its_own():
    driver = changing()
    driver.enqueue("big", prompt=1500, base=OLD)
    driver.enqueue("waits", prompt=1500, base=OLD)
    driver.enqueue("other", base=NEW)
    driver.finish("other")
    assert driver.where("waits") == ""
    driver.finish("big")
    assert driver.where("waits") == "a"


def test_a_request_that_only_another_base_model_could_hold_is_refused():
    driver = ready()
    driver.attach("a", base=OLD, pages=10)
    driver.attach("b", base=NEW, pages=1000)
    driver.enqueue("r", prompt=500, base=OLD)
    assert refused(driver) == {"r": "context_length_exceeded"}


def test_a_stream_whose_base_model_is_gone_everywhere_ends_with_an_error_that_says_so():
    driver = changing()
    driver.wait(31)
    driver.enqueue("r", base=OLD)
    drain(driver, "a")
    driver.lose("r", delivered=5)
    driver.wait(0.1)
    (refusal,) = driver.of(effects.SendRefused)
    assert (refusal.failure.code, refusal.failure.retry_after) == ("base_model_replaced", 1.0)
    assert "base model was replaced" in refusal.failure.message


def test_a_request_that_waits_for_a_base_model_that_is_gone_is_sent_back_to_its_gateway():
    driver = ready()
    driver.attach("b", base=NEW)
    driver.wait(31)
    driver.enqueue("r", base=OLD)
    driver.wait(0.1)
    assert refused(driver) == {"r": "base_model_replaced"}


def test_while_a_runner_of_its_base_model_may_come_back_a_request_waits():
    driver = changing(forget_runner=30.0)
    driver.detach("a")
    driver.enqueue("r", base=OLD)
    driver.wait(29)
    assert refused(driver) == {}
    driver.wait(2)
    assert refused(driver) == {"r": "base_model_replaced"}


def test_without_any_runner_that_takes_work_no_base_model_counts_as_replaced():
    driver = ready()
    driver.attach("b", base=NEW)
    driver.enqueue("r", base=OLD)
    drain(driver, "b")
    driver.wait(0.1)
    assert refused(driver) == {}


@pytest.mark.parametrize("delivered", [0, 5])
def test_after_a_start_a_request_waits_until_its_runner_had_time_to_attach(delivered):
    driver = ready(forget_runner=30.0)
    driver.attach("b", base=NEW)
    driver.enqueue("r", base=OLD, delivered=delivered, epoch=1)
    driver.wait(29)
    assert refused(driver) == {}
    driver.attach("a", base=OLD)
    assert driver.where("r") == "a"


def test_a_scheduler_that_still_waits_for_its_runners_takes_no_base_model_for_gone():
    saved = changing().scheduler.catalog_to_save()
    driver = SchedulerDriver(saved=saved, forget_runner=1.0, startup_wait=9.0)
    driver.gateway()
    driver.attach("b", base=NEW)
    driver.enqueue("r", base=OLD)
    driver.wait(8)
    assert refused(driver) == {}
    driver.attach("a", base=OLD)
    assert driver.where("r") == "a"


def test_many_requests_are_sent_back_in_parts():
    driver = ready()
    driver.attach("b", base=NEW)
    driver.wait(31)
    for number in range(REFUSED_AT_ONCE + 1):
        driver.enqueue(f"r{number}", base=OLD)
    driver.wait(0.1)
    assert len(refused(driver)) == REFUSED_AT_ONCE
    driver.wait(0.1)
    assert len(refused(driver)) == 1


def test_a_request_is_not_tried_again_because_of_room_on_another_base_model(monkeypatch):
    driver = changing()
    driver.enqueue("big", prompt=1500, base=OLD)
    driver.enqueue("waits", prompt=1500, base=OLD)
    tried = []
    choose = placement.choose
    monkeypatch.setattr(
        placement, "choose", lambda one, *args, **how: tried.append(one.id) or choose(one, *args, **how)
    )
    driver.report("b")
    assert not tried
    driver.finish("big")
    assert driver.where("waits") == "a"


def test_tenants_whose_base_model_is_away_hold_back_nobody_behind_them():
    driver = ready(tenants_examined=2)
    driver.attach("a", base=OLD)
    driver.attach("b", base=NEW, max_sequences=1)
    driver.detach("a")
    driver.enqueue("busy", base=NEW)
    for number in range(5):
        driver.enqueue(f"old{number}", tenant=f"t{number}", base=OLD)
    driver.enqueue("behind", tenant="later", base=NEW)
    driver.finish("busy")
    assert driver.where("behind") == "b"
    driver.attach("a", base=OLD)
    assert {driver.where(f"old{number}") for number in range(5)} == {"a"}


def test_no_runner_of_another_base_model_is_reserved_for_an_overdue_request():
    driver = changing(max_passed_over=2)
    driver.enqueue("big", prompt=1500, base=OLD)
    driver.enqueue("overdue", prompt=1500, base=OLD)
    for number in range(5):
        driver.enqueue(f"r{number}", tenant="others", base=NEW)
    assert {driver.where(f"r{number}") for number in range(5)} == {"b"}
    assert reserved(driver) == {}, "what another base model runs takes no room of it"
    for number in range(2):
        driver.enqueue(f"passes{number}", prompt=1, max_tokens=1, tenant=f"small{number}", base=OLD)
    assert reserved(driver) == {"a": "overdue"}
    driver.report("b", *(entry(f"r{number}", 2) for number in range(5)))
    driver.enqueue("next", tenant="others", base=NEW)
    assert reserved(driver) == {"a": "overdue"}
    assert driver.where("next") == "b"


# --------------------------------------------------------------------------------------------- what a group serves


def group_of(driver: SchedulerDriver):
    (group,) = driver.scheduler.catalog.groups
    return group


def test_a_group_serves_the_base_model_of_most_of_its_runners():
    driver = ready()
    for name in ("a", "b", "c"):
        driver.attach(name, base=OLD, assets="sha256:old-assets", max_model_length=512)
    for name in ("d", "e", "f"):
        driver.attach(name, base=NEW, assets="sha256:new-assets", max_model_length=1024)
    assert (group_of(driver).base_digest, group_of(driver).max_model_length) == (OLD, 512), "half is not most"
    drain(driver, "a")
    group = group_of(driver)
    assert (group.base_digest, group.asset_digest, group.max_model_length) == (NEW, "sha256:new-assets", 1024)
    drain(driver)
    assert group_of(driver).base_digest == NEW, "half is not most"


def test_one_runner_that_comes_back_changes_the_base_model_of_no_group():
    driver = ready()
    driver.attach("a", base=NEW)
    driver.attach("b", base=NEW)
    driver.attach("c", base=OLD)
    assert group_of(driver).base_digest == NEW
    driver.detach("c")
    driver.attach("c", base=OLD, incarnation="2")
    assert group_of(driver).base_digest == NEW


def test_a_group_in_which_no_runner_takes_work_keeps_its_base_model():
    driver = ready()
    driver.attach("a", base=OLD)
    driver.detach("a")
    driver.wait(31)
    assert group_of(driver).base_digest == OLD
    driver.attach("b", base=NEW)
    assert group_of(driver).base_digest == NEW


@pytest.mark.parametrize("leaves", ["before its pool", "after its pool", "and its pool stays"])
def test_a_pool_that_has_another_model_now_does_not_have_the_base_model_of_before(leaves):
    driver = ready()
    driver.attach("a", base=OLD)
    if leaves == "after its pool":
        driver.state(pools=())
    driver.detach("a")
    driver.state()
    if leaves == "before its pool":
        assert group_of(driver).base_digest == OLD
        driver.state(pools=())
        assert not driver.scheduler.catalog_to_save().groups
    driver.state(pools=(pool(model_uri="hf://new"),))
    assert (group_of(driver).base_digest, group_of(driver).max_model_length) == ("", 0)
    driver.attach("b", base=NEW)
    assert group_of(driver).base_digest == NEW


def test_as_long_as_runners_of_the_old_model_serve_a_group_keeps_their_base_model():
    driver = ready()
    driver.attach("a", base=OLD)
    driver.state(pools=(pool(model_uri="hf://new"),))
    assert group_of(driver).base_digest == OLD
    driver.detach("a")
    assert (group_of(driver).base_digest, group_of(driver).max_model_length) == ("", 0)


@pytest.mark.parametrize("between", [("hf://new",), ("hf://new", "hf://other"), ()])
def test_a_group_whose_pool_has_its_model_again_keeps_its_base_model_when_it_scales_to_zero(between):
    driver = ready()
    old = pool(model_uri="hf://old")
    driver.state(pools=(old,))
    driver.attach("a", base=OLD)
    for uri in between:
        driver.state(pools=(pool(model_uri=uri),))
    driver.state(pools=())
    driver.state(pools=(old,))
    driver.detach("a")
    assert group_of(driver).base_digest == OLD


def sick(driver: SchedulerDriver, instance: str) -> None:
    runner = driver.scheduler.runners[InstanceName(instance)]
    driver.send(events.RunnerUnhealthy(runner.identity, "silent", hung=False, silent_seconds=2.0))


@pytest.mark.parametrize(
    "leave",
    [
        lambda driver: driver.detach("a"),
        lambda driver: drain(driver, "a"),
        lambda driver: sick(driver, "a"),
        lambda driver: driver.send(events.RunnerShuttingDown(InstanceName("a"), "1", 30.0)),
    ],
    ids=["detached", "drained", "unhealthy", "stopping"],
)
def test_a_runner_that_takes_no_work_does_not_count(leave):
    driver = changing()
    assert group_of(driver).base_digest == OLD
    leave(driver)
    assert group_of(driver).base_digest == NEW


# ------------------------------------------------------------------------------------------------------- adapters


def published(driver: SchedulerDriver):
    (found,) = driver.scheduler.catalog.adapters
    return found


def checks(driver: SchedulerDriver) -> list[str]:
    orders = driver.of(effects.EnsureAdapter)
    return [order.instance for order in orders if order.stage is AdapterStage.CERTIFIED]


def certified(driver: SchedulerDriver, instance: str, base: str, digest: Digest = PIRATE) -> None:
    driver.certify(instance=instance, digest=digest, certificate=Certificate(digest=digest, rank=8, base_digest=base))


REFUSED = Failure("adapter_incompatible", "its tensors fit no module")


def refuse(driver: SchedulerDriver, instance: str) -> None:
    driver.certify(instance=instance, digest=Digest(""), stage=AdapterStage.NONE, certificate=None, failure=REFUSED)


def with_pirate(**how) -> SchedulerDriver:
    """An adapter that is certified for the old base model."""
    driver = ready()
    driver.attach("a", base=OLD, assets="sha256:old-assets")
    driver.state(adapter(**how))
    certified(driver, "a", OLD)
    return driver


def test_an_adapter_stays_on_its_base_model_until_it_is_certified_for_the_new_one():
    driver = with_pirate()
    driver.attach("b", base=NEW)
    assert not checks(driver), "the group still serves the old one"
    driver.attach("c", base=NEW)
    assert group_of(driver).base_digest == NEW
    (checker,) = checks(driver)
    assert checker in ("b", "c")
    (sent,) = conversion.catalog(driver.scheduler.catalog, CatalogRevision(1, 1)).catalog.adapters
    assert (sent.digest, sent.base_digest, sent.asset_digest) == (PIRATE, OLD, "sha256:old-assets")
    certified(driver, checker, NEW)
    (sent,) = conversion.catalog(driver.scheduler.catalog, CatalogRevision(1, 1)).catalog.adapters
    assert (sent.digest, sent.base_digest, sent.asset_digest) == (PIRATE, "", "")
    assert driver.of(effects.ReportAdapter)[-1].certificate.base_digest == NEW


def test_an_adapter_that_does_not_fit_the_new_base_model_serves_as_long_as_runners_have_the_old_one():
    driver = with_pirate()
    driver.attach("b", base=NEW)
    driver.attach("c", base=NEW)
    (checker,) = checks(driver)
    refuse(driver, checker)
    assert (published(driver).digest, published(driver).base.digest) == (PIRATE, OLD)
    drain(driver, "a")
    assert (published(driver).digest, published(driver).state) == ("", AdapterReadiness.FAILED)
    report = driver.of(effects.ReportAdapter)[-1]
    assert (report.serving, report.certificate, report.failure) == ("", None, REFUSED)


def test_an_adapter_of_a_base_model_that_is_gone_is_not_served_before_it_is_checked():
    driver = with_pirate()
    driver.attach("b", base=NEW)
    drain(driver, "a")
    assert checks(driver) == ["b"]
    assert (published(driver).digest, published(driver).state) == ("", AdapterReadiness.LOADING)
    assert driver.of(effects.ReportAdapter)[-1].certificate is None
    certified(driver, "b", NEW)
    assert published(driver).digest == PIRATE


def test_while_no_runner_is_up_an_adapter_keeps_its_certificate():
    driver = with_pirate()
    driver.detach("a")
    driver.wait(31)
    assert published(driver).digest == PIRATE
    driver.attach("a2", base=OLD)
    assert not checks(driver)


@pytest.mark.parametrize("base", [NEW, OLD], ids=["another base model", "the same, perhaps with other bounds"])
def test_an_adapter_that_is_made_again_under_another_pool_is_checked_by_its_runners(base):
    driver = with_pirate()
    other = pool(pool="default/other", group="default/other", served_name="other")
    driver.attach("b", base=base, group="default/other", pool="default/other")
    driver.state(adapter(group="default/other"), pools=(pool(), other))
    assert checks(driver) == ["b"]
    assert (published(driver).group, published(driver).digest) == ("default/other", "")
    report = driver.of(effects.ReportAdapter)[-1]
    assert (report.serving, report.certificate) == ("", None)
    refuse(driver, "b")
    assert published(driver).state is AdapterReadiness.FAILED


def test_what_an_adapter_served_under_another_pool_is_dropped_there_when_nobody_uses_it():
    driver = with_pirate()
    driver.enqueue("r", digest=PIRATE, adapter="default/pirate", base=OLD)
    driver.state(adapter(group="default/other"), pools=(pool(), pool(pool="default/other", group="default/other")))
    assert not driver.of(effects.DropAdapter)
    driver.finish("r")
    assert [(drop.instance, drop.digest) for drop in driver.of(effects.DropAdapter)] == [("a", PIRATE)]


def test_a_certificate_for_another_base_model_is_not_credited():
    driver = ready(load_retry=10.0)
    driver.attach("a", base=OLD)
    driver.state(adapter())
    certified(driver, "a", NEW)
    assert published(driver).digest == ""
    driver.wait(11)
    assert checks(driver) == ["a"]
    certified(driver, "a", OLD)
    assert published(driver).digest == PIRATE


def test_a_check_that_began_for_the_old_base_model_does_not_count_for_the_new_one():
    driver = ready()
    driver.attach("a", base=OLD)
    driver.state(adapter())
    driver.attach("b", base=NEW)
    drain(driver, "a")
    certified(driver, "a", OLD)
    assert published(driver).digest == ""
    assert checks(driver) == ["b"]


def test_min_replicas_are_loaded_only_where_the_adapter_is_certified():
    driver = with_pirate(min_replicas=3)
    driver.attach("b", base=NEW)
    driver.attach("c", base=NEW)
    loads = [order for order in driver.of(effects.EnsureAdapter) if order.stage is AdapterStage.DEVICE]
    assert not loads
    (checker,) = checks(driver)
    certified(driver, checker, NEW)
    loads = [order for order in driver.of(effects.EnsureAdapter) if order.stage is AdapterStage.DEVICE]
    assert {order.instance for order in loads} == {"b", "c"}


def test_a_scheduler_that_starts_again_knows_for_which_base_model_an_adapter_was_certified():
    driver = with_pirate()
    saved = TypeAdapter(SavedCatalog).validate_python(orjson.loads(orjson.dumps(driver.scheduler.catalog_to_save())))
    again = SchedulerDriver(saved=saved)
    again.attach("a", base=OLD)
    assert not checks(again)
    assert published(again).digest == PIRATE
    changed = SchedulerDriver(saved=saved)
    changed.attach("b", base=NEW)
    changed.wait(1)
    assert published(changed).digest == ""
    changed.wait(0.1)
    assert changed.scheduler.adapters.by_name[ObjectName("default", "pirate")].check is not None


def test_runners_of_the_old_base_model_do_not_count_for_the_limit_of_an_adapter_on_the_new_one():
    driver = with_pirate(max_replicas=1)
    driver.enqueue("old", digest=PIRATE, adapter="default/pirate", base=OLD)
    driver.attach("b", base=NEW)
    driver.attach("c", base=NEW)
    (checker,) = checks(driver)
    certified(driver, checker, NEW)
    driver.enqueue("new", digest=PIRATE, adapter="default/pirate", base=NEW)
    assert driver.where("old") == "a"
    assert driver.where("new") in ("b", "c")
