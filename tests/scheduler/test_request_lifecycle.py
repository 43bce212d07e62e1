"""Requests are lost, declined, moved, cancelled and finished; gateways and runners connect and disconnect."""

import pytest

from motet.domain import BASE, InstanceName, RequestId
from motet.runner_info import Failure, RunnerIdentity
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import Promise
from tests.scheduler.builders import PIRATE, SchedulerDriver, adapter, entry, ready


def decline(told, request, *, epoch=1, code="declined", instance="r0"):
    return told.tell(
        events.RunnerDeclined(InstanceName(instance), RequestId(request), epoch, Failure(code, "no room after all"))
    )


def test_a_finished_request_leaves_nothing_behind():
    told = ready()
    told.attach()
    told.enqueue("a")
    told.finish("a")
    assert not told.ledger()
    assert not told.scheduler.requests


def test_a_lost_request_is_placed_again_under_the_next_epoch_with_its_age():
    told = ready()
    told.attach("r0")
    told.enqueue("a", age=7.0)
    told.attach("r1")
    told.lose("a", delivered=5)
    (place,) = told.of(effects.SendPlaced)
    assert (place.instance, place.epoch) == ("r1", 2)
    request = told.scheduler.requests[RequestId("a")]
    assert told.clock() - request.asked_at == 7.0
    assert request.delivered == 5
    assert told.ledger("r0") == {}


def test_losing_the_same_placement_twice_changes_nothing():
    told = ready()
    told.attach("r0")
    told.attach("r1")
    told.enqueue("a")
    told.lose("a", epoch=1)
    first = told.scheduler.requests[RequestId("a")].epoch
    assert not told.lose("a", epoch=1)
    assert told.scheduler.requests[RequestId("a")].epoch == first


def test_the_loss_of_an_unknown_request_is_answered_so_that_no_client_hangs():
    told = ready()
    told.lose("ghost")
    assert told.of(effects.SendRefused)[0].failure.code == "engine_restarted"


def test_a_request_avoids_the_runner_that_declined_it():
    told = ready(avoid_after_decline=1.0)
    told.attach()
    told.enqueue("a")
    decline(told, "a")
    told.lose("a")
    assert told.where("a") == ""
    assert told.scheduler.requests[RequestId("a")].waiting_reason == "the runner declined it recently"
    told.wait(1.1)
    assert told.where("a") == ""  # declined and lost: twice as long
    told.wait(1.0)
    assert told.where("a") == "r0"


def test_a_decline_releases_the_promise_before_the_gateway_reports_the_loss():
    told = ready()
    told.attach()
    told.enqueue("a")
    decline(told, "a")
    assert not told.ledger()


@pytest.mark.parametrize("first", ["the runner", "the gateway"])
def test_a_final_decline_is_a_refusal_whether_gateway_or_runner_reports_it_first(first):
    told = ready()
    told.attach()
    told.enqueue("a")
    if first == "the runner":
        decline(told, "a", code="adapter_incompatible")
        told.lose("a")
    else:
        told.lose("a")
        decline(told, "a", code="adapter_incompatible")
    assert told.of(effects.SendRefused)[0].failure.code == "adapter_incompatible"
    assert not told.scheduler.requests


def test_finishing_under_an_earlier_epoch_cancels_the_later_placement():
    told = ready()
    told.attach("r0")
    told.attach("r1")
    told.enqueue("a")
    told.lose("a")
    told.finish("a", epoch=1)
    assert [(effect.request, effect.epoch) for effect in told.of(effects.CancelAtRunner)] == [("a", 2)]
    assert not told.scheduler.requests


def test_finishing_twice_is_nothing_the_second_time():
    told = ready()
    told.attach()
    told.enqueue("a")
    told.finish("a")
    assert not told.finish("a")


def test_a_cancellation_that_crosses_the_placement_frees_it():
    told = ready()
    told.attach()
    told.enqueue("a")
    told.tell(events.CancelRequested("g0", RequestId("a")))
    assert not told.ledger()
    assert told.of(effects.CancelAtRunner)


def test_cancelling_an_unknown_request_does_nothing():
    assert not ready().tell(events.CancelRequested("g0", RequestId("ghost")))


def test_a_lost_request_gets_its_full_queue_timeout_again():
    told = ready()
    told.attach()
    told.enqueue("a", deadline=5.0)
    told.wait(60)
    told.detach()
    told.lose("a")
    told.wait(4)
    assert not told.of(effects.SendRefused)
    told.wait(2)
    assert told.of(effects.SendRefused)


