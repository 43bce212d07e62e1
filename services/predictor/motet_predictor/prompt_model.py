"""Estimates by the running statistics and by the prompt together, calibrated. Pure: no clock, no I/O.

The statistics of the tenant's adapter say how long its answers are, and its newest answers how long they are lately;
the weights of the prompt's features tilt that. Distributions are mixed by how well each foretold the adapter's last
answers: where nothing has changed, or where the prompt says nothing, or its weights come from other answers, they soon
count for nothing. Quantiles of the mixture are read where the adapter's calibration says."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self
from zlib import crc32

import numpy as np

from motet.length_statistics import EDGES, MAX_TOKENS, bucket_of
from motet_predictor.comparison import pinball_loss
from motet_predictor.length_change import LengthChange, Since
from motet_predictor.length_classes import CLASS_OF_BUCKET, CLASSES, class_shares
from motet_predictor.length_model import QUANTILES, LengthEstimate, LengthModel, Scope
from motet_predictor.prompt_version import FIRST_TRUST, Correction, Fitted, PromptVersion
from motet_predictor.prompt_weights import PromptWeights, tilted_by
from motet_predictor.sample_features import NEWEST, NO_FEATURES, Features, space_in_use
from motet_predictor.versions import Change, Versions

VERSION = "prompts-3"
"""Of estimates by the prompt. Change it when the same samples would give other estimates."""

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
_WHOLE_LENGTHS = np.asarray(EDGES)
_QUANTILES = np.asarray(QUANTILES)
_RECENT_DECAY = 2.0 ** (-1 / RECENT_HALF_LIFE)
_NO_ANSWERS = np.zeros(CLASSES)


@dataclass(slots=True)
class AdapterState:
    """What follows each answer of a tenant's adapter, beside its statistics."""

    change: LengthChange = field(default_factory=LengthChange)
    recent: np.ndarray = field(default_factory=lambda: np.zeros(CLASSES))
    """The weight of the newest answers in each class of lengths"""
    recent_trust: float = MIN_TRUST
    """The part of the distribution by the newest answers"""


class Asked(NamedTuple):
    """A prompt. `space`: what its features belong to; None: what any weights were fitted to."""

    tenant: str
    adapter: str
    features: Features
    space: int | None


@dataclass(frozen=True, slots=True)
class PlainShares:
    """Of each bucket of lengths, without the prompt."""

    lasting: np.ndarray
    recent: np.ndarray
    mixed: np.ndarray

    @classmethod
    def of(cls, lasting: np.ndarray, newest: np.ndarray, trust: float | np.ndarray) -> Self:
        """`newest`: the weight of the newest answers in each class; `trust`: the part of the distribution by these. Of
        one adapter, or of one in each row."""
        weight = newest.sum(axis=-1, keepdims=True)
        part = RECENT_STRENGTH / (RECENT_STRENGTH + weight)
        known = part + (1 - part) / np.maximum(weight, 1e-9) * newest / np.maximum(class_shares(lasting), 1e-9)
        recent = lasting * known.take(CLASS_OF_BUCKET, axis=-1, mode="clip")
        return cls(lasting, recent, _mixed(trust, recent, lasting))


@dataclass(frozen=True, slots=True)
class Shares:
    """Of each bucket of lengths, by one version."""

    sums: np.ndarray | None
    """What the prompt says about each class; None: nothing"""
    tilted: np.ndarray | None
    """By the prompt; None: it says nothing"""
    mixed: np.ndarray


