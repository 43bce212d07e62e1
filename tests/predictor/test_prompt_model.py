"""Estimates by the prompt and by the statistics, and their calibration: pure, without a clock or a socket."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_predictor.calibration import BINS, Calibration
from motet_predictor.fitting import Sample, fit, since_last_change, statistics_of
from motet_predictor.length_change import LengthChange
from motet_predictor.length_model import LengthModel
from motet_predictor.prompt_model import Asked, PromptModel
from motet_predictor.prompt_version import TRUST_AFTER_CHANGE, Correction, Fitted, PromptVersion
from motet_predictor.prompt_weights import PromptWeights
from motet_predictor.sample_features import Features

SPACE = 7
SHORT, LONG = 11, 22
"""Features of prompts that ask for short answers, and of those that ask for long ones"""


def answers(count: int, seed: int, *, tenant: str = "acme", known: bool = True) -> Iterator[Sample]:
    """Prompts of two kinds, with answers of about 20 and about 400 tokens. Each has a feature of its own, too."""
    chance = np.random.default_rng(seed)
    for _ in range(count):
        long = chance.random() < 0.5
        tokens = int((400 if long else 20) * np.exp(chance.normal(0, 0.3)))
        kind = [LONG if long else SHORT] if known else []
        yield Sample(tenant, "a", tokens, False, np.array([*kind, chance.integers(1000, 10**6)], np.uint32))


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return fit(list(answers(1000, seed=1)), SPACE)


def model_with(fitted: Fitted | None, learned: Iterator[Sample]) -> PromptModel:
    model = PromptModel(LengthModel())
    if fitted is not None:
        model.install(fitted)
    for one in learned:
        model.observe(one.tenant, one.adapter, one.tokens, censored=one.censored, features=one.features)
    return model


def features(*numbers: int) -> Features:
    return np.array(numbers, np.uint32)


def test_the_prompt_tells_short_answers_from_long_ones(fitted: Fitted) -> None:
    model = model_with(fitted, answers(200, seed=2))
    short = model.estimate("acme", "a", 2048, features(SHORT))
    long = model.estimate("acme", "a", 2048, features(LONG))
    assert short.q90 < 60
    assert long.q50 > 250
    assert long.q90 < 1000


def test_without_features_or_weights_estimates_are_those_of_the_statistics(fitted: Fitted) -> None:
    statistics = LengthModel()
    for one in answers(30, seed=3):
        statistics.observe(one.tenant, one.adapter, one.tokens)
    plain = statistics.estimate("acme", "a", 2048)
    weighted = PromptModel(statistics, fitted.weights)
    for same in (
        PromptModel(statistics).estimate("acme", "a", 2048, features(SHORT)),
        weighted.estimate("acme", "a", 2048),
    ):
        assert (same.q50, same.q80, same.q90, same.q95) == (plain.q50, plain.q80, plain.q90, plain.q95)
        assert same.expected == pytest.approx(plain.expected)
    assert weighted.estimate("acme", "a", 2048, features(SHORT)).q90 < plain.q90


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.booleans(), st.lists(st.integers(0, 2**32 - 1), max_size=3))),
    st.integers(1, 4000),
    st.floats(0, 30),
)
@settings(max_examples=40)
def test_quantiles_rise_and_none_exceeds_the_bound(
    seen: list[tuple[int, bool, list[int]]], bound: int, largest: float
) -> None:
    weights = PromptWeights.zero(SPACE)
    weights.table[:] = np.random.default_rng(0).uniform(-largest, largest, weights.table.shape[1])
    model = PromptModel(LengthModel(), weights)
    for tokens, censored, own in seen:
        model.observe("acme", "a", tokens, censored=censored, features=features(*own))
    lengths = model.estimate("acme", "a", bound, features(1, 2, 3))
    quantiles = [lengths.q50, lengths.q80, lengths.q90, lengths.q95]
    assert all(1 <= earlier <= later <= bound for earlier, later in pairwise(quantiles))
    assert 0 < lengths.expected <= bound + 1e-6


def test_coverage_is_that_of_the_quantile_where_prompts_say_less_than_the_weights_claim(fitted: Fitted) -> None:
    """The new tenant's prompts have the known features, but its answers have the same lengths whatever they say."""
    chance = np.random.default_rng(5)

    def misled(count: int) -> Iterator[Sample]:
        for _ in range(count):
            kind = LONG if chance.random() < 0.5 else SHORT
            yield Sample("other", "b", int(90 * np.exp(chance.normal(0, 0.8))), False, features(kind))

    model = model_with(fitted, misled(600))
    judged = [(one, model.estimate("other", "b", 4096, one.features)) for one in misled(1000)]
    assert 0.87 <= np.mean([one.tokens <= estimate.q90 for one, estimate in judged]) <= 0.95
    assert model.serving.corrections["other", "b"].trust < 0.1


