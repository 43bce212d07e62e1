"""Runners that admit by a forecast: their charges are parts of it, not of promises."""

import pytest

from motet.domain import BASE, RequestId
from motet.runner_info import Capacity, RunnerIdentity
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.runners import ParkedRequest, Runner
from motet_scheduler.policy.values import Promise
from tests.scheduler.builders import entry, ready


@pytest.mark.parametrize(("pages_free", "resumes"), [(3, False), (5, True)])
def test_a_parked_request_resumes_when_its_pages_are_free(pages_free: int, resumes: bool) -> None:
    """The forecast was wrong when it was parked. That it has room again says nothing about pages."""
    runner = Runner(
        RunnerIdentity(pool="acme/a", group="acme/a", instance="r0", incarnation="1"),
        "r0",
        Capacity(pages=20, by_forecast=True),
        1.0,
    )
    runner.record_promise((RequestId("a"), 1), 18, BASE, 0.0, shared=12).owed = 0
    runner.pages_to_resume = pages_free
    assert runner.may_resume(ParkedRequest(1, Promise(5), BASE, (1, 0.0))) is resumes


def test_of_a_request_that_came_back_only_the_pages_of_its_tokens_are_kept() -> None:
    """Its promise was doubled at once, and by the forecast nobody needs all of it now."""
    driver = ready()
    driver.send(events.SupervisorConnected())
    driver.attach(pages=40, by_forecast=True)
    for name in ("back", "parked"):
        driver.enqueue(name, prompt=64, max_tokens=160)
    back = entry("back", 20, pages_used=2, parked_times=1, prompt_tokens=64, output_tokens=10, charged_pages=8)
    parked = entry("parked", 6, parked=True, charged_pages=6)
    driver.report("r0", back, parked, pages_free=8)
    assert not driver.of(effects.AllowResume), "three of the eight are kept for its tokens"
    driver.report("r0", back, parked, pages_free=9)
    assert [one.request for one in driver.of(effects.AllowResume)] == ["parked"]
