"""Refuses sampling options that no row of a batch may have: each by its name, with what would be right.

Gateways check what clients send. This is the last check before the device, also for the model's own defaults and for
programs that use the engine without a gateway.
"""

import math
from collections.abc import Iterable

from motet import sampling_limits as limits
from motet.errors import InvalidRequest
from motet_runner.interface import NewSequence, Sampling


def refuse_bad_sampling(new: NewSequence, *, vocabulary: int) -> None:
    """Raises InvalidRequest."""
    sampling = new.sampling
    for name, lowest, highest in (
        ("temperature", 0.0, limits.MAX_TEMPERATURE),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -limits.MAX_PENALTY, limits.MAX_PENALTY),
        ("frequency_penalty", -limits.MAX_PENALTY, limits.MAX_PENALTY),
    ):
        _refuse_unless(lowest <= getattr(sampling, name) <= highest, sampling, name, f"from {lowest:g} to {highest:g}")
    highest = limits.MAX_REPETITION_PENALTY
    positive = 0 < sampling.repetition_penalty <= highest
    _refuse_unless(positive, sampling, "repetition_penalty", f"above 0 and at most {highest:g}")
    _refuse_unless(sampling.top_k >= 0, sampling, "top_k", "at least 0, which keeps all tokens")
    fits = 0 <= sampling.min_tokens <= sampling.max_tokens
    _refuse_unless(fits, sampling, "min_tokens", f"from 0 to max_tokens, which is {sampling.max_tokens}")
    for name in ("top_logprobs", "prompt_logprobs"):
        known = 0 <= (getattr(sampling, name) or 0) <= limits.MAX_TOP_LOGPROBS
        _refuse_unless(known, sampling, name, f"from 0 to {limits.MAX_TOP_LOGPROBS}")
    _refuse_bad_tokens("logit_bias", sampling.logit_bias, limits.MAX_LOGIT_BIASES, vocabulary)
    _refuse_bad_tokens("stop_token_ids", sampling.stop_token_ids, limits.MAX_STOP_TOKENS, vocabulary)
    for token, bias in sampling.logit_bias.items():
        if not -limits.MAX_LOGIT_BIAS <= bias <= limits.MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias.{token} must be a number from -{limits.MAX_LOGIT_BIAS:g} to {limits.MAX_LOGIT_BIAS:g}, "
                f"not {bias:g}.",
                param="logit_bias",
            )
    if not -(2**63) <= new.seed < 2**64:
        raise InvalidRequest("seed must be an integer of at most 64 bits.", param="seed")


def _refuse_unless(right: bool, sampling: Sampling, name: str, range_: str) -> None:
    # No comparison with NaN is right.
    if not right:
        value = getattr(sampling, name)
        shown = "not a number" if math.isnan(value) else f"not {value:g}"
        raise InvalidRequest(f"{name} must be {range_}, {shown}.", param=name)


def _refuse_bad_tokens(name: str, tokens: Iterable[int], most: int, vocabulary: int) -> None:
    listed = list(tokens)
    if len(listed) > most:
        raise InvalidRequest(f"{name} must have at most {most} tokens, not {len(listed)}.", param=name)
    wrong = next((token for token in listed if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InvalidRequest(
            f"{name} has the token {wrong}, which is not in the vocabulary of {vocabulary} tokens.", param=name
        )