def test_calibration_reads_a_quantile_further_up_where_answers_were_longer_than_estimated() -> None:
    calibration = Calibration()
    before = calibration.positions(np.array([0.5, 0.9]))
    for position in np.random.default_rng(1).permutation(np.linspace(0.5, 1.0, 400)):
        calibration.observe(position, position)
    after = calibration.positions(np.array([0.5, 0.9]))
    assert (after > before).all()
    assert 0.7 < after[0] < 0.8


def test_where_the_newest_answers_are_too_long_too_often_more_is_promised_until_they_are_not() -> None:
    """A fifth of them exceed the quantile that a tenth should: too few for a change of lengths."""
    even, quantile, calibration = np.arange(2000) * 0.618034 % 1, np.array([0.9]), Calibration()
    for position in even:
        calibration.observe(position, position)
    before = calibration.positions(quantile)
    for position in even[:40] ** 0.5:
        calibration.observe(position, position)
    assert before == pytest.approx(0.9, abs=0.01)
    assert 0.92 < calibration.positions(quantile) < 0.96
    for position in even[:120]:
        calibration.observe(position, position)
    assert calibration.positions(quantile) == pytest.approx(0.9, abs=0.01)


def test_a_correction_outlives_a_restart_with_its_newest_answers() -> None:
    even, quantile, correction = np.arange(2000) * 0.618034 % 1, np.array([0.9]), Correction()
    for position in (*even, *even[:40] ** 0.5):
        correction.calibration.observe(position, position)
    kept = correction.to_bytes()
    wanted = correction.calibration.positions(quantile)
    assert Correction.from_bytes(kept).calibration.positions(quantile) == pytest.approx(wanted, abs=1e-4)
    before = kept[: 4 * (BINS + 2)]  # as versions without the newest answers wrote it
    assert Correction.from_bytes(before).calibration.positions(quantile) == pytest.approx(0.9, abs=0.01)
    assert wanted > 0.92
    for damaged in (b"", kept[:-4], before[:-4], kept + b"1234", kept[:-4] + np.float32("nan").tobytes()):
        with pytest.raises(ValueError, match="damaged"):
            Correction.from_bytes(damaged)


def test_the_choices_of_one_request_raise_what_is_promised_only_a_little() -> None:
    chance = np.random.default_rng(1)
    model = PromptModel(LengthModel())
    for _ in range(1500):
        prompt = chance.integers(2**30, size=8, dtype=np.uint32)
        model.observe("acme", "a", max(1, int(chance.lognormal(np.log(60), 0.5))), features=prompt, space=SPACE)
    before = model.estimate("acme", "a", 4096)
    prompt = chance.integers(2**30, size=8, dtype=np.uint32)
    for _ in range(16):
        model.observe("acme", "a", 200, features=prompt, space=SPACE)
    after = model.estimate("acme", "a", 4096)
    assert before.q50 < after.q50 < 1.6 * before.q50


def test_what_chance_adds_to_the_newest_answers_hardly_changes_what_is_covered() -> None:
    chance, covered = np.random.default_rng(1), []
    for _ in range(20):
        calibration = Calibration()
        for number in range(1200):
            position = chance.random()
            calibration.observe(position, position)
            if number % 50 == 49:
                covered.append(calibration.positions(np.array([0.9, 0.95])))
    assert np.mean(covered, axis=0) == pytest.approx([0.9, 0.95], abs=0.01)


def test_even_positions_are_no_change_however_lengths_tie() -> None:
    """Ten thousand answers of four lengths, and as many that all have one: no alarm."""
    chance, change = np.random.default_rng(1), LengthChange()
    for _ in range(10_000):
        low = chance.integers(4) / 4
        assert not change.observe(0, 1, False, low, low + 0.25)
    for _ in range(10_000):
        assert not change.observe(0, 1, False, 0.0, 1.0)


def test_many_answers_to_one_prompt_are_no_change() -> None:
    """The choices of one request, or one question that is asked again and again."""
    for weights in (None, PromptWeights.zero(SPACE + 1)):  # not known, or of features of another key
        model = PromptModel(LengthModel(), weights)
        for one in answers(800, seed=6):
            model.observe(one.tenant, one.adapter, one.tokens, features=one.features, space=SPACE)
        for _ in range(100):
            model.observe("acme", "a", 3000, features=features(LONG, 7), space=SPACE)
            assert model.answers_since_change == 0
    asked = [*answers(800, seed=6), *[Sample("acme", "a", 3000, False, features(LONG, 7))] * 100]
    assert len(since_last_change(asked, SPACE)) == 900, "a refit keeps what was before"


