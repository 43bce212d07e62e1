"""Requests are lost, declined, moved, cancelled and finished; gateways and runners connect and disconnect."""

from itertools import pairwise

import pytest

from motet.domain import BASE, InstanceName, RequestId
from motet.runner_info import Capacity, Failure, KernelState, RunnerIdentity
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events, request_lifecycle
from motet_scheduler.policy.class_queue import ClassQueue
from motet_scheduler.policy.request_lifecycle import ENDED_AT_ONCE, RequestLifecycle
from motet_scheduler.policy.values import Limits, Promise
from tests.scheduler.builders import GROUP, PIRATE, SchedulerDriver, adapter, entry, pool, ready


def decline(driver, request, *, epoch=1, code="declined", instance="r0"):
    return driver.send(
        events.RunnerDeclined(InstanceName(instance), RequestId(request), epoch, Failure(code, "no room after all"))
    )


def test_a_finished_request_leaves_nothing_behind():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.finish("a")
    assert not driver.ledger()
    assert not driver.scheduler.requests


def test_the_pages_of_a_sequence_that_its_runner_says_has_ended_are_promised_again_at_once():
    """Its gateway says so only when it has read all tokens."""
    driver = ready()
    driver.attach(pages=5)
    driver.enqueue("a")
    driver.enqueue("b")
    assert not driver.of(effects.SendPlaced)
    driver.ended("a", incarnation="0")
    driver.ended("a", epoch=2)
    driver.ended("unknown")
    assert driver.ledger() == {("a", 1): 5}
    driver.ended("a")
    assert [placed.request for placed in driver.of(effects.SendPlaced)] == ["b"]
    assert driver.ledger() == {("b", 1): 5}
    driver.ended("a")
    driver.finish("a")
    assert driver.ledger() == {("b", 1): 5}
    assert set(driver.scheduler.requests) == {"b"}


def test_a_parked_sequence_that_its_runner_says_has_ended_keeps_no_place():
    driver = ready()
    driver.attach(pages=5)
    driver.enqueue("a")
    driver.send(events.RequestParked(InstanceName("r0"), RequestId("a"), 1, Promise(5)))
    driver.enqueue("b")
    assert not driver.of(effects.SendPlaced)
    driver.ended("a")
    assert [placed.request for placed in driver.of(effects.SendPlaced)] == ["b"]


def test_a_lost_request_is_placed_again_under_the_next_epoch_with_its_age():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a", age=7.0)
    driver.attach("r1")
    driver.lose("a", delivered=5)
    (place,) = driver.of(effects.SendPlaced)
    assert (place.instance, place.epoch) == ("r1", 2)
    request = driver.scheduler.requests[RequestId("a")]
    assert driver.clock() - request.asked_at == 7.0
    assert request.delivered == 5
    assert driver.ledger("r0") == {}


def test_losing_the_same_placement_twice_changes_nothing():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.enqueue("a")
    driver.lose("a", epoch=1)
    first = driver.scheduler.requests[RequestId("a")].epoch
    assert not driver.lose("a", epoch=1)
    assert driver.scheduler.requests[RequestId("a")].epoch == first


def test_the_loss_of_an_unknown_request_is_answered_so_that_no_client_hangs():
    driver = ready()
    driver.lose("ghost")
    assert driver.of(effects.SendRefused)[0].failure.code == "engine_restarted"


def test_a_request_avoids_the_runner_that_declined_it():
    driver = ready(avoid_after_decline=1.0)
    driver.attach()
    driver.enqueue("a")
    decline(driver, "a")
    driver.lose("a")
    assert driver.where("a") == ""
    assert driver.scheduler.requests[RequestId("a")].waiting_reason == "it could not run there a moment ago"
    driver.wait(1.1)
    assert driver.where("a") == ""  # declined and lost: twice as long
    driver.wait(1.0)
    assert driver.where("a") == "r0"


def test_a_decline_releases_the_promise_before_the_gateway_reports_the_loss():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    decline(driver, "a")
    assert not driver.ledger()


def decline_and_lose(driver, *, epoch, first, delivered=0):
    tell = [lambda: decline(driver, "a", epoch=epoch), lambda: driver.lose("a", epoch, delivered)]
    for one in tell if first == "the runner" else tell[::-1]:
        one()


@pytest.mark.parametrize("first", ["the runner", "the gateway"])
def test_a_request_that_is_declined_again_and_again_gives_up_when_its_first_wait_would_have_ended(first):
    driver = ready(avoid_after_decline=0.1)
    driver.attach()
    driver.enqueue("a", deadline=5.0)
    began, placed = driver.clock(), driver.of(effects.SendPlaced)
    while not driver.of(effects.SendRefused):
        assert driver.clock() <= began + 5.2, "it waits on"
        for one in placed:
            decline_and_lose(driver, epoch=one.epoch, first=first)
        driver.wait(0.1)
        placed = driver.of(effects.SendPlaced)
    assert driver.clock() >= began + 4.9
    assert driver.of(effects.SendRefused)[0].failure.code == "deadline_exceeded"


@pytest.mark.parametrize("first", ["the runner", "the gateway"])
@pytest.mark.parametrize("held", [False, True])
def test_a_request_that_a_new_scheduler_found_running_gives_up_at_the_same_time_if_it_is_declined(first, held):
    """`held`: it waits for its quota, and its gateway says that it runs. Such requests have been in no queue here."""
    driver = ready(avoid_after_decline=100.0, max_avoid=100.0)
    driver.attach()
    driver.state()
    if held:
        driver.send(events.CatalogReplaced((pool(limits=(("*", Limits(concurrency=1)),)),), ()))
        driver.enqueue("b")
        driver.enqueue("a", deadline=5.0, age=1.0)
        assert driver.scheduler.requests[RequestId("a")].held
    driver.gateway("g0", driver.live("b"), driver.live("a", deadline=5.0, age=1.0))
    decline_and_lose(driver, epoch=1, first=first)
    driver.wait(3.9)
    assert not driver.of(effects.SendRefused)
    driver.wait(0.2)
    assert [(one.request, one.failure.code) for one in driver.of(effects.SendRefused)] == [("a", "deadline_exceeded")]