def test_enqueueing_again_takes_the_place_of_what_was_there():
    told = ready()
    told.attach()
    told.enqueue("a", max_tokens=16)
    told.enqueue("a", max_tokens=16, epoch=0, delivered=3)
    assert told.of(effects.SendPlaced)[0].epoch == 2
    assert list(told.ledger()) == [("a", 2)]


def test_a_gateway_that_goes_takes_its_waiting_requests_along_and_leaves_the_running_ones():
    told = ready()
    told.attach(max_sequences=1)
    told.enqueue("runs")
    told.enqueue("waits")
    told.tell(events.GatewayDisconnected("g0"))
    assert set(told.scheduler.requests) == {"runs"}
    assert told.ledger()


def test_what_a_departed_gateway_left_is_released_when_its_runner_no_longer_lists_it():
    told = ready()
    told.attach()
    told.enqueue("a", max_tokens=16)
    told.report("r0", entry("a", 2))
    told.tell(events.GatewayDisconnected("g0"))
    told.wait(1)
    assert told.ledger()
    for _ in range(2):
        told.clock.advance(1.5)
        told.report("r0")
    told.wait(0.1)
    assert not told.ledger()
    assert not told.scheduler.requests


def test_a_gateway_that_comes_back_keeps_what_it_runs_and_drops_what_it_does_not():
    told = ready()
    told.attach()
    told.enqueue("runs")
    told.enqueue("ended meanwhile")
    told.tell(events.GatewayDisconnected("g0"))
    told.gateway("g0", told.live("runs", pages=5))
    assert set(told.scheduler.requests) == {"runs"}
    assert list(told.ledger()) == [("runs", 1)]


def test_a_gateways_live_requests_are_adopted_by_a_scheduler_that_never_saw_them():
    told = ready()
    told.attach()
    told.gateway("g0", told.live("a", epoch=3, pages=7))
    assert told.ledger() == {("a", 3): 7}
    told.lose("a", epoch=3)
    told.wait(10)
    assert told.scheduler.requests[RequestId("a")].epoch == 4


def test_runner_first_or_gateway_first_the_promise_is_counted_once():
    for order in ("runner", "gateway"):
        told = ready()
        if order == "runner":
            told.attach(live=(entry("a", 7),))
            told.gateway("g0", told.live("a", pages=7))
        else:
            told.gateway("g0", told.live("a", pages=7))
            told.attach(live=(entry("a", 7),))
        assert told.ledger() == {("a", 1): 7}


def test_a_restarted_runner_is_not_taken_for_the_one_that_died():
    told = ready()
    told.attach(incarnation="1")
    told.enqueue("a")
    told.attach(incarnation="2")
    assert told.ledger() == {}
    told.detach(incarnation="1")
    assert told.scheduler.runners[InstanceName("r0")].attached, "the old stream's end says nothing about the new one"
    told.lose("a")
    told.wait(1)
    assert told.ledger() == {("a", 2): 5}


def test_a_runner_that_comes_back_keeps_its_ledger():
    told = ready()
    told.attach()
    told.enqueue("a")
    told.detach()
    told.enqueue("b")
    assert told.where("b") == ""
    told.attach(live=(entry("a", 5),))
    assert told.where("b") == "r0"
    assert told.ledger() == {("a", 1): 5, ("b", 1): 5}


def test_a_runner_that_stays_away_is_forgotten():
    told = ready(forget_runner=30.0)
    told.attach()
    told.detach()
    told.wait(31)
    assert not told.scheduler.runners


def make_unhealthy(told, *, hung):
    return told.tell(events.RunnerUnhealthy(RunnerIdentity(instance="r0", incarnation="1"), "it does not move", hung))


def test_the_requests_of_a_hung_runner_move():
    told = ready()
    told.attach("r0")
    told.enqueue("a")
    told.attach("r1")
    make_unhealthy(told, hung=True)
    assert [(effect.instance, effect.epoch) for effect in told.of(effects.CancelAtRunner)] == [("r0", 1)]
    (place,) = told.of(effects.SendPlaced)
    assert (place.instance, place.epoch, place.moved_reason) == ("r1", 2, "it does not move")
    assert place.engine_hung


def test_only_a_move_away_from_an_engine_that_hangs_says_so():
    told = ready()
    told.attach("r0")
    told.enqueue("a")
    told.attach("r1")
    make_unhealthy(told, hung=True)
    told.attach("r2")
    told.tell(events.RunnerUnhealthy(RunnerIdentity(instance="r1", incarnation="1"), "no word", hung=False))
    told.lose("a", epoch=2)
    (place,) = told.of(effects.SendPlaced)
    assert not place.engine_hung


