"""Which revision of each adapter serves, how new revisions are checked, and which runners hold adapters.

A revision says where the bytes are (source, source revision, Secret), which bytes they are (expected digest, content
stamp) and what they are checked for (group, base model). One runner of the group fetches and checks each new revision.
If it is certified, the adapter's name points to its digest at once. If it fails, the failure is reported and the old
revision continues to serve. If an adapter changes faster than it is checked, some revisions are skipped, but the last
one is always checked. Runners drop a digest when no name points to it and no request uses it."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count, islice
from operator import attrgetter
from typing import NamedTuple

from motet.change_limit import ChangeLimiter
from motet.domain import BASE, Digest, InstanceName, ObjectName
from motet.errors import ModelNotFound
from motet.runner_info import Failure, Tier
from motet_scheduler.policy.adapter_table import AdapterTable
from motet_scheduler.policy.effects import DropAdapter, EnsureAdapter, ForgetManifest, PinAdapters, ReportAdapter
from motet_scheduler.policy.events import AdapterStateChanged
from motet_scheduler.policy.group_bases import GroupBases
from motet_scheduler.policy.revision_state import (
    Asked,
    RevisionState,
    Standing,
    Start,
    is_refusal,
    is_wrong,
    may_be_elsewhere,
)
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.suspects import Suspects
from motet_scheduler.policy.values import (
    DIFFER,
    MAX_BUILDS,
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
CHECKS_AT_ONCE = 4
"""Per runner, so that many new adapters do not overload it."""
MAX_HAD = 4
"""Earlier revisions of an adapter of which it is remembered who had them, and runners of each"""
MAX_DROPPED = 64
"""Of the digests that serve no longer, with one event"""
MAX_CHECKS_AT_WORK = 4 * CHECKS_AT_ONCE
"""Per runner, with those that take so long that they hold up no others"""
MAX_CHECKS_OF_A_LINE = MAX_CHECKS_AT_WORK - CHECKS_AT_ONCE
"""Of these, for one namespace: however long its checks take, those of others begin."""

Line = tuple[GroupName, str]
"""A namespace's adapters in a group, which wait for checks."""


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
    def template_digest(self) -> str:
        return self.certificate.template_digest if self.certificate is not None else ""

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


def start_of(runner: Runner) -> Start:
    return runner.instance, runner.identity.incarnation


NEW = RevisionState()
NOBODY = AdapterRef("", "")


@dataclass(slots=True)
class Adapter:
    spec: AdapterSpec
    wanted: RevisionKey
    """The revision of `spec`, for the base model that its group has now."""
    serving: Revision | None = None
    states: dict[RevisionKey, RevisionState] = field(default_factory=dict)
    """Of the wanted revision and of the one that serves, and of one that was wanted and that a runner still checks"""
    asked_at: float = -math.inf
    """When a runner was last asked to check it."""
    checked_at: float = -math.inf
    """When a runner last answered a check."""
    had: dict[Digest, tuple[InstanceName, ...]] = field(default_factory=dict)
    """Which runners had its earlier revisions when they were replaced: they may still have the bytes."""
    recheck_requested: bool = False
    """A runner was asked to check the wanted revision. Asking again is not a new change."""
    last_report: ReportAdapter | None = field(default=None)

    def __post_init__(self) -> None:
        if self.serving is not None:
            self.states[self.serving.key] = RevisionState(Standing.PROVED)

    def state_of(self, key: RevisionKey) -> RevisionState:
        return self.states.get(key, NEW) if self.states else NEW  # of ten thousand that wait, no key is hashed

    def put(self, key: RevisionKey, state: RevisionState) -> None:
        if state is not NEW and (state.asked is not None or self.needs(key)):
            self.states[key] = state
        else:
            self.states.pop(key, None)

    def needs(self, key: RevisionKey) -> bool:
        return key == self.wanted or (self.serving is not None and key == self.serving.key)

    @property
    def line(self) -> "Line":
        return self.spec.group, self.spec.ref.namespace

    @property
    def newest(self) -> RevisionState:
        return self.state_of(self.wanted)

    @property
    def asked_for(self) -> RevisionKey | None:
        """The revision that a runner is asked to check: one at a time"""
        if not self.states:  # mostly, if many wait
            return None
        return next((key for key, state in self.states.items() if state.asked is not None), None)

    @property
    def check(self) -> Asked | None:
        key = self.asked_for
        return self.states[key].asked if key is not None else None

    def orders(self) -> Iterator[tuple[RevisionKey, Asked]]:
        """Those whose answers count, the newest of a revision first"""
        for key, state in self.states.items():
            for check in (state.asked, *reversed(state.silent)):
                if check is not None:
                    yield key, check

    @property
    def failure(self) -> Failure | None:
        """Of the newest revision, if it failed."""
        return self.newest.failure

    @property
    def undecided(self) -> bool:
        """Nobody has told yet whether it can be served."""
        return self.serving is None and not self.newest.ended

    @property
    def resolved(self) -> bool:
        """Nothing is left to do about it, whoever comes or goes."""
        serves = self.serving is not None and self.serving.key == self.wanted
        return serves and self.newest.standing is Standing.PROVED and not self.newest.refusals

    @property
    def over(self) -> bool:
        """The newest revision does not serve, and of what serves nothing is in doubt. It waits for a runner that comes,
        or for the time of another attempt."""
        newest, serving = self.newest, self.serving
        if not newest.ended or newest.silent or self.asked_for is not None:
            return False
        if serving is None:
            return True
        state = self.state_of(serving.key)
        return state.standing is Standing.PROVED and not state.refusals

    def to_ask(self, now: float) -> Iterator[RevisionKey]:
        """What a runner may be asked to check now. As long as the newest revision is not decided, what serves may be
        replaced soon, and is not asked for."""
        if self.asked_for is not None:
            return
        if self.newest.may_be_asked(now):
            yield self.wanted
        serving = self.serving.key if self.serving is not None else self.wanted
        if serving != self.wanted and self.newest.ended and self.state_of(serving).may_be_asked(now):
            yield serving


