"""The law of an iteration's time is learned from iterations that vary, and from mixed ones (S3-18)."""

import math
import random

import pytest

from motet_runner.plan.step_times import MAX_KINDS, MIN_STEPS, STEPS_PER_FIT, StepTimeLaw, StepTimes, TimedStep

LAW = StepTimeLaw(fixed=0.02, decode=0.005, context=2e-5, prompt=0.002)


def traffic(seed, *, most=24, prompts=0.3, length=100):
    """Decodes come and go, their context grows, and some iterations have prompt tokens."""
    chance = random.Random(seed)
    decodes, mean = 1, length
    while True:
        decodes = min(most, max(1, decodes + chance.choice((-1, 0, 0, 1, 1))))
        mean = min(3 * length, max(length // 3, mean + chance.randint(-4, 4)))
        prompt_tokens = chance.randrange(8, 64) if chance.random() < prompts else 0
        yield decodes, decodes * mean, prompt_tokens


def learned(count, *, noise=0.0, seed=1, law=LAW, slow=0.0, **how):
    times, chance, seen = StepTimes(), random.Random(seed), traffic(seed, **how)
    for _ in range(count):
        work = next(seen)
        factor = math.exp(chance.gauss(0, noise)) * (50 if chance.random() < slow else 1)
        times.learn(TimedStep(law.seconds(*work) * factor, *work))
    return times


def test_there_is_no_law_before_enough_iterations():
    assert learned(MIN_STEPS - 1).law is None
    assert learned(MIN_STEPS + STEPS_PER_FIT).law is not None


def test_without_noise_the_law_is_found():
    law = learned(1000).law
    for part in ("fixed", "decode", "context", "prompt"):
        assert getattr(law, part) == pytest.approx(getattr(LAW, part), rel=0.02), part


@pytest.mark.parametrize("seed", range(4))
def test_iterations_of_which_one_in_twenty_takes_twice_the_median_give_the_mean(seed):
    """p95 is twice the median: the mean is 1.09 times the median."""
    times = learned(2000, noise=math.log(2) / 1.645, seed=seed)
    assert times.law.seconds(20, 2000, 0) == pytest.approx(1.09 * LAW.seconds(20, 2000, 0), rel=0.08)


@pytest.mark.parametrize("seed", range(4))
def test_a_few_very_slow_iterations_change_little(seed):
    """2 % take 50 times as long, which is twice as long on average."""
    times = learned(2000, slow=0.02, seed=seed)
    assert times.law.seconds(20, 2000, 0) == pytest.approx(LAW.seconds(20, 2000, 0), rel=0.08)


def test_where_every_iteration_has_prompt_tokens_there_is_a_law_too():
    law = learned(1000, prompts=1.0).law
    assert law.seconds(20, 2000, 0) == pytest.approx(LAW.seconds(20, 2000, 0), rel=0.05)


def test_the_time_of_a_token_has_the_prompts_of_the_traffic():
    """Each sequence has 100 tokens, and brings 0.5 prompt tokens for each that it generates."""
    times, law = StepTimes(), StepTimeLaw(fixed=0.01, decode=0.001, context=0.0, prompt=0.001)
    for step in range(800):
        decodes = 4 + step % 8
        prompt_tokens = decodes if step // 8 % 2 else 0
        times.learn(
            TimedStep(law.seconds(decodes, 100 * decodes, prompt_tokens), decodes, 100 * decodes, prompt_tokens)
        )
    assert times.token_seconds(16) == pytest.approx(0.01 + 16 * 0.001 + 8 * 0.001, rel=0.01)


def test_a_faster_machine_is_noticed():
    times = learned(1000)
    before = times.token_seconds(24)
    faster = StepTimeLaw(fixed=0.01, decode=0.0025, context=1e-5, prompt=0.001)
    seen = traffic(1)
    for _ in range(2500):
        work = next(seen)
        times.learn(TimedStep(faster.seconds(*work), *work))
    assert times.token_seconds(24) == pytest.approx(before / 2, rel=0.1)


def test_other_kernels_are_learned_anew():
    times = learned(1000)
    times.forget()
    assert times.law is not None
    times.learn(TimedStep(1.0, 1, 1, 0))
    assert times.law.seconds(20, 2000, 0) == pytest.approx(LAW.seconds(20, 2000, 0), rel=0.05)


def test_the_kinds_have_a_bound():
    """Contexts and prompts of any length, as clients may choose them."""
    times, chance = StepTimes(), random.Random(2)
    for _ in range(5000):
        decodes = chance.randrange(1, 4096)
        times.learn(
            TimedStep(0.1, decodes, decodes << chance.randrange(20), chance.randrange(1 << chance.randrange(16)))
        )
    assert len(times._kinds) <= MAX_KINDS  # noqa: SLF001


def test_no_part_is_negative_whatever_is_seen():
    chance = random.Random(3)
    times = StepTimes()
    for _ in range(600):
        decodes = chance.randrange(1, 64)
        times.learn(TimedStep(1 / decodes, decodes, 10 * decodes, 0))
    law = times.law
    assert min(law.fixed, law.decode, law.context, law.prompt) >= 0
    assert times.token_seconds(64) >= times.token_seconds(1)


def test_iterations_without_decodes_and_without_time_are_left_out():
    times = StepTimes()
    for _ in range(100):
        assert not times.learn(TimedStep(0.1, 0, 0, 64))
        assert not times.learn(TimedStep(0.0, 4, 64, 0))
    assert times.law is None