@pytest.mark.parametrize("first", ["the runner", "the gateway"])
@pytest.mark.parametrize(("delivered", "lost"), [(1, True), (0, False)])
def test_a_request_that_has_a_token_or_whose_runner_was_lost_has_its_whole_time_again(first, delivered, lost):
    """It is a stream that a client reads, or it has lost what was computed for it."""
    driver = ready(avoid_after_decline=100.0, max_avoid=100.0)
    driver.attach()
    driver.enqueue("a", deadline=5.0)
    driver.wait(4.0)
    if lost:
        decline_and_lose(driver, epoch=1, first=first, delivered=delivered)
    else:
        driver.lose("a", 1)
    assert driver.where("a") == ""
    driver.wait(4.9)
    assert not driver.of(effects.SendRefused)
    driver.wait(0.2)
    assert driver.of(effects.SendRefused)


@pytest.mark.parametrize("first", ["the runner", "the gateway"])
def test_a_final_decline_is_a_refusal_whether_gateway_or_runner_reports_it_first(first):
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    if first == "the runner":
        decline(driver, "a", code="adapter_incompatible")
        driver.lose("a")
    else:
        driver.lose("a")
        decline(driver, "a", code="adapter_incompatible")
    assert driver.of(effects.SendRefused)[0].failure.code == "adapter_incompatible"
    assert not driver.scheduler.requests


UNABLE = ("structured_output_unavailable", "parameter_unavailable")


@pytest.mark.parametrize("code", UNABLE)
@pytest.mark.parametrize("other", [{"base": "sha256:new"}, {"pages": 3}], ids=["another base model", "too small"])
def test_a_request_that_a_runner_can_never_take_waits_for_none_that_cannot_either(other, code):
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1", pool="default/other", **other)
    decline(driver, "a", code=code)
    driver.lose("a", 1)
    assert driver.of(effects.SendRefused)[-1].failure.code == code


@pytest.mark.parametrize("code", UNABLE)
@pytest.mark.parametrize("first", ["the runner", "the gateway"])
def test_a_request_that_a_runner_can_never_take_waits_for_another_one(first, code):
    """Mutation: it avoids that runner for a while only."""
    driver = ready()
    driver.attach("r0")
    driver.attach("r1", pool="default/other")
    driver.enqueue("a")
    unable = driver.where("a")
    other = {"r0": "r1", "r1": "r0"}[unable]

    def refuse(epoch: int, instance: str) -> None:
        if first == "the runner":
            decline(driver, "a", code=code, epoch=epoch, instance=instance)
            driver.lose("a", epoch)
        else:
            driver.lose("a", epoch)
            decline(driver, "a", code=code, epoch=epoch, instance=instance)

    refuse(1, unable)
    assert driver.where("a") == other
    driver.wait(30)
    driver.lose("a", 2)
    assert driver.where("a") == ""  # it avoids that one for a while
    driver.wait(5)
    assert driver.where("a") == other
    assert not driver.of(effects.SendRefused)
    refuse(3, other)
    assert driver.of(effects.SendRefused)[-1].failure.code == code
    assert not driver.scheduler.requests


@pytest.mark.parametrize("code", UNABLE)
def test_a_request_that_a_runner_can_never_take_is_tried_on_no_other_of_its_pool(code):
    driver = ready()
    for number in range(10):
        driver.attach(f"r{number}")
    driver.attach("new", revision="2")
    driver.enqueue("a")
    runners = []
    for epoch in range(1, 10):
        runners.append(driver.where("a"))
        decline(driver, "a", code=code, epoch=epoch, instance=runners[-1])
        driver.lose("a", epoch)
        if driver.of(effects.SendRefused):
            break
    assert len(runners) == 2
    assert "new" in runners, "its pool's template has changed"
    assert driver.of(effects.SendRefused)[-1].failure.code == code


V, M = "default/v", "default/m"


def two_pools() -> SchedulerDriver:
    driver = ready()
    driver.state(pools=(pool(pool=V, replicas=1), pool(pool=M, replicas=1)))
    return driver


def unable(driver: SchedulerDriver, epoch: int = 1) -> list[str]:
    decline(driver, "a", code="parameter_unavailable", epoch=epoch, instance="v0")
    driver.lose("a", epoch)
    return refusals(driver)


def refusals(driver: SchedulerDriver) -> list[str]:
    return [one.failure.code for one in driver.of(effects.SendRefused)]


def test_what_a_runner_can_never_take_waits_for_those_that_are_missed_after_a_start():
    driver = two_pools()
    driver.attach("v0", pool=V)
    driver.enqueue("a")
    assert unable(driver) == []
    driver.attach("m0", pool=M)
    assert driver.where("a") == "m0"


def test_what_a_runner_can_never_take_is_refused_when_none_is_missed_any_more():
    driver = two_pools()
    driver.attach("v0", pool=V)
    driver.enqueue("a")
    assert unable(driver) == []
    driver.state(pools=(pool(pool=V, replicas=1),))
    assert refusals(driver) == ["parameter_unavailable"]


def away(driver: SchedulerDriver) -> None:
    driver.detach("m0")


def drained(driver: SchedulerDriver) -> None:
    leaves = events.DrainRequested(RunnerIdentity(instance="m0", incarnation="1"), 600.0)
    driver.send(events.DrainsDeclared((leaves,)))


@pytest.mark.parametrize("leave", [away, drained])
def test_what_a_runner_can_never_take_waits_for_one_that_is_only_away(leave):
    driver = two_pools()
    driver.attach("v0", pool=V)
    driver.attach("m0", pool=M)
    driver.wait(60)  # nobody is missed
    leave(driver)
    driver.enqueue("a")
    assert driver.where("a") == "v0"
    assert unable(driver) == []
    driver.attach("m0", pool=M, incarnation="2")
    driver.wait(5)
    assert driver.where("a") == "m0"


