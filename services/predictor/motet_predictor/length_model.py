"""The statistics of answer lengths, and the estimates from them. Pure: no clock, no I/O.

Running quantiles at two levels: every answer counts for its (tenant, adapter) and for its tenant. For an estimate, an
adapter starts from its tenant, and a tenant from the mean over all tenants, as if that were a few answers of its own
(shrinkage). So the first answers of a new adapter already change its estimate, and twenty determine it."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from motet.length_statistics import EDGES, MAX_TOKENS, BucketShares, LengthStatistics, bucket_of, quantiles_of
from motet_predictor.mean_over_tenants import MeanOverTenants

VERSION = "quantiles-2"
"""Change it when the same answers would give other estimates, or are stored in another form."""

QUANTILES = (0.5, 0.8, 0.9, 0.95)

PARENT_STRENGTH = 2.0
"""How many answers the level above counts for. With 1, q95 is too low too often after five answers; with 8, tenants
with short answers reserve ten times too much."""

ROOT_STRENGTH = 1.0
"""The same for the prior in what a tenant adds to the mean: one real answer outweighs it."""


CHANGE_THRESHOLD = 1 / 16
"""One answer changes little at the upper levels, so they are computed again only when this share is new of a tenant's
answers that still count, or of what the mean over all tenants counts. The adapter's own level is always current."""


_EDGES = np.asarray(EDGES, float)


def _log_uniform(shortest: int, longest: int) -> BucketShares:
    first, last = bucket_of(shortest), bucket_of(longest)
    shares: BucketShares = np.diff(_EDGES, prepend=0.0) / _EDGES
    shares[:first] = shares[last + 1 :] = 0.0
    shares /= shares.sum()
    return shares


PRIOR = _log_uniform(8, 8192)
"""Before the first answer, any length is as likely as its double. So the upper quantiles are the client's max_tokens if
that is below some thousands."""


class Scope(NamedTuple):
    """Whose answers: of a tenant's adapter (`namespace/name`, or the digest of a base model), or of a tenant."""

    level: str
    tenant: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Quantiles of an answer's length in tokens, at most what the client allows; and the expected length."""

    q50: int
    q80: int
    q90: int
    q95: int
    expected: float


@dataclass(frozen=True, slots=True)
class _Distribution:
    """A scope's distribution, and what it was computed from."""

    count: int
    parent: BucketShares
    masses: BucketShares


