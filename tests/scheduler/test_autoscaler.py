"""The autoscaler: how it computes a pool's load, when it does not scale down, and when it reports."""

import sys

import pytest

from motet.domain import Digest, InstanceName, RequestId
from motet.runner_info import BatchCap, RunnerIdentity
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.adapter import Revision
from motet_scheduler.policy.adapters.adapters import Adapters
from motet_scheduler.policy.autoscaler import LATER, MAX_LOOKED_AT
from motet_scheduler.policy.catalog import SavedAdapter, SavedCatalog
from motet_scheduler.policy.values import GroupName, ScalingMode
from tests.scheduler.builders import GROUP, PIRATE, POET, SchedulerDriver, adapter, entry, pool, ready, resident

HOUR = 3600.0


def scaled(*adapters, pools=None, gateway=True, **how) -> SchedulerDriver:
    """A scheduler with one pool of 0 to 10 runners. It computes advice every second."""
    driver = SchedulerDriver(forget_runner=HOUR)
    if gateway:
        driver.gateway()
    driver.state(*adapters, pools=pools or (builtin(**how),))
    return driver


def builtin(**how):
    return pool(**({"scaling": ScalingMode.BUILTIN, "replicas": 1, "max_replicas": 10, "stabilization": 60.0} | how))


def advice_after(driver: SchedulerDriver, seconds: float = 1.0) -> list[tuple[int, str]]:
    """The advice that the scheduler sends after `seconds` seconds."""
    driver.wait(seconds)
    return [(one.replicas, one.code) for one in driver.of(effects.ReportDesiredReplicas)]


def desired(driver: SchedulerDriver, name: str = "default/demo") -> int:
    return driver.scheduler.capacity.figures[name].desired


def wait_with_reports(driver: SchedulerDriver, *instances: str, seconds: int = 61) -> None:
    """Let `seconds` seconds pass. Each second the runners report the requests of their ledgers."""
    for _ in range(seconds):
        for instance in instances:
            ledger = driver.scheduler.runners[InstanceName(instance)].ledger
            driver.report(instance, *(entry(request, pages, epoch=epoch) for (request, epoch), pages in ledger))
        driver.wait(1.0)


def test_demand_counts_running_and_waiting_requests():
    driver = scaled()
    driver.attach("r0", pages=100, max_sequences=10)
    for number in range(20):
        driver.enqueue(f"a{number}", max_tokens=16)
    assert advice_after(driver) == [(2, "Pacing")]
    figures = driver.scheduler.capacity.figures["default/demo"]
    assert (figures.running, figures.waiting, figures.serving) == (10, 10, 1)
    wait_with_reports(driver, "r0", seconds=31)
    assert desired(driver) == 3  # each runner counts with eight of its ten sequences


def test_a_runner_whose_cap_has_not_grown_yet_counts_with_what_its_target_allows():
    """It has seen one request at once. Its cap grows within seconds, and another runner would stay for minutes."""
    driver = scaled()
    driver.attach("r0", pages=100, max_sequences=64)
    cap = BatchCap(target_seconds=0.05, sequences=2, token_seconds=0.0204, alone_seconds=0.0202)
    driver.send(events.RunnerReported(instance=InstanceName("r0"), incarnation="1", batch_cap=cap))
    for number in range(8):
        driver.enqueue(f"a{number}", max_tokens=16)
    driver.wait(1.0)
    assert driver.scheduler.runners[InstanceName("r0")].sequences == 2
    assert desired(driver) == 1


def test_one_slow_runner_of_a_pool_with_an_slo_does_not_make_the_others_small():
    driver = scaled(replicas=4)
    for instance, sequences in (("r0", 32), ("r1", 32), ("r2", 32), ("r3", 1)):
        driver.attach(instance, pages=100, max_sequences=64)
        cap = BatchCap(target_seconds=0.1, sequences=sequences, token_seconds=0.09, alone_seconds=0.02)
        driver.send(events.RunnerReported(instance=InstanceName(instance), incarnation="1", batch_cap=cap))
    for number in range(40):
        driver.enqueue(f"a{number}", max_tokens=16)
    driver.wait(1.0)
    assert desired(driver) == 4, "the four are enough, and the slow one does not ask for forty"


def test_requests_that_wait_for_a_runner_with_their_adapter_ask_for_no_other_runner():
    driver = scaled(adapter(max_replicas=1))
    driver.attach("r0", pages=100, max_sequences=4)
    driver.certify()
    for number in range(40):
        driver.enqueue(f"a{number}", max_tokens=16, digest=PIRATE, adapter="default/pirate")
    advice_after(driver)
    figures = driver.scheduler.capacity.figures["default/demo"]
    assert (figures.running, figures.waiting, figures.desired) == (4, 0, 2)  # each counts with three sequences
    driver.enqueue("base", tenant="other")
    advice_after(driver)
    assert driver.scheduler.capacity.figures["default/demo"].waiting == 1


