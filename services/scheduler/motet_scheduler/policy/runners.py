"""One runner as the scheduler knows it: its ledger of promises, its adapters, and what is under way there."""

from collections import Counter
from dataclasses import dataclass

from motet.domain import BASE, Digest, InstanceName, RequestId
from motet.ledger import Ledger
from motet.runner_info import Capacity, ResidentAdapter, RunnerIdentity, Tier
from motet_scheduler.policy.effects import ReportRunner
from motet_scheduler.policy.values import BaseModel, GroupName, Promise

PlacementKey = tuple[RequestId, int]
"""A request under one epoch: what a ledger's lines are about, so that an old placement never hides a new one."""


@dataclass(slots=True)
class LedgerEntry:
    """What the ledger's pages are for."""

    digest: Digest
    since: float
    missed: int = 0
    """Reports in a row that did not list it."""
    orphaned: int = 0
    """Reports in a row that listed it while nobody wanted it."""
    readmitted: bool = False
    """Parked at the runner, and told that it may come back."""


@dataclass(slots=True)
class ParkedRequest:
    epoch: int
    wanted: Promise
    digest: Digest
    order: tuple[int, float]
    """Class, then age: who comes back first."""


@dataclass(slots=True)
class Drain:
    """Nothing new goes to a runner, and what is left there at the deadline moves."""

    runner: RunnerIdentity
    """Without an incarnation: whichever it is."""
    deadline_at: float
    over: bool = False
    """The operator knows that nothing is left there."""

    def may_be(self, incarnation: str) -> bool:
        return not self.runner.incarnation or not incarnation or self.runner.incarnation == incarnation


class Runner:
    """Keeps ledger, lines and adapter counts in step. Decisions are made elsewhere."""

    def __init__(self, identity: RunnerIdentity, address: str, capacity: Capacity, overcommit: float) -> None:
        self.identity = identity
        self.address = address
        self.capacity = capacity
        self.base = BaseModel()
        self.max_sequences = capacity.max_sequences
        self.ledger: Ledger[PlacementKey] = Ledger(capacity.pages, overcommit=overcommit)
        self.entries: dict[PlacementKey, LedgerEntry] = {}
        self.parked: dict[RequestId, ParkedRequest] = {}
        self.resident: dict[Digest, ResidentAdapter] = {}
        self.loads_ordered: dict[Digest, float] = {}
        """Adapters told to go to the device, and when."""
        self.attached = True
        self.detached_at = 0.0
        self.last_report_at = 0.0
        """When it last said how it is."""
        self.requested_drain: Drain | None = None
        """The operator wants it empty; it may think better of it."""
        self.shutdown_drain: Drain | None = None
        """Its process has been told to end, which nobody takes back."""
        self.unhealthy = ""
        self.hung = False
        """Condemned because its engine does not move: only a step of it shows otherwise."""
        self.steps: int | None = None
        """As last reported; None before the first report."""
        self.running = 0
        self.waiting = 0
        self.pages_free = capacity.pages
        self._live_digests: Counter[Digest] = Counter()

    @property
    def instance(self) -> InstanceName:
        return InstanceName(self.identity.instance)

    @property
    def group(self) -> GroupName:
        return GroupName(self.identity.group)

    @property
    def drain(self) -> Drain | None:
        return self.shutdown_drain or self.requested_drain

    @property
    def takes_work(self) -> bool:
        return self.attached and self.drain is None and not self.unhealthy

    @property
    def sequences(self) -> int:
        return len(self.entries)

    @property
    def pages_wanted(self) -> int:
        """Promised to what runs here, and to what is parked here and will come back."""
        return self.ledger.promised + sum(parked.wanted.pages for parked in self.parked.values())

    @property
    def empty(self) -> bool:
        return not self.entries and not self.parked

    @property
    def has_capacity(self) -> bool:
        """Whether anything new could go here at all; parked requests come first."""
        return self.takes_work and not self.parked and self.ledger.free > 0 and self.sequences < self.max_sequences

    def slot_for(self, digest: Digest) -> bool:
        """Whether an adapter has, or can get, a slot without evicting one that is in use (PU-12)."""
        if digest == BASE or digest in self._live_digests:
            return True
        return len(self._live_digests) < self.capacity.adapter_slots

    def tier_of(self, digest: Digest) -> Tier:
        if digest == BASE:
            return Tier.DEVICE
        found = self.resident.get(digest)
        return found.tier if found is not None else Tier.NONE

    # ------------------------------------------------------------------------------------------------- the ledger

    def record_promise(
        self, key: PlacementKey, pages: int, digest: Digest, now: float, *, readmitted: bool = False
    ) -> None:
        """Write a promise that was checked to fit, or that the runner already lives by."""
        line = self.entries.get(key)
        if line is None:
            self.entries[key] = LedgerEntry(digest, now, readmitted=readmitted)
            if digest != BASE:
                self._live_digests[digest] += 1
        self.ledger.adopt(key, max(1, pages))

    def release_promise(self, key: PlacementKey) -> bool:
        """Release a promise; False when there was none."""
        line = self.entries.pop(key, None)
        if line is None:
            return False
        self.ledger.release(key)
        if line.digest != BASE:
            self._live_digests[line.digest] -= 1
            if not self._live_digests[line.digest]:
                del self._live_digests[line.digest]
        return True

    def park(self, entry: RequestId, parked: ParkedRequest) -> None:
        self.release_promise((entry, parked.epoch))
        self.parked[entry] = parked

    def holds(self, request: RequestId, epoch: int) -> bool:
        parked = self.parked.get(request)
        return (request, epoch) in self.entries or (parked is not None and parked.epoch == epoch)

    def next_parked(self) -> tuple[RequestId, ParkedRequest] | None:
        return min(self.parked.items(), key=lambda item: item[1].order, default=None)

    def adapters_in_use(self) -> set[Digest]:
        """Digests of adapters that something here uses, or will when it comes back."""
        return {*self._live_digests, *(parked.digest for parked in self.parked.values() if parked.digest != BASE)}

    def check(self) -> None:
        """Recount; raises AssertionError when the books disagree among themselves."""
        self.ledger.check()
        assert set(self.entries) == {key for key, _ in self.ledger}, "ledger and lines list different requests"
        counted = Counter(line.digest for line in self.entries.values() if line.digest != BASE)
        assert counted == self._live_digests, "adapters in use were miscounted"


def runner_report(runner: Runner) -> ReportRunner:
    return ReportRunner(
        identity=runner.identity,
        address=runner.address,
        attached=runner.attached,
        capacity=runner.capacity,
        running=runner.running,
        waiting=runner.waiting,
        pages_free=runner.pages_free,
        condemned=runner.unhealthy,
    )
