"""A request's sampling options as vLLM's own, and what it is refused for. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any

from motet.errors import ParameterUnavailable
from motet_runner.interface import NewSequence, Sampling

REFUSED: Mapping[str, str] = {
    "prompt_logprobs": "vLLM gives no log probabilities of a prompt that is computed in parts",
}
"""By option of `Sampling`: why a runner with vLLM refuses a request that sets it"""

MAX_TEMPERATURE = 2.0
"""vLLM's own"""

_DEFAULTS = Sampling(max_tokens=1)


def check_served(sequence: NewSequence) -> None:
    """Raises ParameterUnavailable for the first option that this engine does not compute."""
    for name, why in REFUSED.items():
        if getattr(sequence.sampling, name) != getattr(_DEFAULTS, name):
            raise ParameterUnavailable(
                f"{name} is not supported by this pool's engine, vLLM: {why}. Leave it out.", param=name
            )
    if sequence.sampling.logit_bias and sequence.sampling.repetition_penalty != _DEFAULTS.repetition_penalty:
        raise ParameterUnavailable(
            "logit_bias and repetition_penalty together are not supported by this pool's engine, vLLM: it adds "
            "the bias before it penalises. Leave one out.",
            param="logit_bias",
        )
    if sequence.sampling.temperature > MAX_TEMPERATURE:
        raise ParameterUnavailable(
            f"temperature must be at most {MAX_TEMPERATURE:g} in this pool, whose engine is vLLM.", param="temperature"
        )


def options_of(
    sampling: Sampling, *, seed: int | None, output_tokens: int, eos_token_ids: frozenset[int], vocabulary: int
) -> dict[str, Any]:
    """The arguments of vLLM's `SamplingParams` for the rest of an answer, of which `output_tokens` are there: vLLM gets
    them as a part of the prompt. `seed`: None: vLLM draws with noise of its own. It has faster ways to do that."""
    stops = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_token_ids
    options: dict[str, Any] = {
        "max_tokens": sampling.max_tokens - output_tokens,
        "min_tokens": max(0, sampling.min_tokens - output_tokens),
        "temperature": sampling.temperature,
        "stop_token_ids": sorted(token for token in stops if token < vocabulary),  # vLLM refuses others
        "ignore_eos": True,  # the model's own EOS tokens are among the stops, if they end this answer
        "repetition_penalty": sampling.repetition_penalty,
        "detokenize": False,
    }
    if sampling.temperature:
        options |= {
            "top_p": sampling.top_p,
            "top_k": max(0, sampling.top_k),
            "min_p": sampling.min_p,
            "seed": seed,
        }
    if sampling.logit_bias:
        options["logit_bias"] = dict(sampling.logit_bias)
    if sampling.logprobs:
        options["logprobs"] = sampling.top_logprobs
    return options


def seed_of(seed: int, choice: int, output_tokens: int) -> int:
    """vLLM's first model runner begins a request's noise anew when the request comes again. An answer that goes on
    after a park must not repeat the noise of its beginning, and neither must another choice of the same call."""
    digest = hashlib.blake2b(f"{seed} {choice} {output_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