def test_a_moving_request_that_fits_nowhere_waits_and_moves_later():
    told = ready()
    told.attach("r0")
    told.enqueue("a")
    make_unhealthy(told, hung=True)
    assert not told.of(effects.SendPlaced)
    told.attach("r1")
    assert told.of(effects.SendPlaced)[0].moved_reason


def test_when_the_gateway_gives_the_old_place_up_first_it_is_an_ordinary_placement():
    told = ready()
    told.attach("r0")
    told.enqueue("a")
    make_unhealthy(told, hung=True)
    told.lose("a", epoch=1, delivered=9)
    told.attach("r1")
    (place,) = told.of(effects.SendPlaced)
    assert (place.epoch, place.moved_reason) == (2, "")


def test_a_silent_runner_gets_no_new_work_until_it_reports_but_keeps_its_requests():
    told = ready()
    told.attach()
    told.enqueue("a")
    make_unhealthy(told, hung=False)
    told.enqueue("b")
    assert (told.where("a"), told.where("b")) == ("r0", "")
    told.report("r0", entry("a", 5))
    assert told.where("b") == "r0"


def test_a_hung_runner_that_moves_again_is_used_again():
    told = ready()
    told.attach("r0")
    told.report("r0", entry("x", 5), steps=10)
    make_unhealthy(told, hung=True)
    told.report("r0", entry("x", 5), steps=10)
    told.enqueue("a")
    assert told.where("a") == ""
    told.report("r0", entry("x", 5), steps=11)
    assert told.where("a") == "r0"


def test_a_silent_runner_that_reports_without_a_step_gets_no_new_work():
    told = ready()
    told.attach("r0")
    told.report("r0", entry("x", 5), steps=10)
    make_unhealthy(told, hung=False)
    told.report("r0", entry("x", 5), steps=10)
    told.enqueue("a")
    assert told.where("a") == ""
    told.report("r0", entry("x", 5), steps=11)
    assert told.where("a") == "r0"


def test_only_a_step_ends_a_hang_and_not_a_silence_or_a_new_stream():
    told = ready()
    told.attach("r0")
    told.report("r0", entry("x", 5), steps=10)
    make_unhealthy(told, hung=True)
    make_unhealthy(told, hung=False)
    told.report("r0", entry("x", 5), steps=10)
    told.attach("r0", live=(entry("x", 5),))
    told.report("r0", entry("x", 5), steps=10)
    told.enqueue("a")
    assert told.where("a") == ""
    told.report("r0", entry("x", 5), steps=11)
    assert told.where("a") == "r0"


def test_a_hung_runner_that_holds_only_parked_requests_has_nothing_to_show():
    told = ready()
    told.attach("r0")
    told.report("r0", entry("x", 5), steps=10)
    make_unhealthy(told, hung=True)
    told.report("r0", entry("x", 5, parked=True), steps=10)
    assert told.scheduler.runners["r0"].unhealthy == ""


def test_a_new_gateway_gets_the_catalog_at_once():
    told = ready()
    told.attach()
    told.gateway("g1")
    (publish,) = told.of(effects.PublishCatalog)
    assert publish.gateway == "g1"
    assert publish.catalog.groups[0].runners == (("r0", "unix:/run/r0.sock"),)


def test_who_has_just_taken_over_tells_gateways_nothing_before_an_operator_has_spoken():
    """They would believe that there are no models any more."""
    told = SchedulerDriver()
    told.gateway("g0")
    told.attach()
    assert not told.of(effects.PublishCatalog)
    told.gateway("g1")
    assert not told.of(effects.PublishCatalog)
    told.state(pools=())
    (publish,) = told.of(effects.PublishCatalog)
    assert publish.catalog.groups == (), "now it is known that there are none"


def test_the_timeline_of_a_request_names_each_step():
    told = ready()
    told.attach("r0")
    told.enqueue("a")
    told.attach("r1")
    told.lose("a")
    told.finish("a", epoch=2)
    story = told.scheduler.timelines.of(RequestId("a"))
    assert [event for _, event, _ in story] == ["queued", "placed", "lost", "placed", "finished"]


def test_timelines_of_ended_requests_are_bounded_and_those_of_running_ones_kept():
    told = ready(timelines=3)
    told.attach()
    told.enqueue("long")
    for n in range(9):
        told.enqueue(f"{n}")
        told.finish(f"{n}")
    assert told.scheduler.timelines.of(RequestId("0")) is None
    assert told.scheduler.timelines.of(RequestId("8")) is not None
    assert [event for _, event, _ in told.scheduler.timelines.of(RequestId("long"))] == ["queued", "placed"]
    assert len(told.scheduler.timelines) == 4


