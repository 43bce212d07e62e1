"""A group changes its base model: no request crosses from one base model to the other."""

import pytest

from motet.domain import InstanceName
from motet.runner_info import RequestClass
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.replaced_bases import REFUSED_AT_ONCE
from tests.scheduler.builders import GROUP, SchedulerDriver, ready

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


def test_after_a_start_a_stream_waits_until_its_runner_had_time_to_attach():
    driver = ready(forget_runner=30.0)
    driver.attach("b", base=NEW)
    driver.enqueue("stream", base=OLD, delivered=5, epoch=1)
    driver.wait(29)
    assert refused(driver) == {}
    driver.attach("a", base=OLD)
    assert driver.where("stream") == "a"


def test_many_requests_are_sent_back_in_parts():
    driver = ready()
    driver.attach("b", base=NEW)
    for number in range(REFUSED_AT_ONCE + 1):
        driver.enqueue(f"r{number}", base=OLD)
    driver.wait(0.1)
    assert len(refused(driver)) == REFUSED_AT_ONCE
    driver.wait(0.1)
    assert len(refused(driver)) == 1


def test_a_request_is_not_tried_again_because_of_room_on_another_base_model():
    driver = changing()
    driver.enqueue("big", prompt=1500, base=OLD)
    driver.enqueue("waits", prompt=1500, base=OLD)
    queue = driver.scheduler.queues[GROUP]
    queue.retry_on(driver.scheduler.runners[InstanceName("b")])
    assert queue.next_turn(RequestClass.STANDARD, 0, driver.scheduler.config) == 1
    queue.retry_on(driver.scheduler.runners[InstanceName("a")])
    driver.finish("big")
    assert driver.where("waits") == "a"


def test_no_runner_of_another_base_model_is_reserved_for_an_overdue_request():
    driver = changing(max_passed_over=2)
    driver.enqueue("big", prompt=1500, base=OLD)
    driver.enqueue("overdue", prompt=1500, base=OLD)
    for number in range(5):
        driver.enqueue(f"r{number}", tenant="others", base=NEW)
    assert {driver.where(f"r{number}") for number in range(5)} == {"b"}
    assert driver.scheduler.queues[GROUP].reserved_runner is driver.scheduler.runners[InstanceName("a")]
