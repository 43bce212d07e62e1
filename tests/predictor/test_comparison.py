"""The paired test of two versions: pure, with seeds."""

import json
from collections.abc import Iterator
from math import inf

import numpy as np
import pytest

from motet_predictor.comparison import (
    EQUAL_SAY_ABOVE,
    LOOKS,
    MAX_ANSWERS,
    MIN_OTHERS,
    MIN_PROMPTS,
    Comparison,
    Verdict,
    pinball_loss,
)
from motet_predictor.prompt_version import PromptVersion
from motet_predictor.version_figures import as_json


def compared(differences: Iterator[tuple[str, float]], most: int = LOOKS[-1]) -> tuple[Verdict | None, int]:
    """The first verdict, and after how many answers."""
    comparison = Comparison()
    for _ in range(most):
        tenant, difference = next(differences)
        verdict = comparison.observe(tenant, 0, 1.0, 1.0 + difference)
        if verdict is not None:
            return verdict, comparison.answers
    return None, most


def drawn(gain: float, seed: int, tenants: int = 5) -> Iterator[tuple[str, float]]:
    """Differences with heavy tails, as losses have them."""
    chance = np.random.default_rng(seed)
    while True:
        yield f"t{chance.integers(tenants)}", gain + chance.standard_t(4) / 2


def test_a_version_that_is_no_better_is_hardly_ever_found_better() -> None:
    """In 5 % of the cases at most: here 300 of equal versions, which are looked at four times each."""
    found = [compared(drawn(0.0, seed))[0] for seed in range(300)]
    assert found.count(Verdict.BETTER) <= 0.05 * 300
    assert found.count(Verdict.ALIKE) >= 0.9 * 300


def test_a_worse_version_is_never_found_better_and_a_better_one_soon() -> None:
    assert [compared(drawn(-0.05, seed))[0] for seed in range(100)].count(Verdict.BETTER) == 0
    better = [compared(drawn(0.2, seed)) for seed in range(50)]
    assert {verdict for verdict, _ in better} == {Verdict.BETTER}
    assert max(answers for _, answers in better) <= LOOKS[1]


def test_nothing_is_decided_before_the_first_look() -> None:
    assert compared(drawn(5.0, 1), most=LOOKS[0] - 1) == (None, LOOKS[0] - 1)
    assert compared(drawn(5.0, 1)) == (Verdict.BETTER, LOOKS[0])
    assert compared(drawn(-5.0, 1)) == (Verdict.WORSE, LOOKS[0])


def test_two_that_estimate_alike_are_alike_in_the_end() -> None:
    def equal() -> Iterator[tuple[str, float]]:
        while True:
            yield "one", 0.0

    assert compared(equal()) == (Verdict.ALIKE, LOOKS[-1])


def test_a_tenant_with_many_answers_has_no_more_say_than_one_with_some_hundreds() -> None:
    """It has nine of ten answers, and in all of them the version is much better. Six others say that it is worse."""

    def mostly_one(seed: int) -> Iterator[tuple[str, float]]:
        chance = np.random.default_rng(seed)
        while True:
            if chance.random() < 0.9:
                yield "many", 0.5 + chance.normal(0, 0.3)
            else:
                yield f"few{chance.integers(6)}", -1.0 + chance.normal(0, 0.3)

    comparison = Comparison()
    for _, (tenant, difference) in zip(range(2000), mostly_one(1), strict=False):
        comparison.observe(tenant, 0, 1.0, 1.0 + difference)
    gain = comparison.gain()
    few = 2000 / 10
    assert gain.mean == pytest.approx((0.5 * EQUAL_SAY_ABOVE - few) / (EQUAL_SAY_ABOVE + few), abs=0.05)
    assert gain.mean < -2 * gain.error


def test_the_error_is_that_of_a_mean_where_each_counts_the_same() -> None:
    chance, comparison = np.random.default_rng(3), Comparison()
    differences = chance.normal(0.1, 1.0, 600)
    for number, difference in enumerate(differences):
        comparison.observe(f"t{number % 6}", 0, 0.0, float(difference))
    assert comparison.gain().mean == pytest.approx(differences.mean())
    assert comparison.gain().error == pytest.approx(differences.std() / 600**0.5)


def test_answers_to_one_prompt_are_one_difference() -> None:
    """Eight choices each, which differ alike: as eight, an equal version would be promoted in a third of the cases."""
    found = []
    for seed in range(50):
        chance, comparison, verdict, prompt = np.random.default_rng(seed), Comparison(), None, 0
        while verdict is None:
            prompt, difference = prompt + 1, chance.normal(0, 0.1)
            for _ in range(8):
                verdict = verdict or comparison.observe(f"t{prompt % 5}", prompt, 1.0, 1.0 + difference)
        found.append(verdict)
    assert found.count(Verdict.BETTER) <= 0.08 * 50


