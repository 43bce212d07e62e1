"""Computes periodically how many runners each pool should have. `scaling_rule` has the rule itself.

Pools of one group share a queue. The waiting requests count for the group's first pool, by name, that can still grow;
the slots of the adapters count for its first pool that is scaled."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from operator import attrgetter

from motet.domain import Digest
from motet.runner_info import Capacity
from motet_scheduler.policy.effects import ReportDesiredReplicas
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.scaling_rule import (
    DesiredReplicas,
    PoolLoad,
    ReplicaBounds,
    ReplicaStabilizer,
    RunnerSize,
    ScaleDownBlock,
    required_replicas,
)
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import GroupName, PoolSpec, ScalingMode

MAX_LOOKED_AT = 1_000
"""Waiting requests of a group. Where more wait, the others are assumed to be like these."""

SAMPLE = 200
"""Of these, whose size is computed."""

LATER = 0.02
"""Seconds after many positions were told: with many requests that wait, not both in one event."""

NO_GATEWAY = ScaleDownBlock("NoGateway", "no gateway is connected, so the demand is unknown", stale=True)
JUST_STARTED = ScaleDownBlock(
    "JustStarted", "the scheduler has just started, and not all runners have attached", stale=True
)
ROLLOUT = ScaleDownBlock("RollingOut", "a rollout replaces runners; the pool does not shrink during the rollout")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """A pool's figures of the last run, for the metrics that an external autoscaler reads."""

    desired: int
    serving: int
    running: int
    waiting: int
    held: int
    pages: int
    pages_used: int
    pages_promised: int