class Check(NamedTuple):
    """A runner was asked to check a revision."""

    adapter: Adapter
    key: RevisionKey
    asked: Asked


class Adapters:
    def __init__(
        self,
        config: SchedulerConfig,
        bases: GroupBases,
        table: AdapterTable,
        first_order: int,
        places_changed: Callable[[Digest | None], None],
    ) -> None:
        self._policy = config
        self._bases = bases
        self._table = table
        self._places_changed = places_changed
        """Other runners hold an adapter than before, or a load of it has ended. None: a runner has come or gone."""
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
        self.more_to_drop = False
        """Whether the next event may drop more of the same."""
        self._suspects = Suspects()
        self._withdrawn = False
        self._moved_groups: dict[GroupName, None] = {}
        """In which runners may serve some adapter, or may not, that was otherwise at `take_moved`."""
        self.rates: dict[GroupName, float] = {}
        """Bytes per second of the last fetch that has lasted."""
        self.loaded: dict[tuple[GroupName, Digest], None] = {}
        """What has come to a device since `take_loaded`."""
        self._to_tell: dict[ObjectName, None] = {}
        """Adapters of which something has changed, of what the operator and gateways are told. In order, as a set
        would differ from process to process."""
        self._changes = ChangeLimiter[ObjectName](config.revision_pause)
        """Recent checks, also of adapters that were removed or suspended: they may return."""
        self._expire_at = -math.inf
        self.may_be_ordered = False
        """Whether something has changed since orders were given last, so that others may be due."""
        self.order_times: list[float] = []
        """When an order is repeated, or given that could not be given yet. A heap; each once, and some out of date."""
        self._known_times: set[float] = set()
        """The same. An adapter that waits for its time says it each time that orders are given."""
        self._serving: dict[Digest, dict[ObjectName, DigestSource]] | None = None
        """The digests that names point to; None if they must be collected again."""
        self._turns: dict[Line, int] = {}
        """The last order to check, of those that have something to check"""
        self._to_check: dict[ObjectName, Adapter] | None = None
        """Those that may have to be checked; None if they must be found again. Mostly there is none, however many
        adapters there are."""
        self._idle: dict[ObjectName, Adapter] = {}
        """Others, which have to be checked when a runner comes, or it is time for another attempt."""
        self.retry_times: list[tuple[float, ObjectName]] = []
        """When it is. A heap; each once, and some out of date."""
        self._known_retries: set[tuple[float, ObjectName]] = set()
        """The same. Each runner that comes or goes has all of them put aside anew."""
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
        wanted = {spec.ref.object: spec for spec in specs}
        # A list, not a set: the order must be the same in every process.
        gone = [self.by_name.pop(name) for name in list(self.by_name) if name not in wanted]
        changed = bool(gone)
        for name, spec in wanted.items():
            adapter = self.by_name.get(name)
            if adapter is not None and (spec is adapter.spec or spec == adapter.spec):
                continue  # mostly: each time, all are stated
            changed, self._to_tell[name] = True, None
            self._serving = self._replicated = None
            if adapter is None:
                self.by_name[name] = adapter = Adapter(spec, self._wanted(spec))
                self._note(adapter)
            else:
                self._update(adapter, spec)
        # Only now, when all names are updated: another name may serve the same bytes.
        for adapter in gone:
            self._serving = self._replicated = None
            self.gone.append(adapter.spec.ref)
            name = adapter.spec.ref.object
            self._to_tell[name] = None
            self._idle.pop(name, None)
            if self._to_check is not None:
                self._to_check.pop(name, None)
            self._retire(adapter)
        return changed

    def base_changed(self, group: GroupName) -> None:
        """The group may have another base model: its adapters have to be checked for that one."""
        for adapter in self.by_name.values():
            if adapter.spec.group == group:
                self._update(adapter, adapter.spec)
                self._to_tell[adapter.spec.ref.object] = None

    def _update(self, adapter: Adapter, spec: AdapterSpec) -> None:
        self._replicated = None
        self._note(adapter)
        wanted, before = self._wanted(spec), adapter.wanted
        if (before, adapter.spec.max_bytes) != (wanted, spec.max_bytes):
            # The old failure was about another revision or another bound.
            adapter.wanted, adapter.recheck_requested = wanted, False
            for key in (before, wanted):
                if (state := adapter.states.get(key)) is not None:
                    self._put(adapter, key, state.wanted_anew())
        if spec.group != adapter.spec.group:
            self._retire(adapter)
            if (serving := adapter.serving) is not None:
                adapter.serving = None
                self._put(adapter, serving.key, adapter.state_of(serving.key))
        adapter.spec = spec

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

    def end_checks(self, runners: Collection[Runner], now: float, some_may_return: Callable[[GroupName], bool]) -> bool:
        """End those whose runner has gone or does not answer. → True if nobody is left to ask for a revision, so that
        it is refused. What serves stays while a runner is away: it may be the one that computes it rightly."""
        self._find_to_check(now)
        if not (asked := self._with_states()):
            return False
        here = {start_of(runner) for runner in runners if runner.attached}
        of_base: defaultdict[tuple[GroupName, str], list[Runner]] = defaultdict(list)
        for runner in runners:
            of_base[runner.group, runner.base.digest].append(runner)
        refused = False
        for adapter in asked:
            key = adapter.asked_for
            state = adapter.state_of(key) if key is not None else NEW
            if key is not None and (check := state.asked) is not None:
                if check.runner not in here:
                    self._put(adapter, key, state.unanswered())
                elif now >= check.since + self._policy.load_retry:
                    self._put(adapter, key, state.overdue())
            refused |= self._nobody_left(adapter, runners, now)
            if (serving := adapter.serving) is None or not adapter.state_of(serving.key).refusals:
                continue
            if _is_refused_by_all(adapter, serving, of_base[serving.key.group, serving.key.base]):
                self._withdraw(adapter, runners, some_may_return=some_may_return(adapter.spec.group))
        return refused

    def checks(self, runners: Collection[Runner], now: float) -> Iterator[EnsureAdapter]:
        """Ask one runner of the group to fetch and check each new revision: those of each namespace in turn."""
        if now >= self._expire_at:  # not with each event: there may be as many as adapters
            self._changes.expire(now)
            self._expire_at = now + self._policy.revision_pause
        if not self._to_check:
            return
        asked = self._with_states()
        busy = Counter(check.runner[0] for one in asked if (check := one.check) is not None)
        of_lines = Counter((one.line, runner) for one in asked for runner in self._at_work(one, now))
        at_work = Counter[InstanceName]()
        for (_, instance), checks in of_lines.items():
            at_work[instance] += checks

        def is_able(one: Runner) -> bool:
            return busy[one.instance] < CHECKS_AT_ONCE and at_work[one.instance] < MAX_CHECKS_AT_WORK

        for adapter in asked:
            if adapter.over and not self._may_ask(adapter, runners, now):
                name = adapter.spec.ref.object
                self._idle[name] = self._to_check.pop(name)
        free = {one.instance for one in runners if one.takes_work and is_able(one)}
        if not free:
            return  # mostly, if many wait

        # Those that may be given one more check: found once, as many adapters may wait while all runners are busy.
        able: dict[tuple[GroupName, str], list[Runner]] = {}

        def next_of(line: Line, own: Iterator[Adapter]) -> EnsureAdapter | None:
            full = set[tuple[GroupName, str]]()
            for adapter in own:
                of_wanted = adapter.wanted.group, adapter.wanted.base
                if adapter.serving is None and (of_wanted in full or able.get(of_wanted) == []):
                    continue  # all that could check it are busy
                for key in adapter.to_ask(now):
                    of_base = key.group, key.base
                    if of_base not in able:
                        able[of_base] = [one for one in runners if self._may_check(one, key) and is_able(one)]
                    of_line = [one for one in able[of_base] if of_lines[line, one.instance] < MAX_CHECKS_OF_A_LINE]
                    if not of_line:
                        full.add(of_base)
                        continue
                    had = adapter.had.get(Digest(key.expected_digest), ())
                    runner = _best(of_line, adapter.state_of(key), busy, had)
                    if runner is None:
                        continue
                    # An adapter that changes all the time would keep a runner busy. Its newest revision is checked
                    # later.
                    is_new = key == adapter.wanted and not adapter.recheck_requested
                    name = adapter.spec.ref.object
                    if is_new and not self._changes.may_change(name, now):
                        self.order_at(self._changes.next_at(name))
                        continue
                    busy[runner.instance] += 1
                    at_work[runner.instance] += 1
                    of_lines[line, runner.instance] += 1
                    if not is_able(runner):
                        free.discard(runner.instance)
                        for some in able.values():
                            if runner in some:
                                some.remove(runner)
                    if is_new:
                        adapter.recheck_requested = True
                        self._changes.changed(name, now)
                    return self._ask(adapter, key, runner, now)
            return None

        waiting = self._in_turn()
        while waiting and free:
            _, place, line, own = heappop(waiting)
            if (order := next_of(line, own)) is not None:
                self._turns[line] = order.order
                heappush(waiting, (order.order, place, line, own))
                yield order

    def _in_turn(self) -> list[tuple[int, int, Line, Iterator[Adapter]]]:
        """Those that may have to be checked, by namespace: a heap, with the one first whose turn was longest ago. Of a
        namespace, first those that were not asked for the longest time: the orders of some may never be answered."""
        lines: defaultdict[Line, list[Adapter]] = defaultdict(list)
        for adapter in sorted((self._to_check or {}).values(), key=attrgetter("asked_at")):
            lines[adapter.spec.group, adapter.spec.ref.namespace].append(adapter)
        # Who comes, or comes again, goes before none that waits for a turn: else those who come could keep it waiting.
        newest = max((self._turns[line] for line in lines if line in self._turns), default=0)
        self._turns = {line: self._turns.get(line, newest) for line in lines}
        waiting = [(self._turns[line], place, line, iter(own)) for place, (line, own) in enumerate(lines.items())]
        heapify(waiting)
        return waiting

    def _may_ask(self, adapter: Adapter, runners: Iterable[Runner], now: float) -> bool:
        """Whether a runner that is here may be asked, be it busy. If only time is missing, it is looked at then."""
        retry_at = adapter.newest.retry_at
        if retry_at is not None and retry_at > now:
            retry = retry_at, adapter.spec.ref.object
            if retry not in self._known_retries:
                self._known_retries.add(retry)
                heappush(self.retry_times, retry)
            self.order_at(retry_at)
            return False
        state, key = adapter.newest, adapter.wanted
        return state.may_be_asked(now) and any(
            state.is_open(start_of(one)) for one in runners if self._may_check(one, key)
        )

    def _ask(self, adapter: Adapter, key: RevisionKey, runner: Runner, now: float) -> EnsureAdapter:
        order, serving, spec = next(self._orders), adapter.serving, adapter.spec
        adapter.asked_at = now
        state = adapter.state_of(key)
        self._put(adapter, key, state.ask(order, start_of(runner), now))
        self.order_at(now + self._policy.load_retry)
        # What serves is asked for as these bytes: its source may have others by now.
        digest = serving.digest if serving is not None and serving.key == key else key.expected_digest
        source = DigestSource(spec.ref, key, max_bytes=spec.max_bytes)
        cached_only = state.source_failure is not None
        return _ensure(order, runner, source, digest, AdapterStage.CERTIFIED, cached_only=cached_only)

    def _at_work(self, adapter: Adapter, now: float) -> set[InstanceName]:
        """The runners that check one of its revisions, or have just said that they do"""
        return {check.runner[0] for _, check in adapter.orders() if now < check.heard + self._policy.load_retry}

    def _may_check(self, runner: Runner, key: RevisionKey) -> bool:
        serves = runner.group == key.group and runner.serves(key.base)
        return serves and runner.takes_work and self._bases.known(key.group)

    def _find_to_check(self, now: float) -> None:
        if (found := self._to_check) is None:
            found = self.by_name
            self._idle.clear()
            self.retry_times.clear()
            self._known_retries.clear()
        while self.retry_times and self.retry_times[0][0] <= now:
            self._known_retries.discard(retry := heappop(self.retry_times))
            _, name = retry
            if (adapter := self._idle.pop(name, None)) is not None:
                found[name] = adapter
        self._to_check = {
            name: one for name, one in found.items() if not one.states or not one.resolved or one.check is not None
        }

    def _with_states(self) -> list[Adapter]:
        """Of those that may have to be checked. The others wait for their first check: mostly, if there are many."""
        return [one for one in (self._to_check or {}).values() if one.states]

    def check(self) -> None:
        """Recount those that may have to be checked, and those that were put aside."""
        if (waiting := self._to_check) is None:
            return
        assert not waiting.keys() & self._idle.keys(), "an adapter is put aside and looked at"
        assert waiting.keys() | self._idle.keys() <= self.by_name.keys(), "an adapter that has gone is looked at"
        for name, one in self.by_name.items():
            decided = one.states and one.resolved and one.check is None
            assert decided or name in waiting or name in self._idle, "nobody looks at an adapter that is not decided"

    def runners_changed(self) -> None:
        """One has come or gone, or takes work now, or no longer: others may be asked."""
        self.may_be_ordered = True
        if self._to_check is not None:
            self._to_check |= self._idle
            self._idle.clear()

    def _put(self, adapter: Adapter, key: RevisionKey, state: RevisionState) -> None:
        adapter.put(key, state)
        self._note(adapter)

    def _note(self, adapter: Adapter) -> None:
        """Something has changed about it: it may have to be checked."""
        if self._to_check is not None:
            name = adapter.spec.ref.object
            self._to_check[name] = adapter
            self._idle.pop(name, None)

    def checked_by(self, event: AdapterStateChanged) -> Check | None:
        """What this report answers; None if it answers no check that is known.

        A runner of an earlier version repeats no number: its report counts for the check that it was given last.
        """
        adapter = self.by_name.get(event.ref.object)
        for key, check in adapter.orders() if adapter is not None else ():
            answers = event.order == check.order if event.order else event.ordered_stage is AdapterStage.CERTIFIED
            if adapter is not None and check.runner[0] == event.instance and answers:
                return Check(adapter, key, check)
        return None

    def check_reported(
        self,
        answered: Check,
        event: AdapterStateChanged,
        runners: Collection[Runner],
        now: float,
        *,
        some_may_return: bool = False,
    ) -> bool:
        """Apply a runner's report about a check. `some_may_return`: not all runners of the group are known. True if it
        is decided: something was certified, has failed, or does not serve any more."""
        adapter, key, check = answered
        state = adapter.states[key]
        if event.failure is None and event.stage < AdapterStage.CERTIFIED:
            self._put(adapter, key, state.works(check, now, event.bytes, self._policy.check_patience))
            return False
        if event.certificate is not None and event.certificate.base_digest not in ("", key.base):
            return False  # its runner has another base model by now; without an answer the check is ordered again
        adapter.checked_at = now
        serving = adapter.serving
        if key != adapter.wanted and (serving is None or serving.key != key):
            self._put(adapter, key, NEW)
            return False  # the revision changed again: the next check is for the new one
        self._to_tell[adapter.spec.ref.object] = None
        if event.failure is None:
            if not state.refusals or (event.certificate is not None and event.certificate.is_proof):
                self._certified(adapter, key, event, check.runner, runners)
                return True
            self._put(adapter, key, state.unproved(check.runner))
        elif is_refusal(event.failure, serves=state.serves):
            self._refused(adapter, key, event.failure, check.runner, runners, digest=event.digest)
        elif key.expected_digest and may_be_elsewhere(event.failure) and not state.serves:
            self._put(adapter, key, state.lacked(check, event.failure, now))
        else:
            self._put(adapter, key, state.failed(check.runner, event.failure, now))
        self._nobody_left(adapter, runners, now)
        if serving is not None:
            self._withdraw_all(serving.digest, runners, some_may_return=some_may_return)
        return adapter.newest.ended or adapter.serving is not serving

    def _certified(
        self,
        adapter: Adapter,
        key: RevisionKey,
        event: AdapterStateChanged,
        start: Start,
        runners: Collection[Runner],
    ) -> None:
        for cleared in self._suspects.certified(event.instance):
            self._tell_of_refusals_by(cleared)
        replaced, state = adapter.serving, self._with_refusals(adapter, key, event.digest, start, runners)
        adapter.serving = Revision(key=key, digest=event.digest, certificate=event.certificate, bytes=event.bytes)
        if replaced is not None:
            self._serving = None
        elif self._serving is not None:  # of thousands that come together, each would have all collected again
            of_digest = self._serving.setdefault(event.digest, {})
            of_digest[adapter.spec.ref.object] = _source_of(adapter.spec, adapter.serving)
        self._put(adapter, key, state.certified(start))
        if replaced is not None:
            self._put(adapter, replaced.key, adapter.state_of(replaced.key))
            if replaced.digest != event.digest:
                adapter.had.pop(replaced.digest, None)
                adapter.had[replaced.digest] = tuple(self._table.tiers.get(replaced.digest, ()))[:MAX_HAD]
                if len(adapter.had) > MAX_HAD:
                    del adapter.had[next(iter(adapter.had))]
                self._retire_digest(adapter.spec, replaced)

    # ------------------------------------------------------------------------------------------------------- proofs

    def _refused(
        self,
        adapter: Adapter,
        key: RevisionKey,
        failure: Failure,
        start: Start,
        runners: Iterable[Runner],
        *,
        digest: Digest,
    ) -> None:
        """What a runner computes with this revision is wrong. Either may be the cause."""
        name, serving = adapter.spec.ref.object, adapter.serving
        self._put_refusal(adapter, key, start, failure)
        if serving is not None and serving.key == key:
            for runner in runners:
                if start_of(runner) == start:
                    self._may_not_serve(runner, serving.digest, str(name), failure)
        if is_wrong(failure) and self._suspects.proof_failed(start, str(name), digest):
            self._tell_of_refusals_by(start)

    def _put_refusal(self, adapter: Adapter, key: RevisionKey, start: Start, failure: Failure) -> None:
        self._put(adapter, key, adapter.state_of(key).refused(start, failure))
        self._to_tell[adapter.spec.ref.object] = None
        self.may_be_ordered = True

    def _may_not_serve(self, runner: Runner, digest: Digest, adapter: str, failure: Failure) -> bool:
        """→ True if it might before. So it is under each name that serves these bytes, if they are the cause."""
        if not runner.refuse(digest, adapter, failure):
            return False
        self._moved_groups[runner.group] = None
        for one, key in self._that_it_serves(runner, digest):
            if not (
                runner.may_serve(digest, str(one.spec.ref.object)) or one.state_of(key).is_refused_by(start_of(runner))
            ):
                self._put_refusal(one, key, start_of(runner), failure)
        return True

    def refuses_only(self, runner: Runner, digests: Container[Digest]) -> None:
        """It has told all that its proofs have found wrong: the rest it has proved while it was away."""
        for digest in runner.refused.not_among(digests):
            self._may_serve(runner, digest, "")

    def _may_serve(self, runner: Runner, digest: Digest, adapter: str) -> None:
        """It has certified what it has refused before."""
        if not runner.accept(digest, adapter):
            return
        self._moved_groups[runner.group] = None
        for one, key in self._that_it_serves(runner, digest):
            state, start = one.state_of(key), start_of(runner)
            if state.is_refused_by(start) and runner.may_serve(digest, str(one.spec.ref.object)):
                self._put(one, key, state.certified(start))
                self._to_tell[one.spec.ref.object] = None

    def _that_it_serves(self, runner: Runner, digest: Digest) -> Iterator[tuple[Adapter, RevisionKey]]:
        """The adapters that serve these bytes in a runner's group, for its base model."""
        for one in [*self.that_serve(digest)]:
            serving = one.serving
            if serving is not None and serving.key.group == runner.group and runner.serves(serving.key.base):
                yield one, serving.key

    def _with_refusals(
        self, adapter: Adapter, key: RevisionKey, digest: Digest, start: Start, runners: Iterable[Runner]
    ) -> RevisionState:
        """A runner has certified a revision, so its digest is known. Others may have refused it, or these bytes; what
        they have refused for an earlier manifest of this name does not count."""
        name, state = str(adapter.spec.ref.object), adapter.states[key]
        is_new = adapter.serving is None or adapter.serving.key != key
        for runner in runners:
            if runner.group != key.group or not runner.serves(key.base):
                continue
            if is_new and runner.forget_refusal(digest, name):
                self._moved_groups[runner.group] = None
            if (one := start_of(runner)) == start:
                self._may_serve(runner, digest, name)
            elif (refusal := state.refusal_of(one)) is not None:
                self._may_not_serve(runner, digest, name, refusal.failure)
            elif (failure := runner.refused.why(digest, name)) is not None:
                state = state.refused(one, failure)
        return state

    def take_withdrawn(self) -> bool:
        """Whether something was withdrawn since this was called last."""
        withdrawn, self._withdrawn = self._withdrawn, False
        return withdrawn

    def take_moved(self) -> dict[GroupName, None]:
        """The groups in which other runners may serve some adapter than when this was called last."""
        moved, self._moved_groups = self._moved_groups, {}
        return moved

    def _nobody_left(self, adapter: Adapter, runners: Collection[Runner], now: float) -> bool:
        """Whether the newest revision has ended: all that can be asked have refused it, or lack its bytes."""
        state = adapter.newest
        is_refused = state.standing is Standing.WANTED and bool(state.refusals)
        if state.asked is not None or not (is_refused or state.is_lacked):
            return False
        if any(state.is_awaited(start_of(one)) for one in runners if self._may_check(one, adapter.wanted)):
            return False
        ended = state.lacked_by_all(now) if state.is_lacked else state.nobody_left()
        self._put(adapter, adapter.wanted, ended)
        if ended.retry_at is not None:
            self.order_at(ended.retry_at)
        self._to_tell[adapter.spec.ref.object] = None
        return True

    def _withdraw_all(self, digest: Digest, runners: Collection[Runner], *, some_may_return: bool) -> None:
        """Those that serve these bytes"""
        for one in [*self.that_serve(digest)]:
            self._withdraw(one, runners, some_may_return=some_may_return)

    def _withdraw(self, adapter: Adapter, runners: Collection[Runner], *, some_may_return: bool) -> None:
        """What serves does so no longer if all runners have refused it that are known, also those that are away, and no
        other one may come."""
        serving = adapter.serving
        if serving is None or some_may_return or (serving.key != adapter.wanted and not adapter.newest.ended):
            return
        state, key = adapter.state_of(serving.key), serving.key
        of_base = [one for one in runners if one.group == key.group and one.serves(key.base)]
        if state.asked is not None or not of_base or not _is_refused_by_all(adapter, serving, of_base):
            return
        self._retire(adapter)
        adapter.serving, self._serving = None, None
        self._withdrawn = True
        self._put(adapter, serving.key, state.nobody_left())
        self._to_tell[adapter.spec.ref.object] = None

    def refused_on(
        self,
        runner: Runner,
        digest: Digest,
        adapter: str,
        failure: Failure,
        runners: Collection[Runner],
        *,
        some_may_return: bool = False,
    ) -> None:
        """A runner has found by itself that what it computes with these bytes is wrong. `adapter`: under which name."""
        start, new = start_of(runner), self._may_not_serve(runner, digest, adapter, failure)
        for one, key in self._that_it_serves(runner, digest):
            if new and not runner.may_serve(digest, str(one.spec.ref.object)):
                self._refused(one, key, failure, start, runners, digest=digest)
        self._withdraw_all(digest, runners, some_may_return=some_may_return)

    def proved(self, runner: Runner, event: AdapterStateChanged) -> None:
        """A runner says which of its kernels have proved what it serves."""
        adapter, certificate = self.by_name.get(event.ref.object), event.certificate
        if adapter is None or adapter.serving is None or certificate is None or adapter.serving.certificate is None:
            return
        serving, before = adapter.serving, adapter.serving.certificate
        if serving.digest != event.digest or certificate.base_digest != before.base_digest:
            return
        names = tuple(dict.fromkeys((*before.proved_by, *certificate.proved_by)))[:MAX_KERNELS]
        builds = tuple(dict.fromkeys((*before.proved_builds, *certificate.proved_builds)))[-MAX_BUILDS:]
        now = replace(before, proved_by=names, proved_builds=builds)
        if certificate.recorded_answers and before.recorded_answers != DIFFER:  # one that differs is not taken back
            now = replace(
                now,
                recorded_answers=certificate.recorded_answers,
                max_delta_to_reference=certificate.max_delta_to_reference,
                warnings=certificate.warnings,
            )
        if now != before:
            adapter.serving = replace(serving, certificate=now)
            self._to_tell[adapter.spec.ref.object] = None
        state, start = adapter.state_of(serving.key), start_of(runner)
        doubted = state.standing is Standing.DOUBTED or state.is_refused_by(start)
        if certificate.is_proof and doubted:  # it may have refused it with other kernels
            self._put(adapter, serving.key, state.certified(start))
            self._to_tell[adapter.spec.ref.object] = None
            self._may_serve(runner, serving.digest, str(adapter.spec.ref.object))

    def checked_anew(self, event: AdapterStateChanged) -> None:
        """A runner with newer checks has loaded what serves. They may know of a chat template that older ones did not
        look for, as after an upgrade."""
        adapter, certificate = self.by_name.get(event.ref.object), event.certificate
        if adapter is None or (serving := adapter.serving) is None or certificate is None:
            return
        before = serving.certificate
        if serving.digest != event.digest or before is None or certificate.base_digest != before.base_digest:
            return
        if certificate.checker > before.checker:
            now = replace(before, checker=certificate.checker, template_digest=certificate.template_digest)
            adapter.serving = replace(serving, certificate=now)
            self._to_tell[adapter.spec.ref.object] = None

    def _tell_of_refusals_by(self, start: Start) -> None:
        for name, adapter in self.by_name.items():
            if any(state.is_refused_by(start) for state in adapter.states.values()):
                self._to_tell[name] = None

    def _failure_of(self, adapter: Adapter) -> Failure | None:
        """With what the failures of other adapters say about the runner"""
        state = adapter.newest
        if state.failure is None or not is_wrong(state.failure):
            return state.failure
        return self._suspects.said_of(state.failure, [one.runner for one in state.refusals])

    def _certificate_of(self, adapter: Adapter, serving: Revision) -> Certificate | None:
        """With a warning if the proof of what serves has failed somewhere"""
        refusals, certificate = adapter.state_of(serving.key).refusals, serving.certificate
        if certificate is None or not refusals:
            return certificate
        (instance, _), failure = refusals[-1]
        failure = self._suspects.said_of(failure, [one.runner for one in refusals])
        where = instance if len(refusals) == 1 else f"{instance} and {len(refusals) - 1} more"
        warning = f"its proof has failed on {where}, so it is served by other runners only: {failure.message}"
        return replace(certificate, warnings=(*certificate.warnings, warning))

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
                if one.serves(serving.key.base)
                and _may_pin(one, serving.digest, pinned.get(one.instance, ()))
                and one.may_serve(serving.digest, str(spec.ref.object))
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
        if len(before) == spec.min_replicas and all(one.adapters.tiers.get(digest) is Tier.DEVICE for one in before):
            return before

        def rank(one: Runner) -> tuple[int, bool, int, InstanceName]:
            kept = digest in (one.pinned or ())
            if one.adapters.tiers.get(digest) is Tier.DEVICE:
                return 0, not kept, 0, one.instance
            if one.adapters.is_awaited(digest, spec.ref, now, self._policy.load_retry):
                return 1, not kept, 0, one.instance
            failed = not one.adapters.may_be_retried(digest, spec.ref, now)
            return 3 if failed else 2, not kept, len(one.adapters.tiers), one.instance

        return sorted(able, key=rank)[: spec.min_replicas]

    def _lacks(self, runner: Runner, spec: AdapterSpec, digest: Digest, now: float) -> bool:
        """Whether to order a load."""
        if runner.adapters.tiers.get(digest) is Tier.DEVICE:
            return False
        awaited = runner.adapters.is_awaited(digest, spec.ref, now, self._policy.load_retry)
        return not awaited and runner.adapters.may_be_retried(digest, spec.ref, now)

    def load(self, runner: Runner, digest: Digest, source: DigestSource, now: float) -> EnsureAdapter:
        """Order a runner to bring an adapter to its device."""
        order = next(self._orders)
        self.order_at(now + self._policy.load_retry)
        runner.adapters.ordered(order, digest, source.ref, now)
        builds = self._proved_builds(runner, digest)
        return _ensure(order, runner, source, digest, AdapterStage.DEVICE, proved_builds=builds)

    def _proved_builds(self, runner: Runner, digest: Digest) -> tuple[str, ...]:
        """Those of other runners of its group: if it is like one of them, it serves at once, and proves it meanwhile.
        None if one has refused these bytes: then each proves them first."""
        builds = dict[str, None]()
        for one, key in self._that_it_serves(runner, digest):
            if one.state_of(key).refusals:
                return ()
            if one.serving is not None and one.serving.certificate is not None:
                builds |= dict.fromkeys(one.serving.certificate.proved_builds)
        return tuple(builds)[-MAX_BUILDS:]

    # ---------------------------------------------------------------------------------------------- out of the way

    def drops(
        self, is_in_use: Callable[[Digest], bool], runners: Collection[Runner]
    ) -> Iterator[DropAdapter | ForgetManifest]:
        """Drop digests that no name points to and no request uses, and what is kept for manifests that have gone. Each
        event asks: of many digests that stay in use, it looks at some."""
        looked_at = [*islice(self.retired, MAX_DROPPED)]
        unused = [digest for digest in looked_at if not is_in_use(digest)]
        if len(self.retired) > MAX_DROPPED:
            for digest in looked_at:
                self.retired[digest] = self.retired.pop(digest)  # the next event looks at the others
        if unused or self.gone:
            yield from self._drop(unused, runners)
        self.more_to_drop = bool(unused and self.retired)

    def _drop(self, unused: Iterable[Digest], runners: Collection[Runner]) -> Iterator[DropAdapter | ForgetManifest]:
        attached = [runner for runner in runners if runner.attached]
        refusing = [runner for runner in runners if runner.refused.failures]
        for digest in unused:
            self._tell_of(digest)
            sources = self.retired.pop(digest)
            for name in sources:
                if name not in self._serving_sources().get(digest, ()):
                    for runner in refusing:
                        runner.forget_refusal(digest, str(name))
                del self._retired_of[name][digest]
                if not self._retired_of[name]:
                    del self._retired_of[name]
            if self.source_of(digest) is not None:  # another name serves the same bytes
                continue
            # Runners keep the bytes of earlier revisions, but not of names that have gone.
            ref = next((one.ref for name, one in sources.items() if name in self.by_name), NOBODY)
            for runner in attached:
                runner.adapters.forget_loads_of(digest)
                yield DropAdapter(runner.instance, digest, ref)
        for ref in self.gone:
            yield from (ForgetManifest(runner.instance, ref) for runner in attached)
        self.gone.clear()

    def unneeded_on(self, runner: Runner, is_in_use: Callable[[Digest], bool]) -> Iterator[DropAdapter]:
        """Drop adapters in a runner's memory that nothing needs: the runner was away when they were dropped."""
        needed = self._serving_sources()
        unknown = [
            digest
            for digest in runner.adapters.in_memory
            if digest not in needed and digest not in self.retired and digest != BASE
        ]
        if unknown and not self.undecided():
            yield from (DropAdapter(runner.instance, one, NOBODY) for one in unknown if not is_in_use(one))

    # ------------------------------------------------------------------------------------------------------- holders

    def residency_reported(self, runner: Runner, tiers: Mapping[Digest, Tier]) -> None:
        """Replace what is known of the adapters that a runner holds."""
        self._moved(runner, runner.adapters.replace(tiers))

    def residency_changed(self, runner: Runner, gone: Iterable[Digest], tiers: Mapping[Digest, Tier]) -> None:
        """Some have gone from a runner, and others have come, or are at another tier."""
        self._moved(runner, runner.adapters.change(gone, tiers))

    def _moved(self, runner: Runner, digests: Iterable[Digest]) -> None:
        for digest in digests:
            if runner.adapters.tiers.get(digest) is Tier.DEVICE:
                self.loaded[runner.group, digest] = None
            self._tell_of(digest)

    def stage_told(self, runner: Runner, digest: Digest, stage: AdapterStage) -> None:
        """Between two reports, an adapter has come to a runner's device, or gone from there to its disk. Only of what
        serves: nothing else bounds what a runner names until its next report."""
        tier = _TIERS.get(stage)
        if tier is not None and digest in self._serving_sources() and runner.adapters.put(digest, tier):
            self._moved(runner, [digest])

    def take_loaded(self) -> dict[tuple[GroupName, Digest], None]:
        """What has come to a device since this was called last."""
        loaded, self.loaded = self.loaded, {}
        return loaded

    def load_reported(self, runner: Runner, event: AdapterStateChanged) -> None:
        """A runner has reported on a fetch that it was ordered to make for its device."""
        if event.failure is not None or event.stage > AdapterStage.NONE:
            self._places_changed(event.digest)
        elif (fetch := runner.adapters.fetches.get(event.digest)) is not None and fetch.rate > 0:
            self.rates[runner.group] = fetch.rate

    def runner_gone(self, runner: Runner) -> None:
        """It is forgotten, or has been restarted."""
        start = start_of(runner)
        self._suspects.forget(start)
        self._places_changed(None)
        for adapter in self.by_name.values():
            for key, state in list(adapter.states.items()):
                if state.refusals or state.unable or state.silent or state.without_it:
                    self._put(adapter, key, state.without(start))
                    self._to_tell[adapter.spec.ref.object] = None

    def connection_changed(self, runner: Runner) -> None:
        """What a runner holds counts for gateways only while it is connected."""
        self._places_changed(None)
        for digest in runner.adapters.tiers:
            self._tell_of(digest)

    def _tell_of(self, digest: Digest) -> None:
        self.may_be_ordered = True
        self._places_changed(digest)
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
            places += tuple(
                (instance, tier, other) for instance, tier in sorted(self._table.tiers.get(other, {}).items())
            )
        return ReportAdapter(
            ref=adapter.spec.ref,
            serving=digest,
            state=self._readiness(adapter, serving, resident),
            certificate=self._certificate_of(adapter, serving) if serving is not None else None,
            failure=self._failure_of(adapter),
            replicas=places,
            source=serving.key.source if serving is not None else "",
            source_revision=serving.key.source_revision if serving is not None else "",
            checking=adapter.newest.standing is Standing.WANTED,
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
            template_digest=serving.template_digest if serving is not None else "",
            base=self._bases.find(spec.group, serving.key.base) if serving is not None and other else None,
        )

    # ------------------------------------------------------------------------------------------------------ internals

    def _holders_of(self, serving: Revision | None) -> Mapping[InstanceName, Tier]:
        return self._table.tiers.get(serving.digest, {}) if serving is not None else {}

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


