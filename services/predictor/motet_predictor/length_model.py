"""What has been learned and what follows from it. Pure: no clock, no I/O.

Three levels of running quantiles: every answer is counted for its (tenant, adapter), for its tenant, and for everybody.
Estimates go down the same ladder, each level starting from the one above as if that were a few answers of its own
(shrinkage): so the first answers of a new adapter already bend its estimate, and twenty decide it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from motet.quantiles import EDGES, MAX_TOKENS, BucketShares, LengthStatistics, bucket_of, quantiles_of

VERSION = "quantiles-1"
"""Changes whenever the same answers would lead to other estimates, or are kept in another form."""

QUANTILES = (0.5, 0.8, 0.9, 0.95)

PARENT_STRENGTH = 2.0
"""How many answers the level above is worth. With 1, q95 fails too often after five answers; with 8, tenants whose
answers are short reserve ten times too much for as long."""

ROOT_STRENGTH = 1.0
"""The same for the prior, which knows nothing: one real answer outvotes it."""


CHANGE_THRESHOLD = 1 / 16
"""The levels above change with every answer, by less and less: they are computed again after this share of growth. What
an adapter has learned itself counts at once."""


def _log_uniform(shortest: int, longest: int) -> BucketShares:
    first, last = bucket_of(shortest), bucket_of(longest)
    shares = [
        (edge - previous) / edge if first <= i <= last else 0.0
        for i, (previous, edge) in enumerate(zip((0, *EDGES), EDGES, strict=False))
    ]
    total = sum(shares)
    return [share / total for share in shares]


PRIOR = _log_uniform(8, 8192)
"""Before the first answer any length is as likely as its double, so that the upper quantiles are max_tokens, the
client's own bound, wherever that is below some thousands."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose answers: an adapter's of a tenant (`namespace/name`, empty for the base), a tenant's, or everybody's."""

    level: str
    tenant: str = ""
    adapter: str = ""


GLOBAL_SCOPE = Scope("global")


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Quantiles of the length of one answer in tokens, none above what the client allows; and what orders answers."""

    q50: int
    q80: int
    q90: int
    q95: int
    expected: float


@dataclass(frozen=True, slots=True)
class _Distribution:
    """A scope's distribution, and what it was made of."""

    count: int
    parent: BucketShares
    masses: BucketShares


class LengthModel:
    """Learns lengths and estimates them. Keeps at most `max_scopes` scopes: those that learned last."""

    version = VERSION

    def __init__(self, *, max_scopes: int = 20_000) -> None:
        self._max_scopes = max_scopes
        self._known: OrderedDict[Scope, LengthStatistics] = OrderedDict()
        self._changed: dict[Scope, None] = {}
        self._shapes: dict[Scope, _Distribution] = {}

    def __len__(self) -> int:
        return len(self._known)

    def count(self, scope: Scope = GLOBAL_SCOPE) -> int:
        """Answers counted for a scope."""
        statistics = self._known.get(scope)
        return 0 if statistics is None else statistics.count

    def estimate(self, tenant: str, adapter: str, max_tokens: int) -> LengthEstimate:
        """What to expect of an answer that may have at most `max_tokens` tokens; 0 sets no bound."""
        everybody = self._shape(GLOBAL_SCOPE, PRIOR, ROOT_STRENGTH, patience=CHANGE_THRESHOLD)
        tenants = self._shape(Scope("tenant", tenant), everybody, PARENT_STRENGTH, patience=CHANGE_THRESHOLD)
        masses = self._shape(Scope("adapter", tenant, adapter), tenants, PARENT_STRENGTH, patience=0.0)
        bound = max_tokens or MAX_TOKENS
        q50, q80, q90, q95 = (min(tokens, bound) for tokens in quantiles_of(masses, QUANTILES))
        last = bucket_of(bound)
        within = masses[:last]
        expected = sum(map(float.__mul__, within, _EDGES)) + bound * (1.0 - sum(within))
        return LengthEstimate(q50, q80, q90, q95, expected)

    def observe(self, tenant: str, adapter: str, tokens: int, *, censored: bool = False) -> None:
        """Count an answer of `tokens` tokens, or of at least that many when it was cut."""
        for scope in (GLOBAL_SCOPE, Scope("tenant", tenant), Scope("adapter", tenant, adapter)):
            statistics = self._known.get(scope)
            if statistics is None:
                statistics = self._known[scope] = LengthStatistics()
            self._known.move_to_end(scope)
            statistics.observe(tokens, censored=censored)
            self._changed[scope] = None
        self._forget_the_longest_unused()

    @property
    def unsaved_count(self) -> int:
        """How many scopes have learned something that `changes` has not handed out yet."""
        return len(self._changed)

    def changes(self, at_most: int | None = None) -> list[tuple[Scope, bytes]]:
        """What scopes have learned since they were last handed out, the longest waiting first, to be kept somewhere.
        If keeping it fails, hand them to `unsaved`."""
        scopes = list(islice(self._changed, at_most))
        for scope in scopes:
            del self._changed[scope]
        return [(scope, self._known[scope].to_bytes()) for scope in scopes]

    def mark_unsaved(self, scopes: Iterable[Scope]) -> None:
        """Count these scopes as changed again."""
        self._changed |= dict.fromkeys(scope for scope in scopes if scope in self._known)

    def restore(self, kept: Iterable[tuple[Scope, bytes]]) -> Iterator[tuple[Scope, str]]:
        """Take up what an earlier process kept, oldest first. Yields each scope whose bytes are damaged, and why."""
        for scope, data in kept:
            try:
                restored = LengthStatistics.from_bytes(data)
            except ValueError as error:
                yield scope, str(error)
                continue
            learned_since = self._known.get(scope)
            if learned_since is not None:
                restored.merge(learned_since)
                self._changed[scope] = None
            self._known[scope] = restored
            self._shapes.pop(scope, None)
        self._forget_the_longest_unused()

    def _shape(self, scope: Scope, parent: BucketShares, strength: float, *, patience: float) -> BucketShares:
        statistics = self._known.get(scope)
        if statistics is None:
            return parent
        made = self._shapes.get(scope)
        if made is not None and made.parent is parent and statistics.count <= made.count * (1 + patience):
            return made.masses
        masses = statistics.bucket_shares(parent, strength)
        assert masses is not None, "a scope is made by its first answer"
        self._shapes[scope] = _Distribution(statistics.count, parent, masses)
        return masses

    def _forget_the_longest_unused(self) -> None:
        while len(self._known) > self._max_scopes:
            scope = next(iter(self._known))
            if scope == GLOBAL_SCOPE:
                self._known.move_to_end(scope)
                continue
            del self._known[scope]
            self._changed.pop(scope, None)
            self._shapes.pop(scope, None)


_EDGES = tuple(float(edge) for edge in EDGES)