@pytest.mark.parametrize("revision", ["1", "2"])
@pytest.mark.parametrize("forgotten", [False, True])
def test_what_a_runner_can_never_take_runs_on_one_of_its_name_that_was_made_otherwise(revision, forgotten):
    driver = ready(forget_runner=10.0)
    driver.attach("v0", pool=V, revision="1")
    driver.attach("m0", pool=M)
    driver.wait(60)
    driver.detach("m0")
    driver.enqueue("a")
    assert driver.where("a") == "v0"
    driver.attach("m0", pool=M, incarnation="2", max_sequences=1, live=(entry("x", 1),))  # it is full
    assert unable(driver) == []
    driver.detach("v0")
    driver.wait(11 if forgotten else 1)
    driver.attach("v0", pool=V, revision=revision, incarnation="2")
    driver.wait(5)
    assert driver.where("a") == ("v0" if revision == "2" else "")


def test_what_a_runner_can_never_take_runs_on_no_other_one_that_was_made_alike():
    driver = ready()
    driver.attach("v0", pool=V, revision="1")
    driver.attach("m0", pool=M)
    driver.wait(60)
    driver.detach("m0")
    driver.enqueue("a")
    assert unable(driver) == []
    driver.attach("v1", pool=V, revision="1")
    driver.wait(5)
    assert driver.where("a") == ""
    driver.attach("m0", pool=M, incarnation="2")
    assert driver.where("a") == "m0"


def test_what_a_runner_can_never_take_is_refused_when_the_other_one_is_forgotten():
    driver = ready(forget_runner=10.0)
    driver.attach("v0", pool=V)
    driver.attach("m0", pool=M)
    driver.wait(60)
    driver.detach("m0")
    driver.enqueue("a")
    assert unable(driver) == []
    driver.wait(11)
    assert refusals(driver) == ["parameter_unavailable"]


def test_finishing_under_an_earlier_epoch_cancels_the_later_placement():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.enqueue("a")
    driver.lose("a")
    driver.finish("a", epoch=1)
    assert [(effect.request, effect.epoch) for effect in driver.of(effects.CancelAtRunner)] == [("a", 2)]
    assert not driver.scheduler.requests


def test_a_second_finish_changes_nothing():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.finish("a")
    assert not driver.finish("a")


def test_a_cancellation_that_crosses_the_placement_frees_it():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.send(events.CancelRequested("g0", RequestId("a")))
    assert not driver.ledger()
    assert driver.of(effects.CancelAtRunner)


def test_cancelling_an_unknown_request_does_nothing():
    assert not ready().send(events.CancelRequested("g0", RequestId("ghost")))


def test_a_lost_request_gets_its_full_queue_timeout_again():
    driver = ready()
    driver.attach()
    driver.enqueue("a", deadline=5.0)
    driver.wait(60)
    driver.detach()
    driver.lose("a")
    driver.wait(4)
    assert not driver.of(effects.SendRefused)
    driver.wait(2)
    assert driver.of(effects.SendRefused)


def test_a_wait_begins_anew_when_the_runner_that_was_lost_sent_tokens_after_all():
    """It was paused: its client has read on, and would hear of a wait that it did not see."""
    driver = ready()
    driver.attach()
    driver.enqueue("a", deadline=5.0)
    driver.detach()
    driver.lose("a")
    driver.wait(4)
    driver.lose("a", delivered=2)
    driver.wait(4)
    assert not driver.of(effects.SendRefused)
    driver.lose("a", delivered=2)  # nothing new
    driver.wait(2)
    assert [refused.request for refused in driver.of(effects.SendRefused)] == ["a"]


def test_a_request_that_waited_before_it_was_queued_later_gets_its_full_queue_timeout():
    """Its first wait may take only what is left."""
    driver = ready()
    driver.enqueue("a", deadline=2.0, whole_deadline=5.0)
    driver.attach()
    driver.detach()
    driver.lose("a")
    driver.wait(4)
    assert not driver.of(effects.SendRefused)
    driver.enqueue("b", deadline=2.0, whole_deadline=5.0)
    driver.wait(2.5)
    assert [refused.request for refused in driver.of(effects.SendRefused)] == ["a", "b"]


def test_a_stream_that_runs_after_all_is_not_ended_when_its_time_in_the_queue_is_over():
    driver = ready()
    driver.attach()
    driver.enqueue("a", deadline=5.0)
    driver.detach()
    driver.lose("a")
    driver.gateway("g0", driver.live("a", deadline=5.0))
    driver.attach(live=(entry("a", 2),))
    driver.wait(6)
    assert not driver.of(effects.SendRefused)
    assert driver.where("a") == "r0"


def test_a_repeated_enqueue_replaces_the_earlier_one():
    driver = ready()
    driver.attach()
    driver.enqueue("a", max_tokens=16)
    driver.enqueue("a", max_tokens=16, epoch=0, delivered=3)
    assert driver.of(effects.SendPlaced)[0].epoch == 2
    assert list(driver.ledger()) == [("a", 2)]


def test_a_disconnected_gateways_waiting_requests_end_and_its_running_ones_stay():
    driver = ready()
    driver.attach(max_sequences=1)
    driver.enqueue("runs")
    driver.enqueue("waits")
    driver.send(events.GatewayDisconnected("g0"))
    assert set(driver.scheduler.requests) == {"runs"}
    assert driver.ledger()


def test_a_request_of_a_disconnected_gateway_is_released_when_its_runner_no_longer_lists_it():
    driver = ready()
    driver.attach()
    driver.enqueue("a", max_tokens=16)
    driver.report("r0", entry("a", 2))
    driver.send(events.GatewayDisconnected("g0"))
    driver.wait(1)
    assert driver.ledger()
    for _ in range(3):
        driver.clock.advance(1.5)
        driver.report("r0")
    driver.wait(0.1)
    assert not driver.ledger()
    assert not driver.scheduler.requests