def test_timelines_of_unknown_requests_are_bounded_too():
    told = ready(timelines=3, queue_limit=1)
    told.enqueue("waits")
    for n in range(9):
        told.enqueue(f"refused{n}")
    told.attach(live=tuple(entry(f"ghost{n}", 2) for n in range(9)))
    for n in range(9):
        told.tell(events.PromiseChanged(InstanceName("r0"), RequestId(f"ghost{n}"), 1, Promise(4)))
    assert len(told.scheduler.timelines) == 4


def test_many_requests_that_came_and_went_leave_nothing_behind():
    told = ready(timelines=100)
    told.attach()
    told.state(adapter())
    told.certify()
    told.tell(events.SupervisorConnected())
    for n in range(3000):
        told.enqueue(f"{n}", deadline=300.0, digest=PIRATE if n % 3 == 0 else BASE)
        if n % 5 == 0:
            told.lose(f"{n}")
            told.cancel(f"{n}")
        else:
            told.finish(f"{n}")
        if n % 50 == 0:
            told.wait(0.1)
    lives = told.scheduler._lifecycle
    assert len(lives.deadlines) < 200, "they are swept with each tick"
    told.wait(5)
    assert not lives.ended
    assert not lives.unlisted
    assert not lives._retry_times
    assert not told.scheduler.requests
    assert len(told.scheduler.timelines) == 100


def test_a_sweep_keeps_the_deadlines_of_waiting_requests():
    told = ready()
    told.attach(max_sequences=1)
    told.enqueue("runs")
    for n in range(300):
        told.enqueue(f"{n}", deadline=5.0)
    for n in range(299):
        told.cancel(f"{n}")
    told.wait(1)
    assert len(told.scheduler._lifecycle.deadlines) == 1
    told.wait(5)
    assert [refusal.request for refusal in told.of(effects.SendRefused)] == ["299"]


def test_the_operator_hears_that_a_runner_is_unhealthy_and_that_it_is_pardoned():
    told = ready()
    told.attach("r0")
    make_unhealthy(told, hung=False)
    assert [one.unhealthy for one in told.of(effects.ReportRunner)] == ["it does not move"]
    told.tell(events.OperatorConnected())
    assert [one.unhealthy for one in told.of(effects.ReportRunner)] == ["it does not move"]
    told.report("r0")
    assert [one.unhealthy for one in told.of(effects.ReportRunner)] == [""]


# ------------------------------------------------------------------------- a gateway that missed where its request went


def missed_a_move(told):
    """`a` ran on r0 under epoch 1 and was moved to r1 under epoch 2; its gateway never heard of that and comes back."""
    told.attach("r0")
    told.enqueue("a")
    told.attach("r1")
    make_unhealthy(told, hung=True)
    assert told.of(effects.SendPlaced)[0].epoch == 2
    told.tell(events.GatewayDisconnected("g0"))
    told.report("r0", steps=1)
    told.report("r0", steps=2)
    told.gateway("g0", told.live("a", epoch=1))


def test_a_lost_placement_is_placed_again_although_a_later_one_never_arrived():
    told = ready()
    missed_a_move(told)
    assert told.where("a") == "r0"
    told.lose("a", epoch=1)
    assert told.of(effects.SendPlaced)[0].epoch == 3


def test_a_declined_placement_is_released_although_a_later_one_never_arrived():
    told = ready()
    missed_a_move(told)
    assert told.ledger("r0")
    decline(told, "a")
    assert not told.ledger("r0")


def test_what_runs_under_an_earlier_epoch_than_the_last_is_kept_when_its_gateway_leaves():
    told = ready()
    missed_a_move(told)
    told.report("r0", entry("a", 2), steps=3)
    told.tell(events.GatewayDisconnected("g0"))
    told.wait(1)
    assert told.ledger("r0"), "it runs, and its gateway may come back"


def test_a_placement_that_its_runner_never_lists_is_taken_back_and_placed_again():
    told = ready(unlisted_timeout=10.0)
    told.attach("r0")
    told.enqueue("a")
    told.attach("r1")
    for _ in range(10):
        told.wait(1)
        told.report("r0")
    assert not told.of(effects.SendPlaced)
    told.wait(1)
    assert [(effect.instance, effect.epoch) for effect in told.of(effects.CancelAtRunner)] == [("r0", 1)]
    (place,) = told.of(effects.SendPlaced)
    assert (place.instance, place.epoch) == ("r1", 2)
    assert place.moved_reason == "its runner has not listed it for 10 seconds"


