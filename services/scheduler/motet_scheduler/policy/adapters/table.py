"""Which runner has which adapter, at which tier, and what was ordered of it there (PU-07): one table of digest and
runner. A row is what one runner has; a column, which runners have one adapter.

A runner has an adapter, or will have it soon, if it is on its device or on its way there, or if its requests use it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from motet.domain import BASE, Digest, InstanceName
from motet.runner_info import Tier
from motet_scheduler.policy.events import AdapterStateChanged
from motet_scheduler.policy.values import AdapterRef, AdapterStage

LAPSED = float("-inf")
"""The time of a load that is over: it came, or failed."""

MAX_RESIDENT = 65536
"""How many adapters a runner may name in changes. Nothing else bounds what it adds."""


@dataclass(slots=True)
class Load:
    """An adapter that was ordered to the device."""

    order: int
    at: float
    """When it was ordered, or the runner last reported on it."""
    retry_at: float = 0.0
    """It failed: until then it is ordered only for a request."""


@dataclass(slots=True)
class Fetch:
    """The bytes of an adapter that a runner fetches for its device, as it has reported them."""

    since: float
    first: int
    fetched: int
    at: float

    @property
    def rate(self) -> float:
        """In bytes per second; 0: not known yet, or it has begun anew."""
        return max(0, self.fetched - self.first) / (self.at - self.since) if self.at > self.since else 0.0


class AdapterTable:
    """Its columns. Also of runners that are disconnected, until they are forgotten."""

    def __init__(self) -> None:
        self.tiers: dict[Digest, dict[InstanceName, Tier]] = {}
        """Where each adapter is."""
        self.having: dict[Digest, dict[InstanceName, None]] = {}
        """The runners that have each adapter, or will have it soon."""


class AdaptersOfRunner:
    """A row. Only it changes the columns."""

    def __init__(
        self,
        table: AdapterTable,
        instance: InstanceName,
        uses: Callable[[Digest], bool],
        moved: Callable[[Digest], None],
    ) -> None:
        """`uses`: whether requests there use an adapter. `moved` is called when one has come to `having`, or gone."""
        self._table = table
        self._instance = instance
        self._uses = uses
        self._moved = moved
        self.tiers: dict[Digest, Tier] = {}
        """As the runner has told last."""
        self.in_memory: dict[Digest, None] = {}
        """Those that are not only on its disk."""
        self.having: set[Digest] = set()
        """Those that it has or will have soon."""
        self.loading: set[Digest] = set()
        """Those on their way to it, from whichever source."""
        self.fetches: dict[Digest, Fetch] = {}
        """How fast their bytes come, once it has said so."""
        self._loads: dict[Digest, dict[tuple[str, str], Load]] = {}
        """The last load of each digest, from the source of each adapter that has it: by its namespace and name."""

    def tier_of(self, digest: Digest) -> Tier:
        return Tier.DEVICE if digest == BASE else self.tiers.get(digest, Tier.NONE)

    # ------------------------------------------------------------------------------------------------ what it tells

    def replace(self, tiers: Mapping[Digest, Tier]) -> list[Digest]:
        """This is what it holds. Returns what has changed."""
        if tiers == self.tiers:
            return []
        gone = [digest for digest in self.tiers if digest not in tiers]
        changed = [digest for digest, tier in tiers.items() if self.put(digest, tier)]
        return changed + [digest for digest in gone if self.put(digest, None)]

    def change(self, gone: Iterable[Digest], tiers: Mapping[Digest, Tier]) -> list[Digest]:
        """Some have gone, and others have come, or are at another tier. Returns what has changed."""
        changed = [digest for digest in gone if self.put(digest, None)]
        changed += [
            digest
            for digest, tier in tiers.items()
            if (digest in self.tiers or len(self.tiers) < MAX_RESIDENT) and self.put(digest, tier)
        ]
        return changed

    def put(self, digest: Digest, tier: Tier | None) -> bool:
        """It is at this tier now, or nowhere. False if it was there before."""
        if self.tiers.get(digest) is tier:
            return False
        if tier is not None:
            self.tiers[digest] = tier
            self._table.tiers.setdefault(digest, {})[self._instance] = tier
        else:
            del self.tiers[digest]
            column = self._table.tiers[digest]
            del column[self._instance]
            if not column:
                del self._table.tiers[digest]
        if tier is not None and tier >= Tier.HOST:
            self.in_memory[digest] = None
        else:
            self.in_memory.pop(digest, None)
        if tier is Tier.DEVICE:
            for load in self._loads.get(digest, {}).values():
                load.at = LAPSED
            self._end(digest)
        self.look_at(digest)
        return True

    # ---------------------------------------------------------------------------------------------- what was ordered

    def ordered(self, order: int, digest: Digest, adapter: AdapterRef, now: float) -> None:
        self._loads.setdefault(digest, {})[adapter.namespace, adapter.name] = Load(order, now)
        self.fetches.pop(digest, None)
        self.loading.add(digest)
        self.look_at(digest)

    def is_awaited(self, digest: Digest, adapter: AdapterRef, now: float, patience: float) -> bool:
        """Whether a load was ordered not long ago from this adapter's own source. Another one's may fail where this one
        does not."""
        load = self._last_load(digest, adapter)
        return load is not None and load.at + patience > now

    def may_be_retried(self, digest: Digest, adapter: AdapterRef, now: float) -> bool:
        """Whether its last load did not fail just now."""
        load = self._last_load(digest, adapter)
        return load is None or now >= load.retry_at

    def _last_load(self, digest: Digest, adapter: AdapterRef) -> Load | None:
        loads = self._loads.get(digest)
        return loads.get((adapter.namespace, adapter.name)) if loads is not None else None

    def load_reported(self, event: AdapterStateChanged, now: float, load_retry: float) -> bool:
        """Apply the runner's report about a load. False if no load is known that it can be about."""
        load = self._last_load(event.digest, event.ref)
        if load is None or event.order not in (load.order, 0):
            return False
        if event.failure is not None:
            load.at, load.retry_at = LAPSED, now + (event.failure.retry_after or load_retry)
            self.end_loads(now, load_retry)
        elif event.order and load.at > LAPSED:
            load.at = now
            self.loading.add(event.digest)
            self.look_at(event.digest)
        if event.failure is not None or event.stage > AdapterStage.NONE:
            self.fetches.pop(event.digest, None)
        elif event.bytes and event.digest in self.loading:
            fetch = self.fetches.setdefault(event.digest, Fetch(now, event.bytes, event.bytes, now))
            fetch.fetched, fetch.at = event.bytes, now
        return True

    def end_loads(self, now: float, patience: float) -> None:
        """Expect no longer what was ordered or reported on last for longer than the patience."""
        for digest in list(self.loading):
            if all(load.at + patience <= now for load in self._loads[digest].values()):
                self._end(digest)
                self.look_at(digest)

    def forget_loads(self) -> None:
        """It is away: what it was ordered may not have come to it."""
        for digest in list(self._loads):
            self.forget_loads_of(digest)

    def forget_loads_of(self, digest: Digest) -> None:
        self._loads.pop(digest, None)
        self._end(digest)
        self.look_at(digest)

    def _end(self, digest: Digest) -> None:
        self.loading.discard(digest)
        self.fetches.pop(digest, None)

    # -------------------------------------------------------------------------------------------- the other direction

    def look_at(self, digest: Digest) -> None:
        """It may have come or gone."""
        has = digest in self.loading or self.tiers.get(digest) is Tier.DEVICE or self._uses(digest)
        if has and digest != BASE:
            self._has(digest)
        elif digest in self.having:
            self._has_not(digest)

    def _has(self, digest: Digest) -> None:
        if digest not in self.having:
            self.having.add(digest)
            self._table.having.setdefault(digest, {})[self._instance] = None
            self._moved(digest)

    def _has_not(self, digest: Digest) -> None:
        self.having.discard(digest)
        column = self._table.having[digest]
        del column[self._instance]
        if not column:
            del self._table.having[digest]
        self._moved(digest)

    def runner_gone(self) -> None:
        for digest in list(self.having):
            self._has_not(digest)

    def check(self, used: Iterable[Digest]) -> None:
        """Recount, with these that its requests use. Raises AssertionError if the two directions differ."""
        on_device = {digest for digest, tier in self.tiers.items() if tier is Tier.DEVICE and digest != BASE}
        assert self.having == {*used, *self.loading, *on_device}, "adapters were miscounted"
        assert self.in_memory.keys() == {digest for digest, tier in self.tiers.items() if tier >= Tier.HOST}, (
            "adapters in memory were miscounted"
        )
        assert self.fetches.keys() <= self.loading <= self._loads.keys(), "a load that was not ordered is on its way"
        name, table = self._instance, self._table
        having = {digest for digest, column in table.having.items() if name in column}
        assert having == self.having, "the table has other adapters of a runner than it has"
        tiers = {digest: column[name] for digest, column in table.tiers.items() if name in column}
        assert tiers == self.tiers, "the table has other tiers of a runner than it has told"