def test_a_gateway_that_comes_back_keeps_what_it_runs_and_drops_what_it_does_not():
    driver = ready()
    driver.attach()
    driver.enqueue("runs")
    driver.enqueue("ended meanwhile")
    driver.send(events.GatewayDisconnected("g0"))
    driver.gateway("g0", driver.live("runs", pages=5))
    assert set(driver.scheduler.requests) == {"runs"}
    assert list(driver.ledger()) == [("runs", 1)]


def test_a_gateways_live_requests_are_adopted_by_a_scheduler_that_never_saw_them():
    driver = ready()
    driver.attach()
    driver.gateway("g0", driver.live("a", epoch=3, pages=7))
    assert driver.ledger() == {("a", 3): 7}
    driver.lose("a", epoch=3)
    driver.wait(10)
    assert driver.scheduler.requests[RequestId("a")].epoch == 4


def test_runner_first_or_gateway_first_the_promise_is_counted_once():
    for order in ("runner", "gateway"):
        driver = ready()
        if order == "runner":
            driver.attach(live=(entry("a", 7),))
            driver.gateway("g0", driver.live("a", pages=7))
        else:
            driver.gateway("g0", driver.live("a", pages=7))
            driver.attach(live=(entry("a", 7),))
        assert driver.ledger() == {("a", 1): 7}


def test_a_restarted_runner_is_not_taken_for_the_one_that_died():
    driver = ready()
    driver.attach(incarnation="1")
    driver.enqueue("a")
    driver.attach(incarnation="2")
    assert driver.ledger() == {}
    driver.detach(incarnation="1")
    assert driver.scheduler.runners[InstanceName("r0")].attached, (
        "the end of the old stream does not concern the new one"
    )
    driver.lose("a")
    driver.wait(1)
    assert driver.ledger() == {("a", 2): 5}


def test_a_runner_that_comes_back_keeps_its_ledger():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.detach()
    driver.enqueue("b")
    assert driver.where("b") == ""
    driver.attach(live=(entry("a", 5),))
    assert driver.where("b") == "r0"
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 5}


def test_a_runner_that_stays_away_is_forgotten():
    driver = ready(forget_runner=30.0)
    driver.attach()
    driver.detach()
    driver.wait(31)
    assert not driver.scheduler.runners


def make_unhealthy(driver, *, hung):
    return driver.send(events.RunnerUnhealthy(RunnerIdentity(instance="r0", incarnation="1"), "it does not move", hung))


def test_the_requests_of_a_hung_runner_move():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    make_unhealthy(driver, hung=True)
    assert [(effect.instance, effect.epoch) for effect in driver.of(effects.CancelAtRunner)] == [("r0", 1)]
    (place,) = driver.of(effects.SendPlaced)
    assert (place.instance, place.epoch, place.moved_reason) == ("r1", 2, "it does not move")
    assert place.engine_hung


def test_only_a_move_away_from_an_engine_that_hangs_says_so():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    make_unhealthy(driver, hung=True)
    driver.attach("r2")
    driver.send(events.RunnerUnhealthy(RunnerIdentity(instance="r1", incarnation="1"), "no word", hung=False))
    driver.lose("a", epoch=2)
    (place,) = driver.of(effects.SendPlaced)
    assert not place.engine_hung


def moves(driver):
    return [effect.request for effect in driver.of(effects.CancelAtRunner)]


@pytest.mark.parametrize("why", ["it hangs", "its drain is over"])
def test_the_requests_of_a_runner_move_in_parts_the_oldest_first(why, monkeypatch):
    monkeypatch.setattr(request_lifecycle, "MOVED_AT_ONCE", 2)
    driver = ready()
    driver.attach("r0")
    for n in (3, 1, 0, 4, 2):
        driver.enqueue(f"a{n}", age=10.0 - n)
    driver.attach("r1")
    if why == "it hangs":
        make_unhealthy(driver, hung=True)
    else:
        driver.send(events.RunnerShuttingDown(InstanceName("r0"), "1", 0.0))
        driver.wait(0.1)
    moved = [moves(driver)]
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        moved.append(moves(driver))
    assert moved == [["a0", "a1"], ["a2", "a3"], ["a4"]]
    assert {driver.where(f"a{n}") for n in range(5)} == {"r1"}


def test_what_ended_or_left_meanwhile_does_not_move(monkeypatch):
    monkeypatch.setattr(request_lifecycle, "MOVED_AT_ONCE", 1)
    driver = ready()
    driver.attach("r0")
    for n in range(4):
        driver.enqueue(f"a{n}")
    driver.attach("r1")
    make_unhealthy(driver, hung=True)
    assert moves(driver) == ["a0"]
    driver.finish("a1")
    assert moves(driver) == ["a2"]
    driver.lose("a3")
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        assert not moves(driver)
    assert driver.where("a3") == "r1"


def test_a_runner_that_takes_work_again_keeps_what_has_not_moved_yet(monkeypatch):
    monkeypatch.setattr(request_lifecycle, "MOVED_AT_ONCE", 1)
    driver = ready()
    driver.attach("r0")
    for n in range(3):
        driver.enqueue(f"a{n}")
    driver.attach("r1")
    driver.report("r0", *(entry(f"a{n}", 5) for n in range(3)))
    make_unhealthy(driver, hung=True)
    driver.report("r0", entry("a1", 5), entry("a2", 5), steps=1)
    assert [driver.where(f"a{n}") for n in range(3)] == ["r1", "r0", "r0"]
    assert not driver.scheduler.more_to_try


def test_a_moving_request_that_fits_nowhere_waits_and_moves_later():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    make_unhealthy(driver, hung=True)
    assert not driver.of(effects.SendPlaced)
    driver.attach("r1")
    assert driver.of(effects.SendPlaced)[0].moved_reason