@pytest.mark.parametrize("asked", [[], [5]], ids=["without features", "one prompt"])
def test_a_refit_calibrates_answers_whose_prompts_say_nothing(asked: list[int]) -> None:
    """They are all in one part of the samples. So its estimates must not come from the others alone."""
    chance = np.random.default_rng(12)

    def silent(count: int) -> list[Sample]:
        return [
            Sample("silent", "s", int(30 * np.exp(chance.normal(0, 0.3))), False, features(*asked))
            for _ in range(count)
        ]

    samples = [*answers(300, seed=1), *silent(300)]
    model = PromptModel(statistics_of(samples, 100))
    model.install(fit(samples, SPACE))
    tokens = [one.tokens for one in silent(1000)]
    covered = np.mean(np.array(tokens) <= model.estimate("silent", "s", 100_000, features(*asked)).q90)
    assert 0.85 <= covered <= 0.95


def test_when_lengths_change_the_answers_before_it_are_dropped(fitted: Fitted) -> None:
    model = model_with(fitted, answers(800, seed=6))
    chance = np.random.default_rng(7)
    for _ in range(24):
        tokens = int(3000 * np.exp(chance.normal(0, 0.1)))
        model.observe("acme", "a", tokens, features=features(SHORT, 10**6 + tokens))
    assert model.estimate("acme", "a", 8000, features(SHORT)).q50 > 2000
    assert model.estimate("acme", "a", 8000, features(SHORT)).q90 < 4500
    kept = since_last_change(
        [*answers(800, seed=6), *(Sample("acme", "a", 3000, False, features(number)) for number in range(24))], SPACE
    )
    assert 8 <= len(kept) <= 32
    assert [one.tokens for one in kept[-24:]] == [3000] * 24


