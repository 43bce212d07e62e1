"""Quotas in trials: the checks of what tenants are let in for can fail."""

from dataclasses import replace

import pytest

from motet.runner_info import RequestClass
from motet_simulator.trials.draw import draw_plan
from motet_simulator.trials.plan import Grant, Plan
from motet_simulator.trials.run import run_trial
from tests.simulator.defects import Defect, put_back

QUOTAS = "motet_scheduler.policy.quotas"


def limited(*, classes: tuple[RequestClass, ...] = tuple(RequestClass), **limits: int) -> Plan:
    drawn = draw_plan(1)
    asks = tuple(
        replace(ask, request_class=classes[number % len(classes)], cancel_after=None, deadline=300.0)
        for number, ask in enumerate(drawn.asks)
    )
    grants = tuple(Grant(tenant, **limits) for tenant in sorted({ask.tenant for ask in asks}))
    settings = replace(drawn.settings, queue_limit=10_000)
    return replace(drawn, faults=(), asks=asks, grants=grants, settings=settings)


def test_limits_are_drawn_for_some_trials():
    plans = [draw_plan(seed) for seed in range(50)]
    grants = [grant for plan in plans for grant in plan.grants]
    assert 5 < sum(bool(plan.grants) for plan in plans) < 20
    for limit in ("requests_per_minute", "tokens_per_minute", "concurrency"):
        assert {bool(getattr(grant, limit)) for grant in grants} == {True, False}


def test_who_is_over_a_rate_is_refused_and_class_batch_waits():
    outcome = run_trial(limited(requests_per_minute=30, classes=(RequestClass.INTERACTIVE, RequestClass.STANDARD)))
    assert outcome.problem == ""
    assert outcome.answered < outcome.asked / 2
    outcome = run_trial(limited(requests_per_minute=60, classes=(RequestClass.BATCH,)))
    assert outcome.problem == ""
    assert outcome.answered > 0.85 * outcome.asked


def test_a_bucket_that_never_empties_is_a_problem():
    plan = limited(requests_per_minute=30)
    with put_back(Defect("", f"{QUOTAS}.buckets", "Bucket.take", "self.level -= taken", "pass")):
        assert " were let in, and at most " in run_trial(plan).problem


@pytest.mark.parametrize(
    "defect",
    [
        Defect("", f"{QUOTAS}.quotas", "Quotas._freed", "self.ready[account] = None", "pass"),
        Defect("", f"{QUOTAS}.quotas", "Quotas.tick", "self.ready[account] = None", "pass"),
    ],
    ids=["places", "rates"],
)
def test_who_waits_although_its_quota_has_room_is_a_problem(defect):
    rates = {"requests_per_minute": 60} if defect.where.endswith("tick") else {"concurrency": 1}
    plan = limited(classes=(RequestClass.BATCH,), **rates)
    with put_back(defect):
        assert "waits although there is room on tenant " in run_trial(plan).problem