def test_of_thousands_that_wait_some_are_looked_at_and_the_others_count_as_these():
    driver = scaled(adapter(max_replicas=1))
    driver.scheduler.check = lambda: None  # it counts all requests, at each event
    driver.attach("r0", pages=100, max_sequences=4)
    driver.certify()
    base, limited = 2 * MAX_LOOKED_AT, MAX_LOOKED_AT
    for number in range(limited):
        driver.enqueue(f"a{number}", tenant="limited", max_tokens=16, digest=PIRATE, adapter="default/pirate")
    for number in range(base):
        driver.enqueue(f"b{number}", tenant=f"t{number % 7}", max_tokens=16)
    advice_after(driver)
    driver.wait(LATER)  # many positions were told first
    running = driver.scheduler.runners[InstanceName("r0")].ledger
    waiting = base - sum(request.startswith("b") for (request, _), _ in running)
    assert driver.scheduler.capacity.figures["default/demo"].waiting == pytest.approx(waiting, rel=0.01)


def test_demand_and_placement_agree_on_what_max_replicas_means_while_the_base_model_changes():
    """A runner of the old base model that has the adapter serves no request of the new one."""
    driver = scaled(adapter(max_replicas=1))
    driver.attach("old", base="sha256:old")
    driver.certify(instance="old")
    driver.report("old", resident=resident(PIRATE))
    driver.attach("new", base="sha256:new", max_sequences=1)
    driver.enqueue("busy", base="sha256:new")
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate", base="sha256:new")
    assert driver.scheduler.requests[RequestId("a")].waiting_reason == "every batch is full", "it is not limited"
    advice_after(driver)
    assert driver.scheduler.capacity.figures["default/demo"].waiting == 1
    driver.finish("busy")
    assert driver.where("a") == "new"


def test_demand_and_placement_agree_on_requests_that_no_runner_with_their_adapter_can_hold():
    driver = scaled(adapter(max_replicas=1))
    driver.attach("small", pages=4)
    driver.certify(instance="small")
    driver.report("small", resident=resident(PIRATE))
    driver.attach("large", max_sequences=1)
    driver.enqueue("busy", max_tokens=500)
    driver.enqueue("a", max_tokens=500, digest=PIRATE, adapter="default/pirate")
    assert driver.scheduler.requests[RequestId("a")].waiting_reason == "every batch is full", "it is not limited"
    advice_after(driver)
    assert driver.scheduler.capacity.figures["default/demo"].waiting == 1
    driver.finish("busy")
    assert driver.where("a") == "large"


@pytest.mark.parametrize("large_first", [True, False])
def test_of_requests_for_one_adapter_only_those_ask_for_a_runner_that_are_too_large_for_those_that_have_it(large_first):
    driver = scaled(adapter(max_replicas=1))
    driver.attach("small", pages=4, max_sequences=1)
    driver.certify(instance="small")
    driver.report("small", resident=resident(PIRATE))
    driver.attach("large", max_sequences=1)
    driver.enqueue("busy", max_tokens=500)
    driver.enqueue("runs", max_tokens=16, digest=PIRATE, adapter="default/pirate")
    sizes = [500, 16, 16] if large_first else [16, 16, 500]
    for number, max_tokens in enumerate(sizes):
        tenant = f"t{number}"
        driver.enqueue(f"a{number}", max_tokens=max_tokens, tenant=tenant, digest=PIRATE, adapter="default/pirate")
    advice_after(driver)
    assert driver.scheduler.capacity.figures["default/demo"].waiting == 1


def test_a_queue_at_an_empty_pool_asks_for_the_first_runner():
    driver = scaled(replicas=0)
    assert advice_after(driver) == [(0, "Idle")]
    driver.enqueue("a")
    assert advice_after(driver) == [(1, "Requests")]


def test_requests_that_a_gateway_cannot_read_yet_ask_for_the_first_runner():
    driver = scaled(replicas=0)
    advice_after(driver)
    driver.send(events.RequestsHeld("g0", ((GROUP, 2), (GroupName("default/other"), 5))))
    assert advice_after(driver) == [(1, "HeldRequests")]
    assert driver.scheduler.capacity.figures["default/demo"].held == 2
    driver.send(events.RequestsHeld("g0", ()))
    advice_after(driver)
    assert driver.scheduler.capacity.figures["default/demo"].held == 0


def test_held_requests_are_forgotten_when_their_gateway_disconnects_or_connects_again():
    for event in (events.GatewayDisconnected("g0"), events.GatewayConnected("g0")):
        driver = scaled(replicas=0)
        driver.gateway("g1")
        driver.send(events.RequestsHeld("g0", ((GROUP, 2),)))
        driver.send(event)
        assert advice_after(driver) == [(0, "Idle")]


