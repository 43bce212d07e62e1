"""Teaches the predictor's own model some rows, and compares its estimates with others."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.length_cases.rows import FOLDS, LONGEST, Row
from motet_predictor.fitting import Sample, fit, statistics_of
from motet_predictor.length_model import LengthEstimate
from motet_predictor.prompt_model import PromptModel

SPACE = 1


@dataclass(slots=True)
class Judged:
    """Answers, their estimates, and which quantiles covered them with ties split at random."""

    rows: list[Row] = field(default_factory=list)
    estimates: list[LengthEstimate] = field(default_factory=list)
    covered: list[tuple[bool, bool, bool, bool]] = field(default_factory=list)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([row.sample.tokens for row in self.rows])

    def of(self, quantile: str) -> np.ndarray:
        return np.array([getattr(one, quantile) for one in self.estimates])

    def reserved(self, quantile: str = "q90") -> float:
        """R: tokens reserved for each token used."""
        return float(self.of(quantile).sum() / self.lengths.sum())

    def short(self, quantile: str = "q90") -> float:
        """U: the share of answers that are longer than what is reserved."""
        return float((self.of(quantile) < self.lengths).mean())

    def reserved_after_doubling(self) -> float:
        """R2: each reservation is doubled until its answer fits."""
        first, lengths = self.of("q90"), self.lengths
        doubled = first * 2.0 ** np.ceil(np.log2(np.maximum(lengths / first, 1.0)))
        return float(doubled.sum() / lengths.sum())

    def gaps(self) -> tuple[float, float]:
        """How far the coverage of q90 and of q95 is from what they say."""
        shares = np.mean(self.covered, axis=0)
        return float(shares[2] - 0.90), float(shares[3] - 0.95)

    def constant(self, quantile: str = "q90") -> float:
        """R of one guess for all rows that is as often too short."""
        return float(np.quantile(self.lengths, 1 - self.short(quantile)) / self.lengths.mean())

    def where(self, tenant: str) -> "Judged":
        at = [number for number, row in enumerate(self.rows) if row.sample.tenant == tenant]
        return Judged([self.rows[n] for n in at], [self.estimates[n] for n in at], [self.covered[n] for n in at])


def taught(samples: Sequence[Sample]) -> PromptModel:
    """A model that has learned these, and was fitted to them."""
    model = PromptModel(statistics_of(samples, 1000))
    model.install(fit(samples, SPACE))
    return model


def mixed(rows: Iterable[Row], seed: int, of_each: int | None = None) -> list[Sample]:
    """In random order; at most `of_each` of a tenant."""
    samples = [row.sample for row in rows]
    samples = [samples[at] for at in np.random.default_rng(seed).permutation(len(samples))]
    seen = Counter[str]()
    kept = []
    for one in samples:
        seen[one.tenant] += 1
        if of_each is None or seen[one.tenant] <= of_each:
            kept.append(one)
    return kept


def judge(model: PromptModel, rows: Iterable[Row], into: Judged, seed: int = 0) -> Judged:
    chance = np.random.default_rng(seed)
    for row in rows:
        one = row.sample
        into.rows.append(row)
        into.estimates.append(model.estimate(one.tenant, one.adapter, LONGEST, one.features))
        into.covered.append(model.covers(one.tenant, one.adapter, one.tokens, one.features, chance.random()))
    return into


def folded(rows: Sequence[Row], of_each: int | None = None, folds: int = FOLDS) -> Judged:
    """Each row by what the other folds teach."""
    pooled = Judged()
    for fold in range(folds):
        model = taught(mixed((row for row in rows if row.fold != fold), fold, of_each))
        judge(model, (row for row in rows if row.fold == fold), pooled, fold)
    return pooled