class PromptModel:
    def __init__(self, lengths: LengthModel, weights: PromptWeights | None = None, *, max_adapters: int = 5000) -> None:
        self.lengths = lengths
        self.max_adapters = max_adapters
        self.versions = Versions(self._version(lengths.version if weights is None else VERSION, weights))
        self.adapters: OrderedDict[tuple[str, str], AdapterState] = OrderedDict()
        self.changed: set[tuple[str, str]] = set()
        """Whose lengths have changed since the samples of the next refit were read"""
        self.unsaved_changes: dict[tuple[str, str], None] = {}
        """Whose lengths have changed, and the database does not know it yet"""
        self.answers = 0
        """How many were observed"""
        self._spaces: deque[int] = deque(maxlen=NEWEST)
        """What the newest features belong to, the newest first"""
        self.answers_since_change = 0
        """How many answers are left if the last one made a change known, else 0"""

    @property
    def serving(self) -> PromptVersion:
        return self.versions.serving

    @property
    def awaits_a_decision(self) -> bool:
        """Whether a candidate is compared. One that was fitted to features of another key or version than most of the
        newest is not worth waiting for."""
        candidate = self.versions.candidate
        return candidate is not None and candidate.knows(space_in_use(self._spaces) or None)

    def refit_begins(self) -> None:
        self.changed.clear()

    def install(self, fitted: Fitted) -> None:
        """Serve what was fitted, without a comparison, and nothing in shadow."""
        self.versions = Versions(self.version_of(VERSION, fitted))

    def version_of(self, name: str, fitted: Fitted, *, changed: Iterable[tuple[str, str]] = ()) -> PromptVersion:
        """A version of what a refit has made. What it says about adapters whose lengths have changed since it began is
        not used, nor about those in `changed`."""
        return PromptVersion.of(name, fitted, restarted=self.changed.union(changed), max_adapters=self.max_adapters)

    def plain_version(self) -> PromptVersion:
        """One without weights: its estimates are those of the statistics."""
        return self._version(self.lengths.version, None)

    def estimate(
        self, tenant: str, adapter: str, max_tokens: int, features: Features = NO_FEATURES, *, space: int | None = None
    ) -> LengthEstimate:
        """Estimate an answer of at most `max_tokens` tokens; 0: no bound. `space`: what the features belong to; None:
        what the weights were fitted to."""
        (found,) = self.estimates([Asked(tenant, adapter, features, space)], [max_tokens])
        return found

    def estimates(self, asked: Sequence[Asked], max_tokens: Sequence[int]) -> list[LengthEstimate]:
        """The estimates of several prompts, each with its own bound. Each is what it is alone, to the last bit. All
        together take less time: numpy takes longer to begin an operation than to carry it out."""
        if not asked:
            return []
        version = self.versions.serving
        corrections = [version.corrections.get((one.tenant, one.adapter)) for one in asked]
        shares = _mixed_rows(version, corrections, self._plain_rows(asked), asked)
        bounds = np.array([bound or MAX_TOKENS for bound in max_tokens])[:, np.newaxis]
        quantiles = np.minimum(_quantile_rows(shares, corrections), bounds).tolist()
        expected = (shares * np.minimum(_LENGTHS, bounds)).sum(axis=1).tolist()
        return [
            LengthEstimate(q50, q80, q90, q95, mean)
            for (q50, q80, q90, q95), mean in zip(quantiles, expected, strict=True)
        ]

    def covers(
        self, tenant: str, adapter: str, tokens: int, features: Features, part: float
    ) -> tuple[bool, bool, bool, bool]:
        """Whether the answer is within each quantile. Where a quantile lies within the answer's bucket, `part` decides,
        between 0 and 1: so much of the bucket counts as shorter."""
        version = self.versions.serving
        correction = version.corrections.get((tenant, adapter))
        plain = self.plain(self.adapters.get((tenant, adapter)), tenant, adapter)
        shares = tilted_shares(version, correction, plain, Asked(tenant, adapter, features, None)).mixed
        low, high = _interval(shares, bucket_of(tokens), False)
        q50, q80, q90, q95 = (low + part * (high - low) <= _positions(correction)).tolist()
        return q50, q80, q90, q95

    def observe(
        self,
        tenant: str,
        adapter: str,
        tokens: int,
        *,
        censored: bool = False,
        features: Features = NO_FEATURES,
        space: int | None = None,
    ) -> Change | None:
        """Learn from an answer of `tokens` tokens, or of at least that many if it was cut (`censored`). Each version
        estimates it first. Returns what follows of that."""
        self.answers += 1
        if len(features) and space is not None:
            self._spaces.appendleft(space)
        state = self._state(tenant, adapter)
        plain, asked = self.plain(state, tenant, adapter), Asked(tenant, adapter, features, space)
        prompt = crc32(features.tobytes()) if len(features) else 0
        repeats = state.change.knows(prompt)
        losses, expected = [], plain.lasting
        for version in self.versions:
            correction = version.correction(tenant, adapter)
            shares = tilted_shares(version, correction, plain, asked)
            if version is self.serving and shares.sums is not None:
                # Not by the newest answers: those that have changed would be expected.
                expected = _mixed(correction.trust, tilted_by(plain.lasting, shares.sums), plain.lasting)
            losses.append(_loss(version, shares, correction, tokens, censored=censored))
            _correct(correction, shares, plain, tokens, censored=censored, repeats=repeats)
        if not censored:
            bucket = bucket_of(tokens)
            state.recent_trust = _trust(state.recent_trust, plain.recent, plain.lasting, bucket)
            state.recent *= _RECENT_DECAY
            state.recent[CLASS_OF_BUCKET[bucket]] += 1.0
        since: Since | None = None
        if self.lengths.count(Scope("adapter", tenant, adapter)) >= MIN_ANSWERS_BEFORE_CHANGE:
            since = state.change.observe(prompt, tokens, censored, *_interval(expected, bucket_of(tokens), censored))
        self.answers_since_change = 0 if since is None else since.all
        if since is not None:
            self.changed.add((tenant, adapter))
            self._note_change(tenant, adapter)
            self.lengths.restart(tenant, adapter, since.answers[:-1])
            state.recent_trust = MIN_TRUST
            for version in self.versions:
                version.correction(tenant, adapter).restart()
        self.lengths.observe(tenant, adapter, tokens, censored=censored)
        return self.versions.judge(tenant, prompt, losses)

    def _note_change(self, tenant: str, adapter: str) -> None:
        self.unsaved_changes[tenant, adapter] = None
        if len(self.unsaved_changes) > self.max_adapters:  # the database is away
            del self.unsaved_changes[next(iter(self.unsaved_changes))]

    def _version(self, name: str, weights: PromptWeights | None) -> PromptVersion:
        return PromptVersion(name, weights, max_adapters=self.max_adapters)

    def _state(self, tenant: str, adapter: str) -> AdapterState:
        state = self.adapters.get((tenant, adapter))
        if state is None:
            state = self.adapters[tenant, adapter] = AdapterState()
            if len(self.adapters) > self.max_adapters:
                self.adapters.popitem(last=False)
        self.adapters.move_to_end((tenant, adapter))
        return state

    def plain(self, state: AdapterState | None, tenant: str, adapter: str) -> PlainShares:
        lasting = np.asarray(self.lengths.shares(tenant, adapter))
        if state is None:
            return PlainShares(lasting, lasting, lasting)
        return PlainShares.of(lasting, state.recent, state.recent_trust)

    def _plain_rows(self, asked: Sequence[Asked]) -> np.ndarray:
        """The mixed ones of each prompt."""
        states = [self.adapters.get((one.tenant, one.adapter)) for one in asked]
        return PlainShares.of(
            np.array([self.lengths.shares(one.tenant, one.adapter) for one in asked]),
            np.array([_NO_ANSWERS if state is None else state.recent for state in states]),
            np.array([[0.0 if state is None else state.recent_trust] for state in states]),
        ).mixed