def test_an_idle_pool_scales_to_zero_after_its_window_and_remembers_its_capacity():
    driver = scaled()
    driver.attach("r0", pages=100, max_sequences=4)
    advice_after(driver)
    wait_with_reports(driver, "r0")
    assert desired(driver) == 0
    driver.state(pools=(builtin(replicas=0),))
    driver.send(events.DrainsDeclared((events.DrainRequested(RunnerIdentity(instance="r0"), 1.0),)))
    driver.detach("r0")
    for number in range(9):
        driver.enqueue(f"a{number}", max_tokens=16)
    assert driver.scheduler.requests[RequestId("a0")].waiting_reason == "no runner of this model is up"
    assert advice_after(driver) == [(1, "Pacing")]
    assert "3 runners" in driver.of(effects.ReportDesiredReplicas)[0].reason


def test_a_starting_runner_is_no_capacity_and_asks_for_no_more():
    driver = scaled()
    driver.attach("r0", pages=100, max_sequences=4)
    for number in range(6):
        driver.enqueue(f"a{number}", max_tokens=16)
    assert advice_after(driver) == [(2, "Requests")]
    driver.state(pools=(builtin(replicas=2),))
    wait_with_reports(driver, "r0", seconds=50)
    assert desired(driver) == 2


def test_an_unexplained_long_wait_asks_for_one_more_runner():
    driver = scaled()
    driver.attach("r0", pages=100)
    driver.enqueue("a", max_tokens=200, q80=1)  # its promise is small
    driver.report("r0", entry("a", 100))  # and it has grown to all pages
    driver.enqueue("b", max_tokens=32, q80=16, deadline=300.0)
    assert advice_after(driver) == [(1, "Requests")] or desired(driver) == 2
    wait_with_reports(driver, "r0", seconds=6)
    assert desired(driver) == 2


def test_adapters_in_use_need_slots_and_resident_ones_need_runners():
    driver = scaled(adapter("pirate"), adapter("poet"))
    driver.attach("r0", pages=100, adapter_slots=1)
    driver.certify("pirate", PIRATE)
    driver.certify("poet", POET)
    driver.enqueue("a", max_tokens=16, digest=PIRATE)
    driver.enqueue("b", max_tokens=16, digest=POET)
    assert advice_after(driver)[-1] == (2, "Adapters")
    resident = scaled(adapter("pirate", min_replicas=3))
    resident.attach("r0", pages=100)
    advice_after(resident)
    wait_with_reports(resident, "r0", seconds=31)
    assert desired(resident) == 3


def test_that_many_adapters_are_in_use_costs_no_look_at_each():
    def calls(count: int) -> int:
        specs = [adapter(f"a{number}") for number in range(count)]
        serving = [Revision(key=one.revision, digest=Digest(f"sha256:{n:064}")) for n, one in enumerate(specs)]
        saved = [SavedAdapter(spec=one, serving=revision) for one, revision in zip(specs, serving, strict=True)]
        driver, found = SchedulerDriver(saved=SavedCatalog(pools=(builtin(),), adapters=tuple(saved))), []
        for number, revision in enumerate(serving):
            driver.enqueue(f"{number}", digest=revision.digest, adapter=f"default/a{number}")
        driver.wait(1.0)
        sys.setprofile(lambda _frame, event, _argument: found.append(event))
        try:
            adapters = driver.scheduler.capacity._adapters()  # noqa: SLF001
        finally:
            sys.setprofile(None)
        assert adapters[GROUP].slots == count
        return len(found)

    assert calls(40) == calls(10)


def test_adapters_that_nobody_uses_are_not_looked_at(monkeypatch):
    driver = scaled(adapter("pirate"), adapter("poet"), adapter("pinned", min_replicas=2), cold_wait=HOUR)
    driver.attach("r0", pages=100, adapter_slots=1)
    driver.certify("pirate", PIRATE)
    driver.certify("poet", POET)
    driver.enqueue("a", max_tokens=16, digest=PIRATE)
    monkeypatch.setattr(Adapters, "__iter__", lambda _: pytest.fail("all adapters"))
    wait_with_reports(driver, "r0", seconds=61)
    assert desired(driver) == 3, "a slot for the one in use, and two for the one that is pinned"


def test_no_runner_leaves_while_one_does_not_report_or_no_gateway_is_connected():
    driver = scaled()
    driver.attach("r0")
    advice_after(driver)
    driver.wait(HOUR)
    assert desired(driver) == 1
    driver.report("r0")
    driver.wait(1.0)
    wait_with_reports(driver, "r0")
    assert desired(driver) == 0

    alone = scaled(gateway=False)
    alone.attach("r0")
    assert advice_after(alone) == [(1, "NoGateway")]
    assert alone.of(effects.ReportDesiredReplicas)[0].stale
    wait_with_reports(alone, "r0", seconds=200)
    assert desired(alone) == 1


