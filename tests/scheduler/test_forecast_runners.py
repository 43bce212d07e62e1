"""Runners that admit by a forecast: their charges are parts of it, not of promises."""

import pytest

from motet.domain import BASE, RequestId
from motet.runner_info import Capacity, RunnerIdentity
from motet_scheduler.policy.runners import ParkedRequest, Runner
from motet_scheduler.policy.values import Promise


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
