"""What an estimate comes from: the last step is the estimate, and the feature that decides is named first."""

import numpy as np

from motet_predictor.explanation import MAX_MOVES, explain
from motet_predictor.fitting import fit
from motet_predictor.length_model import LengthModel
from motet_predictor.prompt_model import Asked, PromptModel
from tests.predictor.test_prompt_model import LONG, SHORT, SPACE, answers, features, model_with


def test_the_feature_that_decides_is_named_first_and_the_last_step_is_the_estimate() -> None:
    model = model_with(fit(list(answers(1000, seed=1)), SPACE), answers(100, seed=2))
    for kind, longer in ((LONG, True), (SHORT, False)):
        asked = Asked("acme", "a", features(kind, 5, 6), SPACE)
        found = explain(model, asked, 4096)
        assert found.steps[-1][1] == model.estimate("acme", "a", 4096, asked.features)
        assert found.steps[0][1].q95 == model.lengths.estimate("acme", "a", 4096).q95
        assert len(found.steps) == 4
        feature, factor = found.moves[0]
        assert feature == kind
        assert factor > 1.5 if longer else factor < 0.67
        assert found.known
        assert found.answers == 100


def test_features_of_another_key_move_nothing_and_it_is_said() -> None:
    model = model_with(fit(list(answers(50, seed=1)), SPACE), answers(10, seed=2))
    found = explain(model, Asked("acme", "a", features(LONG), SPACE + 1), 100)
    assert (found.known, found.moves, found.trust, len(found.steps)) == (False, [], 0.0, 3)
    assert found.steps[-1][1] == model.estimate("acme", "a", 100, features(LONG), space=SPACE + 1)


def test_before_the_first_answer_there_is_an_explanation_too() -> None:
    found = explain(PromptModel(LengthModel()), Asked("new", "n", features(), None), 100)
    assert found.steps[-1][1].q95 == 100
    assert (found.known, found.moves, found.answers) == (True, [], 0)


def test_moves_are_bounded() -> None:
    model = PromptModel(LengthModel(), fit(list(answers(50, seed=1)), SPACE).weights)
    assert model.serving.weights is not None
    model.serving.weights.table[:] = np.random.default_rng(1).normal(0, 1, model.serving.weights.table.shape)
    found = explain(model, Asked("acme", "a", np.arange(280, dtype=np.uint32), SPACE), 100)
    assert len(found.moves) == MAX_MOVES
