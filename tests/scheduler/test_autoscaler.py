"""The autoscaler: how it computes a pool's load, when it does not scale down, and when it reports."""

from motet.domain import InstanceName, RequestId
from motet.runner_info import RunnerIdentity
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import GroupName, ScalingMode
from tests.scheduler.builders import GROUP, PIRATE, POET, SchedulerDriver, adapter, entry, pool, ready

HOUR = 3600.0


def scaled(*adapters, pools=None, gateway=True, **how) -> SchedulerDriver:
    """A scheduler with one pool between 0 and 10 runners, which looks at it every second."""
    told = SchedulerDriver(forget_runner=HOUR)
    if gateway:
        told.gateway()
    told.state(*adapters, pools=pools or (builtin(**how),))
    return told


def builtin(**how):
    return pool(**({"scaling": ScalingMode.BUILTIN, "replicas": 1, "max_replicas": 10, "stabilization": 60.0} | how))


def look(told: SchedulerDriver, seconds: float = 1.0) -> list[tuple[int, str]]:
    """The advice said by the next look."""
    told.wait(seconds)
    return [(one.replicas, one.code) for one in told.of(effects.ReportDesiredReplicas)]


def desired(told: SchedulerDriver, name: str = "default/demo") -> int:
    return told.scheduler.capacity.figures[name].desired


def calm(told: SchedulerDriver, *instances: str, seconds: int = 61) -> None:
    """So much time passes while these runners report every second that they have what we think."""
    for _ in range(seconds):
        for instance in instances:
            ledger = told.scheduler.runners[InstanceName(instance)].ledger
            told.report(instance, *(entry(request, pages, epoch=epoch) for (request, epoch), pages in ledger))
        told.wait(1.0)


def test_demand_is_what_is_promised_and_what_waits():
    told = scaled()
    told.attach("r0", pages=100, max_sequences=10)
    for number in range(20):
        told.enqueue(f"a{number}", max_tokens=16)
    assert look(told) == [(2, "Pacing")]
    figures = told.scheduler.capacity.figures["default/demo"]
    assert (figures.running, figures.waiting, figures.serving) == (10, 10, 1)
    calm(told, "r0", seconds=31)
    assert desired(told) == 3  # eight of ten places each


def test_a_queue_at_a_pool_without_runners_asks_for_the_first():
    told = scaled(replicas=0)
    assert look(told) == [(0, "Idle")]
    told.enqueue("a")
    assert look(told) == [(1, "Requests")]


def test_requests_that_a_gateway_cannot_read_yet_ask_for_the_first_runner():
    told = scaled(replicas=0)
    look(told)
    told.tell(events.RequestsHeld("g0", ((GROUP, 2), (GroupName("default/other"), 5))))
    assert look(told) == [(1, "HeldRequests")]
    assert told.scheduler.capacity.figures["default/demo"].held == 2
    told.tell(events.RequestsHeld("g0", ()))
    look(told)
    assert told.scheduler.capacity.figures["default/demo"].held == 0


def test_held_requests_are_forgotten_when_their_gateway_disconnects_or_connects_again():
    for event in (events.GatewayDisconnected("g0"), events.GatewayConnected("g0")):
        told = scaled(replicas=0)
        told.gateway("g1")
        told.tell(events.RequestsHeld("g0", ((GROUP, 2),)))
        told.tell(event)
        assert look(told) == [(0, "Idle")]


def test_an_idle_pool_goes_to_nothing_after_its_window_and_knows_what_a_runner_takes_when_it_is_called():
    told = scaled()
    told.attach("r0", pages=100, max_sequences=4)
    look(told)
    calm(told, "r0")
    assert desired(told) == 0
    told.state(pools=(builtin(replicas=0),))
    told.tell(events.DrainsDeclared((events.DrainRequested(RunnerIdentity(instance="r0"), 1.0),)))
    told.detach("r0")
    for number in range(9):
        told.enqueue(f"a{number}", max_tokens=16)
    assert told.scheduler.requests[RequestId("a0")].waiting_reason == "no runner of this model is up"
    assert look(told) == [(1, "Pacing")]
    assert "3 runners" in told.of(effects.ReportDesiredReplicas)[0].reason


def test_a_runner_that_starts_is_no_capacity_and_orders_no_more():
    told = scaled()
    told.attach("r0", pages=100, max_sequences=4)
    for number in range(6):
        told.enqueue(f"a{number}", max_tokens=16)
    assert look(told) == [(2, "Requests")]
    told.state(pools=(builtin(replicas=2),))
    calm(told, "r0", seconds=50)
    assert desired(told) == 2


def test_a_wait_that_the_sums_do_not_explain_asks_for_one_more():
    told = scaled()
    told.attach("r0", pages=100)
    told.enqueue("a", max_tokens=200, q80=1)  # little is promised
    told.report("r0", entry("a", 100))  # and it has grown to everything there is
    told.enqueue("b", max_tokens=32, q80=16, deadline=300.0)
    assert look(told) == [(1, "Requests")] or desired(told) == 2
    calm(told, "r0", seconds=6)
    assert desired(told) == 2


