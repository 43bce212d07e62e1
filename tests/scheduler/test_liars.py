"""What a runner says about requests that are placed elsewhere counts for nothing: neither for these requests, nor for
the runners that have them. It may deny its own requests, which then go on elsewhere."""

import pytest

from motet.domain import InstanceName, RequestId
from motet.runner_info import Failure
from motet_scheduler.policy import effects, events
from tests.scheduler.builders import entry, ready


def two_runners():
    """Request `a` is placed on r0, and listed there. r1 has told nothing yet."""
    driver = ready(unlisted_timeout=4.0)
    driver.attach("r0")
    driver.enqueue("a")
    driver.report("r0", entry("a", 5))
    driver.attach("r1")
    return driver


def decline(driver, instance, *, epoch=1, code="adapter_incompatible"):
    return driver.send(events.RunnerDeclined(InstanceName(instance), RequestId("a"), epoch, Failure(code, "no")))


def assert_untouched(driver):
    assert driver.where("a") == "r0"
    assert driver.ledger("r0") == {("a", 1): 5}
    assert not driver.of(effects.SendRefused)
    assert not driver.of(effects.SendPlaced)


def test_a_runner_cannot_decline_what_another_one_has():
    driver = two_runners()
    decline(driver, "r1")
    assert_untouched(driver)
    driver.lose("a")
    assert not driver.of(effects.SendRefused), "the decline was noted"


def test_a_runner_cannot_decline_what_waits():
    driver = two_runners()
    driver.detach("r0")
    driver.detach("r1")
    driver.lose("a")
    decline(driver, "r1")
    assert RequestId("a") in driver.scheduler.requests
    assert not driver.of(effects.SendRefused)


@pytest.mark.parametrize("epoch", [1, 2, 9])
def test_what_a_runner_claims_is_charged_to_it_alone_and_cancelled_there(epoch):
    driver = two_runners()
    for _ in range(2):
        driver.report("r1", entry("a", 60, epoch=epoch, output_tokens=50))
        assert [(one.instance, one.epoch) for one in driver.of(effects.CancelAtRunner)] == [("r1", epoch)]
    assert_untouched(driver)
    assert driver.ledger("r1") == {("a", epoch): 60}
    assert driver.scheduler.requests[RequestId("a")].delivered == 0


def test_a_runner_that_claims_a_request_does_not_hide_that_it_never_arrived():
    driver = ready(unlisted_timeout=4.0)
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    for _ in range(5):
        driver.wait(1)
        driver.report("r0")
        driver.report("r1", entry("a", 2))
    assert driver.scheduler.requests[RequestId("a")].epoch == 2, "it was placed again"


def test_a_runner_that_claims_a_request_and_gives_it_up_does_not_move_it():
    driver = two_runners()
    driver.report("r1", entry("a", 2))
    for _ in range(3):
        driver.wait(1)
        driver.report("r1")
    assert not driver.ledger("r1")
    driver.report("r0", entry("a", 5))
    driver.send(events.SequencesEnded(InstanceName("r1"), "1", ((RequestId("a"), 1),)))
    assert not driver.scheduler.lifecycle.unlisted
    assert_untouched(driver)


def test_a_runner_cannot_end_what_another_one_has():
    driver = two_runners()
    driver.report("r1", entry("a", 2))
    driver.ended("a", instance="r1")
    assert not driver.scheduler.lifecycle.unanswered
    assert_untouched(driver)


def test_what_a_runner_denies_goes_on_elsewhere_and_is_cancelled_there_once_it_is_listed_again():
    driver = two_runners()
    for _ in range(10):
        driver.wait(1)
        driver.report("r0")
        driver.report("r1")
        if driver.where("a") == "r1":
            break
    assert driver.where("a") == "r1"
    driver.wait(3)  # it may have been in a report that was under way
    driver.report("r0", entry("a", 5))
    assert [(one.instance, one.epoch) for one in driver.of(effects.CancelAtRunner)] == [("r0", 1)]