def test_a_move_after_the_gateways_loss_report_is_an_ordinary_placement():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    make_unhealthy(driver, hung=True)
    driver.lose("a", epoch=1, delivered=9)
    driver.attach("r1")
    (place,) = driver.of(effects.SendPlaced)
    assert (place.epoch, place.moved_reason) == (2, "")


def test_a_silent_runner_gets_no_new_work_until_it_reports_but_keeps_its_requests():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    make_unhealthy(driver, hung=False)
    driver.enqueue("b")
    assert (driver.where("a"), driver.where("b")) == ("r0", "")
    driver.report("r0", entry("a", 5))
    assert driver.where("b") == "r0"


def silent_for(driver, seconds, *, runner="r0"):
    identity = RunnerIdentity(instance=runner, incarnation="1")
    return driver.send(events.RunnerUnhealthy(identity, "it has sent nothing", hung=False, silent_seconds=seconds))


def test_the_requests_of_a_runner_that_nobody_hears_go_on_elsewhere():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    driver.wait(2.0)
    driver.report("r1")
    silent_for(driver, 2.1)
    (place,) = driver.of(effects.SendPlaced)
    assert (place.instance, place.epoch, place.moved_reason) == ("r1", 2, "it has sent nothing")
    assert not place.engine_hung, "nobody knows what its engine does"


def test_a_runner_that_only_the_supervisor_does_not_hear_keeps_its_requests():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    driver.wait(1.0)
    driver.report("r0", entry("a", 5))
    driver.wait(1.1)
    silent_for(driver, 2.1)
    assert driver.where("a") == "r0"
    driver.enqueue("b")
    assert driver.where("b") == "r1"


def test_a_silent_runner_keeps_its_requests_while_no_other_could_take_them():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.wait(2.1)
    silent_for(driver, 2.1)
    assert driver.where("a") == "r0"


def test_the_supervisor_s_reminder_moves_them_once_another_could():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.wait(2.1)
    silent_for(driver, 2.1)
    driver.attach("r1")
    driver.wait(10.0)
    driver.report("r1")
    silent_for(driver, 12.1)
    assert driver.where("a") == "r1"


def test_a_supervisor_that_hears_nobody_moves_nothing_in_circles():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    driver.wait(2.1)
    silent_for(driver, 2.1, runner="r1")
    silent_for(driver, 2.1, runner="r0")
    assert driver.where("a") == "r0"


def test_a_hung_runner_that_computes_again_is_used_again():
    driver = ready()
    driver.attach("r0")
    driver.report("r0", entry("x", 5), steps=10)
    make_unhealthy(driver, hung=True)
    driver.report("r0", entry("x", 5), steps=10)
    driver.enqueue("a")
    assert driver.where("a") == ""
    driver.report("r0", entry("x", 5), steps=11)
    assert driver.where("a") == "r0"


def test_a_silent_runner_that_reports_without_a_step_gets_no_new_work():
    driver = ready()
    driver.attach("r0")
    driver.report("r0", entry("x", 5), steps=10)
    make_unhealthy(driver, hung=False)
    driver.report("r0", entry("x", 5), steps=10)
    driver.enqueue("a")
    assert driver.where("a") == ""
    driver.report("r0", entry("x", 5), steps=11)
    assert driver.where("a") == "r0"


def test_only_a_step_ends_a_hang_and_not_a_silence_or_a_new_stream():
    driver = ready()
    driver.attach("r0")
    driver.report("r0", entry("x", 5), steps=10)
    make_unhealthy(driver, hung=True)
    make_unhealthy(driver, hung=False)
    driver.report("r0", entry("x", 5), steps=10)
    driver.attach("r0", live=(entry("x", 5),))
    driver.report("r0", entry("x", 5), steps=10)
    driver.enqueue("a")
    assert driver.where("a") == ""
    driver.report("r0", entry("x", 5), steps=11)
    assert driver.where("a") == "r0"


def test_a_hung_runner_with_only_parked_requests_is_healthy_again():
    driver = ready()
    driver.attach("r0")
    driver.report("r0", entry("x", 5), steps=10)
    make_unhealthy(driver, hung=True)
    driver.report("r0", entry("x", 5, parked=True), steps=10)
    assert driver.scheduler.runners["r0"].unhealthy == ""


def test_a_new_gateway_gets_the_catalog_at_once():
    driver = ready()
    driver.attach()
    driver.gateway("g1")
    (publish,) = driver.of(effects.PublishCatalog)
    assert publish.gateway == "g1"
    assert publish.catalog.groups[0].runners == (("r0", "unix:/run/r0.sock"),)


def test_a_new_scheduler_publishes_no_catalog_before_an_operator_connects():
    """An empty catalog would remove all models from the gateways."""
    driver = SchedulerDriver()
    driver.gateway("g0")
    driver.attach()
    assert not driver.of(effects.PublishCatalog)
    driver.gateway("g1")
    assert not driver.of(effects.PublishCatalog)
    driver.state(pools=())
    (publish,) = driver.of(effects.PublishCatalog)
    assert publish.catalog.groups == (), "the operator has said that there are none"


def test_the_timeline_of_a_request_names_each_step():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    driver.lose("a")
    driver.finish("a", epoch=2)
    story = driver.scheduler.timelines.of(RequestId("a"))
    assert [event for _, event, _ in story] == ["queued", "placed", "lost", "placed", "finished"]


def test_timelines_of_ended_requests_are_bounded_and_those_of_running_ones_kept():
    driver = ready(timelines=3)
    driver.attach()
    driver.enqueue("long")
    for n in range(9):
        driver.enqueue(f"{n}")
        driver.finish(f"{n}")
    assert driver.scheduler.timelines.of(RequestId("0")) is None
    assert driver.scheduler.timelines.of(RequestId("8")) is not None
    assert [event for _, event, _ in driver.scheduler.timelines.of(RequestId("long"))] == ["queued", "placed"]
    assert len(driver.scheduler.timelines) == 4