class LengthModel:
    """Learns lengths and estimates them. Keeps the `max_scopes` scopes that learned last."""

    version = VERSION

    def __init__(self, *, max_scopes: int = 20_000) -> None:
        self._max_scopes = max_scopes
        self._known: OrderedDict[Scope, LengthStatistics] = OrderedDict()
        self._changed: dict[Scope, None] = {}
        self._restarted: dict[Scope, None] = {}
        """Adapters of which nothing counts that was saved before, also if they were forgotten and learn again"""
        self._distributions: dict[Scope, _Distribution] = {}
        self._mean = MeanOverTenants(PRIOR, self._shares_in_mean)
        self._overall: BucketShares = PRIOR
        self._moved = 0.0
        """What has changed in the mean since then: 1 for a tenant that is new or forgotten, and of an answer its share
        in what is known of its tenant. So a tenant with many answers does not hide those that have few."""

    def __len__(self) -> int:
        return len(self._known)

    def count(self, scope: Scope) -> int:
        """Answers counted for a scope."""
        statistics = self._known.get(scope)
        return 0 if statistics is None else statistics.count

    def estimate(self, tenant: str, adapter: str, max_tokens: int) -> LengthEstimate:
        """Estimate an answer of at most `max_tokens` tokens; 0: no bound."""
        masses = self.shares(tenant, adapter)
        bound = max_tokens or MAX_TOKENS
        q50, q80, q90, q95 = (min(tokens, bound) for tokens in quantiles_of(masses, QUANTILES))
        last = bucket_of(bound)
        within = masses[:last]
        expected = within @ _EDGES[:last] + bound * (1.0 - within.sum())
        return LengthEstimate(q50, q80, q90, q95, float(expected))

    def shares(self, tenant: str, adapter: str) -> BucketShares:
        """The share of each bucket of lengths among the next answers of a tenant's adapter."""
        if self._moved > CHANGE_THRESHOLD * len(self._mean):
            self._overall, self._moved = self._mean.shares(), 0.0
        tenants = self._distribution(Scope("tenant", tenant), self._overall, threshold=CHANGE_THRESHOLD)
        return self._distribution(Scope("adapter", tenant, adapter), tenants, threshold=0.0)

    def restart(self, tenant: str, adapter: str, answers: Iterable[tuple[int, bool]]) -> None:
        """Drop what an adapter's statistics are, and learn only these answers (length, censored). Its tenant's keep
        all: other adapters start from them."""
        scope = Scope("adapter", tenant, adapter)
        statistics = LengthStatistics()
        for tokens, censored in answers:
            statistics.observe(tokens, censored=censored)
        self._known[scope] = statistics
        self._known.move_to_end(scope)
        self._restarted[scope] = None
        if len(self._restarted) > self._max_scopes:
            del self._restarted[next(iter(self._restarted))]
        self._distributions.pop(scope, None)
        self._changed[scope] = None
        self._forget_least_recent()

    def observe(self, tenant: str, adapter: str, tokens: int, *, censored: bool = False) -> None:
        """Count an answer of `tokens` tokens, or of at least that many if it was cut (`censored`)."""
        for scope in (Scope("tenant", tenant), Scope("adapter", tenant, adapter)):
            statistics = self._known.get(scope)
            if statistics is None:
                statistics = self._known[scope] = LengthStatistics()
            self._known.move_to_end(scope)
            statistics.observe(tokens, censored=censored)
            self._changed[scope] = None
        self._mean.changed(tenant)
        self._moved += 1 / max(1.0, self._known[Scope("tenant", tenant)].weight)
        self._forget_least_recent()

    @property
    def unsaved_count(self) -> int:
        """How many scopes have changes that `changes` has not returned yet."""
        return len(self._changed)

    def changes(self, at_most: int | None = None) -> list[tuple[Scope, bytes]]:
        """Scopes that changed since they were last returned, the longest waiting first, to be saved.
        If saving fails, pass them to `mark_unsaved`."""
        scopes = list(islice(self._changed, at_most))
        for scope in scopes:
            del self._changed[scope]
        return [(scope, self._known[scope].to_bytes()) for scope in scopes]

    def mark_unsaved(self, scopes: Iterable[Scope]) -> None:
        """Count these scopes as changed again."""
        self._changed |= dict.fromkeys(scope for scope in scopes if scope in self._known)

    def restore(self, kept: Iterable[tuple[Scope, bytes]]) -> Iterator[tuple[Scope, str]]:
        """Load what an earlier process saved, newest first. What was learned since counts on top of it, and is newer.
        Yields each scope whose bytes are damaged, and why."""
        for scope, data in kept:
            try:
                restored = LengthStatistics.from_bytes(data)
            except ValueError as error:
                yield scope, str(error)
                continue
            if scope in self._restarted:
                continue
            learned_since = self._known.get(scope)
            if learned_since is not None:
                restored.merge(learned_since)
                self._changed[scope] = None
            self._known[scope] = restored
            if learned_since is None:
                self._known.move_to_end(scope, last=False)
            self._distributions.pop(scope, None)
            if scope.level == "tenant":
                self._mean.changed(scope.tenant)
                self._moved += 1
        self._forget_least_recent()

    def _shares_in_mean(self, tenant: str) -> BucketShares:
        shares = self._known[Scope("tenant", tenant)].bucket_shares(PRIOR, ROOT_STRENGTH)
        assert shares is not None, "a tenant has at least one answer"
        return shares

    def _distribution(self, scope: Scope, parent: BucketShares, *, threshold: float) -> BucketShares:
        statistics = self._known.get(scope)
        if statistics is None:
            return parent
        made = self._distributions.get(scope)
        # A share of what still counts. Of all answers ever it may be thousands: the level would stand still.
        most_new = threshold * statistics.weight
        if made is not None and made.parent is parent and statistics.count - made.count <= most_new:
            return made.masses
        masses = statistics.bucket_shares(parent, PARENT_STRENGTH)
        assert masses is not None, "a scope has at least one answer"
        self._distributions[scope] = _Distribution(statistics.count, parent, masses)
        return masses

    def _forget_least_recent(self) -> None:
        while len(self._known) > self._max_scopes:
            scope, _ = self._known.popitem(last=False)
            self._changed.pop(scope, None)
            self._distributions.pop(scope, None)
            if scope.level == "tenant":
                self._mean.forget(scope.tenant)
                self._moved += 1
