"""Fits the weights of prompts' features to samples. Pure, and slow: it runs in a process of its own.

Adagrad on the softmax's loss, one sample at a time, some passes over all. After the first pass, the mean over the way
is kept: the last samples leave less noise in it than in where the way ends. The truth is not one class but also its
neighbours: one and a half as long is a smaller error than ten times. That makes what is fitted flatter than the truth,
so in the end it is made steeper by a factor. A sample that was cut teaches the statistics and not the weights. Each
tenant has equal say: a sample counts for less where a tenant has many."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from motet_predictor.length_classes import CLASSES, class_of, class_shares
from motet_predictor.length_model import LengthModel
from motet_predictor.prompt_model import PromptModel
from motet_predictor.prompt_version import Fitted
from motet_predictor.prompt_weights import MAX_WEIGHT, ROWS, PromptWeights, rows_of, scale_of

PASSES = 3
RATE = 0.6
SLOWER = 0.6
"""Each pass changes weights by this factor of the one before, so that the samples that come last weigh no more."""
MEAN_OF = 8
"""How many places of each pass but the first are in the mean."""
NEIGHBOURS = 1.4
"""How far the truth spreads over neighbours: the standard deviation, in classes."""
STEEPER = 1.3
PARTS = 3
"""Each part of the samples is estimated by weights that were fitted to the others. How far these estimates are from the
answers begins the calibration. Samples of one prompt are in one part: a fitted prompt is foretold too well."""
MAX_SCOPES = 20_000
EQUAL_SAY_ABOVE = 200
"""A tenant with more samples than this has no more say than one with this number."""


@dataclass(frozen=True, slots=True)
class Sample:
    tenant: str
    adapter: str
    tokens: int
    censored: bool
    features: np.ndarray
    space: int | None = None
    """What the features belong to; None: what weights are fitted to"""

    @property
    def of(self) -> tuple[str, str]:
        return self.tenant, self.adapter


def _targets() -> np.ndarray:
    distance = np.subtract.outer(np.arange(CLASSES), np.arange(CLASSES))
    near = np.exp(-0.5 * (distance / NEIGHBOURS) ** 2)
    shares: np.ndarray = near / near.sum(axis=1, keepdims=True)
    return shares.astype(np.float32)


def fit_weights(samples: Sequence[Sample], lengths: LengthModel, space: int, *, seed: int = 0) -> PromptWeights:
    """Fit weights beside the statistics of `lengths`, which has learned the same samples."""
    table, squares = PromptWeights.zero(space).table, np.full((ROWS, CLASSES), 1e-2, np.float32)
    targets = _targets()
    counts = Counter(sample.tenant for sample in samples)
    prepared = []
    priors: dict[tuple[str, str], np.ndarray] = {}
    for sample in samples:
        if sample.censored or not len(sample.features) or sample.space not in (None, space):
            continue
        key = sample.of
        if key not in priors:
            # Blurred like the truth, so that a prompt that says nothing tilts nothing.
            shares = class_shares(np.asarray(lengths.shares(*key))).astype(np.float32) @ targets
            priors[key] = np.log(shares + 1e-6)
        say = min(1.0, EQUAL_SAY_ABOVE / counts[sample.tenant]) if len(counts) > 1 else 1.0
        rows = rows_of(*key, sample.features).astype(np.uint32)  # they are the most of the memory that a refit takes
        prepared.append((rows, priors[key], targets[class_of(sample.tokens)], say))
    chance, mean = np.random.default_rng(seed), np.zeros_like(table)
    for turn in range(PASSES):
        rate = RATE * SLOWER**turn
        for part in np.array_split(chance.permutation(len(prepared)), MEAN_OF):
            for at in part:
                rows, prior, target, say = prepared[at]
                count = len(rows) // 2
                scale = scale_of(count)
                own, own_squares = table.take(rows, axis=0), squares.take(rows, axis=0)
                logits = prior + scale * own.sum(axis=0)
                shares = np.exp(logits - logits.max())
                step = (shares / shares.sum() - target) * scale
                own_squares += step * step
                squares[rows] = own_squares
                change = rate * step / np.sqrt(own_squares)
                # Adagrad undoes a factor that all steps of a row share, so the say goes into the rate.
                change[:count] *= say
                table[rows] = own - change
            if turn:
                mean += table
    mean *= STEEPER / (MEAN_OF * (PASSES - 1))
    return PromptWeights(space, np.clip(mean, -MAX_WEIGHT, MAX_WEIGHT, out=mean))


def since_last_change(samples: Sequence[Sample], space: int) -> list[Sample]:
    """The samples, oldest first, without those from before their adapter's lengths changed. Where weights that were
    fitted to other prompts foretell the answers, nothing has changed: it was a burst of another kind of prompts."""
    changed = _last_changes(samples, [None] * len(samples))
    doubtful = [at for at, one in enumerate(samples) if one.of in changed]
    own = [samples[at] for at in doubtful]
    first = {of: doubtful[at] for of, at in _last_changes(own, _fitted_to_others(own, space)).items()}
    return [one for at, one in enumerate(samples) if at >= first.get(one.of, 0)]


def fit(samples: Sequence[Sample], space: int, *, max_scopes: int = MAX_SCOPES) -> Fitted:
    """Fit weights to all samples, oldest first, and begin the calibration: as if they arrived now, one after the other,
    and each was estimated by weights that have not seen its prompt."""
    model = PromptModel(LengthModel(max_scopes=max_scopes))
    for one, weights in zip(samples, _fitted_to_others(samples, space, max_scopes), strict=True):
        _observe(model, one, weights)
    return Fitted(fit_weights(samples, statistics_of(samples, max_scopes), space), dict(model.serving.corrections))


def _fitted_to_others(samples: Sequence[Sample], space: int, max_scopes: int = MAX_SCOPES) -> list[PromptWeights]:
    """For each sample, weights that have not seen its prompt."""
    part_of = [crc32(sample.features.tobytes()) % PARTS for sample in samples]
    parts = []
    for part in range(PARTS):
        others = [sample for sample, own in zip(samples, part_of, strict=True) if own != part]
        parts.append(fit_weights(others, statistics_of(others, max_scopes), space))
    return [parts[part] for part in part_of]


def _last_changes(samples: Sequence[Sample], weights: Sequence[PromptWeights | None]) -> dict[tuple[str, str], int]:
    """Where the samples since the last change of an adapter's lengths begin, if there was one."""
    model = PromptModel(LengthModel())
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    first = {}
    for at, (one, own) in enumerate(zip(samples, weights, strict=True)):
        seen[one.of].append(at)
        _observe(model, one, own)
        if model.answers_since_change:
            first[one.of] = seen[one.of][-model.answers_since_change]
    return first


def _observe(model: PromptModel, one: Sample, weights: PromptWeights | None) -> None:
    model.serving.weights = weights
    model.observe(one.tenant, one.adapter, one.tokens, censored=one.censored, features=one.features, space=one.space)


def statistics_of(samples: Sequence[Sample], max_scopes: int = MAX_SCOPES) -> LengthModel:
    lengths = LengthModel(max_scopes=max_scopes)
    for sample in samples:
        lengths.observe(sample.tenant, sample.adapter, sample.tokens, censored=sample.censored)
    return lengths
