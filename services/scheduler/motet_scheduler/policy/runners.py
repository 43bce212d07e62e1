"""One runner as the scheduler knows it: its ledger of promises, its adapters and its requests."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from operator import itemgetter

from motet.domain import BASE, Digest, InstanceName, RequestId
from motet.prefix_hints import HINT_TOKENS
from motet.runner_info import BatchCap, Capacity, Failure, KernelState, RunnerIdentity
from motet.shared_pages import ReportedLedger
from motet_scheduler.policy.adapters.refused_digests import RefusedDigests
from motet_scheduler.policy.adapters.table import AdaptersOfRunner, AdapterTable
from motet_scheduler.policy.effects import ReportRunner
from motet_scheduler.policy.fill_limits import FillLimits
from motet_scheduler.policy.step_profile import NO_PROFILE
from motet_scheduler.policy.values import BaseModel, GroupName, Promise

PlacementKey = tuple[RequestId, int]
"""A request under one epoch: the key of a ledger's entries. An old placement never hides a new one."""


@dataclass(slots=True)
class LedgerEntry:
    """What the pages of a promise are for."""

    digest: Digest
    since: float
    missing_since: float | None = None
    """When the first of the last reports came that did not list it. None: the last one lists it, or none has come."""
    readmitted: bool = False
    """It was parked, and has been allowed to resume."""
    tokens: int = 0
    """To compute, until a report lists it. The report says what is left of them."""
    owed: int = 0
    """Pages that it will take beyond those in use by the last report: all of its promise until a report lists it, and
    after a park the rest of it, so that it is not parked again."""


@dataclass(slots=True)
class ParkedRequest:
    epoch: int
    wanted: Promise
    digest: Digest
    order: tuple[int, float]
    """Class, then age: the smallest resumes first."""


@dataclass(slots=True)
class Listing:
    """What a runner has listed of what it has, until it has listed all: in its hello, or in a report."""

    whole: bool = False
    """Promises are charged whole, whatever they share: a hello says nothing of that."""
    heard: int = 0
    """How many requests it has listed."""
    keys: set[PlacementKey] = field(default_factory=set)
    """Without those that ended recently."""
    parked: set[RequestId] = field(default_factory=set)
    orphaned: dict[PlacementKey, float] = field(default_factory=dict)
    """As `Runner.orphaned`"""
    charged_to_ended: int = 0
    context_tokens: int = 0
    idle: bool = True
    """None of them computes."""
    moves: bool = False
    """Its engine has taken a step since the report before, or need not."""
    prompt_tokens: int | None = None
    """To compute, as its report says. None: it is no report."""


LESS_USED = itemgetter(1, 0)


@dataclass(slots=True)
class Drain:
    """A runner takes nothing new. Requests that are left at the deadline move to other runners."""

    runner: RunnerIdentity
    """Without an incarnation: any process of that name."""
    deadline_at: float
    over: bool = False
    """The operator was told that the runner is empty."""

    def may_be(self, incarnation: str) -> bool:
        return not self.runner.incarnation or not incarnation or self.runner.incarnation == incarnation


