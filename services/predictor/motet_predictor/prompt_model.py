"""Estimates by the running statistics and by the prompt together, calibrated. Pure: no clock, no I/O.

The statistics of the tenant's adapter say how long its answers are, and its newest answers how long they are lately;
the weights of the prompt's features tilt that. Distributions are mixed by how well each foretold the adapter's last
answers: where nothing has changed, or where the prompt says nothing, or its weights come from other answers, they soon
count for nothing. Quantiles of the mixture are read where the adapter's calibration says."""

from collections import OrderedDict
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from motet.length_statistics import EDGES, MAX_TOKENS, bucket_of
from motet_predictor.calibration import Calibration
from motet_predictor.length_change import LengthChange
from motet_predictor.length_classes import CLASS_OF_BUCKET, CLASSES, class_shares
from motet_predictor.length_model import QUANTILES, LengthEstimate, LengthModel, Scope
from motet_predictor.prompt_weights import PromptWeights
from motet_predictor.sample_features import NO_FEATURES, Features

VERSION = "prompts-2"
"""Of estimates by the prompt. Change it when the same samples would give other estimates."""

FIRST_TRUST = 0.7
"""The part of the tilted distribution in the mixture before the first answer."""
TRUST_AFTER_CHANGE = 0.1
MIN_ANSWERS_BEFORE_CHANGE = 32
"""Before this number of answers, positions only show how much is unknown yet."""
MIN_TRUST = 0.02
"""The part that each of two distributions keeps, so that either can come back."""
MAX_STEP = 8.0
"""How much a single answer can shift the odds between them."""
RECENT_HALF_LIFE = 16
RECENT_STRENGTH = 8.0
"""How many answers the statistics count for beside the newest ones."""

_LENGTHS = np.asarray(EDGES, float)
_QUANTILES = np.asarray(QUANTILES)
_RECENT_DECAY = 2.0 ** (-1 / RECENT_HALF_LIFE)


