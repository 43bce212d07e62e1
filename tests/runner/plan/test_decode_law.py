"""What an iteration of decodes takes in any case, and for each of them, as it is reported (PU-13)."""

from random import Random

import pytest

from motet_runner.step_costs import StepCosts


def learned(seconds_of: dict[int, float]) -> tuple[float, float]:
    costs = StepCosts(prefill_seconds_per_token=1e-4, swap_seconds_per_page=1e-4)
    for _ in range(20):
        for decodes, seconds in seconds_of.items():
            costs.learn_decodes(decodes, (seconds,))
    return costs.decode_law()


@pytest.mark.parametrize(("fixed", "each"), [(0.02, 0.001), (0.02, 0.0), (0.0, 0.003)])
def test_the_law_of_the_iterations_is_found(fixed, each):
    assert learned({rows: fixed + each * rows for rows in (1, 2, 5, 8, 20)}) == pytest.approx((fixed, each), abs=1e-9)


def test_no_part_is_negative():
    assert learned({1: 0.04, 2: 0.03, 4: 0.02, 8: 0.02})[1] == 0.0
    fixed, each = learned({1: 0.001, 2: 0.004, 4: 0.02, 8: 0.08})
    assert fixed == pytest.approx(0.0)
    assert each > 0


def test_noise_moves_it_little():
    chance = Random(1)
    noisy = {rows: (0.02 + 0.001 * rows) * chance.uniform(0.9, 1.1) for rows in range(1, 33)}
    assert learned(noisy) == pytest.approx((0.02, 0.001), rel=0.2)


@pytest.mark.parametrize("seen", [(), (1, 2, 4), (28, 29, 30, 31, 32)])
def test_few_numbers_of_decodes_say_nothing(seen):
    assert learned({rows: 0.02 + 0.001 * rows for rows in seen}) == (0.0, 0.0)