def test_timelines_that_one_tenant_ends_push_out_none_of_others():
    driver = ready(timelines=3)
    driver.attach()
    for number in range(9):
        driver.enqueue(str(number), tenant="zeta" if number else "acme")
        driver.finish(str(number))
    known = [driver.scheduler.timelines.of(RequestId(str(number))) is not None for number in range(9)]
    assert known == [True, *[False] * 6, True, True]


def test_timelines_of_unknown_requests_are_bounded_too():
    driver = ready(timelines=3, queue_limit=1)
    driver.enqueue("waits")
    for n in range(9):
        driver.enqueue(f"refused{n}")
    driver.attach(live=tuple(entry(f"ghost{n}", 2) for n in range(9)))
    for n in range(9):
        driver.send(events.PromiseChanged(InstanceName("r0"), RequestId(f"ghost{n}"), 1, Promise(4)))
    assert len(driver.scheduler.timelines) == 4


def test_many_requests_that_came_and_went_leave_nothing_behind():
    driver = ready(timelines=100)
    driver.attach()
    driver.state(adapter())
    driver.certify()
    driver.send(events.SupervisorConnected())
    for n in range(3000):
        driver.enqueue(f"{n}", deadline=300.0, digest=PIRATE if n % 3 == 0 else BASE)
        if n % 5 == 0:
            driver.lose(f"{n}")
            driver.cancel(f"{n}")
        else:
            driver.finish(f"{n}")
        if n % 50 == 0:
            driver.wait(0.1)
    lives = driver.scheduler.lifecycle
    assert len(lives.deadlines) < 200, "each tick removes old ones"
    driver.wait(5)
    assert not lives.ended
    assert not lives.unlisted
    assert not lives.retry_times
    assert not driver.scheduler.requests
    assert len(driver.scheduler.timelines) == 100


def test_a_sweep_keeps_the_deadlines_of_waiting_requests():
    driver = ready()
    driver.attach(max_sequences=1)
    driver.enqueue("runs")
    for n in range(300):
        driver.enqueue(f"{n}", deadline=5.0)
    for n in range(299):
        driver.cancel(f"{n}")
    driver.wait(1)
    assert len(driver.scheduler.lifecycle.deadlines) == 1
    driver.wait(5)
    assert [refusal.request for refusal in driver.of(effects.SendRefused)] == ["299"]


def test_the_operator_is_told_when_a_runner_is_unhealthy_and_healthy_again():
    driver = ready()
    driver.attach("r0")
    make_unhealthy(driver, hung=False)
    assert [one.unhealthy for one in driver.of(effects.ReportRunner)] == ["it does not move"]
    driver.send(events.OperatorConnected())
    assert [one.unhealthy for one in driver.of(effects.ReportRunner)] == ["it does not move"]
    driver.report("r0")
    assert [one.unhealthy for one in driver.of(effects.ReportRunner)] == [""]


def test_the_operator_is_told_which_kernels_a_runner_has():
    driver = ready()
    driver.attach("r0")
    for serving in ("torch", "cpp (avx512)"):
        kernels = KernelState(serving, 1.0)
        told = driver.send(events.RunnerReported(instance="r0", incarnation="1", kernels=kernels))
        assert [one.kernels for one in told if isinstance(one, effects.ReportRunner)] == [kernels]
        down = conversion.operator_message(next(one for one in told if isinstance(one, effects.ReportRunner)))
        assert KernelState.from_proto(down.runner.kernels) == kernels


# ------------------------------------------------------------------------- a gateway that missed where its request went


def with_a_missed_move(driver):
    """`a` ran on r0 under epoch 1 and was moved to r1 under epoch 2. Its gateway missed the move and reconnects."""
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    make_unhealthy(driver, hung=True)
    assert driver.of(effects.SendPlaced)[0].epoch == 2
    driver.send(events.GatewayDisconnected("g0"))
    driver.report("r0", steps=1)
    driver.report("r0", steps=2)
    driver.gateway("g0", driver.live("a", epoch=1))


def test_a_lost_placement_is_placed_again_although_a_later_one_never_arrived():
    driver = ready()
    with_a_missed_move(driver)
    assert driver.where("a") == "r0"
    driver.lose("a", epoch=1)
    assert driver.of(effects.SendPlaced)[0].epoch == 3


def test_a_declined_placement_is_released_although_a_later_one_never_arrived():
    driver = ready()
    with_a_missed_move(driver)
    assert driver.ledger("r0")
    decline(driver, "a")
    assert not driver.ledger("r0")


def test_a_request_that_runs_under_an_earlier_epoch_is_kept_when_its_gateway_leaves():
    driver = ready()
    with_a_missed_move(driver)
    driver.report("r0", entry("a", 2), steps=3)
    driver.send(events.GatewayDisconnected("g0"))
    driver.wait(1)
    assert driver.ledger("r0"), "it runs, and its gateway may come back"


def test_a_placement_that_its_runner_never_lists_is_taken_back_and_placed_again():
    driver = ready(unlisted_timeout=10.0)
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    for _ in range(10):
        driver.wait(1)
        driver.report("r0")
    assert not driver.of(effects.SendPlaced)
    driver.wait(1)
    assert [(effect.instance, effect.epoch) for effect in driver.of(effects.CancelAtRunner)] == [("r0", 1)]
    (place,) = driver.of(effects.SendPlaced)
    assert (place.instance, place.epoch) == ("r1", 2)
    assert place.moved_reason == "its runner has not listed it for 10 seconds"


def test_a_paused_scheduler_reads_reports_before_it_releases_placements():
    driver = ready(unlisted_timeout=10.0)
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    driver.wait(60)  # the scheduler was paused: reports wait to be read
    assert not driver.of(effects.CancelAtRunner)
    driver.report("r0", entry("a", 5))
    driver.wait(1)
    assert (driver.where("a"), driver.scheduler.requests[RequestId("a")].epoch) == ("r0", 1)


