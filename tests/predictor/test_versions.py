"""Which version serves: decided by answers, pure, with seeds."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from motet_predictor.comparison import LOOKS
from motet_predictor.fitting import Sample, fit
from motet_predictor.length_model import VERSION as STATISTICS
from motet_predictor.length_model import LengthModel
from motet_predictor.prompt_model import PromptModel
from motet_predictor.prompt_version import Fitted, PromptVersion
from motet_predictor.prompt_weights import PromptWeights
from motet_predictor.versions import Change, Role, Why
from tests.predictor.test_prompt_model import LONG, SHORT, SPACE, answers


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return fit(list(answers(1000, seed=1)), SPACE)


@pytest.fixture(scope="module")
def experienced(fitted: Fitted) -> PromptModel:
    """It serves weights that are right, and has learned some hundred answers."""
    model = PromptModel(LengthModel())
    model.install(fitted)
    assert changes(model, answers(300, seed=2)) == []
    return model


def changes(model: PromptModel, samples: Iterable[Sample], *, space: int | None = None) -> list[tuple[int, Change]]:
    found = []
    for number, one in enumerate(samples, start=1):
        change = model.observe(one.tenant, one.adapter, one.tokens, features=one.features, space=space)
        if change is not None:
            found.append((number, change))
    return found


def swapped(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Prompts that ask for short answers get long ones from now on."""
    for one in samples:
        features = one.features.copy()
        features[0] = SHORT if features[0] == LONG else LONG
        yield replace(one, features=features)


def bad(kind: int, fitted: Fitted) -> PromptWeights:
    chance, weights = np.random.default_rng(kind), PromptWeights.zero(SPACE)
    if kind % 4 == 0:  # noise
        weights.table[:] = chance.normal(0, 1, weights.table.shape)
    elif kind % 4 == 1:  # the contrary of what is right, more or less of it
        weights.table[:] = -fitted.weights.table * chance.uniform(0.2, 1)
    elif kind % 4 == 2:  # it claims one length for every prompt
        weights.table[:, chance.integers(weights.table.shape[1])] = 8
    else:  # it knows some of the prompts, and half of what it says is forgotten
        weights.table[:] = fitted.weights.table * chance.choice([0, 0.1, 0.3], (len(weights.table), 1))
    return weights


def test_none_of_twenty_bad_candidates_is_promoted(fitted: Fitted, experienced: PromptModel) -> None:
    for kind in range(20):
        model = copy.deepcopy(experienced)
        model.versions.offer(PromptVersion.of("bad", Fitted(bad(kind, fitted), {})))
        found = changes(model, answers(LOOKS[0], seed=100 + kind))
        assert [change.why for _, change in found if change.why is not Why.REJECTED] == []
        assert model.serving.name != "bad"


def test_a_better_candidate_is_promoted_and_the_one_before_is_in_shadow(fitted: Fitted) -> None:
    model = PromptModel(LengthModel())
    changes(model, answers(100, seed=2))
    model.versions.offer(PromptVersion.of("good", fitted))
    ((number, change),) = changes(model, answers(800, seed=3))
    assert (number, change.why, change.version.name) == (LOOKS[0], Why.PROMOTED, "good")
    assert change.gain.least > 0
    assert model.serving is change.version
    assert model.serving.decision.startswith("promoted after 500 answers: loss lower by 0.")
    assert model.versions.role_of(STATISTICS) is Role.FORMER
    assert model.versions.candidate is None


def test_a_version_that_turns_bad_is_rolled_back(fitted: Fitted) -> None:
    model = PromptModel(LengthModel())
    changes(model, answers(100, seed=2))
    model.versions.offer(PromptVersion.of("good", fitted))
    changes(model, answers(LOOKS[0] + 100, seed=3))
    assert model.serving.name == "good"
    found = changes(model, swapped(answers(2 * LOOKS[0], seed=4)))
    assert [(change.why, change.version.name) for _, change in found] == [(Why.ROLLED_BACK, STATISTICS)]
    assert model.versions.role_of("good") is Role.FORMER


def test_after_a_change_of_prompts_the_error_falls_with_the_refit(fitted: Fitted) -> None:
    model = PromptModel(LengthModel())
    model.install(fitted)
    changes(model, answers(300, seed=2))

    def loss(seed: int) -> float:
        before = model.serving.judged.loss, model.serving.judged.answers
        serving = model.serving
        changes(model, swapped(answers(200, seed=seed)))
        assert model.serving is serving
        return (serving.judged.loss - before[0]) / (serving.judged.answers - before[1])

    drifted = loss(5)
    model.refit_begins()
    model.versions.offer(model.version_of("refitted", fit(list(swapped(answers(500, seed=6))), SPACE)))
    changes(model, swapped(answers(LOOKS[0], seed=7)))
    assert model.serving.name == "refitted"
    assert loss(8) < 0.6 * drifted


def test_an_answer_that_was_cut_says_nothing_against_estimates_above_it(fitted: Fitted) -> None:
    """A tenant that always hits its max_tokens: both say that or more."""
    model = PromptModel(LengthModel())
    model.versions.offer(PromptVersion.of("good", fitted))
    for one in answers(LOOKS[0], seed=9):
        change = model.observe("cut", "a", 4, censored=True, features=one.features)
        assert change is None
    assert model.serving.judged.loss < 0.1 * LOOKS[0]
    assert model.serving.judged.complete == 0


def test_a_candidate_for_features_of_another_key_estimates_by_the_statistics(fitted: Fitted) -> None:
    model = PromptModel(LengthModel())
    model.versions.offer(PromptVersion.of("other", fitted))
    changes(model, answers(LOOKS[0], seed=3), space=SPACE + 1)
    assert model.versions.candidate is not None
    gain = model.versions.comparison_of(model.versions.candidate)
    assert gain is not None
    assert abs(gain.gain().mean) < 0.01


def test_a_candidate_begins_again_when_another_one_serves(fitted: Fitted) -> None:
    """It was compared with the one before."""
    model = PromptModel(LengthModel())
    model.versions.offer(PromptVersion.of("candidate", fitted))
    changes(model, answers(LOOKS[0] - 1, seed=3))
    model.versions.serve(PromptVersion("ordered"))
    assert changes(model, answers(LOOKS[0] - 1, seed=4)) == []
    assert [one.name for one in model.versions] == ["ordered", STATISTICS, "candidate"]
