"""Quotas: what a request is charged at its end, after a restart and after other limits."""

import pytest

from motet.domain import RequestId
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import Estimate
from tests.scheduler.builders import SchedulerDriver
from tests.scheduler.test_quotas import account, grant, placed, refusal, successor, told, with_limits


def finish(driver, request: str, tokens: int) -> None:
    driver.send(events.RequestFinished("g0", RequestId(request), 1, output_tokens=tokens, reason="stop"))


@pytest.mark.parametrize("restart", [False, True])
def test_more_than_a_debt_may_be_comes_back_from_no_scheduler(restart):
    driver = with_limits(tokens_per_minute=6000)
    much = {"max_tokens": 50_000, "estimate": Estimate(q90=40_000)}
    driver.enqueue("a", prompt=100, **much)
    if restart:
        heard = told(driver)
        driver = successor(driver, tokens_per_minute=6000)
        driver.gateway("g0", driver.live("a", prompt_tokens=100, **much))
        driver.send(events.LevelsTold("g0", tuple((level, 1.0) for level in heard)))
    finish(driver, "a", 20_000)
    assert account(driver).tokens.level == pytest.approx(-6000)


def test_an_account_that_was_full_owes_nothing_of_before():
    """It was forgotten meanwhile, and its tenant comes again soon after a restart."""
    driver = with_limits(tokens_per_minute=6000)
    driver.enqueue("a", prompt=100, max_tokens=6900)
    heard = told(driver)
    after = successor(driver, tokens_per_minute=6000)
    after.gateway("g0", after.live("a", prompt_tokens=100, max_tokens=6900))
    after.send(events.LevelsTold("g0", tuple((level, 1.0) for level in heard)))
    finish(after, "a", 10)
    after.clock.advance(2.0)
    after.enqueue("b")
    assert placed(after) == ["b"]


def test_a_limit_does_not_count_what_began_before_it():
    driver = with_limits(concurrency=8)
    driver.enqueue("a", prompt=100, max_tokens=4000)
    grant(driver, concurrency=8, tokens_per_minute=6000)
    finish(driver, "a", 3000)
    driver.enqueue("b", prompt=100, max_tokens=100)
    assert placed(driver) == ["b"]
    assert account(driver).tokens.level == pytest.approx(1000 - 200)


def test_what_a_limit_of_before_took_does_not_come_back_to_the_limit_of_now():
    """A limit that was taken away and set again has a new bucket, which has given this request nothing."""
    limits = {"concurrency": 8, "tokens_per_minute": 6000, "requests_per_minute": 60}
    driver = with_limits(runner=False, **limits)
    driver.enqueue("a", prompt=100, max_tokens=600)
    grant(driver, concurrency=8)
    grant(driver, **limits)
    driver.enqueue("b", prompt=100, max_tokens=400)
    driver.cancel("a")
    assert account(driver).tokens.level == pytest.approx(1000 - 500)
    assert account(driver).requests.level == pytest.approx(10 - 1)


@pytest.mark.parametrize("number", range(3))
def test_choices_together_use_no_more_than_a_minutes_grant(number):
    """Each of them alone is let in if its first choice was, and no debt is larger."""
    driver = with_limits(tokens_per_minute=6000)
    how = {"prompt": 900, "max_tokens": 1000, "estimate": Estimate(q90=1000)}
    parent = RequestId("c0") if number else None
    driver.enqueue(f"c{number}", parent=parent, choices=6, **how)
    (failure,) = refusal(driver)
    assert failure.retry_after == 0
    assert "The 6 answers may have 6900 tokens" in failure.message
    assert "Lower n" in failure.message
    driver.enqueue("fewer", choices=5, **how)
    assert placed(driver) == ["fewer"]


def test_what_gateways_run_before_the_limits_are_known_has_its_places_and_is_settled():
    driver = SchedulerDriver()
    driver.attach(pages=65_536, max_sequences=2048, adapter_slots=8)
    driver.gateway("g0", *(driver.live(f"a{number}", prompt_tokens=100, max_tokens=200) for number in range(4)))
    grant(driver, concurrency=4, tokens_per_minute=6000)
    driver.enqueue("b", max_tokens=500)
    assert driver.of(effects.SendPosition)[0].why == "tenant acme is over its concurrency 4"
    level = account(driver).tokens.level
    finish(driver, "a0", 50)
    assert account(driver).tokens.level == pytest.approx(level + 150)
    assert account(driver).running == 4


def test_what_ran_before_its_tenant_was_granted_limits_has_places_and_is_charged_nothing():
    driver = with_limits()
    for name in ("a", "b"):
        driver.enqueue(name, prompt=100)
    grant(driver, concurrency=2, tokens_per_minute=6000)
    driver.enqueue("c", max_tokens=500)
    level = account(driver).tokens.level
    finish(driver, "a", 0)
    assert account(driver).tokens.level == pytest.approx(level)
    assert (account(driver).running, account(driver).draws) == (2, 2)


def test_what_is_in_a_queue_when_limits_are_granted_is_charged_and_goes_on():
    driver = with_limits(runner=False)
    for number in range(3):
        driver.enqueue(f"r{number}", prompt=100, max_tokens=100)
    grant(driver, concurrency=2, tokens_per_minute=6000)
    assert account(driver).tokens.level == pytest.approx(1000 - 600)
    driver.attach(pages=65_536)
    assert len(placed(driver)) == 3
    driver.enqueue("over")
    assert driver.of(effects.SendPosition)[0].why == "tenant acme is over its concurrency 2"
