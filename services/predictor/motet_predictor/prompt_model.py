"""Estimates by the running statistics and by the prompt together, calibrated. Pure: no clock, no I/O.

The statistics of the tenant's adapter say how long its answers are; the weights of the prompt's features tilt them.
Both distributions, with and without the tilt, are mixed by how well each foretold the adapter's last answers: where
the prompt says nothing, or its weights come from other answers, they soon count for nothing. Quantiles of the mixture
are read where the adapter's calibration says."""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from motet.length_statistics import EDGES, MAX_TOKENS, bucket_of
from motet_predictor.calibration import Calibration
from motet_predictor.length_change import LengthChange
from motet_predictor.length_model import QUANTILES, LengthEstimate, LengthModel, Scope
from motet_predictor.prompt_weights import PromptWeights
from motet_predictor.sample_features import NO_FEATURES, Features

VERSION = "prompts-1"
"""Of estimates by the prompt. Change it when the same samples would give other estimates."""

FIRST_TRUST = 0.7
"""The part of the tilted distribution in the mixture before the first answer."""
TRUST_AFTER_CHANGE = 0.1
MIN_ANSWERS_BEFORE_CHANGE = 32
"""Before this number of answers, positions only show how much is unknown yet."""
MIN_TRUST = 0.02
"""The part that each of the two distributions keeps, so that either can come back."""
MAX_STEP = 8.0
"""How much a single answer can shift the odds between them."""

_LENGTHS = np.asarray(EDGES, float)
_QUANTILES = np.asarray(QUANTILES)


@dataclass(slots=True)
class AdapterState:
    """What follows each answer of a tenant's adapter, beside its statistics."""

    calibration: Calibration = field(default_factory=Calibration)
    change: LengthChange = field(default_factory=LengthChange)
    trust: float = FIRST_TRUST


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a refit makes."""

    weights: PromptWeights
    adapters: dict[tuple[str, str], AdapterState]


class PromptModel:
    def __init__(self, lengths: LengthModel, weights: PromptWeights | None = None, *, max_adapters: int = 5000) -> None:
        self.lengths = lengths
        self.weights = weights
        self._max_adapters = max_adapters
        self.adapters: OrderedDict[tuple[str, str], AdapterState] = OrderedDict()
        self._changed: set[tuple[str, str]] = set()
        """Whose lengths have changed since the samples of the next refit were read"""
        self.answers = 0
        """How many were observed"""
        self.answers_since_change = 0
        """How many answers are left if the last one made a change known, else 0"""

    @property
    def version(self) -> str:
        return self.lengths.version if self.weights is None else VERSION

    def refit_begins(self) -> None:
        self._changed.clear()

    def install(self, fitted: Fitted) -> None:
        """Use what a refit has made. Adapters whose lengths have changed since it began keep what they have."""
        self.weights = fitted.weights
        for name, state in fitted.adapters.items():
            if name not in self._changed:
                own = self._state(*name)
                own.calibration, own.trust = state.calibration, state.trust

    def estimate(self, tenant: str, adapter: str, max_tokens: int, features: Features = NO_FEATURES) -> LengthEstimate:
        """Estimate an answer of at most `max_tokens` tokens; 0: no bound."""
        shares = self._mixed(tenant, adapter, features)[0]
        below = np.cumsum(shares)
        state = self.adapters.get((tenant, adapter))
        positions = _QUANTILES if state is None else state.calibration.positions(_QUANTILES)
        at = np.minimum(np.searchsorted(below, positions - 1e-9), len(EDGES) - 1)
        bound = max_tokens or MAX_TOKENS
        q50, q80, q90, q95 = (min(EDGES[i], bound) for i in at)
        expected = float(shares @ np.minimum(_LENGTHS, bound))
        return LengthEstimate(q50, q80, q90, q95, expected)

    def observe(
        self, tenant: str, adapter: str, tokens: int, *, censored: bool = False, features: Features = NO_FEATURES
    ) -> None:
        """Learn from an answer of `tokens` tokens, or of at least that many if it was cut (`censored`)."""
        self.answers += 1
        state = self._state(tenant, adapter)
        plain = self._judge(state, (tenant, adapter), tokens, censored, features)
        since: list[tuple[int, bool]] = []
        if self.lengths.count(Scope("adapter", tenant, adapter)) >= MIN_ANSWERS_BEFORE_CHANGE:
            since = state.change.observe(tokens, censored, *_interval(plain, bucket_of(tokens), censored))
        self.answers_since_change = len(since)
        if since:
            self._changed.add((tenant, adapter))
            self.lengths.restart(tenant, adapter, since[:-1])
            state.calibration = Calibration()
            state.trust = min(state.trust, TRUST_AFTER_CHANGE)
        self.lengths.observe(tenant, adapter, tokens, censored=censored)

    def judge(self, tenant: str, adapter: str, tokens: int, *, censored: bool, features: Features) -> None:
        """Compare an answer with its estimate, and learn nothing else from it."""
        self._judge(self._state(tenant, adapter), (tenant, adapter), tokens, censored, features)

    def _judge(
        self, state: AdapterState, name: tuple[str, str], tokens: int, censored: bool, features: Features
    ) -> np.ndarray:
        mixed, plain, tilted = self._mixed(*name, features)
        bucket = bucket_of(tokens)
        state.calibration.observe(*_interval(mixed, bucket, censored))
        if tilted is not None and not censored:
            odds = state.trust / (1 - state.trust)
            step = (tilted[bucket] + 1e-9) / (plain[bucket] + 1e-9)
            odds *= min(max(step, 1 / MAX_STEP), MAX_STEP)
            state.trust = MIN_TRUST + (1 - 2 * MIN_TRUST) * odds / (1 + odds)
        return plain

    def _state(self, tenant: str, adapter: str) -> AdapterState:
        state = self.adapters.get((tenant, adapter))
        if state is None:
            state = self.adapters[tenant, adapter] = AdapterState()
            if len(self.adapters) > self._max_adapters:
                self.adapters.popitem(last=False)
        self.adapters.move_to_end((tenant, adapter))
        return state

    def _mixed(self, tenant: str, adapter: str, features: Features) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The shares of all buckets: mixed, by the statistics alone, and tilted by the prompt."""
        plain = np.asarray(self.lengths.shares(tenant, adapter))
        if self.weights is None or not len(features):
            return plain, plain, None
        tilted = self.weights.tilted(plain, tenant, adapter, features)
        state = self.adapters.get((tenant, adapter))
        trust = FIRST_TRUST if state is None else state.trust
        return trust * tilted + (1 - trust) * plain, plain, tilted


def _interval(shares: np.ndarray, bucket: int, censored: bool) -> tuple[float, float]:
    low = float(shares[:bucket].sum())
    return low, 1.0 if censored else low + float(shares[bucket])