def _is_refused_by_all(adapter: Adapter, serving: Revision, runners: Iterable[Runner]) -> bool:
    """Its state remembers some runners, and each runner some adapters."""
    state, name = adapter.state_of(serving.key), str(adapter.spec.ref.object)
    return bool(state.refusals) and all(
        state.is_refused_by(start_of(one)) or not one.may_serve(serving.digest, name) for one in runners
    )


def _may_pin(runner: Runner, digest: Digest, pinned: Collection[Digest]) -> bool:
    return digest in pinned or len(pinned) < max(1, runner.capacity.adapter_slots - 1)


def _best(
    able: Iterable[Runner], state: RevisionState, busy: Mapping[InstanceName, int], had: Collection[InstanceName]
) -> Runner | None:
    """First those that have not left an order unanswered, then those that had it before, then those that name their
    kernels, as others prove nothing, then those with the fewest checks"""

    def rank(runner: Runner) -> tuple[bool, bool, bool, int, InstanceName]:
        silent = any(one.runner == start_of(runner) for one in state.silent)
        return silent, runner.instance not in had, runner.kernels is None, busy[runner.instance], runner.instance

    return min((one for one in able if state.is_open(start_of(one))), key=rank, default=None)


_TIERS = {AdapterStage.CERTIFIED: Tier.DISK, AdapterStage.HOST: Tier.HOST, AdapterStage.DEVICE: Tier.DEVICE}


def _ensure(
    order: int,
    runner: Runner,
    source: DigestSource,
    digest: str,
    stage: AdapterStage,
    *,
    proved_builds: tuple[str, ...] = (),
    cached_only: bool = False,
) -> EnsureAdapter:
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
        proved_builds=proved_builds,
        cached_only=cached_only,
    )


def _source_of(spec: AdapterSpec, revision: Revision) -> DigestSource:
    return DigestSource(spec.ref, revision.key, revision.bytes, spec.max_bytes, revision.device_rank)