def test_no_runner_leaves_while_an_undrained_runner_is_away():
    driver = scaled(replicas=2)
    driver.attach("r0")
    driver.attach("r1")
    advice_after(driver)
    driver.detach("r1")
    wait_with_reports(driver, "r0", seconds=200)
    assert desired(driver) == 2
    assert driver.scheduler.capacity.figures["default/demo"].serving == 1
    driver.attach("r1", incarnation="2")
    driver.send(events.DrainsDeclared((events.DrainRequested(RunnerIdentity(instance="r1"), 1.0),)))
    driver.detach("r1", incarnation="2")
    wait_with_reports(driver, "r0")
    assert desired(driver) == 0


def test_no_runner_leaves_during_a_rollout():
    driver = scaled(replicas=2)
    driver.attach("r0", revision="old")
    driver.attach("r1", revision="new")
    wait_with_reports(driver, "r0", "r1", seconds=200)
    assert desired(driver) == 2


def test_a_successor_starts_with_the_wanted_replicas_and_reports_none_before_its_runners_attach():
    first = scaled(replicas=3)
    first.attach("r0")
    driver = SchedulerDriver(saved=first.scheduler.catalog_to_save(), now=2000.0, startup_wait=0.5)
    driver.gateway()
    assert advice_after(driver, 0.2) == []
    assert advice_after(driver, 0.5) == [(3, "JustStarted")]
    assert driver.of(effects.ReportDesiredReplicas)[0].stale


def test_a_new_scheduler_does_not_scale_down_while_runners_reconnect():
    driver = scaled(replicas=3, stabilization=0.0)
    assert advice_after(driver) == [(3, "JustStarted")]
    driver.attach("r0")
    wait_with_reports(driver, "r0", seconds=3)
    assert desired(driver) == 3
    driver.attach("r1")
    driver.attach("r2")
    wait_with_reports(driver, "r0", "r1", "r2", seconds=1)
    assert desired(driver) == 0


def test_desired_replicas_are_reported_when_they_change_and_to_each_new_operator():
    driver = scaled()
    driver.attach("r0")
    assert advice_after(driver) == [(1, "Stabilizing")]
    assert advice_after(driver) == []
    driver.send(events.OperatorConnected())
    assert [one.replicas for one in driver.of(effects.ReportDesiredReplicas)] == [1]
    driver.enqueue("a")
    assert advice_after(driver) == []  # another reason for the same number can wait
    wait_with_reports(driver, "r0", seconds=9)
    driver.send(events.OperatorConnected())
    assert driver.of(effects.ReportDesiredReplicas)[0].code == "Requests"


def test_a_pool_without_scaling_is_reported_with_its_own_replicas():
    driver = ready()
    assert advice_after(driver) == [(1, "Disabled")]
    driver.state(pools=(pool(replicas=5),))
    assert advice_after(driver, 0.0) == [(5, "Disabled")]
    driver.state(pools=(builtin(replicas=5),))
    assert advice_after(driver, 0.0) == [(5, "JustStarted")]
    assert advice_after(driver, 11.0) == [(5, "Stabilizing")]


def test_pools_of_a_group_share_a_queue_and_the_first_that_may_grow_takes_it():
    first = builtin(pool="default/a", max_replicas=1)
    second = builtin(pool="default/b", replicas=1)
    driver = scaled(pools=(first, second))
    driver.attach("a0", pool="default/a", pages=100, max_sequences=2)
    driver.attach("b0", pool="default/b", pages=100, max_sequences=2)
    for number in range(5):
        driver.enqueue(f"r{number}", max_tokens=16)
    advice_after(driver)
    assert (desired(driver, "default/a"), desired(driver, "default/b")) == (1, 2)
    assert driver.scheduler.capacity.figures["default/a"].waiting == 0
    assert driver.scheduler.capacity.figures["default/b"].waiting == 1


def test_a_removed_pools_metrics_are_removed():
    driver = scaled()
    advice_after(driver)
    driver.state(pools=())
    driver.wait(0.0)
    assert not driver.scheduler.capacity.figures


def test_which_runners_serve_an_adapter_is_asked_once_for_all_that_wait_for_it(monkeypatch):
    driver = scaled(adapter(max_replicas=1))
    driver.attach(max_sequences=1)
    driver.certify()
    for n in range(30):
        driver.enqueue(f"a{n}", digest=PIRATE, adapter="default/pirate")
    asked, state = [], driver.scheduler.state
    limited_to = state.limited_to
    monkeypatch.setattr(state, "limited_to", lambda request: asked.append(request) or limited_to(request))
    driver.scheduler.capacity.pools_changed()
    driver.scheduler.capacity.tick()
    assert len(asked) == 1
