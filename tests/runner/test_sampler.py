"""From logits to tokens."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import BASE, RequestId
from motet_runner.execute.row_table import TableRow
from motet_runner.execute.sampler import sample, uniform
from motet_runner.interface import Sampling

VOCABULARY = 40


def sequence(*, prompt=(1, 2), output=(), seed: int = 0, choice: int = 0, **sampling) -> TableRow:
    return TableRow(
        request=RequestId("r"),
        tokens=[*prompt, *output],
        prompt_tokens=len(prompt),
        adapter=BASE,
        sampling=Sampling(**({"max_tokens": 100} | sampling)),
        seed=seed,
        choice=choice,
    )


def logits(rows: int = 1, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def tokens(row: torch.Tensor, *, draws: int = 1, eos=frozenset(), **wanted) -> list[int]:
    """Draws from one row, as different seeds see it."""
    many = [sequence(seed=seed, **wanted) for seed in range(draws)]
    return [one.token for one in sample(row.expand(draws, -1), many, eos)]


def test_greedy_sampling_takes_the_most_likely_token() -> None:
    row = logits()
    assert tokens(row) == [int(row.argmax())]


def test_sampling_follows_the_distribution() -> None:
    row = logits()
    counted = Counter(tokens(row, draws=4000, temperature=0.7))
    expected = (row[0] / 0.7).softmax(-1)
    for token in range(VOCABULARY):
        p = float(expected[token])
        assert abs(counted[token] / 4000 - p) < 5 * math.sqrt(p * (1 - p) / 4000) + 1e-3


def test_top_k_top_p_and_min_p_remove_unlikely_tokens() -> None:
    row = logits()
    probabilities, order = row[0].softmax(-1).sort(descending=True)
    assert set(tokens(row, draws=300, temperature=1.0, top_k=3)) == set(order[:3].tolist())
    nucleus = int((probabilities.cumsum(-1) < 0.5).sum()) + 1
    assert set(tokens(row, draws=500, temperature=1.0, top_p=0.5)) == set(order[:nucleus].tolist())
    strong = order[probabilities >= 0.3 * probabilities[0]].tolist()
    assert set(tokens(row, draws=500, temperature=1.0, min_p=0.3)) == set(strong)


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_the_strictest_filter_equals_greedy_sampling(cut: dict[str, float]) -> None:
    row = logits()
    assert set(tokens(row, draws=50, temperature=1.5, **cut)) == {int(row.argmax())}


@given(
    others=st.integers(0, 5), seed=st.integers(0, 2**63), temperature=st.floats(0.1, 2), top_k=st.integers(0, 50),
    top_p=st.floats(0.05, 1), min_p=st.floats(0, 0.5),
)  # fmt: skip
def test_sampling_does_not_depend_on_other_rows(others: int, seed: int, **wanted: float) -> None:
    row = logits(seed=3)
    one = sequence(seed=seed, **wanted)
    crowd = [sequence(seed=i, temperature=1.0, top_k=i, presence_penalty=i / 7) for i in range(others)]
    alone = sample(row, [one], frozenset())[0]
    beside = sample(torch.cat([logits(others, seed=9), row]), [*crowd, one], frozenset())[-1]
    assert alone.token == beside.token


def test_sampling_depends_only_on_seed_choice_and_position() -> None:
    drawn = {
        uniform(seed, choice, position)
        for seed in (0, 1, 2**64, -1)
        for choice in range(5)
        for position in range(50)
    }  # fmt: skip
    assert len(drawn) == 4 * 5 * 50
    assert all(0 <= number < 1 for number in drawn)
    assert uniform(7, 1, 3) == uniform(7, 1, 3)
    numbers = [uniform(1, 0, position) for position in range(4000)]
    assert abs(sum(numbers) / 4000 - 0.5) < 0.03


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, 5], row[0, 6], row[0, 1] = 2.0, 1.5, 1.0
    seen = sequence(prompt=(1, 1, 1), output=(5, 5), frequency_penalty=0.4, presence_penalty=0.2, logprobs=True)
    assert sample(row, [seen], frozenset())[0].token == 6
    milder = sequence(prompt=(1, 1, 1), output=(5, 5), frequency_penalty=0.1, presence_penalty=0.2)
    assert sample(row, [milder], frozenset())[0].token == 5


def test_the_repetition_penalty_counts_prompt_and_output() -> None:
    row = torch.full((1, VOCABULARY), -1.0)
    row[0, 1], row[0, 5], row[0, 6] = 2.0, 1.9, 1.2
    assert sample(row, [sequence(prompt=(1,), output=(5,), repetition_penalty=2.0)], frozenset())[0].token == 6
    negative = torch.full((1, VOCABULARY), -2.0)
    negative[0, 1], negative[0, 7] = -1.0, -1.5
    assert sample(negative, [sequence(prompt=(1,), repetition_penalty=2.0)], frozenset())[0].token == 7


def test_logit_bias_favours_and_forbids_tokens_and_ignores_unknown_ids() -> None:
    row = logits()
    assert tokens(row, logit_bias={3: 100.0, VOCABULARY + 5: 100.0}) == [3]
    best = int(row.argmax())
    assert tokens(row, logit_bias={best: -100.0}) != [best]


def test_end_tokens_are_forbidden_until_min_tokens() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, 4], row[0, 9], row[0, 11] = 9.0, 8.0, 7.0
    wanted = {"min_tokens": 3, "stop_token_ids": frozenset({9})}
    early, late = sequence(output=(1, 1), **wanted), sequence(output=(1, 1, 1), **wanted)
    first, second = sample(row.expand(2, -1), [early, late], frozenset({4}))
    assert (first.token, second.token) == (11, 4)


def test_logprobs_are_the_models_own() -> None:
    row = logits()
    asked = sequence(temperature=1.7, top_k=2, logit_bias={3: 5.0}, logprobs=True, top_logprobs=3)
    sampled = sample(row, [asked], frozenset())[0]
    logs = row[0].log_softmax(-1)
    assert sampled.logprobs.logprob == pytest.approx(float(logs[sampled.token]))
    values, ids = logs.topk(3)
    assert [i for i, _ in sampled.logprobs.top] == ids.tolist()
    assert [v for _, v in sampled.logprobs.top] == pytest.approx(values.tolist())


def test_logprobs_are_there_only_for_those_who_asked() -> None:
    row = logits(3)
    asked = [sequence(), sequence(logprobs=True), sequence(logprobs=True, top_logprobs=2)]
    counts = [one.logprobs and len(one.logprobs.top) for one in sample(row, asked, frozenset())]
    assert counts == [None, 0, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("wanted", [{}, {"temperature": 1.0}, {"logit_bias": {2: 1.0}, "temperature": 1.0}])
def test_a_row_that_is_not_finite_gives_no_token_and_affects_no_other(bad: float, wanted: dict) -> None:
    rows = logits(3)
    rows[1, 7] = bad
    sampled = sample(rows, [sequence(**wanted) for _ in range(3)], frozenset())
    assert sampled[1] is None
    assert sampled[0] is not None
    assert sampled[2] is not None
