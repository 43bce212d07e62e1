"""Values at which a decision of the policy turns: the last that is still one thing, and the first that is the other."""

import pytest

from motet.domain import InstanceName, RequestId
from motet_scheduler.policy import effects, events
from tests.scheduler.builders import entry, ready

A, R0 = RequestId("a"), InstanceName("r0")
SMALL = {"prompt": 8, "max_tokens": 8}
"""One page. The default request takes five."""


def hung(driver, instance="r0"):
    driver.send(events.RunnerUnhealthy(driver.scheduler.runners[InstanceName(instance)].identity, "no step", hung=True))


def test_a_request_that_comes_again_avoids_the_runners_that_its_gateway_names():
    driver = ready(avoid_after_decline=1.0)
    driver.attach("r0")
    driver.attach("r1")
    driver.enqueue("a", avoid=(InstanceName("r1"),))
    assert driver.where("a") == "r0", "r1 has the higher name"
    driver.enqueue("b", avoid=(R0, InstanceName("r1")))
    driver.wait(0.9)
    assert driver.where("b") == ""
    driver.wait(0.1)
    assert driver.where("b") == "r0", "the fuller one"


@pytest.mark.parametrize(
    ("pages", "sequences", "chosen"), [(10, 2, "roomy"), (9, 2, "full"), (10, 1, "full"), (11, 3, "roomy")]
)
def test_the_first_of_several_choices_goes_where_all_of_them_just_fit(pages, sequences, chosen):
    driver = ready()
    driver.attach("full", pages=14)
    driver.enqueue("other")
    driver.attach("roomy", pages=pages, max_sequences=sequences)
    driver.enqueue("a", choices=2)
    assert driver.where("a") == chosen


@pytest.mark.parametrize(("sequences", "chosen"), [(3, "fuller"), (2, "roomy")])
def test_running_sequences_count_for_the_room_of_all_choices(sequences, chosen):
    driver = ready()
    driver.attach("fuller", max_sequences=sequences)
    driver.enqueue("other")
    driver.attach("roomy")
    driver.enqueue("a", choices=2)
    assert driver.where("a") == chosen


def test_a_single_request_needs_no_room_for_others():
    driver = ready()
    driver.attach("full", pages=10)
    driver.enqueue("other")
    driver.attach("roomy")
    driver.enqueue("a")
    assert driver.where("a") == "full"


def test_the_last_free_page_is_given_away():
    driver = ready()
    driver.attach(pages=6)
    driver.enqueue("long")
    for name in "bc":
        driver.enqueue(name, tenant=name, **SMALL)
    assert (driver.where("b"), driver.where("c")) == ("r0", "")
    driver.finish("b")
    assert driver.where("c") == "r0"


def test_the_last_place_in_a_batch_is_given_away():
    driver = ready()
    driver.attach(max_sequences=2)
    for name in "abc":
        driver.enqueue(name, tenant=name)
    assert [driver.where(name) for name in "abc"] == ["r0", "r0", ""]
    driver.finish("a")
    assert driver.where("c") == "r0"


@pytest.mark.parametrize(("gone", "reported"), [(12, []), (13, [107])])
def test_a_late_position_is_reported_when_it_has_moved_by_more_than_a_tenth(gone, reported):
    driver = ready()
    for number in range(120):
        driver.enqueue(f"a{number}")
    for number in range(gone):
        driver.cancel(f"a{number}")
    driver.wait(1.0)
    assert [one.position for one in driver.of(effects.SendPosition) if one.request == "a119"] == reported


def test_positions_up_to_a_hundred_are_reported_exactly():
    driver = ready()
    for number in range(102):
        driver.enqueue(f"a{number}")
    driver.cancel("a0")
    driver.wait(1.0)
    assert [one.position for one in driver.of(effects.SendPosition)] == list(range(1, 101))


def test_positions_are_reported_once_a_second():
    driver = ready()
    for name in "ab":
        driver.enqueue(name)
    driver.wait(1.0)
    driver.cancel("a")
    driver.wait(0.5)
    assert not driver.of(effects.SendPosition)
    driver.wait(0.5)
    assert [one.position for one in driver.of(effects.SendPosition)] == [1]


def test_each_loss_doubles_the_time_in_which_a_runner_is_avoided():
    driver = ready(avoid_after_decline=1.0, max_avoid=5.0)
    driver.attach()
    driver.enqueue("a")
    for epoch, pause in enumerate((1.0, 2.0, 4.0, 5.0, 5.0), 1):
        driver.lose("a", epoch)
        assert driver.where("a") == ""
        driver.wait(pause - 0.5)
        assert driver.where("a") == "", epoch
        driver.wait(0.5)
        assert driver.where("a") == "r0", epoch


def test_a_runner_that_hung_is_not_named_to_a_request_that_its_gateway_lost():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    hung(driver)
    driver.lose("a", epoch=1)
    driver.attach("r1")
    (place,) = driver.of(effects.SendPlaced)
    assert (place.instance, place.moved_reason, place.engine_hung) == ("r1", "", False)


def test_a_stream_that_its_gateway_still_has_is_not_moved_away_from_a_hang_any_more():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    hung(driver)
    assert driver.where("a") == ""
    driver.report("r0", steps=1)
    driver.gateway("g0", driver.live("a"))
    assert driver.where("a") == "r0"
    driver.lose("a", epoch=1)
    driver.wait(5.0)
    (place,) = driver.of(effects.SendPlaced)
    assert (place.epoch, place.moved_reason, place.engine_hung) == (3, "", False)


def test_a_placement_that_ended_and_is_adopted_again_is_seen_in_reports():
    """It was to move, and meanwhile its gateway, whose stream was down, had no order to do so."""
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a")
    driver.report("r0", steps=1)
    hung(driver)
    driver.report("r0", steps=2)
    driver.gateway("g0", driver.live("a"))
    for steps in (3, 4, 5):
        driver.clock.advance(1.1)
        driver.report("r0", entry("a", 5), steps=steps)
    assert driver.ledger() == {("a", 1): 5}
    assert not driver.scheduler.lifecycle.unlisted


def test_a_refused_request_has_its_reason_in_its_timeline():
    driver = ready(queue_limit=1)
    driver.enqueue("waits", tenant="other")
    driver.enqueue("a", tenant="other")
    (refused,) = driver.of(effects.SendRefused)
    assert refused.failure.code == "pool_saturated"
    assert driver.scheduler.timelines.of(A) == [(0.0, "refused", refused.failure.message)]


def test_the_timeline_of_a_request_has_the_details():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.finish("a")
    assert driver.scheduler.timelines.of(A) == [
        (0.0, "queued", "class standard"),
        (0.0, "placed", "on runner r0 with 5 pages (placement 1)"),
        (0.0, "finished", "0 tokens ()"),
    ]
    driver.enqueue("b")
    driver.cancel("b")
    assert driver.scheduler.timelines.of(RequestId("b"))[-1] == (0.0, "cancelled", "")


@pytest.mark.parametrize(("delivered", "refused"), [(0, True), (1, False)])
def test_a_queue_takes_as_many_requests_as_its_limit_and_streams_that_must_continue(delivered, refused):
    driver = ready(queue_limit=2)
    driver.enqueue("a")
    assert not driver.enqueue("b", tenant="b") or not driver.of(effects.SendRefused)
    driver.enqueue("c", delivered=delivered)
    assert bool(driver.of(effects.SendRefused)) is refused