def test_adapters_in_use_need_slots_and_resident_ones_need_runners():
    told = scaled(adapter("pirate"), adapter("poet"))
    told.attach("r0", pages=100, adapter_slots=1)
    told.certify("pirate", PIRATE)
    told.certify("poet", POET)
    told.enqueue("a", max_tokens=16, digest=PIRATE)
    told.enqueue("b", max_tokens=16, digest=POET)
    assert look(told)[-1] == (2, "Adapters")
    resident = scaled(adapter("pirate", min_replicas=3))
    resident.attach("r0", pages=100)
    look(resident)
    calm(resident, "r0", seconds=31)
    assert desired(resident) == 3


def test_nothing_leaves_while_a_runner_does_not_report_or_no_gateway_is_there():
    told = scaled()
    told.attach("r0")
    look(told)
    told.wait(HOUR)
    assert desired(told) == 1
    told.report("r0")
    told.wait(1.0)
    calm(told, "r0")
    assert desired(told) == 0

    alone = scaled(gateway=False)
    alone.attach("r0")
    assert look(alone) == [(1, "NoGateway")]
    assert alone.of(effects.ReportDesiredReplicas)[0].stale
    calm(alone, "r0", seconds=200)
    assert desired(alone) == 1


def test_nothing_leaves_while_a_runner_is_away_but_one_that_was_drained_may_be():
    told = scaled(replicas=2)
    told.attach("r0")
    told.attach("r1")
    look(told)
    told.detach("r1")
    calm(told, "r0", seconds=200)
    assert desired(told) == 2
    assert told.scheduler.capacity.figures["default/demo"].serving == 1
    told.attach("r1", incarnation="2")
    told.tell(events.DrainsDeclared((events.DrainRequested(RunnerIdentity(instance="r1"), 1.0),)))
    told.detach("r1", incarnation="2")
    calm(told, "r0")
    assert desired(told) == 0


def test_nothing_leaves_during_a_rollout():
    told = scaled(replicas=2)
    told.attach("r0", revision="old")
    told.attach("r1", revision="new")
    calm(told, "r0", "r1", seconds=200)
    assert desired(told) == 2


def test_a_successor_starts_with_the_wanted_replicas_and_reports_none_before_its_runners_attach():
    first = scaled(replicas=3)
    first.attach("r0")
    told = SchedulerDriver(saved=first.scheduler.catalog_to_save(), now=2000.0, startup_wait=0.5)
    told.gateway()
    assert look(told, 0.2) == []
    assert look(told, 0.5) == [(3, "JustStarted")]
    assert told.of(effects.ReportDesiredReplicas)[0].stale


def test_a_successor_without_a_memory_takes_nothing_away_from_runners_on_their_way_back():
    told = scaled(replicas=3, stabilization=0.0)
    assert look(told) == [(3, "JustStarted")]
    told.attach("r0")
    calm(told, "r0", seconds=3)
    assert desired(told) == 3
    told.attach("r1")
    told.attach("r2")
    calm(told, "r0", "r1", "r2", seconds=1)
    assert desired(told) == 0


def test_desired_replicas_are_reported_when_they_change_and_to_each_new_operator():
    told = scaled()
    told.attach("r0")
    assert look(told) == [(1, "Stabilizing")]
    assert look(told) == []
    told.tell(events.OperatorConnected())
    assert [one.replicas for one in told.of(effects.ReportDesiredReplicas)] == [1]
    told.enqueue("a")
    assert look(told) == []  # another reason for the same number can wait
    calm(told, "r0", seconds=9)
    told.tell(events.OperatorConnected())
    assert told.of(effects.ReportDesiredReplicas)[0].code == "Requests"


def test_a_pool_without_scaling_is_reported_with_its_own_replicas():
    told = ready()
    assert look(told) == [(1, "Disabled")]
    told.state(pools=(pool(replicas=5),))
    assert look(told, 0.0) == [(5, "Disabled")]
    told.state(pools=(builtin(replicas=5),))
    assert look(told, 0.0) == [(5, "JustStarted")]
    assert look(told, 11.0) == [(5, "Stabilizing")]


def test_pools_of_a_group_share_a_queue_and_the_first_that_may_grow_takes_it():
    first = builtin(pool="default/a", max_replicas=1)
    second = builtin(pool="default/b", replicas=1)
    told = scaled(pools=(first, second))
    told.attach("a0", pool="default/a", pages=100, max_sequences=2)
    told.attach("b0", pool="default/b", pages=100, max_sequences=2)
    for number in range(5):
        told.enqueue(f"r{number}", max_tokens=16)
    look(told)
    assert (desired(told, "default/a"), desired(told, "default/b")) == (1, 2)
    assert told.scheduler.capacity.figures["default/a"].waiting == 0
    assert told.scheduler.capacity.figures["default/b"].waiting == 1


def test_a_pool_that_goes_takes_its_figures_along():
    told = scaled()
    look(told)
    told.state(pools=())
    told.wait(0.0)
    assert not told.scheduler.capacity.figures