@dataclass(slots=True)
class _Watched:
    mode: ScalingMode
    stabilizer: ReplicaStabilizer
    last_report: ReportDesiredReplicas | None = None
    reported_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The waiting requests of a group."""

    requests: int = 0
    pages: int = 0
    waited: float = 0.0
    held: int = 0


@dataclass(slots=True)
class _Adapters:
    """Adapters of a group that need slots in device memory."""

    in_use: set[Digest] = field(default_factory=set)
    pinned: dict[Digest, int] = field(default_factory=dict)
    """Digests to be kept resident, and on how many runners."""

    @property
    def slots(self) -> int:
        return len(self.in_use | self.pinned.keys()) + sum(self.pinned.values()) - len(self.pinned)


class Autoscaler:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._watched: dict[str, _Watched] = {}
        self._capacity: dict[str, Capacity] = {}
        """Of one runner of each pool, kept so that a pool without runners knows what one would take."""
        self._next_run_at = state.now
        self._is_late = False
        self.figures: Mapping[str, PoolFigures] = {}
        self.needed: dict[str, int] = {}
        """How many runners each pool keeps at least, of those that may shrink now."""

    def tick(self) -> None:
        now, config = self._state.now, self._state.config
        if not self._state.may_place or now < self._next_run_at:
            return
        if self._state.many_told_at == now and not self._is_late:
            self._next_run_at, self._is_late = now + LATER, True
            return
        self._next_run_at, self._is_late = now + config.capacity_every, False
        groups: dict[GroupName, list[PoolSpec]] = {}
        for name, pool in sorted(self._state.pools.items()):
            groups.setdefault(pool.group, []).append(pool)
            watched = self._watched.get(name)
            if watched is None or watched.mode is not pool.scaling:
                self._watched[name] = _Watched(
                    pool.scaling, ReplicaStabilizer(pool.replicas, now, window=config.growth_window)
                )
        for name in self._watched.keys() - self._state.pools.keys():
            del self._watched[name]
            self._capacity.pop(name, None)
        adapters = self._adapters()
        self.needed.clear()
        self.figures = {
            name: figures
            for group, pools in groups.items()
            for name, figures in self._evaluate_group(group, pools, adapters.get(group, _Adapters()))
        }

    def pools_changed(self) -> None:
        """Run again at the next tick."""
        self._next_run_at = self._state.now

    def next_due(self) -> float:
        return self._next_run_at if self._state.may_place and (self._watched or self._state.pools) else inf

    def report_all(self) -> None:
        """Report the last result again, to a new operator stream."""
        for watched in self._watched.values():
            if watched.last_report is not None:
                self._state.emit(watched.last_report)

    # ------------------------------------------------------------------------------------------------------- one group

    def _evaluate_group(
        self, group: GroupName, pools: Sequence[PoolSpec], adapters: _Adapters
    ) -> Iterator[tuple[str, PoolFigures]]:
        members: dict[str, list[Runner]] = {pool.pool: [] for pool in pools}
        for runner in self._state.runners_of(group):
            if runner.identity.pool in members:
                members[runner.identity.pool].append(runner)
        for name, runners in members.items():
            newest = next((runner for runner in reversed(runners) if runner.takes_work), None)
            if newest is not None:
                self._capacity[name] = newest.capacity
        scalable = [pool for pool in pools if pool.scalable]
        growing = next((pool for pool in scalable if self._may_grow(pool)), next(iter(scalable[-1:]), pools[0]))
        waiting = self._waiting(group, self._capacity.get(growing.pool))
        for pool in pools:
            runners = members[pool.pool]
            load = self._load(pool, runners, waiting if pool is growing else _Waiting())
            if scalable and pool is scalable[0]:
                load = replace(
                    load, adapters=adapters.slots, min_replicas_of_adapters=max(adapters.pinned.values(), default=0)
                )
            advice = self._advise(pool, load, self._scale_down_block(pool, runners))
            yield pool.pool, _figures(runners, load, advice)

    def _may_grow(self, pool: PoolSpec) -> bool:
        return pool.max_replicas is None or self._watched[pool.pool].stabilizer.replicas < pool.max_replicas

    def _adapters(self) -> Mapping[GroupName, _Adapters]:
        """Of each group. There may be very many adapters, and mostly few of them are asked for or pinned."""
        found: defaultdict[GroupName, _Adapters] = defaultdict(_Adapters)
        for adapter in self._state.adapters.replicated():
            spec, serving = adapter.spec, adapter.serving
            # An adapter that was not checked yet has no digest, but needs its slots all the same.
            digest = serving.digest if serving is not None else Digest(str(spec.ref))
            pinned = found[spec.group].pinned
            pinned[digest] = max(spec.min_replicas, pinned.get(digest, 0))
        for group in {
            pool.group for pool in self._state.pools.values()
        }:  # thousands may be in use: compared in one step
            found[group].in_use = self._state.adapter_uses.keys() & self._state.adapters.served_in(group)
        return found

    def _waiting(self, group: GroupName, capacity: Capacity | None) -> _Waiting:
        held = sum(groups.get(group, 0) for groups in self._state.held.values())
        queue = self._state.queues.get(group)
        every = ceil(len(queue) / MAX_LOOKED_AT) if queue is not None else 0
        if queue is None or not every:
            return _Waiting(held=held)
        looked_at = queue.one_in(every)
        requests = self._served_by_more_runners(group, looked_at)
        if not requests:
            return _Waiting(held=held)
        waiting = round(len(requests) / len(looked_at) * len(queue))
        pages = 0
        if capacity is not None:
            sample = requests[:: ceil(len(requests) / SAMPLE)]
            wanted = sum(self._promised_pages(request, capacity) for request in sample)
            pages = round(wanted / len(sample) * waiting)
        oldest = min(requests, key=attrgetter("may_run_from"))
        return _Waiting(waiting, pages, self._state.now - oldest.waits_since, held)

    def _served_by_more_runners(self, group: GroupName, requests: Sequence[Request]) -> Sequence[Request]:
        """Those of these, but for those whose adapter's `maxReplicas` allows no more runners."""
        runners = len(self._state.runners_of(group))
        if runners < self._state.limits.lowest:
            return requests
        adapters = {request.adapter for request in requests}
        limited = {adapter for adapter in adapters if self._state.limits.may_apply(adapter, runners)}
        if not limited:
            return requests
        # One request answers for all alike.
        alike = {_kind(one): one for one in requests if one.adapter in limited}
        waiting = {key for key, one in alike.items() if self._state.limited_to(one) is not None}
        return [one for one in requests if one.adapter not in limited or _kind(one) not in waiting]

    def _promised_pages(self, request: Request, capacity: Capacity) -> int:
        adapter_pages = capacity.adapter_pages(self._state.adapters.rank_of(request.digest))
        return request.requirement_on(capacity, self._state.config, adapter_pages).promise.pages

    # -------------------------------------------------------------------------------------------------------- one pool

    def _load(self, pool: PoolSpec, runners: Iterable[Runner], waiting: _Waiting) -> PoolLoad:
        serving = [runner for runner in runners if runner.takes_work]
        capacity = self._capacity.get(pool.pool)
        runner_size = None
        if capacity is not None:
            # Of sequences the mean: of two runners with the same SLO, a slow one may take one and a fast one many.
            before_any = min(capacity.max_sequences, pool.max_sequences or capacity.max_sequences)
            sequences = [runner.sequences_at_target for runner in serving] or [before_any]
            runner_size = RunnerSize(
                pages=min((runner.ledger.limit for runner in serving), default=capacity.pages),
                sequences=sum(sequences) // len(sequences),
                adapter_slots=capacity.adapter_slots,
            )
        confirmed_by = self._state.now - self._state.config.report_patience
        demands = [runner.demand(confirmed_by) for runner in runners]
        return PoolLoad(
            requests=waiting.requests + sum(requests for requests, _ in demands),
            pages=waiting.pages + sum(pages for _, pages in demands),
            waiting=waiting.requests,
            waited=waiting.waited,
            held=waiting.held,
            serving=len(serving),
            starting=max(pool.replicas, self._watched[pool.pool].stabilizer.replicas),
            runner_size=runner_size,
        )

    def _scale_down_block(self, pool: PoolSpec, runners: Sequence[Runner]) -> ScaleDownBlock | None:
        if not self._state.gateways:
            return NO_GATEWAY
        staying = [runner for runner in runners if runner.drain is None]
        for runner in staying:
            if not runner.attached:
                return ScaleDownBlock("RunnerAway", f"{runner.instance} is not connected", stale=True)
            if self._state.now - runner.last_report_at > self._state.config.report_patience:
                return ScaleDownBlock("ReportsMissing", f"{runner.instance} does not report", stale=True)
        just_started = self._state.now < self._state.reports_by
        if just_started and len(staying) < pool.replicas:
            return JUST_STARTED
        if len({runner.identity.revision for runner in staying}) > 1:
            return ROLLOUT
        return None

    def _advise(self, pool: PoolSpec, load: PoolLoad, block: ScaleDownBlock | None) -> DesiredReplicas:
        watched = self._watched[pool.pool]
        if not pool.scalable:
            watched.stabilizer.replicas = pool.replicas
            advice = DesiredReplicas(pool.replicas, "Disabled", "spec.replicas decides")
        else:
            bounds = ReplicaBounds(
                minimum=pool.min_replicas, maximum=pool.max_replicas, stabilization=pool.stabilization
            )
            need = required_replicas(load, queue_patience=self._state.config.queue_patience)
            advice = watched.stabilizer.advise(need, bounds, self._state.now, block)
            if block is None:
                self.needed[pool.pool] = max(need.replicas, pool.min_replicas)
        self._report(pool, watched, advice)
        return advice

    def _report(self, pool: PoolSpec, watched: _Watched, advice: DesiredReplicas) -> None:
        last_report, now = watched.last_report, self._state.now
        if (
            last_report is not None
            and (last_report.replicas, last_report.stale) == (advice.replicas, advice.stale)
            and (last_report.code == advice.code or now - watched.reported_at < self._state.config.repeat_advice)
        ):
            return
        watched.reported_at = now
        watched.last_report = ReportDesiredReplicas(
            pool.pool, advice.replicas, advice.reason, advice.code, advice.stale
        )
        self._state.emit(watched.last_report)


def _kind(request: Request) -> tuple[str, str, Digest, int, int, int]:
    """Of equal ones, `maxReplicas` keeps back all or none. The size matters: it does not keep back what is too large
    for the runners that have the adapter."""
    size = (request.prompt_tokens, request.max_tokens, request.delivered)
    return (request.base, request.adapter, request.digest, *size)


def _figures(runners: Iterable[Runner], load: PoolLoad, advice: DesiredReplicas) -> PoolFigures:
    attached = [runner for runner in runners if runner.attached]
    return PoolFigures(
        desired=advice.replicas,
        serving=load.serving,
        running=sum(runner.sequences for runner in attached),
        waiting=load.waiting,
        held=load.held,
        pages=sum(runner.ledger.capacity for runner in attached),
        pages_used=sum(max(0, runner.ledger.capacity - runner.pages_free) for runner in attached),
        pages_promised=sum(runner.ledger.promised for runner in attached),
    )