@dataclass(slots=True)
class AdapterState:
    """What follows each answer of a tenant's adapter, beside its statistics."""

    calibration: Calibration = field(default_factory=Calibration)
    change: LengthChange = field(default_factory=LengthChange)
    trust: float = FIRST_TRUST
    """The part of the distribution by the prompt"""
    recent: np.ndarray = field(default_factory=lambda: np.zeros(CLASSES))
    """The weight of the newest answers in each class of lengths"""
    recent_trust: float = MIN_TRUST
    """The part of the distribution by the newest answers"""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a refit makes."""

    weights: PromptWeights
    adapters: dict[tuple[str, str], AdapterState]


@dataclass(frozen=True, slots=True)
class _Shares:
    """Of each bucket of lengths, by one kind of knowledge each."""

    lasting: np.ndarray
    recent: np.ndarray
    plain: np.ndarray
    """Both without the prompt"""
    tilted: np.ndarray | None
    mixed: np.ndarray


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
        state = self.adapters.get((tenant, adapter))
        shares = self._shares(state, tenant, adapter, features).mixed
        at = np.minimum(np.searchsorted(np.cumsum(shares), _positions(state)), len(EDGES) - 1)
        bound = max_tokens or MAX_TOKENS
        q50, q80, q90, q95 = (min(EDGES[i], bound) for i in at)
        expected = float(shares @ np.minimum(_LENGTHS, bound))
        return LengthEstimate(q50, q80, q90, q95, expected)

    def covers(
        self, tenant: str, adapter: str, tokens: int, features: Features, part: float
    ) -> tuple[bool, bool, bool, bool]:
        """Whether the answer is within each quantile. Where a quantile lies within the answer's bucket, `part` decides,
        between 0 and 1: so much of the bucket counts as shorter."""
        state = self.adapters.get((tenant, adapter))
        low, high = _interval(self._shares(state, tenant, adapter, features).mixed, bucket_of(tokens), False)
        q50, q80, q90, q95 = (low + part * (high - low) <= _positions(state)).tolist()
        return q50, q80, q90, q95

    def observe(
        self, tenant: str, adapter: str, tokens: int, *, censored: bool = False, features: Features = NO_FEATURES
    ) -> None:
        """Learn from an answer of `tokens` tokens, or of at least that many if it was cut (`censored`)."""
        self.answers += 1
        state = self._state(tenant, adapter)
        shares = self._shares(state, tenant, adapter, features)
        self._judge(state, shares, tokens, censored=censored)
        since: list[tuple[int, bool]] = []
        if self.lengths.count(Scope("adapter", tenant, adapter)) >= MIN_ANSWERS_BEFORE_CHANGE:
            prompt = crc32(features.tobytes()) if len(features) else 0
            since = state.change.observe(
                prompt, tokens, censored, *_interval(shares.lasting, bucket_of(tokens), censored)
            )
        self.answers_since_change = len(since)
        if since:
            self._changed.add((tenant, adapter))
            self.lengths.restart(tenant, adapter, since[:-1])
            state.calibration = Calibration()
            state.trust = min(state.trust, TRUST_AFTER_CHANGE)
            state.recent_trust = MIN_TRUST
        self.lengths.observe(tenant, adapter, tokens, censored=censored)

    def _judge(self, state: AdapterState, shares: _Shares, tokens: int, *, censored: bool) -> None:
        bucket = bucket_of(tokens)
        state.calibration.observe(*_interval(shares.mixed, bucket, censored))
        if censored:
            return
        state.recent_trust = _trust(state.recent_trust, shares.recent, shares.lasting, bucket)
        if shares.tilted is not None:
            state.trust = _trust(state.trust, shares.tilted, shares.plain, bucket)
        state.recent *= _RECENT_DECAY
        state.recent[CLASS_OF_BUCKET[bucket]] += 1.0

    def _state(self, tenant: str, adapter: str) -> AdapterState:
        state = self.adapters.get((tenant, adapter))
        if state is None:
            state = self.adapters[tenant, adapter] = AdapterState()
            if len(self.adapters) > self._max_adapters:
                self.adapters.popitem(last=False)
        self.adapters.move_to_end((tenant, adapter))
        return state

    def _shares(self, state: AdapterState | None, tenant: str, adapter: str, features: Features) -> _Shares:
        lasting = plain = recent = np.asarray(self.lengths.shares(tenant, adapter))
        if state is not None:
            of_classes = class_shares(lasting)
            part = RECENT_STRENGTH / (RECENT_STRENGTH + state.recent.sum())
            known = part + (1 - part) / max(state.recent.sum(), 1e-9) * state.recent / np.maximum(of_classes, 1e-9)
            recent = lasting * known[CLASS_OF_BUCKET]
            plain = state.recent_trust * recent + (1 - state.recent_trust) * lasting
        if self.weights is None or not len(features):
            return _Shares(lasting, recent, plain, None, plain)
        tilted = self.weights.tilted(plain, tenant, adapter, features)
        trust = FIRST_TRUST if state is None else state.trust
        return _Shares(lasting, recent, plain, tilted, trust * tilted + (1 - trust) * plain)


def _positions(state: AdapterState | None) -> np.ndarray:
    """Where to read the quantiles. The tolerance is for a share that is one except for rounding."""
    positions = _QUANTILES if state is None else state.calibration.positions(_QUANTILES)
    return np.asarray(positions - 1e-9)


def _trust(trust: float, one: np.ndarray, other: np.ndarray, bucket: int) -> float:
    """The part of `one` in a mixture with `other`, after an answer in this bucket."""
    step = (one[bucket] + 1e-9) / (other[bucket] + 1e-9)
    odds = trust / (1 - trust) * min(max(step, 1 / MAX_STEP), MAX_STEP)
    return float(MIN_TRUST + (1 - 2 * MIN_TRUST) * odds / (1 + odds))


def _interval(shares: np.ndarray, bucket: int, censored: bool) -> tuple[float, float]:
    low = float(shares[:bucket].sum())
    return low, 1.0 if censored else low + float(shares[bucket])