def test_a_placement_that_its_runner_lists_stays_however_long_it_takes():
    driver = ready(unlisted_timeout=10.0)
    driver.attach()
    driver.enqueue("a")
    for _ in range(60):
        driver.wait(1)
        driver.report("r0", entry("a", 5))
    assert driver.scheduler.requests[RequestId("a")].epoch == 1
    assert not driver.scheduler.lifecycle.unlisted


def test_a_request_that_its_runner_does_not_list_and_its_gateway_does_not_report_is_placed_again():
    driver = ready(unlisted_timeout=10.0)
    driver.attach()
    driver.enqueue("a")
    driver.report("r0", entry("a", 5))
    for _ in range(16):
        driver.wait(1)
        driver.report("r0")
    assert driver.scheduler.requests[RequestId("a")].epoch == 2


def test_a_runner_that_is_away_may_serve_what_it_was_given_until_it_is_forgotten():
    driver = ready(unlisted_timeout=10.0, forget_runner=30.0)
    driver.attach("r0")
    driver.enqueue("a")
    driver.detach("r0")
    driver.wait(29)
    assert driver.scheduler.requests[RequestId("a")].placement is not None
    driver.wait(2)
    driver.wait(11)
    driver.attach("r1")
    assert driver.where("a") == "r1"


def test_a_decline_that_the_gateway_never_reports_is_placed_again():
    driver = ready(unlisted_timeout=10.0)
    driver.attach()
    driver.enqueue("a")
    decline(driver, "a")
    driver.wait(11)
    driver.report("r0")
    driver.wait(1)
    driver.wait(1)
    assert driver.scheduler.requests[RequestId("a")].epoch == 2


def test_the_refusal_of_a_move_names_the_last_epoch_so_that_the_gateway_gives_up_the_one_it_has():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a", deadline=5.0)
    make_unhealthy(driver, hung=True)
    driver.wait(6)
    (refusal,) = driver.of(effects.SendRefused)
    assert (refusal.request, refusal.epoch) == ("a", 1)


def test_a_refusal_carries_its_term_and_epoch_over_the_wire():
    failure = Failure("deadline_exceeded", "The request waited 5 seconds")
    refused = conversion.refuse(effects.SendRefused("g0", RequestId("a"), 3, failure), term=7).refused
    assert (refused.request, refused.term, refused.epoch) == ("a", 7, 3)


def test_many_deadlines_that_end_together_do_not_delay_everything_else():
    driver = ready()
    for n in range(2 * ENDED_AT_ONCE + 1):
        driver.enqueue(f"{n}", tenant=f"t{n}", deadline=5.0)
    driver.wait(6)
    refused = [driver.of(effects.SendRefused)]
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        refused.append(driver.of(effects.SendRefused))
    assert [len(some) for some in refused] == [ENDED_AT_ONCE, ENDED_AT_ONCE, 1]
    assert [one.request for some in refused for one in some] == [f"{n}" for n in range(2 * ENDED_AT_ONCE + 1)]


def test_deadlines_of_requests_that_have_gone_are_passed_by_in_parts():
    driver = ready()
    for n in range(10):
        driver.enqueue(f"stays {n}", tenant=f"t{n}", deadline=50.0)
    for n in range(2 * ENDED_AT_ONCE):
        driver.enqueue(f"{n}", deadline=5.0)
        driver.cancel(f"{n}")
    assert len(driver.scheduler.lifecycle.deadlines) == 2 * ENDED_AT_ONCE + 10
    driver.wait(6)
    assert len(driver.scheduler.lifecycle.deadlines) == ENDED_AT_ONCE + 10
    driver.send(events.TryMore())
    assert len(driver.scheduler.lifecycle.deadlines) == 10
    assert not driver.scheduler.more_to_try


def after(driver, event):
    """How many requests are left after an event, and after each that follows it."""
    driver.send(event)
    left = [len(driver.scheduler.requests)]
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        left.append(len(driver.scheduler.requests))
    return left


GONE = (events.GatewayDisconnected("g0"), events.GatewayConnected("g0"))


@pytest.mark.parametrize("event", GONE)
def test_a_gateway_that_goes_or_comes_with_many_requests_does_not_delay_everything_else(event):
    driver = ready()
    count = 6 * ENDED_AT_ONCE
    for n in range(count):
        driver.enqueue(f"{n}")
    left = [count, *after(driver, event)]
    most = ENDED_AT_ONCE + driver.scheduler.config.tenants_examined
    assert all(before - now <= most for before, now in pairwise(left)), left
    assert left[-1] == 0


def many_waiting(*, tenants=4 * ENDED_AT_ONCE, **config):
    """Of one gateway, that has gone; most of its requests have not ended yet."""
    driver = ready(**config)
    driver.gateway("g1")
    for n in range(4 * ENDED_AT_ONCE):
        driver.enqueue(f"{n}", tenant=f"t{n % tenants}", deadline=5.0)
    return driver


def test_nothing_is_placed_or_said_for_a_gateway_that_has_gone():
    driver = many_waiting()
    driver.send(events.GatewayDisconnected("g0"))
    driver.attach()
    assert not driver.of(effects.SendPlaced)
    driver = many_waiting()
    driver.send(events.GatewayDisconnected("g0"))
    driver.wait(6)
    assert not driver.of(effects.SendRefused)
    assert not driver.of(effects.SendPosition)