def tilted_shares(version: PromptVersion, correction: Correction | None, plain: PlainShares, asked: Asked) -> Shares:
    if version.weights is None or not _tilts(version, asked):
        return Shares(None, None, plain.mixed)
    (sums,) = version.weights.sums([asked[:3]])
    tilted = tilted_by(plain.mixed, sums)
    trust = FIRST_TRUST if correction is None else correction.trust
    return Shares(sums, tilted, _mixed(trust, tilted, plain.mixed))


def _mixed_rows(
    version: PromptVersion, corrections: Sequence[Correction | None], plain: np.ndarray, asked: Sequence[Asked]
) -> np.ndarray:
    """As `tilted_shares`, of several prompts."""
    at = [row for row, one in enumerate(asked) if _tilts(version, one)]
    if version.weights is None or not at:
        return plain
    tilted = tilted_by(plain[at], version.weights.sums([asked[row][:3] for row in at]))
    trusts = [FIRST_TRUST if own is None else own.trust for own in corrections]
    plain[at] = _mixed(np.array(trusts)[at, np.newaxis], tilted, plain[at])
    return plain


def _tilts(version: PromptVersion, asked: Asked) -> bool:
    """Whether the prompt says anything."""
    return len(asked.features) > 0 and version.knows(asked.space)


def _mixed(trust: float | np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """With this part of `one`."""
    mixed: np.ndarray = trust * one + (1 - trust) * other
    return mixed


def quantiles_at(shares: np.ndarray, correction: Correction | None) -> np.ndarray:
    lengths: np.ndarray = _quantile_rows(shares[np.newaxis], [correction])[0]
    return lengths


def _quantile_rows(shares: np.ndarray, corrections: Sequence[Correction | None]) -> np.ndarray:
    below = np.cumsum(shares, axis=1)
    at = np.array([own.searchsorted(_positions(one)) for own, one in zip(below, corrections, strict=True)])
    lengths: np.ndarray = _WHOLE_LENGTHS.take(at, mode="clip")
    return lengths


def _loss(version: PromptVersion, shares: Shares, correction: Correction, tokens: int, *, censored: bool) -> float:
    estimated = quantiles_at(shares.mixed, correction)
    loss = pinball_loss(np.minimum(estimated, tokens) if censored else estimated, tokens)
    version.judged.count(estimated, tokens, loss, censored=censored)
    return loss


def _correct(
    correction: Correction, shares: Shares, plain: PlainShares, tokens: int, *, censored: bool, repeats: bool
) -> None:
    bucket = bucket_of(tokens)
    correction.calibration.observe(*_interval(shares.mixed, bucket, censored), repeats=repeats)
    if shares.tilted is not None and not censored:
        correction.trust = _trust(correction.trust, shares.tilted, plain.mixed, bucket)


def _positions(correction: Correction | None) -> np.ndarray:
    """Where to read the quantiles. The tolerance is for a share that is one except for rounding."""
    positions = _QUANTILES if correction is None else correction.calibration.positions(_QUANTILES)
    return np.asarray(positions - 1e-9)


def _trust(trust: float, one: np.ndarray, other: np.ndarray, bucket: int) -> float:
    """The part of `one` in a mixture with `other`, after an answer in this bucket."""
    step = (one[bucket] + 1e-9) / (other[bucket] + 1e-9)
    odds = trust / (1 - trust) * min(max(step, 1 / MAX_STEP), MAX_STEP)
    return float(MIN_TRUST + (1 - 2 * MIN_TRUST) * odds / (1 + odds))


def _interval(shares: np.ndarray, bucket: int, censored: bool) -> tuple[float, float]:
    low = float(shares[:bucket].sum())
    return low, 1.0 if censored else low + float(shares[bucket])