class Runner:
    """Keeps ledger, entries and adapter counts in step. It makes no decisions."""

    def __init__(
        self,
        identity: RunnerIdentity,
        address: str,
        capacity: Capacity,
        overcommit: float,
        *,
        table: AdapterTable | None = None,
        rank_of: Callable[[Digest], int] = lambda _: 0,
        adapter_moved: Callable[["Runner", Digest], None] = lambda _runner, _digest: None,
    ) -> None:
        """`rank_of` gives the rank of an adapter, or 0 as long as it is not known. `adapter_moved` is called when it
        has another adapter than before, or may serve another one."""
        self.identity = identity
        self.instance = InstanceName(identity.instance)
        self.group = GroupName(identity.group)
        self.address = address
        self.capacity = capacity
        self.base = BaseModel()
        self.max_sequences = self.sequences_at_target = capacity.max_sequences
        """How many may be placed now, and how many once its cap on the batch has grown to its pool's SLO."""
        self.max_pages = max(1, min(capacity.pages, capacity.pages_for(capacity.max_model_length)))
        """Of one request: more than a context, or than there are, a peer may claim, and none can have."""
        self.ledger: ReportedLedger[PlacementKey] = ReportedLedger(
            capacity.pages, overcommit=overcommit, by_forecast=capacity.by_forecast
        )
        self.entries: dict[PlacementKey, LedgerEntry] = {}
        self.parked: dict[RequestId, ParkedRequest] = {}
        self.orphaned: dict[PlacementKey, float] = {}
        """Requests, running or parked, that only reports of this runner say it has, and since which report."""
        self._adapter_moved = partial(adapter_moved, self)
        self.adapters = AdaptersOfRunner(table or AdapterTable(), self.instance, self.uses, self._adapter_moved)
        self.refused = RefusedDigests()
        """What it may not serve."""
        self.pinned: frozenset[Digest] | None = None
        """What it was told to keep resident, also without requests. None: it has not been told since it attached."""
        self.attached = True
        """It is connected, and has told all that it has."""
        self.listing: Listing | None = None
        """None: it has listed all."""
        self.telling = False
        """It has sent a hello, and not yet all of its parts. Until then it counts as it did before."""
        self.tell_by = inf
        """When its hello has to be whole, at the latest. It began when it sent the first one since it told all."""
        self.forget_at = inf
        """When it is forgotten, while it is away, or has not told all."""
        self.last_report_at = 0.0
        """When it last reported."""
        self.requested_drain: Drain | None = None
        """The operator wants it empty, and may change its mind."""
        self.shutdown_drain: Drain | None = None
        """Its process is stopping, which is never taken back."""
        self.unhealthy = ""
        self.hung = False
        """Unhealthy because its engine takes no steps; only a step makes it healthy again."""
        self.emptied = False
        """Its requests move away, so that it can leave; it gets new ones only if the others have no room."""
        self.steps: int | None = None
        """As last reported; None before the first report."""
        self.running = 0
        self.waiting = 0
        self.pages_free = capacity.pages
        self.pages_to_resume = 0
        """Free pages by the last report; 0 from when a request is parked to the next one, since pages were short."""
        self.cached_prefixes: frozenset[int] = frozenset()
        """Hints of the pages in its prefix cache, as last reported."""
        self.kernels: KernelState | None = None
        """As last reported."""
        self.batch_cap: BatchCap | None = None
        """As last reported: how many sequences keep its pool's SLO. None: the pool has none."""
        self.step_seconds = self.prompt_token_seconds = 0.0
        """As last reported: of an iteration, and of one token of a prompt."""
        self.profile = NO_PROFILE
        """As last reported."""
        self.limits: FillLimits | None = None
        """By what it has measured."""
        self.limits_made_of: object = None
        """Its pool and what it has measured, as they were then. None: they have not been made."""
        self._context_told = self._prompts_told = 0
        """By the last report: tokens of what it has, and tokens of prompts that it has still to compute."""
        self._tokens_not_told = 0
        """To compute, of what was placed here and no report has listed yet."""
        self._rank_of = rank_of
        self._pages_by_rank: dict[Digest, int] = {}
        """Of adapters that were asked for since the last report: asking takes too long for each request and runner."""
        self._reported_kv_pages = capacity.pages
        self._live_digests: Counter[Digest] = Counter()
        self._least_used: Digest | None = None
        """None: not known since requests came or left."""
        self._parked_digests: Counter[Digest] = Counter()
        self._adapter_pages: dict[Digest, int] = {}
        """Pages that each adapter in use takes from KV, of those that take any."""

    @property
    def drain(self) -> Drain | None:
        return self.shutdown_drain or self.requested_drain

    @property
    def takes_work(self) -> bool:
        if self.shutdown_drain is not None or self.requested_drain is not None:
            return False
        return self.attached and not self.unhealthy

    @property
    def start(self) -> tuple[InstanceName, str]:
        """After another one, its kernels may be others."""
        return self.instance, self.identity.incarnation

    def serves(self, base: str) -> bool:
        """Whether it has this base model; an empty digest means any."""
        return not base or base == self.base.digest

    def may_serve(self, digest: Digest, adapter: str) -> bool:
        """Whether it has not refused these bytes under this name."""
        return not self.refused.failures or self.refused.why(digest, adapter) is None

    def refuse(self, digest: Digest, adapter: str, failure: Failure) -> bool:
        """→ True if it might serve it before"""
        changed = digest != BASE and self.refused.refuse(digest, adapter, failure)
        if changed:
            self._adapter_moved(digest)
        return changed

    def accept(self, digest: Digest, adapter: str) -> bool:
        """→ True if it might not serve it before"""
        changed = bool(self.refused.failures) and self.refused.accept(digest, adapter)
        if changed:
            self._adapter_moved(digest)
        return changed

    def forget_refusal(self, digest: Digest, adapter: str) -> bool:
        """What it has refused under this name alone it may serve. → True if there was such a refusal"""
        changed = bool(self.refused.failures) and self.refused.forget(digest, adapter)
        if changed:
            self._adapter_moved(digest)
        return changed

    @property
    def sequences(self) -> int:
        return len(self.entries)

    @property
    def context_tokens(self) -> int:
        """Of all its requests."""
        return self._context_told + self._tokens_not_told

    @property
    def prompt_tokens_left(self) -> int:
        """That it has still to compute, by the last report."""
        return self._prompts_told + self._tokens_not_told

    def note_work(self, context_tokens: int, prompt_tokens: int) -> None:
        """It has reported this of what it has."""
        self._context_told, self._prompts_told = context_tokens, prompt_tokens

    def demand(self, before: float) -> tuple[int, int]:
        """How many requests it has, and the pages that they want. Without those that it alone has named since `before`:
        its pool would grow by what it invents."""
        invented = {key for key, since in self.orphaned.items() if since < before}
        parked = [one for name, one in self.parked.items() if (name, one.epoch) not in invented]
        running, pages = self.sequences, self.ledger.promised
        for key in invented & self.entries.keys():
            running, pages = running - 1, pages - self.ledger.promise_of(key)
        return running + len(parked), pages + sum(min(one.wanted.pages, self.max_pages) for one in parked)

    @property
    def empty(self) -> bool:
        return not self.entries and not self.parked

    @property
    def has_capacity(self) -> bool:
        """Whether any new request could be placed here; parked requests go first."""
        if self.parked or len(self.entries) >= self.max_sequences:
            return False
        return self.ledger.free > 0 and self.takes_work

    @property
    def adapters_running(self) -> Collection[Digest]:
        """The adapters that running requests use."""
        return self._live_digests.keys()

    def using(self, digest: Digest) -> int:
        """How many running requests use it."""
        return self._live_digests[digest]

    @property
    def only_adapters(self) -> Collection[Digest] | None:
        """The adapters that alone may be used here, since all slots are in use (PU-12). None: any may."""
        return None if len(self._live_digests) < self.capacity.adapter_slots else self.adapters_running

    def slot_for(self, digest: Digest) -> bool:
        """Whether an adapter has a slot, or can get one without evicting an adapter in use."""
        if digest == BASE or digest in self._live_digests:
            return True
        return len(self._live_digests) < self.capacity.adapter_slots

    @property
    def least_used_adapter(self) -> Digest:
        """Of those that running requests use, the one that the fewest do. `BASE`: none does."""
        if (found := self._least_used) is None:
            found, _ = min(self._live_digests.items(), key=LESS_USED, default=(BASE, 0))
            self._least_used = found
        return found

    def adapter_pages(self, digest: Digest) -> int:
        """How many pages an adapter takes from KV while requests use it."""
        if digest == BASE or not self.capacity.adapter_rank_bytes:
            return 0
        pages = self._pages_by_rank.get(digest, 0)
        if not pages:
            pages = self._pages_by_rank[digest] = self.capacity.adapter_pages(self._rank_of(digest))
        return pages

    def free_for(self, digest: Digest) -> int:
        """Pages that may be promised to a request, beside those of its adapter if no other request uses that here."""
        if digest in self._live_digests or not self.capacity.adapter_rank_bytes:
            return self.ledger.free
        return self.free_beside(self.adapter_pages(digest))

    def free_beside(self, adapter_pages: int) -> int:
        """Pages that may be promised, if an adapter takes `adapter_pages` that it does not take yet."""
        if not adapter_pages:
            return self.ledger.free
        return int(self._kv_pages(adapter_pages) * self.ledger.overcommit) - self.ledger.promised

    def may_resume(self, parked: ParkedRequest) -> bool:
        """Whether a parked request has room. Where more may be promised than there is, its pages must be free, too: it
        was parked because pages were short, and would be parked again at once."""
        wanted = parked.wanted.pages
        if wanted > self.free_for(parked.digest) or not self.slot_for(parked.digest):
            return False
        if (self.ledger.overcommit <= 1 and not self.capacity.by_forecast) or not self.entries:
            return True
        return wanted <= self.pages_to_resume - sum(entry.owed for entry in self.entries.values())

    def cached_tokens(self, hints: Sequence[int]) -> int:
        """How many of the first tokens of a prompt are in the prefix cache. A hint covers the blocks before its own."""
        cached = self.cached_prefixes
        if not cached.isdisjoint(hints):
            for blocks in range(len(hints), 0, -1):
                if hints[blocks - 1] in cached:
                    return blocks * HINT_TOKENS
        return 0

    # ------------------------------------------------------------------------------------------------- the ledger

    def note_kv_pages(self, reported: int) -> None:
        """The runner has reported how many pages KV can have."""
        self._reported_kv_pages = self.capacity.kv_pages(reported)
        self._pages_by_rank.clear()
        # Again, because the rank of an adapter may have become known.
        if self.capacity.adapter_rank_bytes:
            of_each = ((digest, self.adapter_pages(digest)) for digest in self._live_digests)
            self._adapter_pages = {digest: pages for digest, pages in of_each if pages}
        self.ledger.capacity = self._kv_pages()

    def _kv_pages(self, more: int = 0) -> int:
        """How many pages KV can have, if adapters take `more` pages. A report does not know the adapters of requests
        that were placed after it, and we do not know those that the runner has beside ours: the smaller number
        counts."""
        return max(0, min(self._reported_kv_pages, self.capacity.pages - sum(self._adapter_pages.values()) - more))

    def _use_adapter(self, digest: Digest) -> None:
        if digest == BASE:
            return
        self._least_used = None
        self._live_digests[digest] += 1
        if self._live_digests[digest] > 1:
            return
        if pages := self.adapter_pages(digest):
            self._adapter_pages[digest] = pages
            self.ledger.capacity = self._kv_pages()
        if digest not in self.adapters.having:
            self.adapters.look_at(digest)

    def _leave_adapter(self, digest: Digest) -> None:
        if digest == BASE:
            return
        self._least_used = None
        self._live_digests[digest] -= 1
        if not self._live_digests[digest]:
            self._live_digests.pop(digest)  # `del` of a Counter is slow
            if self._adapter_pages.pop(digest, 0):
                self.ledger.capacity = self._kv_pages()
            self.adapters.look_at(digest)

    def record_promise(
        self,
        key: PlacementKey,
        pages: int,
        digest: Digest,
        now: float,
        *,
        shared: int | None = None,
        readmitted: bool = False,
        tokens: int = 0,
    ) -> LedgerEntry:
        """Record a promise that was checked to fit, or that the runner has already made. By the runner's report,
        `shared` of its pages are not charged. `tokens`: that are to be computed, if no report has listed it yet."""
        pages = min(pages, self.max_pages)
        if shared is not None:
            shared = max(shared, pages - self.capacity.pages)  # negative by a forecast, which charges more
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = LedgerEntry(digest, now, readmitted=readmitted, tokens=tokens, owed=pages)
            self._tokens_not_told += tokens
            self._use_adapter(digest)
        self.ledger.record(key, pages, shared=shared)
        return entry

    def listed(self, entry: LedgerEntry) -> None:
        """A report lists it."""
        self._tokens_not_told -= entry.tokens
        entry.missing_since, entry.readmitted, entry.tokens = None, False, 0

    def release_promise(self, key: PlacementKey) -> bool:
        """Release a promise. False if there is none."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return False
        self._tokens_not_told -= entry.tokens
        self.ledger.release(key)
        self._leave_adapter(entry.digest)
        return True

    def park(self, entry: RequestId, parked: ParkedRequest) -> None:
        self.unpark(entry)
        self.parked[entry] = parked
        if parked.digest != BASE:
            self._parked_digests[parked.digest] += 1
        self.release_promise((entry, parked.epoch))
        self.adapters.look_at(parked.digest)

    def unpark(self, entry: RequestId) -> ParkedRequest | None:
        """It resumes, or has ended. None: it was not parked."""
        parked = self.parked.pop(entry, None)
        if parked is not None and parked.digest != BASE:
            self._parked_digests[parked.digest] -= 1
            if not self._parked_digests[parked.digest]:
                del self._parked_digests[parked.digest]
                self.adapters.look_at(parked.digest)
        return parked

    def parked_under(self, key: PlacementKey) -> ParkedRequest | None:
        """None: it is not parked, or under another epoch."""
        parked = self.parked.get(key[0])
        return parked if parked is not None and parked.epoch == key[1] else None

    def holds(self, request: RequestId, epoch: int) -> bool:
        return (request, epoch) in self.entries or self.parked_under((request, epoch)) is not None

    def uses(self, digest: Digest) -> bool:
        """Whether running or parked requests use this adapter."""
        return digest in self._live_digests or digest in self._parked_digests

    def check(self) -> None:
        """Recount. Raises AssertionError if ledger, entries and counters differ."""
        self.ledger.check()
        assert set(self.entries) == {key for key, _ in self.ledger}, "ledger and entries list different requests"
        counted = Counter(entry.digest for entry in self.entries.values() if entry.digest != BASE)
        not_told = sum(entry.tokens for entry in self.entries.values())
        assert not_told == self._tokens_not_told, "tokens that are to be computed were miscounted"
        assert counted == self._live_digests, "adapters in use were miscounted"
        parked = Counter(one.digest for one in self.parked.values() if one.digest != BASE)
        assert parked == self._parked_digests, "adapters of parked requests were miscounted"
        self.adapters.check({*counted, *parked})
        assert self._adapter_pages.keys() <= counted.keys(), "an adapter that nobody uses takes pages"
        assert self.ledger.capacity == self._kv_pages(), "the ledger has another capacity than the runner"


def runner_report(runner: Runner) -> ReportRunner:
    return ReportRunner(
        identity=runner.identity,
        address=runner.address,
        attached=runner.attached,
        capacity=runner.capacity,
        running=runner.running,
        waiting=runner.waiting,
        pages_free=runner.pages_free,
        unhealthy=runner.unhealthy,
        kernels=runner.kernels,
        batch_cap=runner.batch_cap,
    )