def test_a_few_prompts_that_are_repeated_decide_nothing() -> None:
    comparison = Comparison()
    verdicts = [comparison.observe("one", number % (MIN_PROMPTS - 1) + 1, 1.0, 1.001) for number in range(MAX_ANSWERS)]
    assert [verdict for verdict in verdicts if verdict is not None] == [Verdict.ALIKE]


def test_a_tenant_that_repeats_one_prompt_does_not_keep_others_from_deciding() -> None:
    """It has 98 of 100 answers."""
    chance, comparison, verdicts = np.random.default_rng(1), Comparison(), []
    for prompt in range(1, LOOKS[0]):
        verdicts += [comparison.observe("many", 7, 1.0, 1.0) for _ in range(49)]
        verdicts.append(comparison.observe(f"t{prompt % 5}", prompt, 1.0, 1.5 + chance.normal(0, 0.1)))
    assert [one for one in verdicts if one is not None] == [Verdict.BETTER]
    assert comparison.prompts == LOOKS[0]


@pytest.mark.parametrize(("others", "verdict"), [(MIN_OTHERS - 1, Verdict.BETTER), (50, Verdict.WORSE)])
def test_a_tenant_has_no_more_say_than_all_others_together(others: int, verdict: Verdict) -> None:
    """It gains a little in nearly all answers, they lose twice as much. Hardly any others keep nobody from deciding."""
    chance, comparison, found = np.random.default_rng(1), Comparison(), []
    for number in range(LOOKS[0]):
        tenant, gain = (f"t{number}", -0.1) if number < others else ("most", 0.05)
        found.append(comparison.observe(tenant, 0, 1.0, 1.0 + gain + chance.normal(0, 0.1)))
    assert found[-1] is verdict
    assert (comparison.gain().mean > 0) == (verdict is Verdict.BETTER)


def test_a_comparison_goes_on_from_its_bytes_as_if_it_had_not_ended() -> None:
    whole, parts = Comparison(), Comparison()
    chance = np.random.default_rng(5)
    for number in range(LOOKS[0]):
        if number % 100 == 99:
            parts = Comparison.from_bytes(parts.to_bytes("prompts-3.1"), "prompts-3.1")
        tenant, prompt, difference = f"t{number % 7}", number % 90 * (number % 2), chance.normal(0.1, 0.2)
        verdicts = [one.observe(tenant, prompt, 1.0, 1.0 + difference) for one in (whole, parts)]
    assert verdicts == [Verdict.BETTER] * 2
    assert (parts.answers, parts.gain()) == (whole.answers, whole.gain())


def test_the_error_is_not_known_before_the_second_prompt() -> None:
    """A request with many choices is one."""
    comparison = Comparison()
    for _ in range(3):
        comparison.observe("acme", 7, 1.0, 1.25)
    assert comparison.gain().error == inf
    version = PromptVersion("v")
    assert "error" not in json.loads(as_json(version, comparison))
    comparison.observe("acme", 8, 1.0, 1.0)
    figures = json.loads(as_json(version, comparison))
    assert (figures["compared"], figures["prompts"]) == (4, 2)
    assert 0 < figures["error"] < inf


def test_a_comparison_with_another_version_begins_again_and_a_damaged_one_is_refused() -> None:
    comparison = Comparison()
    for number in range(10):
        comparison.observe("one", number, 1.0, 2.0)
    data = comparison.to_bytes("prompts-3.1")
    assert Comparison.from_bytes(data, "prompts-3.2").answers == 0
    assert Comparison.from_bytes(Comparison().to_bytes("prompts-3.1"), "prompts-3.1").answers == 0
    for damaged in (data[:-1], data[:4] + b"\xff" * (len(data) - 4), data + data[-24:] * LOOKS[-1]):
        with pytest.raises(ValueError):  # noqa: PT011 - of several parsers
            Comparison.from_bytes(damaged, "prompts-3.1")


def test_the_loss_is_least_at_the_quantiles_of_what_came() -> None:
    lengths = np.random.default_rng(4).lognormal(4, 0.7, 20_000)
    best = np.quantile(lengths, (0.5, 0.8, 0.9, 0.95))

    def mean(factor: float) -> float:
        return float(np.mean([pinball_loss(best * factor, int(one)) for one in lengths[:5000]]))

    assert mean(1.0) < min(mean(0.8), mean(1.25))
    assert pinball_loss(np.full(4, 64.0), 64) == 0
    assert pinball_loss(np.full(4, 64.0), 128) == pytest.approx((0.5 + 0.8 + 0.9 + 0.95) / 4)
    assert pinball_loss(np.full(4, 64.0), 32) == pytest.approx((0.5 + 0.2 + 0.1 + 0.05) / 4)
