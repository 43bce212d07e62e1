"""The whole system in simulated processes: what must hold holds, whatever a plan does to it."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from motet.errors import PoolSaturated
from motet_scheduler.policy.gateway_events import GatewayEvents
from motet_simulator.trials.__main__ import described
from motet_simulator.trials.plan import FAULT_KINDS, Fault, draw_plan
from motet_simulator.trials.run import messages_of, run_trial, shrunk

SEEDS = 200
SOAK_SEEDS = 10_000


def failures(first: int, end: int, processes: int) -> str:
    command = [sys.executable, "-m", "motet_simulator.trials", str(first), str(end), "--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_nothing_goes_wrong_in_the_first_trials():
    assert failures(0, SEEDS, 2) == ""


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_nothing_goes_wrong_in_ten_thousand_trials():
    assert failures(SEEDS, SOAK_SEEDS, 2) == ""


def test_a_trial_sends_the_same_messages_each_time_in_each_process():
    command = [sys.executable, "-m", "motet_simulator.trials", "--messages", "3", "6"]
    said = {
        subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {"".join(f"{seed} {messages_of(seed)}\n" for seed in range(3, 6))}


def test_a_fault_that_is_left_out_changes_nothing_before_it():
    plan = draw_plan(4)
    without = replace(plan, faults=plan.faults[:3])
    logs: list[list[tuple[float, str, bytes]]] = [[], []]
    for one, log in zip((plan, without), logs, strict=True):
        run_trial(one, lambda at, stream, message, log=log: log.append((at, stream, message)))
    until = plan.faults[3].at
    before = [[sent for sent in log if sent[0] < until] for log in logs]
    assert before[0] == before[1] != []
    assert logs[0] != logs[1]


def test_requests_are_answered_and_faults_of_every_kind_are_drawn():
    plans = [draw_plan(seed) for seed in range(50)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(FAULT_KINDS)
    assert all(len(plan.asks) >= 60 and len(plan.faults) >= 8 for plan in plans)
    plan = replace(plans[1], faults=(), settings=replace(plans[1].settings, queue_limit=10_000))
    outcome = run_trial(plan)
    assert outcome.problem == ""
    stays = sum(one.cancel_after is None and one.deadline == 300 and not one.unreadable for one in plan.asks)
    assert 50 < stays <= outcome.answered <= len(plan.asks), "who would leave may have its answer before"


@pytest.mark.parametrize("limit", [10_000, 5])
def test_a_product_that_refuses_everybody_does_not_pass(limit, monkeypatch):
    monkeypatch.setattr(GatewayEvents, "_refusal", lambda *_: PoolSaturated("no"))
    plan = draw_plan(1)
    outcome = run_trial(replace(plan, faults=(), settings=replace(plan.settings, queue_limit=limit)))
    assert "refused for room, but" in outcome.problem
    assert outcome.answered == 0


def test_a_failed_plan_is_made_smaller():
    plan = draw_plan(5)
    guilty = plan.asks[20].name

    def fails(smaller):
        return any(one.name == guilty for one in smaller.asks) and len(smaller.faults) > 1

    smallest = shrunk(plan, fails)
    assert [one.name for one in smallest.asks] == [guilty]
    assert len(smallest.faults) == 2
    assert smallest.drawn_events == 3


def test_a_runner_that_never_comes_back_is_seen_and_described():
    """The checks can fail: with a pool that has lost all runners for good, requests do not end."""
    faults = tuple(Fault("kill", 2.0, f"runner-{number}", seconds=1e6) for number in range(3))
    outcome = run_trial(replace(draw_plan(1), faults=faults))
    assert "has not ended" in outcome.problem
    assert outcome.problem in described(outcome)
    assert "kind='kill'" in described(outcome)
