"""Mended defects that are put back are found, and their plans made small: so the trials look where defects were."""

import pytest

from motet_simulator.trials.plan import Plan, draw_plan
from motet_simulator.trials.run import run_trial, shrunk
from tests.simulator.defects import DEFECTS, Defect, put_back

SEEDS = 1_000
FEW_SEEDS = 40
FEW_EVENTS = 12

QUICKLY_FOUND = [one for one in DEFECTS if one.where in ("Election._run", "handle")]


def fails(plan: Plan) -> bool:
    return bool(run_trial(plan).problem)


def first_that_fails(seeds: int) -> Plan | None:
    return next((plan for plan in map(draw_plan, range(seeds)) if fails(plan)), None)


@pytest.mark.parametrize("defect", QUICKLY_FOUND, ids=lambda defect: defect.what)
def test_a_defect_that_is_put_back_is_found_soon_and_is_gone_without_it(defect: Defect) -> None:
    with put_back(defect):
        plan = first_that_fails(FEW_SEEDS)
        assert plan is not None
    assert not fails(plan)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_each_defect_is_found_and_its_plan_made_small(defect: Defect) -> None:
    with put_back(defect):
        plan = first_that_fails(SEEDS)
        assert plan is not None
        assert shrunk(plan, fails).drawn_events <= FEW_EVENTS
