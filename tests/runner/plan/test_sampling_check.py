"""Sampling options that no engine may get are refused by name."""

import math
from dataclasses import replace

import pytest

from motet.errors import InvalidRequest
from motet_runner.plan.sampling_check import refuse_bad_sampling
from tests.runner.plan.fake_device import VOCABULARY, make_planner, new

NAN, INFINITE = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (NAN, INFINITE, -0.1, 10.5)),
        *(("top_p", value) for value in (NAN, -0.1, 1.1)),
        *(("min_p", value) for value in (NAN, -0.1, 1.1)),
        *(("presence_penalty", value) for value in (NAN, -INFINITE, -2.1, 2.1)),
        *(("frequency_penalty", value) for value in (NAN, INFINITE, -2.1, 2.1)),
        *(("repetition_penalty", value) for value in (NAN, INFINITE, 0.0, -1.0, 10.5)),
        ("top_k", -1),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("logit_bias", dict.fromkeys(range(200_000), 1.0)),
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", {1: -INFINITE}),
        ("logit_bias", {1: 100.5}),
        ("stop_token_ids", frozenset({VOCABULARY})),
        ("stop_token_ids", frozenset({-1})),
        ("stop_token_ids", frozenset(range(129))),
    ],
)
def test_what_no_row_may_have_is_refused_by_its_name(field: str, value: object) -> None:
    asked = new("a", max_tokens=5)
    wrong = replace(asked, sampling=replace(asked.sampling, **{field: value}))
    with pytest.raises(InvalidRequest, match=f"^{field}[. ].*(must|not in)") as refused:
        refuse_bad_sampling(wrong, vocabulary=VOCABULARY)
    assert refused.value.param == field
    planner = make_planner(pages=8)
    with pytest.raises(InvalidRequest):
        planner.add(wrong)
    assert not list(planner.sequences)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 2**200])
def test_a_seed_of_more_bits_than_numbers_are_drawn_from_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^seed must"):
        refuse_bad_sampling(replace(new("a"), seed=seed), vocabulary=VOCABULARY)


def test_the_ends_of_the_ranges_are_taken() -> None:
    asked = new("a", max_tokens=5)
    for changes in (
        {"temperature": 10.0, "top_p": 0.0, "min_p": 1.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"top_k": 2**31, "repetition_penalty": 10.0, "min_tokens": 5, "top_logprobs": 20, "logit_bias": {0: -100.0}},
        {"stop_token_ids": frozenset({VOCABULARY - 1}), "logit_bias": {VOCABULARY - 1: 100.0}},
    ):
        for seed in (-(2**63), 2**64 - 1):
            sampling = replace(asked.sampling, **changes)
            refuse_bad_sampling(replace(asked, sampling=sampling, seed=seed), vocabulary=VOCABULARY)