def test_the_requests_of_a_gateway_that_has_gone_take_no_others_place_in_the_queue():
    driver = many_waiting(tenants=1, queue_limit=4 * ENDED_AT_ONCE)
    driver.enqueue("too many", gateway="g1", tenant="t0")
    assert driver.of(effects.SendRefused)
    for n in range(ENDED_AT_ONCE):
        driver.cancel(f"{n}")
        driver.enqueue(f"late {n}", gateway="g1", tenant="t0")
    driver.send(events.GatewayDisconnected("g0"))
    for n in range(2 * ENDED_AT_ONCE):
        driver.enqueue(f"next {n}", gateway="g1", tenant="t0")
        assert not driver.of(effects.SendRefused)


def test_a_gateway_that_comes_back_enqueues_again_what_has_not_ended_yet():
    driver = many_waiting()
    driver.send(events.GatewayDisconnected("g0"))
    driver.gateway()
    last = f"{4 * ENDED_AT_ONCE - 1}"
    driver.enqueue(last, epoch=3)
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
    assert set(driver.scheduler.requests) == {last}
    assert driver.scheduler.requests[RequestId(last)].epoch == 3


def test_a_gateway_that_comes_back_has_lost_what_it_did_not_list():
    driver = many_waiting()
    driver.gateway()
    last = f"{4 * ENDED_AT_ONCE - 1}"
    driver.lose(last, epoch=1)
    assert [one.failure.code for one in driver.of(effects.SendRefused)] == ["engine_restarted"]
    assert RequestId(last) not in driver.scheduler.requests


@pytest.mark.parametrize("back", [("runs",), (), ("another",), ("runs", "ended meanwhile")])
@pytest.mark.parametrize("twice", [False, True])
def test_what_waited_ends_although_its_gateway_comes_back_before_that(back, twice, monkeypatch):
    """One request ends in each event, and ticks come in between. Quotas count none that is over."""
    monkeypatch.setattr(request_lifecycle, "ENDED_AT_ONCE", 1)
    driver = ready()
    driver.state(pools=(pool(limits=(("acme", Limits(concurrency=20)),)),))
    driver.attach(max_sequences=2)
    for name in ("runs", "ended meanwhile", *"abcdefgh"):
        driver.enqueue(name)
    driver.report("r0", entry("runs", 5), entry("ended meanwhile", 5))
    for _ in range(1 + twice):
        driver.send(events.GatewayDisconnected("g0"))
        driver.ended("ended meanwhile")
        driver.wait(0.2)
        driver.gateway("g0", *(driver.live(name, pages=5) for name in back))
        driver.wait(0.2)
    driver.enqueue("h", epoch=3)
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
    assert set(driver.scheduler.requests) == {*back, "h"}
    (account,) = driver.scheduler.state.quotas.accounts.values()
    assert account.draws == len(back) + 1


def test_another_gateway_may_use_an_id_of_one_that_has_gone():
    driver = many_waiting()
    driver.send(events.GatewayDisconnected("g0"))
    last = f"{4 * ENDED_AT_ONCE - 1}"
    driver.enqueue(last, gateway="g1")
    assert not driver.of(effects.SendRefused)
    assert driver.scheduler.requests[RequestId(last)].gateway == "g1"


def test_running_requests_of_a_gateway_that_has_forgotten_them_are_not_moved():
    driver = ready()
    driver.attach("r0", pages=1000, max_sequences=4 * ENDED_AT_ONCE)
    driver.attach("r1", pages=1)
    for n in range(4 * ENDED_AT_ONCE):
        driver.enqueue(f"{n}", max_tokens=16)
    driver.gateway()
    make_unhealthy(driver, hung=True)
    assert not driver.of(effects.CancelAtRunner)
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
    assert not driver.ledger()


# --------------------------------------------------------------------------------------- a request has one gateway


def test_another_gateway_that_uses_a_taken_id_is_refused_and_ends_nothing():
    driver = ready()
    driver.gateway("g1")
    driver.attach()
    driver.enqueue("a")
    driver.enqueue("a", gateway="g1")
    (refusal,) = driver.of(effects.SendRefused)
    assert (refusal.gateway, refusal.failure.code) == ("g1", "internal_error")
    driver.cancel("a", gateway="g1")
    driver.finish("a", gateway="g1")
    driver.lose("a", gateway="g1")
    assert driver.of(effects.SendRefused)[0].gateway == "g1", (
        "a gateway that reports a foreign request as lost gets a refusal"
    )
    driver.gateway("g1", driver.live("a"))
    assert driver.of(effects.SendRefused)[0].gateway == "g1"
    assert driver.scheduler.requests[RequestId("a")].gateway == "g0"
    assert driver.ledger() == {("a", 1): 5}


def test_a_gateway_that_reconnects_under_its_name_keeps_its_requests():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.gateway("g0", driver.live("a"))
    driver.enqueue("b")
    driver.enqueue("b", epoch=1)
    driver.finish("a")
    assert set(driver.scheduler.requests) == {"b"}


def test_an_id_is_free_again_once_its_request_has_ended():
    driver = ready()
    driver.gateway("g1")
    driver.attach()
    driver.enqueue("a")
    driver.finish("a")
    driver.enqueue("a", gateway="g1")
    assert driver.of(effects.SendPlaced)[0].gateway == "g1"


def test_of_those_that_wait_none_is_looked_at_alone_when_a_runner_comes_or_goes(monkeypatch):
    """A hundred thousand may."""
    driver = ready(tenants_examined=4)
    driver.attach(max_sequences=2)
    for n in range(50):
        driver.enqueue(f"q{n}")
    looked = []
    is_on = RequestLifecycle._is_on  # noqa: SLF001
    monkeypatch.setattr(RequestLifecycle, "_is_on", lambda *given: looked.append(given) or is_on(*given))
    monkeypatch.setattr(ClassQueue, "unordered", lambda _: pytest.fail("all that wait were looked at"))
    came = {"identity": RunnerIdentity(instance="r0", incarnation="2", pool="default/demo", group=GROUP), "address": ""}
    for pages in (100, 60):
        driver.scheduler.handle(events.RunnerAttached(**came, capacity=Capacity(pages=pages)), driver.clock())
    assert len(looked) <= 2
