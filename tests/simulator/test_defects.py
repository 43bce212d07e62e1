"""Mended defects that are put back are found, and their plans made small: so the trials look where defects were."""

import pytest

from motet_simulator.trials.draw import draw_plan
from motet_simulator.trials.plan import Plan
from motet_simulator.trials.run import run_trial
from motet_simulator.trials.shrink import smaller_alike
from tests.simulator.defects import DEFECTS, Defect, put_back
from tests.simulator.test_trials import SEEDS as FIRST_TRIALS

SEEDS = 1_000
CHEAPEST = "an error of one step ends the election"
"""To make its plan smaller takes the fewest seconds."""


def fails(plan: Plan) -> bool:
    return bool(run_trial(plan).problem)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_a_defect_that_is_put_back_is_found_and_is_gone_without_it(defect: Defect) -> None:
    plan = draw_plan(defect.seed)
    with put_back(defect):
        assert fails(plan)
    if defect.seed >= FIRST_TRIALS:  # those do not fail: `test_trials.py` runs them
        assert not fails(plan)


def test_the_plan_of_a_defect_is_made_small() -> None:
    defect = next(one for one in DEFECTS if one.what == CHEAPEST)
    with put_back(defect):
        small = smaller_alike(run_trial(draw_plan(defect.seed)))
        assert fails(small)
    assert 0 < small.drawn_events <= defect.most_events
    assert not fails(small)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_a_thousand_seeds_find_each_defect_not_later_than_is_known_and_that_plan_is_made_small(defect: Defect) -> None:
    """An earlier seed may need more events: it finds the defect where runners are busy, say."""
    with put_back(defect):
        found = next((plan for plan in map(draw_plan, range(SEEDS)) if fails(plan)), None)
        assert found is not None
        assert found.seed <= defect.seed
        small = smaller_alike(run_trial(draw_plan(defect.seed)))
    assert small.drawn_events <= defect.most_events, small
