"""What an estimate comes from, step by step, and which features of the prompt moved it. Pure."""

from dataclasses import dataclass

import numpy as np

from motet.length_statistics import EDGES, MAX_TOKENS
from motet_predictor.length_model import LengthEstimate, Scope
from motet_predictor.prompt_model import Asked, PromptModel, quantiles_at, tilted_shares
from motet_predictor.prompt_version import FIRST_TRUST
from motet_predictor.prompt_weights import rows_of, scale_of, tilted_by

MAX_MOVES = 20
_LENGTHS = np.asarray(EDGES, float)
_LOG_LENGTHS = np.log2(_LENGTHS)


@dataclass(frozen=True, slots=True)
class Explanation:
    steps: list[tuple[str, LengthEstimate]]
    """The last one is the estimate."""
    moves: list[tuple[int, float]]
    """Features, and how many times as long the answer is expected to be (geometric mean) as without it"""
    answers: int
    trust: float
    known: bool


def explain(model: PromptModel, asked: Asked, max_tokens: int) -> Explanation:
    version, tenant, adapter = model.serving, asked.tenant, asked.adapter
    correction = version.corrections.get((tenant, adapter))
    plain = model.plain(model.adapters.get((tenant, adapter)), tenant, adapter)
    shares = tilted_shares(version, correction, plain, asked)
    trust = FIRST_TRUST if correction is None else correction.trust
    bound = max_tokens or MAX_TOKENS

    def estimate(of: np.ndarray, *, corrected: bool = False) -> LengthEstimate:
        q50, q80, q90, q95 = np.minimum(quantiles_at(of, correction if corrected else None), bound).tolist()
        return LengthEstimate(q50, q80, q90, q95, float((of * np.minimum(_LENGTHS, bound)).sum()))

    steps = [
        ("all answers of the adapter", estimate(plain.lasting)),
        ("its newest answers, too", estimate(plain.mixed)),
        *([("the prompt, too", estimate(shares.mixed))] if shares.tilted is not None else []),
        ("corrected by how right earlier estimates were", estimate(shares.mixed, corrected=True)),
    ]
    moves: list[tuple[int, float]] = []
    if shares.tilted is not None and version.weights is not None:
        count, table = len(asked.features), version.weights.table
        own = table[rows_of(tenant, adapter, asked.features)] * scale_of(count)
        of_feature = own[:count] + own[count:]
        sums = of_feature.sum(axis=0)
        whole = _LOG_LENGTHS @ shares.mixed
        for feature, part in zip(asked.features.tolist(), of_feature, strict=True):
            if part.any():
                without = trust * tilted_by(plain.mixed, sums - part) + (1 - trust) * plain.mixed
                moves.append((feature, float(2.0 ** (whole - _LOG_LENGTHS @ without))))
        moves.sort(key=lambda move: -abs(np.log2(move[1])))
    answers = model.lengths.count(Scope("adapter", tenant, adapter))
    known = not len(asked.features) or version.weights is None or version.knows(asked.space)
    return Explanation(steps, moves[:MAX_MOVES], answers, trust if shares.tilted is not None else 0.0, known)
