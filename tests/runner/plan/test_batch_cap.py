"""As many sequences run at once as keep the time of a token (S3-18)."""

import math
import random
from itertools import pairwise

import pytest

from motet.domain import RequestId
from motet_runner.plan.batch_cap import SloCap
from motet_runner.plan.step_times import MIN_STEPS, STEPS_PER_FIT, StepTimeLaw, TimedStep
from tests.runner.plan.fake_device import FakeDevice, make_planner, new

LAW = StepTimeLaw(fixed=0.02, decode=0.005, context=2e-5)
TARGET = 0.1
LENGTH = 100
BEST = 11  # 0.02 + 11 * 0.007 is 0.097, and with one more 0.104


def run(cap, steps, *, wanted=64, law=LAW, noise=0.0, seed=1):
    """As many decode as wait, up to the cap. → the caps."""
    chance, seen = random.Random(seed), []
    for _ in range(steps):
        decodes = min(wanted, cap.sequences)
        seconds = law.seconds(decodes, LENGTH * decodes, 0) * math.exp(chance.gauss(0, noise))
        cap.learn_step(TimedStep(seconds, decodes, LENGTH * decodes, 0))
        seen.append(cap.sequences)
    return seen


def test_the_cap_is_the_largest_batch_that_keeps_the_target():
    cap = SloCap(TARGET, 64)
    run(cap, 400)
    assert cap.sequences == BEST
    assert cap.report().token_seconds <= TARGET
    assert LAW.seconds(BEST + 1, LENGTH * (BEST + 1), 0) > TARGET


def test_there_is_no_cap_before_enough_iterations():
    cap = SloCap(TARGET, 64)
    assert set(run(cap, MIN_STEPS - 1)) == {64}
    assert cap.report().sequences == 0
    run(cap, STEPS_PER_FIT)
    assert 0 < cap.report().sequences < 64


def test_it_grows_from_few_sequences_to_many():
    cap = SloCap(TARGET, 64)
    few = run(cap, 100, wanted=1)[-1]
    assert 2 <= few <= 4  # that number is safe, or twice as many as were seen
    assert max(run(cap, 800)) == BEST


def test_a_target_that_one_sequence_cannot_keep_leaves_one():
    cap = SloCap(0.01, 64)
    run(cap, 400)
    assert cap.sequences == 1
    assert cap.report().alone_seconds == pytest.approx(LAW.seconds(1, LENGTH, 0), rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("alone", [MIN_STEPS, 12_000])
def test_one_sequence_that_keeps_the_target_alone_is_joined_by_others(noise, alone):
    """What a second one takes is unknown, or was seen so long ago that it no longer counts. With a second one alone it
    can be seen: a cap of 1 would stay for ever."""
    cap, law = SloCap(0.03, 64), StepTimeLaw(fixed=0.02, decode=0.0001, context=1e-6)
    run(cap, 400 if alone > MIN_STEPS else 0, law=law, noise=noise)
    run(cap, alone, wanted=1, law=StepTimeLaw(fixed=0.04), noise=noise)  # too slow, as long as the machine is
    assert run(cap, 1, wanted=1, law=law)[-1] == 1
    assert max(run(cap, 1600, law=law, noise=noise)) > 40


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_if_all_iterations_had_as_many_sequences_fewer_take_less(noise):
    """Many began together: what of their time is fixed is not known yet, and nobody says that one alone takes as
    long."""
    cap, chance = SloCap(TARGET, 64), random.Random(1)
    for step in range(MIN_STEPS + 10 * STEPS_PER_FIT):
        context = 64 * (LENGTH + step)
        seconds = LAW.seconds(64, context, 0) * math.exp(chance.gauss(0, noise))
        cap.learn_step(TimedStep(seconds, 64, context, 0))
        if cap.report().sequences:
            assert BEST - 2 <= cap.sequences <= 2 * BEST
            assert not cap.report().too_slow


def test_a_target_that_all_places_keep_is_no_cap():
    cap = SloCap(10.0, 64)
    run(cap, 400)
    assert cap.sequences == 64


@pytest.mark.parametrize("seed", range(4))
def test_one_slow_iteration_closes_nothing_and_noise_moves_it_little(seed):
    cap = SloCap(TARGET, 64)
    run(cap, 600, noise=0.2, seed=seed)
    cap.learn_step(TimedStep(30.0, cap.sequences, LENGTH * cap.sequences, 0))
    caps = run(cap, 1600, noise=0.2, seed=seed)
    assert min(caps) >= BEST - 2
    assert max(caps) <= BEST + 2
    changes = sum(before != after for before, after in pairwise(caps))
    assert changes <= 1600 / STEPS_PER_FIT / 4


def test_a_lower_cap_stops_nobody_who_has_started():
    planner = make_planner(pages=64, tpot_seconds=TARGET)
    device = FakeDevice(planner)
    for number in range(6):
        planner.commands.add(new(f"r{number}", max_tokens=40))
    assert decoding(device) == 6
    planner.cap.sequences = 2
    for number in range(6, 9):
        planner.commands.add(new(f"r{number}", max_tokens=40))
    assert decoding(device) == 6
    for number in range(5):
        planner.commands.cancel(RequestId(f"r{number}"))
    assert decoding(device) == 2


def decoding(device):
    """In the newest of some iterations."""
    plans = [device.step() for _ in range(4)]
    return len(plans[-1].decodes)
