"""Which revision of each adapter serves, how new revisions are checked, and which runners hold adapters.

A revision says where the bytes are (source, source revision, Secret), which bytes they are (expected digest, content
stamp) and what they are checked for (group, base model). One runner of the group fetches and checks each new revision.
If it is certified, the adapter's name points to its digest at once. If it fails, the failure is reported and the old
revision continues to serve. If an adapter changes faster than it is checked, some revisions are skipped, but the last
one is always checked. Runners drop a digest when no name points to it and no request uses it."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from motet.change_limit import ChangeLimiter
from motet.domain import BASE, Digest, InstanceName, ObjectName
from motet.errors import PROOF_FAILED, AdapterUnproved, ModelNotFound
from motet.runner_info import Failure, Tier
from motet_scheduler.policy.effects import DropAdapter, EnsureAdapter, ForgetManifest, PinAdapters, ReportAdapter
from motet_scheduler.policy.events import AdapterStateChanged
from motet_scheduler.policy.group_bases import GroupBases
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import (
    MAX_KERNELS,
    AdapterReadiness,
    AdapterRef,
    AdapterSpec,
    AdapterStage,
    CatalogAdapter,
    Certificate,
    GroupName,
    RevisionKey,
    SchedulerConfig,
)

REVISION_REPLACED = ModelNotFound(
    "This revision of the adapter is no longer served. Send the request again to use the current revision."
)

MAX_REFUSED_BY = 64
"""The number of runners of which it is remembered that their proof of a revision has failed"""

OTHERS_FAIL_TOO = (
    "On this runner, the proofs of other adapters fail, too: its kernels or its device are probably at fault, and not "
    "the adapter. Ask the platform team to replace the runner."
)

CHECKS_AT_ONCE = 4
"""Per runner, so that many new adapters do not overload it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A certified revision."""

    key: RevisionKey
    digest: Digest
    certificate: Certificate | None = None
    bytes: int = 0

    @property
    def rank(self) -> int:
        return self.certificate.rank if self.certificate is not None else 0

    @property
    def device_rank(self) -> int:
        return (self.certificate.device_rank if self.certificate is not None else 0) or self.rank


@dataclass(frozen=True, slots=True)
class DigestSource:
    """Where the bytes of a digest came from, for runners that do not have them."""

    ref: AdapterRef
    key: RevisionKey
    bytes: int = 0
    max_bytes: int = 0
    rank: int = 0
    """What counts in device memory"""


@dataclass(slots=True)
class Coming:
    """The bytes of an adapter that a runner fetches, as it has reported them."""

    since: float
    first: int
    fetched: int
    at: float

    @property
    def rate(self) -> float:
        """In bytes per second; 0: not known yet, or it has begun anew."""
        return max(0, self.fetched - self.first) / (self.at - self.since) if self.at > self.since else 0.0


@dataclass(slots=True)
class PendingCheck:
    """A runner is fetching and checking this revision."""

    order: int
    key: RevisionKey
    instance: InstanceName
    since: float


Start = tuple[InstanceName, str]
"""One start of a runner: after another one, its kernels may be others."""


def start_of(runner: Runner) -> Start:
    return runner.instance, runner.identity.incarnation


@dataclass(slots=True)
class Adapter:
    spec: AdapterSpec
    wanted: RevisionKey
    """The revision of `spec`, for the base model that its group has now."""
    serving: Revision | None = None
    check: PendingCheck | None = None
    checked_at: float = -math.inf
    """When a runner last answered a check."""
    failure: Failure | None = None
    """Of the newest revision, if it failed."""
    failed: RevisionKey | None = None
    retry_at: float | None = None
    recheck_requested: bool = False
    """A runner was asked to check the wanted revision. Asking again is not a new change."""
    refused_by: dict[Start, None] = field(default_factory=dict)
    """The runners whose proof of the wanted revision has failed"""
    doubted: bool = False
    """It serves, and the newest proof of it has failed: another runner is asked."""
    last_report: ReportAdapter | None = field(default=None)

    @property
    def undecided(self) -> bool:
        """Nobody has told yet whether it can be served."""
        return self.serving is None and self.failed != self.wanted

    @property
    def resolved(self) -> bool:
        return self.serving is not None and self.serving.key == self.wanted and not self.doubted

    def may_be_proved_by(self, runner: Runner) -> bool:
        """False if that was tried, or the runner takes no work of this adapter."""
        serves = runner.attached and runner.takes_work and runner.serves(self.wanted.base)
        return serves and runner.group == self.wanted.group and start_of(runner) not in self.refused_by

    def refuses(self, start: Start) -> None:
        self.refused_by[start] = None
        if len(self.refused_by) > MAX_REFUSED_BY:
            del self.refused_by[next(iter(self.refused_by))]

    def wants_check(self, now: float) -> bool:
        if self.resolved or self.check is not None:
            return False
        return self.failed != self.wanted or (self.retry_at is not None and now >= self.retry_at)


class Adapters:
    def __init__(self, config: SchedulerConfig, bases: GroupBases, first_order: int) -> None:
        self._policy = config
        self._bases = bases
        self._orders = count(first_order)
        """The numbers of orders to runners."""
        self.by_name: dict[ObjectName, Adapter] = {}
        self.retired: dict[Digest, dict[ObjectName, DigestSource]] = {}
        """Where adapters that no longer serve a digest have it from, as long as requests use it."""
        self._retired_of: dict[ObjectName, dict[Digest, None]] = {}
        """The same by name, so that telling of an adapter does not look at all others. In order, as a set would differ
        from process to process."""
        self.gone: list[AdapterRef] = []
        """Manifests that were removed, until runners are told."""
        self._unproved_on: dict[Start, dict[str, None]] = {}
        """The adapters whose proofs have failed on each runner since it last certified one"""
        self._holders: dict[Digest, dict[InstanceName, Tier]] = {}
        """Which runners hold each digest, also those that are disconnected, until they are forgotten."""
        self._coming: dict[tuple[GroupName, Digest], dict[InstanceName, Coming]] = {}
        """How fast the bytes of adapters come that are fetched now, to each runner."""
        self.rates: dict[GroupName, float] = {}
        """Bytes per second of the last fetch that has lasted."""
        self.loaded: dict[tuple[GroupName, Digest], None] = {}
        """What has come to a device since `take_loaded`."""
        self._to_tell: dict[ObjectName, None] = {}
        """Adapters of which something has changed, of what the operator and gateways are told. In order, as a set
        would differ from process to process."""
        self._changes = ChangeLimiter[ObjectName](config.revision_pause)
        """Recent checks, also of adapters that were removed or suspended: they may return."""
        self.may_be_ordered = False
        """Whether something has changed since orders were given last, so that others may be due."""
        self.order_times: list[float] = []
        """When an order is repeated, or given that could not be given yet. A heap; each once, and some out of date."""
        self._known_times: set[float] = set()
        """The same. An adapter that waits for its time says it each time that orders are given."""
        self._serving: dict[Digest, dict[ObjectName, DigestSource]] | None = None
        """The digests that names point to; None if they must be collected again."""
        self._to_check: list[Adapter] | None = None
        """Those that may have to be checked, in the order of their names; None if they must be found again. Mostly
        there is none, however many adapters there are."""
        self._replicated: list[Adapter] | None = None
        """Those with `minReplicas`; None if they must be found again."""

    def __iter__(self) -> Iterator[Adapter]:
        yield from self.by_name.values()

    def order_at(self, at: float) -> None:
        """Another order may be due then."""
        if at not in self._known_times:
            self._known_times.add(at)
            heappush(self.order_times, at)

    def orders_due(self) -> float:
        """When other orders may be due."""
        if self.may_be_ordered:
            return -math.inf
        return self.order_times[0] if self.order_times else math.inf

    def orders_begin(self, now: float) -> None:
        """What is due now is ordered."""
        self.may_be_ordered = False
        while self.order_times and self.order_times[0] <= now:
            self._known_times.discard(heappop(self.order_times))

    # --------------------------------------------------------------------------------------------- what should exist

    def state(self, specs: Iterable[AdapterSpec]) -> bool:
        """Replace the list of adapters. True if something changed."""
        self._to_check = self._replicated = None
        wanted = {spec.ref.object: spec for spec in specs}
        before = {name: adapter.spec for name, adapter in self.by_name.items()}
        # A list, not a set: the order must be the same in every process.
        gone = [self.by_name.pop(name) for name in before if name not in wanted]
        for name, spec in wanted.items():
            adapter = self.by_name.get(name)
            if before.get(name) != spec:
                self._to_tell[name] = None
            if adapter is None:
                self.by_name[name] = Adapter(spec, self._wanted(spec))
            elif spec != adapter.spec:
                self._update(adapter, spec)
        self._serving = None
        # Only now, when all names are updated: another name may serve the same bytes.
        for adapter in gone:
            self.gone.append(adapter.spec.ref)
            self._to_tell[adapter.spec.ref.object] = None
            self._retire(adapter)
        return before != wanted

    def base_changed(self, group: GroupName) -> None:
        """The group may have another base model: its adapters have to be checked for that one."""
        for adapter in self.by_name.values():
            if adapter.spec.group == group:
                self._update(adapter, adapter.spec)
                self._to_tell[adapter.spec.ref.object] = None

    def _update(self, adapter: Adapter, spec: AdapterSpec) -> None:
        self._to_check = self._replicated = None
        wanted = self._wanted(spec)
        if (adapter.wanted, adapter.spec.max_bytes) != (wanted, spec.max_bytes):
            # The old failure was about another revision or another bound.
            adapter.failure = adapter.failed = adapter.retry_at = None
            adapter.recheck_requested = adapter.doubted = False
            adapter.refused_by.clear()
        if spec.group != adapter.spec.group:
            self._retire(adapter)
            adapter.serving = None
        adapter.spec, adapter.wanted = spec, wanted

    def _wanted(self, spec: AdapterSpec) -> RevisionKey:
        return replace(spec.revision, group=spec.group, base=self._bases.of(spec.group).model.digest)

    def restore(self, spec: AdapterSpec, serving: Revision | None) -> None:
        self.by_name[spec.ref.object] = Adapter(spec, self._wanted(spec), serving)
        self._serving = self._to_check = self._replicated = None

    def source_of(self, digest: Digest, adapter: str = "") -> DigestSource | None:
        """Where a digest's bytes come from; None if no name and no request needs it.

        Several adapters may have the same bytes, each from a source and with a Secret of its own. With `adapter`, as
        namespace/name, only that one's counts: no tenant depends on the source of another one, or learns of it.
        """
        name = ObjectName.parse(adapter) if adapter else None
        for sources in (self._serving_sources().get(digest), self.retired.get(digest)):
            if sources and (name is None or name in sources):
                return next(iter(sources.values())) if name is None else sources[name]
        return None

    def _serving_sources(self) -> dict[Digest, dict[ObjectName, DigestSource]]:
        if self._serving is None:
            self._serving = {}
            for name, adapter in self.by_name.items():
                if adapter.serving is not None:
                    source = _source_of(adapter.spec, adapter.serving)
                    self._serving.setdefault(adapter.serving.digest, {})[name] = source
        return self._serving

    def replicated(self) -> list[Adapter]:
        """Those with `minReplicas`."""
        if self._replicated is None:
            self._replicated = [one for one in self.by_name.values() if one.spec.min_replicas]
        return self._replicated

    def that_serve(self, digest: Digest) -> Iterator[Adapter]:
        """Those that serve these bytes."""
        for name in self._serving_sources().get(digest, ()):
            yield self.by_name[name]

    def rank_of(self, digest: Digest) -> int:
        """The rank of an adapter in device memory; 0 for the base model, and for an adapter that was not checked for
        this scheduler."""
        source = self.source_of(digest)
        return source.rank if source is not None else 0

    def undecided(self, group: GroupName | None = None) -> bool:
        """Whether an unknown digest may belong to an adapter that has not been checked yet. After a takeover the
        scheduler knows the adapters from the operator, but their digests only after a runner has reported them."""
        return any(
            adapter.undecided for adapter in self.by_name.values() if group is None or adapter.spec.group == group
        )

    def is_replaced(self, digest: Digest, adapter: str, group: GroupName) -> bool:
        """Whether a request wants a revision that no adapter has any more, and whose source nobody knows."""
        return digest != BASE and self.source_of(digest, adapter) is None and not self.undecided(group)

    # ----------------------------------------------------------------------------------------------- towards serving

    def checks(self, runners: Collection[Runner], now: float) -> Iterator[EnsureAdapter]:
        """Ask one runner of the group to fetch and check each new revision."""
        self._changes.expire(now)
        self._to_check = [one for one in self._may_want_check() if not one.resolved or one.check is not None]
        if not self._to_check:
            return
        attached = {runner.instance for runner in runners if runner.attached}
        for adapter in self._to_check:
            check = adapter.check
            if check is not None and (check.instance not in attached or now >= check.since + self._policy.load_retry):
                adapter.check = None
        busy = Counter(adapter.check.instance for adapter in self._to_check if adapter.check is not None)
        # Those that may be given one more check: found once, as many adapters may wait while all runners are busy. All
        # adapters of a group want the same base model.
        able: dict[GroupName, list[Runner]] = {}
        for adapter in self._to_check:
            if not adapter.wants_check(now) and not self._may_ask_another(adapter, runners):
                continue
            name = adapter.spec.ref.object
            # An adapter that changes all the time would keep a runner busy. Its newest revision is checked later.
            if not adapter.recheck_requested and not self._changes.may_change(name, now):
                self.order_at(self._changes.next_at(name))
                continue
            spec, group = adapter.spec, adapter.wanted.group
            if group not in able:
                base, known = adapter.wanted.base, self._bases.known(group)
                serving = (r for r in runners if known and r.takes_work and r.group == group and r.serves(base))
                able[group] = [r for r in serving if busy[r.instance] < CHECKS_AT_ONCE]
            others = (r for r in able[group] if start_of(r) not in adapter.refused_by)
            runner = min(others, key=lambda r: (busy[r.instance], r.instance), default=None)
            if runner is None:
                continue
            busy[runner.instance] += 1
            if busy[runner.instance] == CHECKS_AT_ONCE:
                able[group].remove(runner)
            order = next(self._orders)
            adapter.check = PendingCheck(order, adapter.wanted, runner.instance, now)
            self.order_at(now + self._policy.load_retry)
            if not adapter.recheck_requested:
                adapter.recheck_requested = True
                self._changes.changed(name, now)
            source = DigestSource(spec.ref, adapter.wanted, max_bytes=spec.max_bytes)
            yield _ensure(order, runner, source, adapter.wanted.expected_digest, AdapterStage.CERTIFIED)

    def _may_want_check(self) -> Iterable[Adapter]:
        return self.by_name.values() if self._to_check is None else self._to_check

    def checked_by(self, event: AdapterStateChanged) -> Adapter | None:
        """The adapter whose pending check this report answers; None if it answers none that is known.

        A runner of an earlier version repeats no number: its report counts for the check that it was given last.
        """
        adapter = self.by_name.get(event.ref.object)
        if adapter is None or adapter.check is None or adapter.check.instance != event.instance:
            return None
        answers = event.order == adapter.check.order if event.order else event.ordered_stage is AdapterStage.CERTIFIED
        return adapter if answers else None

    def check_reported(
        self, adapter: Adapter, event: AdapterStateChanged, runners: Collection[Runner], now: float
    ) -> bool:
        """Apply a runner's report about a check. True if the check ended: it was certified, or failed."""
        check = adapter.check
        assert check is not None
        if event.failure is None and event.stage < AdapterStage.CERTIFIED:
            check.since = now
            return False
        if event.certificate is not None and event.certificate.base_digest not in ("", check.key.base):
            return False  # its runner has another base model by now; without an answer the check is ordered again
        adapter.check, adapter.checked_at = None, now
        if check.key != adapter.wanted:
            return False  # the revision changed again: the next check is for the new one
        self._to_tell[adapter.spec.ref.object] = None
        if event.failure is not None:
            if _is_wrong(event.failure):
                return self._refused(adapter, event, runners)
            adapter.failure, adapter.failed = event.failure, check.key
            adapter.retry_at = now + event.failure.retry_after if event.failure.retry_after > 0 else None
            return True
        for start in [one for one in self._unproved_on if one[0] == event.instance]:
            del self._unproved_on[start]
            self._tell_of_refusals_by(start)
        adapter.doubted = False
        replaced = adapter.serving
        self._serving = None
        adapter.serving = Revision(key=check.key, digest=event.digest, certificate=event.certificate, bytes=event.bytes)
        adapter.failure = adapter.failed = adapter.retry_at = None
        if replaced is not None and replaced.digest != event.digest:
            self._retire_digest(adapter.spec, replaced)
        return True

    # ------------------------------------------------------------------------------------------------------- proofs

    def _refused(self, adapter: Adapter, event: AdapterStateChanged, runners: Collection[Runner]) -> bool:
        """A runner's proof of the wanted revision has failed. Either may be the cause: another runner is asked, if
        there is one → False. Otherwise the revision has failed, and does not serve on."""
        starts = {runner.instance: start_of(runner) for runner in runners}
        start = starts.get(event.instance, (event.instance, ""))
        adapter.refuses(start)
        self._unproved_on = {one: failed for one, failed in self._unproved_on.items() if one in starts.values()}
        failed = self._unproved_on.setdefault(start, {})
        if len(failed) < MAX_REFUSED_BY:
            failed[event.digest or str(adapter.spec.ref.object)] = None
        self._tell_of_refusals_by(start)
        self.may_be_ordered, self._to_check = True, None
        if any(map(adapter.may_be_proved_by, runners)):
            return False
        assert event.failure is not None
        adapter.failure, adapter.failed, adapter.retry_at = event.failure, adapter.wanted, None
        if adapter.doubted:
            self._retire(adapter)
            adapter.serving, adapter.doubted, self._serving = None, False, None
        return True

    def proof_failed(self, runner: Runner, event: AdapterStateChanged, runners: Collection[Runner]) -> bool:
        """A runner that has served a revision has proved it again, and what it computes is wrong. True if the revision
        does not serve any more."""
        adapter = self.by_name.get(event.ref.object)
        if adapter is None or adapter.serving is None or adapter.serving.digest != event.digest:
            return False
        if adapter.serving.key != adapter.wanted or not adapter.may_be_proved_by(runner):
            return False  # a newer revision is on its way, or this is known
        adapter.doubted = True
        return self._refused(adapter, event, runners)

    def proved(self, event: AdapterStateChanged) -> None:
        """A runner says which of its kernels have proved what it serves."""
        adapter, certificate = self.by_name.get(event.ref.object), event.certificate
        if adapter is None or adapter.serving is None or certificate is None or adapter.serving.certificate is None:
            return
        serving, before = adapter.serving, adapter.serving.certificate
        if serving.digest != event.digest or certificate.base_digest != before.base_digest:
            return
        names = tuple(dict.fromkeys((*before.proved_by, *certificate.proved_by)))[:MAX_KERNELS]
        if names != before.proved_by:
            adapter.serving = replace(serving, certificate=replace(before, proved_by=names))
            self._to_tell[adapter.spec.ref.object] = None

    def _may_ask_another(self, adapter: Adapter, runners: Collection[Runner]) -> bool:
        """True if a revision was refused for its proofs alone, and a runner has come that was not asked."""
        if not adapter.refused_by or adapter.check is not None or adapter.resolved or adapter.failure is None:
            return False
        return _is_wrong(adapter.failure) and any(map(adapter.may_be_proved_by, runners))

    def _tell_of_refusals_by(self, start: Start) -> None:
        for name, adapter in self.by_name.items():
            if start in adapter.refused_by:
                self._to_tell[name] = None

    def _failure_of(self, adapter: Adapter) -> Failure | None:
        """With what the failures of other adapters say about the runner"""
        failure = adapter.failure
        if failure is None or not _is_wrong(failure):
            return failure
        if not any(len(self._unproved_on.get(one, ())) > 1 for one in adapter.refused_by):
            return failure
        return replace(failure, message=f"{failure.message} {OTHERS_FAIL_TOO}")

    # ----------------------------------------------------------------------------------------------------- replicas

    def replicas(self, runners: Collection[Runner], now: float) -> Iterator[PinAdapters | EnsureAdapter]:
        """Pin adapters on as many runners as their `minReplicas`, and load them there. One slot of a runner is left to
        adapters that are not pinned: else each request for one of these evicts a pinned one, which comes back."""
        groups: dict[GroupName, list[Runner]] = {}
        for runner in runners:
            if runner.takes_work:
                groups.setdefault(runner.group, []).append(runner)
        pinned: dict[InstanceName, set[Digest]] = {}
        missing: list[tuple[Runner, Digest, DigestSource]] = []
        unknown = {adapter.spec.group for adapter in self.replicated() if adapter.undecided}
        for adapter in self.replicated():
            spec = adapter.spec
            if (serving := self.usable(adapter)) is None:
                continue
            able = [
                one
                for one in groups.get(spec.group, ())
                if one.serves(serving.key.base) and _may_pin(one, serving.digest, pinned.get(one.instance, ()))
            ]
            for holder in self._to_hold(spec, serving.digest, able, now):
                pinned.setdefault(holder.instance, set()).add(serving.digest)
                if self._lacks(holder, spec, serving.digest, now):
                    missing.append((holder, serving.digest, _source_of(spec, serving)))
        for runner in runners:
            to_keep = frozenset(pinned.get(runner.instance, ()))
            if not runner.attached or to_keep == runner.pinned or (runner.pinned is None and runner.group in unknown):
                continue  # after a takeover it keeps what the last scheduler has told, until the adapters are known
            runner.pinned = to_keep
            yield PinAdapters(runner.instance, tuple(sorted(to_keep)))
        for runner, digest, source in missing:
            yield self.load(runner, digest, source, now)

    def pin_again(self, runners: Iterable[Runner]) -> None:
        """They have not heard what they were told."""
        for runner in runners:
            runner.pinned = None
        self.may_be_ordered = True

    def _to_hold(self, spec: AdapterSpec, digest: Digest, able: list[Runner], now: float) -> list[Runner]:
        """The runners that keep it: those that have it, then those to which it comes, then those that hold least."""
        before = [one for one in able if one.pinned is not None and digest in one.pinned]
        if len(before) == spec.min_replicas and all(one.resident.get(digest) is Tier.DEVICE for one in before):
            return before

        def rank(one: Runner) -> tuple[int, bool, int, InstanceName]:
            kept = digest in (one.pinned or ())
            if one.resident.get(digest) is Tier.DEVICE:
                return 0, not kept, 0, one.instance
            if one.load_is_awaited(digest, spec.ref, now, self._policy.load_retry):
                return 1, not kept, 0, one.instance
            failed = not one.load_may_be_retried(digest, spec.ref, now)
            return 3 if failed else 2, not kept, len(one.resident), one.instance

        return sorted(able, key=rank)[: spec.min_replicas]

    def _lacks(self, runner: Runner, spec: AdapterSpec, digest: Digest, now: float) -> bool:
        """Whether to order a load."""
        if runner.resident.get(digest) is Tier.DEVICE:
            return False
        awaited = runner.load_is_awaited(digest, spec.ref, now, self._policy.load_retry)
        return not awaited and runner.load_may_be_retried(digest, spec.ref, now)

    def load(self, runner: Runner, digest: Digest, source: DigestSource, now: float) -> EnsureAdapter:
        """Order a runner to bring an adapter to its device."""
        order = next(self._orders)
        self.order_at(now + self._policy.load_retry)
        runner.load_ordered(order, digest, source.ref, now)
        self._fetch_ended(runner, digest)
        return _ensure(order, runner, source, digest, AdapterStage.DEVICE)

    # ---------------------------------------------------------------------------------------------- out of the way

    def drops(self, in_use: Collection[Digest], runners: Collection[Runner]) -> Iterator[DropAdapter | ForgetManifest]:
        """Drop digests that no name points to and no request uses, and what is kept for manifests that have gone."""
        attached = [runner for runner in runners if runner.attached]
        for digest in [digest for digest in self.retired if digest not in in_use]:
            self._tell_of(digest)
            sources = self.retired.pop(digest)
            for name in sources:
                del self._retired_of[name][digest]
                if not self._retired_of[name]:
                    del self._retired_of[name]
            (source, *_) = sources.values()
            if self.source_of(digest) is not None:  # another name serves the same bytes
                continue
            for runner in attached:
                runner.forget_loads(digest)
                yield DropAdapter(runner.instance, digest, source.ref)
        for ref in self.gone:
            yield from (ForgetManifest(runner.instance, ref) for runner in attached)
        self.gone.clear()

    def unneeded_on(self, runner: Runner, in_use: Callable[[], Collection[Digest]]) -> Iterator[DropAdapter]:
        """Drop adapters in a runner's memory that nothing needs: the runner was away when they were dropped."""
        needed = self._serving_sources()
        unknown = [
            digest
            for digest in runner.in_memory
            if digest not in needed and digest not in self.retired and digest != BASE
        ]
        if unknown and not self.undecided():
            used = in_use()
            yield from (DropAdapter(runner.instance, one, AdapterRef("", "")) for one in unknown if one not in used)

    # ------------------------------------------------------------------------------------------------------- holders

    def residency_reported(self, runner: Runner, resident: Mapping[Digest, Tier]) -> None:
        """Replace what is known of the adapters that a runner holds."""
        self._moved(runner, runner.note_resident(resident))

    def residency_changed(self, runner: Runner, gone: Iterable[Digest], resident: Mapping[Digest, Tier]) -> None:
        """Some have gone from a runner, and others have come, or are at another tier."""
        self._moved(runner, runner.note_changes(gone, resident))

    def _moved(self, runner: Runner, moved: Iterable[tuple[Digest, Tier | None]]) -> None:
        for digest, tier in moved:
            if tier is Tier.DEVICE:
                self._note_loaded(runner, digest)
            if tier is not None:
                self._holders.setdefault(digest, {})[runner.instance] = tier
            else:
                holders = self._holders[digest]
                del holders[runner.instance]
                if not holders:
                    del self._holders[digest]
            self._tell_of(digest)

    def stage_told(self, runner: Runner, digest: Digest, stage: AdapterStage) -> None:
        """Between two reports, an adapter has come to a runner's device, or gone from there to its disk. Only of what
        serves: nothing else bounds what a runner names until its next report."""
        tier = _TIERS.get(stage)
        if tier is not None and digest in self._serving_sources() and runner.note_tier(digest, tier):
            self._holders.setdefault(digest, {})[runner.instance] = tier
            self._tell_of(digest)
            if tier is Tier.DEVICE:
                self._note_loaded(runner, digest)

    def _note_loaded(self, runner: Runner, digest: Digest) -> None:
        self.loaded[runner.group, digest] = None
        self._fetch_ended(runner, digest)

    def take_loaded(self) -> dict[tuple[GroupName, Digest], None]:
        """What has come to a device since this was called last."""
        loaded, self.loaded = self.loaded, {}
        return loaded

    def is_on_a_device(self, digest: Digest, group: GroupName, runners: Mapping[InstanceName, Runner]) -> bool:
        """Whether a runner of the group that is connected has it on its device."""
        if not (holders := self._holders.get(digest)):  # mostly, where this is asked
            return False
        on_device = (one for one, tier in holders.items() if tier is Tier.DEVICE)
        return any(runners[one].attached and runners[one].group == group for one in on_device)

    def bytes_come(self, runner: Runner, event: AdapterStateChanged, now: float) -> None:
        """A runner has reported on a fetch that it was ordered to make for its device."""
        if event.failure is not None or event.stage > AdapterStage.NONE:
            self._fetch_ended(runner, event.digest)
        elif event.bytes and event.digest in self._serving_sources():
            of_runners = self._coming.setdefault((runner.group, event.digest), {})
            coming = of_runners.setdefault(runner.instance, Coming(now, event.bytes, event.bytes, now))
            coming.fetched, coming.at = event.bytes, now
            if coming.rate > 0:
                self.rates[runner.group] = coming.rate

    def coming_to(self, group: GroupName, digest: Digest) -> Coming | None:
        """The fetch that has most of the bytes."""
        of_runners = self._coming.get((group, digest), {})
        return max(of_runners.values(), key=lambda one: one.fetched, default=None)

    def fetches_ended(self, runner: Runner) -> None:
        """It has gone."""
        self._unproved_on.pop(start_of(runner), None)
        for digest in [digest for group, digest in self._coming if group == runner.group]:
            self._fetch_ended(runner, digest)

    def _fetch_ended(self, runner: Runner, digest: Digest) -> None:
        if (of_runners := self._coming.get((runner.group, digest))) is not None:
            of_runners.pop(runner.instance, None)
            if not of_runners:
                del self._coming[runner.group, digest]

    def connection_changed(self, runner: Runner) -> None:
        """What a runner holds counts for gateways only while it is connected."""
        for digest in runner.resident:
            self._tell_of(digest)

    def _tell_of(self, digest: Digest) -> None:
        self.may_be_ordered = True
        for name in (*self._serving_sources().get(digest, ()), *self.retired.get(digest, ())):
            self._to_tell[name] = None

    # ------------------------------------------------------------------------------------------------------- telling

    @property
    def changed(self) -> bool:
        """Whether the operator or gateways may have to be told something."""
        return bool(self._to_tell)

    def take_changed(self) -> dict[ObjectName, None]:
        """The adapters that have changed since this was called last, or have been removed since."""
        changed, self._to_tell = self._to_tell, {}
        return changed

    def report(self, adapter: Adapter) -> ReportAdapter:
        """The report for the operator. A disconnected runner still counts until it is forgotten: usually its stream
        broke only briefly, and each change would cause one API write per adapter."""
        serving = self.usable(adapter)
        digest = serving.digest if serving is not None else BASE
        places = tuple((instance, tier, digest) for instance, tier in sorted(self._holders_of(serving).items()))
        resident = any(tier >= Tier.HOST for _, tier, _ in places)
        for other in self._replaced_of(adapter):
            places += tuple((instance, tier, other) for instance, tier in sorted(self._holders.get(other, {}).items()))
        return ReportAdapter(
            ref=adapter.spec.ref,
            serving=digest,
            state=self._readiness(adapter, serving, resident),
            certificate=serving.certificate if serving is not None else None,
            failure=self._failure_of(adapter),
            replicas=places,
            source=serving.key.source if serving is not None else "",
            source_revision=serving.key.source_revision if serving is not None else "",
            checking=not adapter.resolved and adapter.failed != adapter.wanted,
        )

    def _replaced_of(self, adapter: Adapter) -> Iterator[Digest]:
        """Revisions that requests still use."""
        for digest in self._retired_of.get(adapter.spec.ref.object, ()):
            if adapter.serving is None or digest != adapter.serving.digest:
                yield digest

    def entry(self, adapter: Adapter, runners: Mapping[InstanceName, Runner]) -> CatalogAdapter:
        """The adapter's entry in the gateways' catalog."""
        spec, serving = adapter.spec, self.usable(adapter)
        other = serving is not None and serving.key.base != adapter.wanted.base
        holders = self._holders_of(serving).items()
        resident = any(tier >= Tier.HOST and runners[instance].attached for instance, tier in holders)
        return CatalogAdapter(
            ref=spec.ref,
            group=spec.group,
            model_name=spec.model_name,
            state=self._readiness(adapter, serving, resident),
            digest=serving.digest if serving is not None else BASE,
            source=serving.key.source if serving is not None else spec.revision.source,
            rank=serving.rank if serving is not None else 0,
            max_class=spec.max_class,
            failure=adapter.failure,
            share=spec.share,
            chat=spec.chat,
            base=self._bases.find(spec.group, serving.key.base) if serving is not None and other else None,
        )

    # ------------------------------------------------------------------------------------------------------ internals

    def _holders_of(self, serving: Revision | None) -> Mapping[InstanceName, Tier]:
        return self._holders.get(serving.digest, {}) if serving is not None else {}

    def usable(self, adapter: Adapter) -> Revision | None:
        """The revision that new requests get. One for a base model that leaves serves as long as runners that have it
        take work; then none does, until the adapter is checked for the group's own."""
        serving = adapter.serving
        if serving is None or self._bases.find(adapter.spec.group, serving.key.base) is None:
            return None
        return serving

    @staticmethod
    def _readiness(adapter: Adapter, serving: Revision | None, resident: bool) -> AdapterReadiness:
        if serving is not None:
            return AdapterReadiness.READY if resident else AdapterReadiness.COLD
        return AdapterReadiness.FAILED if adapter.failure is not None else AdapterReadiness.LOADING

    def _retire(self, adapter: Adapter) -> None:
        if adapter.serving is not None:
            self._retire_digest(adapter.spec, adapter.serving)

    def _retire_digest(self, spec: AdapterSpec, revision: Revision) -> None:
        self.retired.setdefault(revision.digest, {})[spec.ref.object] = _source_of(spec, revision)
        self._retired_of.setdefault(spec.ref.object, {})[revision.digest] = None


