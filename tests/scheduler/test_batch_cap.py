"""No more requests are placed on a runner than keep its pool's SLO for the time of a token (S3-18)."""

from dataclasses import replace

from motet.domain import InstanceName, RequestId
from motet.runner_info import BatchCap
from motet_scheduler.policy import effects, events
from tests.scheduler.builders import SchedulerDriver, entry, pool, ready

CAP = BatchCap(target_seconds=0.1, sequences=2, token_seconds=0.09, alone_seconds=0.02)
R0 = InstanceName("r0")


def report(driver: SchedulerDriver, cap: BatchCap | None) -> None:
    live = tuple(entry(request, pages) for (request, _), pages in driver.scheduler.runners[R0].ledger)
    driver.send(events.RunnerReported(instance=R0, incarnation="1", live=live, batch_cap=cap))


def asked(count: int, cap: BatchCap | None, **capacity) -> SchedulerDriver:
    driver = ready()
    driver.attach(**capacity)
    report(driver, cap)
    for number in range(count):
        driver.enqueue(f"q{number}")
    return driver


def running(driver: SchedulerDriver) -> int:
    return driver.scheduler.runners[R0].sequences


def test_no_more_are_placed_than_the_cap():
    assert running(asked(5, CAP)) == 2


def test_without_a_cap_or_before_it_is_known_the_places_count():
    assert running(asked(5, None, max_sequences=4)) == 4
    assert running(asked(5, BatchCap(target_seconds=0.1), max_sequences=4)) == 4


def test_the_smallest_of_cap_pool_and_runner_counts():
    driver = asked(0, replace(CAP, sequences=3), max_sequences=4)
    driver.state(pools=(pool(max_sequences=2),))
    for number in range(5):
        driver.enqueue(f"q{number}")
    assert running(driver) == 2
    driver.state(pools=(pool(max_sequences=9),))
    assert running(driver) == 3


def test_a_higher_cap_places_those_that_wait_and_a_lower_one_moves_nobody():
    driver = asked(5, CAP)
    report(driver, replace(CAP, sequences=4))
    assert running(driver) == 4
    report(driver, replace(CAP, sequences=1))
    assert running(driver) == 4
    driver.finish("q0")
    assert running(driver) == 3


def test_a_runner_that_connects_again_keeps_its_cap():
    driver = asked(5, CAP)
    driver.detach()
    driver.attach(live=tuple(entry(request, pages) for (request, _), pages in driver.scheduler.runners[R0].ledger))
    assert running(driver) == 2


def test_the_operator_is_told_the_cap():
    driver = asked(0, CAP)
    report(driver, CAP)
    assert driver.of(effects.ReportRunner)[-1].batch_cap == CAP


def test_the_waiting_reason_is_that_every_batch_is_full():
    driver = asked(3, CAP)
    assert driver.scheduler.requests[RequestId("q2")].waiting_reason == "every batch is full"
