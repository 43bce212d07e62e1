"""A request's sampling options as vLLM's, and what is refused."""

import time
from dataclasses import fields
from pathlib import Path

import pytest

from motet.errors import InvalidRequest, ParameterUnavailable
from motet_runner.external.vllm.engine import Engine
from motet_runner.external.vllm.options import REFUSED, check_served, options_of, seed_of
from motet_runner.interface import EngineConfig, Sampling
from tests.runner.engines import ask
from tests.runner.external.fake_driven import FakeDriven

SET = {
    "prompt_logprobs": 0,
}


BEFORE_VLLM_DRAWS = {"allowed_token_ids", "bad_words", "presence_penalty", "frequency_penalty"}


def options(output_tokens: int = 0, *, seed: int | None = 0, **sampling) -> dict[str, object]:
    of = Sampling(**({"max_tokens": 40} | sampling))
    return options_of(of, seed=seed, output_tokens=output_tokens, eos_token_ids=frozenset({1, 2, 600}), vocabulary=600)


def test_every_option_is_computed_or_refused() -> None:
    given = options(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, logit_bias={3: 1.0}, logprobs=True
    )
    by_another_name = {"top_logprobs": "logprobs"}
    names = {by_another_name.get(one.name, one.name) for one in fields(Sampling)}
    assert names - REFUSED.keys() - BEFORE_VLLM_DRAWS <= given.keys()
    assert REFUSED.keys() == SET.keys()


def test_options_keep_their_values() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 1.0},
    }
    assert options(**given).items() >= given.items()
    assert options()["ignore_eos"], "the model's own ends are stops"


@pytest.mark.parametrize("name", SET)
def test_an_option_that_is_not_computed_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ParameterUnavailable, match=rf"^{name} is not supported .* Leave it out\.$") as refused:
        check_served(ask("a", **{name: SET[name]}))
    assert refused.value.param == name


@pytest.mark.parametrize("name", SET)
def test_an_engine_does_not_take_what_it_does_not_compute(name: str) -> None:
    engine = Engine(
        EngineConfig(model=Path()), FakeDriven(), target_modules={}, eos_token_ids=(1,), clock=time.perf_counter
    )
    with pytest.raises(ParameterUnavailable, match=f"^{name} is not supported"):
        engine.add(ask("a", **{name: SET[name]}))
    assert not engine.has_work()


def test_a_temperature_above_vllms_highest_is_refused() -> None:
    check_served(ask("a", temperature=2.0))
    with pytest.raises(ParameterUnavailable, match=r"^temperature must be at most 2 in this pool") as refused:
        check_served(ask("a", temperature=2.1))
    assert refused.value.param == "temperature"


def test_a_bias_with_a_repetition_penalty_is_refused() -> None:
    for alone in ({"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.1}):
        check_served(ask("a", **alone))
    with pytest.raises(ParameterUnavailable, match=r"^logit_bias and repetition_penalty together") as refused:
        check_served(ask("a", logit_bias={3: 1.0}, repetition_penalty=1.1))
    assert refused.value.param == "logit_bias"


def test_what_vllm_does_not_take_is_a_refusal_of_that_request() -> None:
    def checks(options: dict[str, object]) -> None:
        if options["repetition_penalty"] == 9.0:
            raise KeyError("repetition_penalty is too large")

    engine = Engine(
        EngineConfig(model=Path()),
        FakeDriven(checks=checks),
        target_modules={},
        eos_token_ids=(1,),
        clock=time.perf_counter,
    )
    with pytest.raises(ParameterUnavailable, match=r"vLLM does not take this request: .*is too large") as refused:
        engine.add(ask("a", repetition_penalty=9.0))
    assert refused.value.param == "repetition_penalty"
    assert not engine.has_work()


def test_what_no_engine_takes_is_an_invalid_request() -> None:
    """And not placed on runners with another engine"""

    def checks(options: dict[str, object]) -> None:
        raise ValueError(f"vLLM refuses {options}")

    engine = Engine(
        EngineConfig(model=Path()),
        FakeDriven(checks=checks),
        target_modules={},
        eos_token_ids=(1,),
        clock=time.perf_counter,
    )
    for wrong in ({"temperature": float("inf")}, {"stop_token_ids": frozenset({10**6})}, {"min_tokens": 10**6}):
        with pytest.raises(InvalidRequest):
            engine.add(ask("a", **wrong))
    assert not engine.has_work()


def test_what_an_answer_has_already_is_no_part_of_what_is_left() -> None:
    assert options(0, min_tokens=10)["max_tokens"] == 40
    later = options(15, min_tokens=10)
    assert (later["max_tokens"], later["min_tokens"]) == (25, 0)
    assert options(4, min_tokens=10)["min_tokens"] == 6


def test_the_models_own_ends_are_stops_unless_they_are_ignored() -> None:
    """Some models name ends that their vocabulary has not."""
    assert options(stop_token_ids=frozenset({9}))["stop_token_ids"] == [1, 2, 9]
    assert options(stop_token_ids=frozenset({9}), ignore_eos=True)["stop_token_ids"] == [9]


def test_top_k_of_all_tokens_has_one_form() -> None:
    assert [options(temperature=1.0, top_k=k)["top_k"] for k in (-1, 0, 7)] == [0, 0, 7]


def test_an_answer_that_goes_on_does_not_repeat_its_noise() -> None:
    seeds = [seed_of(7, 0, 0), seed_of(7, 0, 12), seed_of(7, 1, 0), seed_of(8, 0, 0)]
    assert len(set(seeds)) == 4
    assert all(0 <= one < 2**63 for one in seeds)
    assert seed_of(7, 0, 12) == seeds[1]
    assert "seed" not in options(), "nothing is drawn"
    assert options(temperature=1.0, seed=None)["seed"] is None