def _may_pin(runner: Runner, digest: Digest, pinned: Collection[Digest]) -> bool:
    return digest in pinned or len(pinned) < max(1, runner.capacity.adapter_slots - 1)


def _is_wrong(failure: Failure) -> bool:
    """True if a runner's results were wrong: its kernels or its device may be the cause."""
    return failure.code == AdapterUnproved.mapping.code and failure.reason == PROOF_FAILED


_TIERS = {AdapterStage.CERTIFIED: Tier.DISK, AdapterStage.HOST: Tier.HOST, AdapterStage.DEVICE: Tier.DEVICE}


def _ensure(order: int, runner: Runner, source: DigestSource, digest: str, stage: AdapterStage) -> EnsureAdapter:
    """`digest`: the one that the bytes must have; empty: any"""
    return EnsureAdapter(
        order=order,
        instance=runner.instance,
        ref=source.ref,
        source=source.key.source,
        source_revision=source.key.source_revision,
        credentials=source.key.credentials,
        volume=source.key.volume,
        folder=source.key.folder,
        requires_record=source.key.requires_record,
        refuses_mismatch=source.key.refuses_mismatch,
        max_bytes=source.max_bytes,
        expected_digest=digest,
        stage=stage,
    )


def _source_of(spec: AdapterSpec, revision: Revision) -> DigestSource:
    return DigestSource(spec.ref, revision.key, revision.bytes, spec.max_bytes, revision.device_rank)
