"""What tokens cost in the shares of tenants, by what runners have measured."""

import pytest

from motet.domain import InstanceName, RequestId
from motet_scheduler.policy import events
from motet_scheduler.policy.step_profile import StepProfile
from motet_scheduler.policy.token_costs import LOOK_EVERY, MAX_CHANGE, MOST, TokenCosts
from motet_scheduler.policy.values import Estimate
from tests.scheduler.builders import GROUP, SchedulerDriver, entry, ready

LONG = 100
"""Looks after which the costs are what was measured."""


def report(driver: SchedulerDriver, instance: str = "r0", **how: float) -> None:
    live = [entry(request, pages) for (request, _), pages in driver.scheduler.runners[InstanceName(instance)].ledger]
    driver.report(instance, *live, **how)


def measured(*answer_costs: float, looks: int = LONG) -> SchedulerDriver:
    """A runner for each of these. 0: it does not say."""
    driver = ready()
    for number in range(len(answer_costs)):
        driver.attach(f"r{number}", max_sequences=8, pages=1000)
    for _ in range(looks):
        for number, cost in enumerate(answer_costs):
            how = {"fixed_seconds": 4e-3 * cost, "sequence_seconds": 5e-4 * cost} if cost else {}
            report(driver, f"r{number}", prompt_token_seconds=1e-3, **how)
        driver.wait(LOOK_EVERY)
    return driver


def costs(driver: SchedulerDriver) -> TokenCosts:
    return driver.scheduler.queues[GROUP].token_costs


def counter(driver: SchedulerDriver) -> float:
    """Of the only tenant."""
    (shares,) = [one.shares for one in driver.scheduler.queues[GROUP].class_queues.values() if len(one.shares)]
    (share,) = shares
    return share.counter + share.owed


@pytest.mark.parametrize(
    ("of_runners", "expected"),
    [((5.0,), 5.0), ((3.0, 0.0, 5.0, 1000.0), 5.0), ((0.0,), 2.0), ((0.01,), 1.0), ((1000.0,), MOST)],
)
def test_the_median_of_what_runners_measure_counts_within_bounds(of_runners, expected):
    found = costs(measured(*of_runners))
    assert found.answer / found.prompt == pytest.approx(expected)
    assert found.answer + found.prompt == pytest.approx(3.0), "a usual request costs as much as before"


def test_a_runner_without_places_may_say_what_it_measured():
    driver = ready()
    driver.attach(max_sequences=0)
    driver.report(fixed_seconds=4e-3, sequence_seconds=5e-4, prompt_token_seconds=1e-3)
    assert driver.scheduler.runners[InstanceName("r0")].profile.knee == 8


def test_a_request_is_charged_by_them():
    driver = measured(5.0)
    driver.enqueue("a", prompt=100, max_tokens=50, estimate=Estimate(q50=50))
    assert counter(driver) == pytest.approx(0.5 * 100 + 2.5 * 50)


def test_the_costs_change_slowly_and_no_counter_with_them():
    driver = measured(16.0, looks=1)
    assert costs(driver).answer / costs(driver).prompt == pytest.approx(2.0 * MAX_CHANGE)
    driver.enqueue("a", prompt=100, max_tokens=50, estimate=Estimate(q50=50))
    before = counter(driver)
    for _ in range(LONG):
        report(driver, fixed_seconds=0.064, sequence_seconds=0.008, prompt_token_seconds=1e-3)
        driver.wait(LOOK_EVERY)
    assert costs(driver).answer / costs(driver).prompt == pytest.approx(16.0)
    assert counter(driver) == before


def test_what_was_charged_before_is_given_back_by_the_same_costs():
    driver = measured(0.0, looks=1)
    driver.enqueue("stays", prompt=1, max_tokens=1)
    driver.enqueue("a", prompt=100, max_tokens=50, estimate=Estimate(q50=50))
    before = counter(driver)
    for _ in range(LONG):
        report(driver, fixed_seconds=0.064, sequence_seconds=0.008, prompt_token_seconds=1e-3)
        driver.wait(LOOK_EVERY)
    driver.send(events.RequestFinished("g0", RequestId("a"), 1, 10))
    assert counter(driver) == pytest.approx(before - 2 * 40)


@pytest.mark.parametrize(("batch", "cost"), [(1, 11.0), (10, 2.0), (100, 1.1)])
def test_a_token_of_an_answer_costs_its_part_of_an_iteration(batch, cost):
    assert StepProfile(0.01, 0.001, 0.001).answer_cost(batch) == pytest.approx(cost)


def test_a_runner_that_has_not_measured_prompts_says_nothing():
    assert StepProfile(0.01, 0.001).answer_cost(8) == 0