def test_a_scheduler_that_stood_still_hears_its_runners_before_it_takes_anything_back():
    told = ready(unlisted_timeout=10.0)
    told.attach("r0")
    told.enqueue("a")
    told.attach("r1")
    told.wait(60)  # it was stopped, and its reports are still to be read
    assert not told.of(effects.CancelAtRunner)
    told.report("r0", entry("a", 5))
    told.wait(1)
    assert (told.where("a"), told.scheduler.requests[RequestId("a")].epoch) == ("r0", 1)


def test_a_placement_that_its_runner_lists_stays_however_long_it_takes():
    told = ready(unlisted_timeout=10.0)
    told.attach()
    told.enqueue("a")
    for _ in range(60):
        told.wait(1)
        told.report("r0", entry("a", 5))
    assert told.scheduler.requests[RequestId("a")].epoch == 1
    assert not told.scheduler._lifecycle.unlisted


def test_a_request_that_its_runner_does_not_list_and_its_gateway_does_not_report_is_placed_again():
    told = ready(unlisted_timeout=10.0)
    told.attach()
    told.enqueue("a")
    told.report("r0", entry("a", 5))
    for _ in range(16):
        told.wait(1)
        told.report("r0")
    assert told.scheduler.requests[RequestId("a")].epoch == 2


def test_a_runner_that_is_away_may_serve_what_it_was_given_until_it_is_forgotten():
    told = ready(unlisted_timeout=10.0, forget_runner=30.0)
    told.attach("r0")
    told.enqueue("a")
    told.detach("r0")
    told.wait(29)
    assert told.scheduler.requests[RequestId("a")].placement is not None
    told.wait(2)
    told.wait(11)
    told.attach("r1")
    assert told.where("a") == "r1"


def test_a_decline_that_the_gateway_never_reports_is_placed_again():
    told = ready(unlisted_timeout=10.0)
    told.attach()
    told.enqueue("a")
    decline(told, "a")
    told.wait(11)
    told.report("r0")
    told.wait(1)
    told.wait(1)
    assert told.scheduler.requests[RequestId("a")].epoch == 2


def test_the_refusal_of_a_move_names_the_last_epoch_so_that_the_gateway_gives_up_the_one_it_has():
    told = ready()
    told.attach("r0")
    told.enqueue("a", deadline=5.0)
    make_unhealthy(told, hung=True)
    told.wait(6)
    (refusal,) = told.of(effects.SendRefused)
    assert (refusal.request, refusal.epoch) == ("a", 1)


def test_a_refusal_carries_its_term_and_epoch_over_the_wire():
    failure = Failure("deadline_exceeded", "The request waited 5 seconds")
    refused = conversion.refuse(effects.SendRefused("g0", RequestId("a"), 3, failure), term=7).refused
    assert (refused.request, refused.term, refused.epoch) == ("a", 7, 3)


# --------------------------------------------------------------------------------------- a request has one gateway


def test_another_gateway_that_uses_a_taken_id_is_refused_and_ends_nothing():
    told = ready()
    told.gateway("g1")
    told.attach()
    told.enqueue("a")
    told.enqueue("a", gateway="g1")
    (refusal,) = told.of(effects.SendRefused)
    assert (refusal.gateway, refusal.failure.code) == ("g1", "internal_error")
    told.cancel("a", gateway="g1")
    told.finish("a", gateway="g1")
    told.lose("a", gateway="g1")
    assert told.of(effects.SendRefused)[0].gateway == "g1", "whoever has lost what is not its own is told so"
    told.gateway("g1", told.live("a"))
    assert told.of(effects.SendRefused)[0].gateway == "g1"
    assert told.scheduler.requests[RequestId("a")].gateway == "g0"
    assert told.ledger() == {("a", 1): 5}


def test_a_gateway_that_reconnects_under_its_name_keeps_its_requests():
    told = ready()
    told.attach()
    told.enqueue("a")
    told.gateway("g0", told.live("a"))
    told.enqueue("b")
    told.enqueue("b", epoch=1)
    told.finish("a")
    assert set(told.scheduler.requests) == {"b"}


def test_an_id_is_free_again_once_its_request_has_ended():
    told = ready()
    told.gateway("g1")
    told.attach()
    told.enqueue("a")
    told.finish("a")
    told.enqueue("a", gateway="g1")
    assert told.of(effects.SendPlaced)[0].gateway == "g1"