def bursts(count: int, seed: int) -> list[Sample]:
    """Prompts of one kind, then of the other: 50 of each."""
    both = list(answers(4 * count, seed))
    kinds = [[one for one in both if one.features[0] == kind] for kind in (SHORT, LONG)]
    return [kinds[at // 50 % 2].pop() for at in range(count)]


def test_bursts_of_another_kind_of_prompts_are_no_change_where_weights_foretell_them(fitted: Fitted) -> None:
    model = model_with(fitted, answers(200, seed=2))
    for one in bursts(600, seed=3):
        model.observe(one.tenant, one.adapter, one.tokens, features=one.features)
        assert model.answers_since_change == 0
    assert model.serving.correction("acme", "a").trust > 0.8
    assert len(since_last_change(bursts(600, seed=4), SPACE)) == 600, "a refit begins without weights"


def test_where_weights_do_not_foretell_it_a_change_is_noticed_among_bursts(fitted: Fitted) -> None:
    """All answers have become eight times as long, whatever the prompt."""
    model = model_with(fitted, answers(200, seed=2))
    longer = [replace(one, tokens=8 * one.tokens) for one in bursts(100, seed=5)]
    found = []
    for one in longer:
        model.observe(one.tenant, one.adapter, one.tokens, features=one.features)
        found.append(model.answers_since_change)
    assert any(found[:40])
    assert len(since_last_change([*bursts(600, seed=4), *longer], SPACE)) <= 100


def test_a_refit_keeps_all_answers_since_a_change_also_those_to_one_prompt() -> None:
    """A change is found among the newest answers of 8 to 32 prompts. Each of these has four answers."""
    changed = [
        Sample("acme", "a", int(3000 + prompt), False, features(10**6 + prompt))
        for prompt in range(40)
        for _ in range(4)
    ]
    kept = since_last_change([*answers(400, seed=6), *changed], SPACE)
    assert [one.tokens for one in kept if one.tokens >= 3000] == [one.tokens for one in changed]
    assert len(kept) <= len(changed) + 1


def test_the_newest_answers_count_more_while_they_foretell_the_next_ones_better() -> None:
    """Lengths grow by half: too little to drop what was before, and the statistics would take hundreds of answers."""
    chance = np.random.default_rng(3)
    model = PromptModel(LengthModel())
    for tokens in (100 * np.exp(chance.normal(0, 0.5, 800))).astype(int):
        model.observe("acme", "a", int(tokens))
    before = model.estimate("acme", "a", 2048)
    for tokens in (150 * np.exp(chance.normal(0, 0.5, 40))).astype(int):
        model.observe("acme", "a", int(tokens))
        assert model.answers_since_change == 0
    assert model.adapters["acme", "a"].recent_trust > 0.5
    assert model.estimate("acme", "a", 2048).q90 > 1.2 * before.q90
    assert model.lengths.estimate("acme", "a", 2048).q90 < 1.2 * before.q90


def test_what_a_refit_made_does_not_correct_an_adapter_that_has_changed_since(fitted: Fitted) -> None:
    model = model_with(None, answers(100, seed=8))
    model.refit_begins()
    for _ in range(16):
        model.observe("acme", "a", 4000)
    changed = model.version_of("new", fitted).corrections["acme", "a"]
    assert (changed.calibration.below == Calibration().below).all()
    assert changed.trust == TRUST_AFTER_CHANGE
    model.refit_begins()
    correction = model.version_of("new", fitted).corrections["acme", "a"]
    assert correction.calibration is fitted.corrections["acme", "a"].calibration


def test_a_version_of_thousands_of_adapters_is_made_in_time_for_the_next_predict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its corrections are taken as they are: a new one for each took 16 ms, and a Predict has 5."""
    corrections = {("acme", f"a{number}"): Correction() for number in range(5)}
    monkeypatch.setattr(Calibration, "__init__", None)
    made = PromptVersion.of("new", Fitted(PromptWeights.zero(SPACE), corrections), max_adapters=3)
    assert list(made.corrections) == [("acme", "a2"), ("acme", "a3"), ("acme", "a4")]
    assert made.corrections["acme", "a4"] is not corrections["acme", "a4"]


def test_a_tenant_with_many_answers_has_no_more_say_in_the_weights_for_everybody() -> None:
    """One tenant's 3,000 answers say that LONG means short. Ten others of 60 say what it means."""
    chance = np.random.default_rng(9)
    lies = [
        Sample("liar", "x", 20 if one.features[0] == LONG else 400, False, one.features)
        for one in answers(3000, seed=10)
    ]
    truth = [one for number in range(10) for one in answers(60, seed=11 + number, tenant=f"t{number}")]
    mixed = [*lies, *truth]
    chance.shuffle(mixed)  # type: ignore[arg-type]
    model = PromptModel(LengthModel(), fit(mixed, SPACE).weights)
    assert model.estimate("new", "n", 4096, features(LONG)).q50 > model.estimate("new", "n", 4096, features(SHORT)).q50


def test_the_adapters_with_the_oldest_answers_are_forgotten() -> None:
    model = PromptModel(LengthModel(), max_adapters=3)
    for number in range(10):
        model.observe("acme", f"a{number}", 10)
        model.observe("acme", "a0", 10)
    assert [adapter for _, adapter in model.adapters] == ["a8", "a9", "a0"]


def test_one_gateway_with_another_key_does_not_end_a_comparison(fitted: Fitted) -> None:
    """Each look could find that the last answer was of that one."""
    model = PromptModel(LengthModel())
    model.versions.offer(model.version_of("candidate", fitted))
    for number, one in enumerate(answers(400, seed=2)):
        model.observe(one.tenant, one.adapter, one.tokens, features=one.features, space=SPACE + (number % 5 == 0))
        assert model.awaits_a_decision == (number > 1)
    for one in answers(110, seed=3):
        model.observe(one.tenant, one.adapter, one.tokens, features=one.features, space=SPACE + 1)
    assert not model.awaits_a_decision, "most of the newest are of the other one"


def test_each_prompt_of_a_call_is_estimated_as_it_is_alone(fitted: Fitted) -> None:
    """To the last bit: which requests arrive together is chance."""
    model = model_with(fitted, answers(60, seed=4))
    for number, one in enumerate(answers(60, seed=5, tenant="other")):
        model.observe("other", f"o{number % 7}", one.tokens, censored=number % 5 == 0, features=one.features)
    chance = np.random.default_rng(6)
    asked, bounds = [], []
    for number in range(32):
        of = [("acme", "a"), ("other", f"o{number % 7}"), ("other", "new"), ("new", "n")][number % 4]
        own = features(*sorted(chance.choice(1000, number * 8 % 250, replace=False)))
        asked.append(Asked(*of, own, [SPACE, None, SPACE + 1][number % 3]))
        bounds.append([0, 30, 4096][number % 3 - number % 2])
    together = model.estimates(asked, bounds)
    alone = [
        model.estimate(one.tenant, one.adapter, bound, one.features, space=one.space)
        for one, bound in zip(asked, bounds, strict=True)
    ]
    assert together == alone
    assert len(set(together)) > 20
    assert model.estimates([], []) == []
