"""The scheduler's state, and the effects of the current event: shared by all parts of the policy.

Each part changes its own share of the state and adds its effects. Only `Scheduler.handle` starts and ends a decision.

After a start the state is not whole for a while. Three questions differ:
- `may_place`: the runners that were attached before have said which requests they have, so placing is safe;
- `missed`: how many runners of a group may still come back. Until none is missed, nobody is refused because he is too
  large for those that are here, and a few runners do not decide which base model the group has;
- `catalog_known`: the operator has said which pools and adapters there are.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf

from motet.domain import BASE, Digest, InstanceName, RequestId
from motet.runner_info import Failure
from motet_scheduler.policy.adapters.adapters import Adapters
from motet_scheduler.policy.adapters.checks import AdapterChecks
from motet_scheduler.policy.adapters.drops import AdapterDrops
from motet_scheduler.policy.adapters.limits import AdapterLimits
from motet_scheduler.policy.adapters.loads import AdapterLoads
from motet_scheduler.policy.adapters.orders import Orders
from motet_scheduler.policy.adapters.reports import AdapterReports
from motet_scheduler.policy.adapters.residency import Residency
from motet_scheduler.policy.adapters.table import AdapterTable
from motet_scheduler.policy.adapters.verdicts import AdapterVerdicts
from motet_scheduler.policy.effects import Effect
from motet_scheduler.policy.families import Families
from motet_scheduler.policy.gateway_requests import GatewayRequests
from motet_scheduler.policy.group_bases import GroupBases
from motet_scheduler.policy.happenings import Happening
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.quotas.quotas import Quotas
from motet_scheduler.policy.requests import CapacityId, PageNeed, Placement, Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.template_loads import TemplateLoads
from motet_scheduler.policy.template_wishes import TemplateWishes
from motet_scheduler.policy.tenant_weights import TenantWeights
from motet_scheduler.policy.timeline import Timelines
from motet_scheduler.policy.values import Catalog, GroupName, NamespaceUids, PoolSpec, SchedulerConfig

MAX_CONTEXT = 1 << 20
"""Tokens, where no runner has said what it can hold."""


class StartupWait:
    """After a start, placing waits until the runners that were attached before have reported their requests."""

    def __init__(self, awaited: Iterable[InstanceName], until: float) -> None:
        self._awaited = set(awaited)
        self.until = until if self._awaited else -inf
        """When it ends although some are missing. -inf: it has ended."""

    @property
    def awaited(self) -> set[InstanceName]:
        """Another set: those that are waited for at first may attach later."""
        return set(self._awaited)

    @property
    def over(self) -> bool:
        return self.until == -inf

    def runner_attached(self, instance: InstanceName) -> None:
        self._awaited.discard(instance)
        if not self._awaited:
            self.until = -inf

    def expire(self, now: float) -> None:
        """The wait may end although some runners are missing."""
        if now >= self.until:
            self._awaited.clear()
            self.until = -inf


class SchedulerState:
    def __init__(self, config: SchedulerConfig, now: float, waiting_for_runners: StartupWait, first_order: int) -> None:
        self.config = config
        self.now = now
        """Of the current event."""
        self.reports_by = now + config.report_patience
        """By then, runners that are there have attached and reported after the start of this scheduler."""
        self.attached_by = now + config.forget_runner
        """By then, those that were only away have attached."""
        self.away_since_start = waiting_for_runners.awaited
        """Runners that a former scheduler knew, and that have not attached yet."""
        self.many_told_at = -inf
        """When many positions were told: that takes so long that the autoscaler waits."""
        self.effects: list[Effect] = []
        """Of the current event."""
        self.requests: dict[RequestId, Request] = {}
        self.of_gateways: defaultdict[str, GatewayRequests] = defaultdict(GatewayRequests)
        self.adapter_uses: Counter[Digest] = Counter()
        """How many requests use each adapter."""
        self.families = Families()
        self.queues: dict[GroupName, Queue] = {}
        self.runners: dict[InstanceName, Runner] = {}
        self.by_group: dict[GroupName, list[Runner]] = {}
        self.gateways: set[str] = set()
        self.held: dict[str, dict[GroupName, int]] = {}
        """By gateway: requests that it can't tokenize until their model has a runner."""
        self.pools: dict[str, PoolSpec] = {}
        self.bases = GroupBases()
        self.table = AdapterTable()
        self.bases_changed = False
        """By the current event: which base models new requests can have."""
        wishes = TemplateWishes()
        self.orders = Orders(first_order)
        self.adapters = Adapters(self.bases, self.orders, places_changed=wishes.changed)
        self.residency = Residency(self.adapters)
        self.verdicts = AdapterVerdicts(self.adapters, self.table, self.orders)
        self.checks = AdapterChecks(config, self.bases, self.adapters, self.verdicts, self.orders)
        self.loads = AdapterLoads(config, self.adapters, self.orders)
        self.drops = AdapterDrops(self.adapters)
        self.reports = AdapterReports(self.bases, self.adapters, self.table, self.verdicts.suspects)
        self.template_loads = TemplateLoads(config, self.adapters, self.loads, self.orders, wishes)
        if self.away_since_start:
            self.orders.look_at(self.attached_by)  # what the others have refused need not wait for them any more
        self.limits = AdapterLimits(self.table, self.runners)
        self.quotas = Quotas(first_order, now)
        self.weights = TenantWeights()
        self.namespaces: NamespaceUids = ()
        self.catalog: Catalog | None = None
        """The last catalog that was published."""
        self.catalog_changed = True
        self.catalog_known = False
        """Whether the operator has sent its catalog."""
        self.supervised = False
        self.waiting_for_runners = waiting_for_runners
        self.timelines = Timelines(config.timelines, self.requests)

        self._one_of_each: dict[GroupName, dict[CapacityId, Runner]] = {}
        """Of the runners of a group, one of each capacity. Known until one comes or goes: there may be a thousand."""
        self._longest_context: dict[GroupName, int] = {}
        """Of the same runners. Each report asks for it for each of its requests."""
        self._refusing: dict[GroupName, Sequence[Runner]] = {}
        """Of the same runners, those that have refused adapters. Known until that changes of one."""
        self._undecided: set[GroupName] = set()
        """Groups of which something is left to decide until no runner is missed."""

    @property
    def may_place(self) -> bool:
        return self.waiting_for_runners.over

    def some_may_return(self, group: GroupName) -> bool:
        """Whether runners may be away of which nobody has told since the start, or of which the pools lack some."""
        if self.away_since_start and self.now < self.attached_by:
            return True
        known = Counter(one.identity.pool for one in self.runners_of(group))
        return any(pool.group == group and pool.replicas > known[pool.pool] for pool in self.pools.values())

    def missed(self, group: GroupName) -> float:
        """How many runners of the group may still come back after a start. For those that stay away this ends soon."""
        if self.now >= self.reports_by:
            return 0
        if not self.pools and not self.catalog_known:
            return inf  # nobody has said how many there are
        # One that drains is to leave, or has a successor: it makes up for no other.
        back = Counter(one.identity.pool for one in self.runners_of(group) if one.attached and one.drain is None)
        return sum(max(0, pool.replicas - back[pool.pool]) for pool in self.pools.values() if pool.group == group)

    def may_refuse(self, group: GroupName) -> bool:
        """Whether what is too large for all runners of the group is too large for good."""
        if not self.may_place:
            return False
        if not self.missed(group):
            return True
        self._undecided.add(group)
        return False

    def decide_again(self) -> None:
        """What was left while runners were missed."""
        for group in list(self._undecided):
            self._decide(group)

    def tick(self) -> None:
        self.waiting_for_runners.expire(self.now)
        self.decide_again()

    def next_due(self) -> float:
        """When the waits after a start end."""
        started = inf if self.may_place else self.waiting_for_runners.until
        return min(started, self.reports_by) if self._undecided else started

    def runner_changed(self, runner: Runner) -> None:
        """It has come or gone, or takes work now, or no longer."""
        group = runner.group
        self._forget_capacities(group)
        self.queue(group).rooms.changed(runner)
        self.catalog_changed = True
        self.orders.changed = True
        self.adapters.to_check.runners_changed()
        self._adapters_moved(runner, runner.adapters.having)
        self._decide(group)

    def _decide(self, group: GroupName) -> None:
        """Which base model the group has, and, when none of its runners is missed any more, who is too large."""
        missed = self.missed(group)
        if missed:
            self._undecided.add(group)
        elif group in self._undecided:
            self._undecided.remove(group)
            self.queue(group).try_all_again()
        if self.bases.runners_changed(group, self.runners_of(group), missed):
            self.bases_changed = self.catalog_changed = True
            self.adapters.base_changed(group)

    def adapter_moved(self, runner: Runner, digest: Digest) -> None:
        """A runner has this adapter now, or no longer; or one that has it has changed; or it has refused it, or serves
        it again."""
        if bool(runner.refused.failures) is not (runner in self._refusing.get(runner.group, ())):
            self._refusing.pop(runner.group, None)
        self._adapters_moved(runner, (digest,))

    def _adapters_moved(self, runner: Runner, digests: Collection[Digest]) -> None:
        self.limits.adapters_moved(digests)
        runners = len(self.runners_of(runner.group))
        if runners >= self.limits.lowest:
            queue = self.queue(runner.group)
            waiting = queue.with_adapters(digests)
            queue.try_again([request for request in waiting if self.limits.may_apply(request.adapter, runners)])

    def limited_to(self, request: Request) -> Sequence[Runner] | None:
        """The runners that alone may serve it: those that hold its revision if that was replaced, or if `maxReplicas`
        allows no more. None: any of its base model may, also if those of `maxReplicas` are all too small for it: better
        one runner more than that it waits for ever."""
        if request.replaced and self.adapters.is_replaced(request.digest, request.adapter, request.group):
            group = self.runners_of(request.group)
            return [one for one in _that_may_serve(group, request) if request.digest in one.adapters.tiers]
        holders = self.limits.holders_at_limit(request)
        if holders is None or all(
            request.requirement_on(runner.capacity, self.config, runner.adapter_pages(request.digest)).never
            for runner in holders
        ):
            return None
        return holders

    def runners_for(self, request: Request, among: Sequence[Runner] | None = None) -> Sequence[Runner]:
        """Those that may serve it, of these runners. None: of all."""
        holders = self.limited_to(request)
        if holders is not None:
            return [runner for runner in holders if among is None or runner in among]
        runners = self.runners_of(request.group) if among is None else among
        if not request.base and request.digest == BASE:
            return runners
        return [*_that_may_serve(runners, request)]

    def each_for(self, request: Request) -> Iterable[Runner]:
        """The same of all, of whom nobody looks at more than the caller asks for: mostly at one, of a thousand."""
        holders = self.limited_to(request)
        return _that_may_serve(self.runners_of(request.group), request) if holders is None else holders

    def refused_by_all(self, request: Request) -> Failure | None:
        """Why no runner of its base model may serve its adapter; None: one may, or may come."""
        why = None
        for runner in self.runners_of(request.group):
            if runner.serves(request.base):
                if runner.may_serve(request.digest, request.adapter):
                    return None
                why = runner.refused.why(request.digest, request.adapter)
        return why if why is not None and self.may_refuse(request.group) else None

    def refused_for_good(self, request: Request) -> Sequence[InstanceName]:
        """By which runners."""
        refusing = self._refusing.get(request.group)
        if refusing is None:
            group = self.runners_of(request.group)
            refusing = self._refusing[request.group] = [one for one in group if one.refused.failures]
        if not refusing and not request.avoid:  # mostly
            return ()
        digest, adapter = request.digest, request.adapter
        refused = [one.instance for one in refusing if digest in one.refused.failures]
        return [
            *(one for one in refused if not self.runners[one].may_serve(digest, adapter)),
            *(InstanceName(one) for one, until in request.avoid.items() if until == inf),
        ]

    def one_of_each_capacity(self, group: GroupName) -> Mapping[CapacityId, Runner]:
        found = self._one_of_each.get(group)
        if found is None:
            found = self._one_of_each[group] = {id(runner.capacity): runner for runner in self.runners_of(group)}
        return found

    def note_delivered(self, request: Request, tokens: int) -> None:
        """A peer says that it has this much of its answer: at most what it asked for, and what a context holds."""
        context = self._longest_context.get(request.group) or self._find_longest_context(request.group)
        delivered = min(tokens, request.max_tokens or context, context)
        if delivered > request.delivered:
            request.delivered, request.room_lacked, request.unfetched_since = delivered, 0, None

    def _find_longest_context(self, group: GroupName) -> int:
        runners = self.one_of_each_capacity(group).values()
        found = max((one.capacity.max_model_length for one in runners), default=MAX_CONTEXT)
        self._longest_context[group] = found
        return found

    def _forget_capacities(self, group: GroupName) -> None:
        self._one_of_each.pop(group, None)
        self._longest_context.pop(group, None)
        self._refusing.pop(group, None)

    def page_needs(self, request: Request) -> Mapping[CapacityId, PageNeed]:
        """What it needs on the runners of its group that could hold it."""
        needs: dict[CapacityId, PageNeed] = {}
        for capacity, runner in self.one_of_each_capacity(request.group).items():
            need = request.requirement_on(runner.capacity, self.config, runner.adapter_pages(request.digest))
            if not need.never:
                needs[capacity] = (need.room, need.adapter_pages)
        return needs

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def note_event(self, request: Request, kind: Happening, *arguments: object) -> None:
        request.story.add((self.now, kind, arguments))

    def queue(self, group: GroupName) -> Queue:
        queue = self.queues.get(group)
        if queue is None:
            queue = self.queues[group] = Queue(self.config)
        return queue

    def drop_unused_queues(self) -> None:
        """Of groups without requests and runners: there may be many names in the life of a scheduler."""
        for group in [group for group, queue in self.queues.items() if not queue.active and group not in self.by_group]:
            del self.queues[group]
            self.residency.rates.pop(group, None)
            self._forget_capacities(group)

    def runners_of(self, group: GroupName) -> Sequence[Runner]:
        return self.by_group.get(group, ())

    def current(self, instance: InstanceName, incarnation: str) -> Runner | None:
        runner = self.runners.get(instance)
        return runner if runner is not None and runner.identity.incarnation == incarnation else None

    def runner_of(self, placement: Placement) -> Runner | None:
        return self.current(placement.instance, placement.incarnation)

    def having(self, digest: Digest, group: GroupName | None = None) -> Iterator[Runner]:
        """The runners that have this adapter, or will have it soon: those of the group. None: all."""
        found = map(self.runners.__getitem__, self.table.having.get(digest, ()))
        return found if group is None else (one for one in found if one.group == group)

    def is_in_use(self, digest: Digest) -> bool:
        """Whether a request has this adapter, or a runner has one that it alone names."""
        return digest in self.adapter_uses or any(runner.uses(digest) for runner in self.having(digest))


def _that_may_serve(runners: Iterable[Runner], request: Request) -> Iterator[Runner]:
    base, digest, adapter = request.base, request.digest, request.adapter
    for runner in runners:
        # `serves` and `may_serve`, but this is asked very often.
        if (not base or base == runner.base.digest) and (
            not runner.refused.failures or runner.refused.why(digest, adapter) is None
        ):
            yield runner
