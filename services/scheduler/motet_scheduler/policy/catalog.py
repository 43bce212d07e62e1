"""Pools and adapters as the operator states them, the catalog that gateways get, and the catalog that is saved."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf

from motet.domain import InstanceName, ObjectName
from motet.runner_info import BatchCap
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.adapter import Revision
from motet_scheduler.policy.autoscaler import Autoscaler
from motet_scheduler.policy.fill_limits import fill_limits
from motet_scheduler.policy.group_bases import GroupBase, Models
from motet_scheduler.policy.runners import Runner, runner_report
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.step_profile import NO_PROFILE, StepProfile
from motet_scheduler.policy.values import (
    AdapterSpec,
    BaseModel,
    Catalog,
    CatalogAdapter,
    CatalogChanges,
    CatalogGroup,
    GroupName,
    NamespaceUids,
    PoolSpec,
)

MAX_CHECK_PATIENCE = 4.0
"""How long a new operator is not told of all while checks are answered, in times of `forget_runner`: as long as it
waits for that."""

MAX_REPORTED = 200
"""Adapters of which one event tells the operator. `TryMore` goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    spec: AdapterSpec
    serving: Revision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    group: GroupName
    base: BaseModel
    max_model_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCatalog:
    pools: tuple[PoolSpec, ...] = ()
    adapters: tuple[SavedAdapter, ...] = ()
    groups: tuple[SavedGroup, ...] = ()
    runners: tuple[InstanceName, ...] = ()
    """The attached runners: a successor waits for them shortly before it places anything."""
    namespaces: NamespaceUids = ()


class CatalogPublisher:
    def __init__(self, state: SchedulerState, capacity: Autoscaler) -> None:
        self._state = state
        self._capacity = capacity
        self._began_at = state.now
        self._operator_since: float | None = None
        """When the last operator connected."""
        self._reported: set[GroupName] = set()
        """Groups of which it has heard that it has heard all."""
        self._unreported: set[GroupName] = set()
        """The others."""
        self._complete: set[GroupName] = set()
        """Of these, those of which it has heard all when nothing of `_to_report` is left."""
        self._entries: dict[ObjectName, CatalogAdapter] = {}
        """The adapters of the catalog that was published last."""
        self._to_report: dict[ObjectName, bool] = {}
        """Adapters of which the operator may have to hear, and whether it has to in any case."""
        self._to_publish: dict[ObjectName, None] = {}
        """Adapters that may have changed since then. In order, as a set would differ from process to process."""
        self._residency_due = state.now
        self._measured: dict[str, StepProfile] = {}
        """Of each pool, what one of its runners has measured last."""

    def operator_connected(self, _event: events.OperatorConnected) -> None:
        self._operator_since = self._state.now
        self._reported.clear()
        self._complete.clear()
        self._groups_changed()
        self._to_report = dict.fromkeys(self._state.adapters.by_name, True)
        self._report_some()
        self._capacity.report_all()
        for runner in self._state.runners.values():
            self._state.emit(runner_report(runner))

    def _groups_changed(self) -> None:
        groups = {pool.group for pool in self._state.pools.values()}
        self._reported &= groups
        self._unreported = groups - self._reported

    def next_due(self) -> float:
        """When the operator and the gateways are told which runners have which adapters."""
        return self._residency_due if self._state.adapters.changed and not self._state.catalog_changed else inf

    def look_from(self) -> float:
        """Other orders about adapters may be due, or a new operator has not heard all yet."""
        if not self._state.may_place:
            return inf
        return -inf if self._operator_since is not None and self._unreported else self._state.orders.next_due()

    def look(self) -> None:
        self.order_adapter_loads()
        self._end_reports()

    def _end_reports(self) -> None:
        """Find of which groups a new operator hears what is left, and then that it has heard all: the need of all pools
        is known, and all adapters are that a runner can tell of."""
        state, since = self._state, self._operator_since
        if since is None or not self._unreported or self._to_report or not (state.may_place and state.catalog_known):
            return
        self._complete = self._unreported - self._groups_that_miss_runners() - self._groups_with_due_checks(since)
        if self._complete:
            for adapter in state.adapters:
                if adapter.last_report is None and adapter.spec.group in self._complete:
                    self._to_report[adapter.spec.ref.object] = False
            if state.adapters.changed:  # with many runners there is always one that waits
                self._residency_due = state.now

    def _groups_that_miss_runners(self) -> set[GroupName]:
        groups = {pool.group for pool in self._state.pools.values()}
        return {group for group in groups if self._state.missed(group)}

    def _groups_with_due_checks(self, since: float) -> set[GroupName]:
        """Groups of which a runner can check an adapter that nobody has told of yet. It ends soon after `since` if no
        check is answered, and some time after it in any case."""
        state = self._state
        patience = state.config.forget_runner
        if state.now - since > MAX_CHECK_PATIENCE * patience:
            return set()
        able = {runner.group for runner in state.runners.values() if runner.takes_work}
        due, answered = set(), dict.fromkeys(able, since)
        for adapter in state.adapters if able else ():
            if (group := adapter.spec.group) in able:
                answered[group] = max(answered[group], adapter.checked_at)
                if group not in due and adapter.undecided:
                    due.add(group)
        return {group for group in due if state.now - answered[group] <= patience}

    def catalog_replaced(self, event: events.CatalogReplaced) -> None:
        first, self._state.catalog_known = not self._state.catalog_known, True
        pools = {pool.pool: pool for pool in event.pools}
        changed = self._state.adapters.state(event.adapters) or pools != self._state.pools
        changed |= event.namespaces != self._state.namespaces
        models = _models(self._state.pools.values()), _models(pools.values())
        self._state.pools, self._state.namespaces = pools, event.namespaces
        self._measured = {pool: profile for pool, profile in self._measured.items() if pool in pools}
        self._groups_changed()
        self._state.decide_again()
        for group in self._state.bases.models_changed(*models):
            self._state.bases_changed = True
            self._state.adapters.base_changed(group)
        if self._state.weights.state(event.pools):
            for group, queue in self._state.queues.items():
                queue.weigh(partial(self._state.weights.of, group))
        if self._state.quotas.state(event.pools, event.adapters, self._state.now):
            self._state.quotas.adopt(self._state.requests.values(), self._state.now, charged=first)
        limits_changed = self._state.limits.state(event.adapters)
        for queue in self._state.queues.values() if limits_changed else ():
            queue.limits_changed(limits_changed)
        if changed:
            self._state.emit(effects.SaveCatalog(outdates=True))
            self._state.catalog_changed = True
        for runner in self._state.runners.values():
            self.apply_pool(runner)
        self._capacity.pools_changed()
        self.order_adapter_loads()

    def catalog_updated(self, event: events.CatalogUpdated) -> None:
        gone = {ref.object for ref in event.removed_adapters}
        pools = self._state.pools | {pool.pool: pool for pool in event.pools}
        specs = {adapter.spec.ref.object: adapter.spec for adapter in self._state.adapters}
        specs |= {spec.ref.object: spec for spec in event.adapters}
        self.catalog_replaced(
            events.CatalogReplaced(
                tuple(pool for name, pool in pools.items() if name not in event.removed_pools),
                tuple(spec for name, spec in specs.items() if name not in gone),
                self._state.namespaces,
            )
        )

    def bases_changed(self) -> None:
        """A group has another base model, or one has gone: its adapters are checked for the one that it has."""
        self._state.bases_changed = False
        heard = self._state.catalog.groups if self._state.catalog is not None else ()
        replaced = any(self._state.bases.of(one.group).model.digest != one.base_digest for one in heard)
        self._state.emit(effects.SaveCatalog(outdates=replaced))
        self.order_adapter_loads()

    def apply_pool(self, runner: Runner) -> None:
        pool, profile = self._state.pools.get(runner.identity.pool), self._profile_of(runner)
        made_of = (pool, profile, runner.batch_cap)
        if made_of == runner.limits_made_of:  # mostly: each report asks
            return
        runner.limits_made_of = made_of
        before, cap = runner.max_sequences, runner.batch_cap or BatchCap(target_seconds=0.0)
        places = min(runner.capacity.max_sequences, (pool.max_sequences if pool is not None else 0) or inf)
        runner.max_sequences = int(min(places, cap.sequences or inf))
        runner.sequences_at_target = int(min(places, cap.at_target or inf))
        runner.limits = fill_limits(profile, runner.batch_cap, runner.max_sequences)
        if runner.max_sequences != before:
            self._state.queue(runner.group).retry_on(runner)

    def _profile_of(self, runner: Runner) -> StepProfile:
        """A runner that has just come has measured no iterations: without a limit of its own it would get all requests,
        beside others that have one. So those of its pool's other runners count until then."""
        pool, profile = runner.identity.pool, runner.profile
        if profile.known:
            if pool in self._state.pools:
                self._measured[pool] = profile
            return profile
        return profile.with_iterations_of(self._measured.get(pool, NO_PROFILE))

    def order_adapter_loads(self) -> None:
        if not self._state.may_place:
            return
        self._state.orders.begin(self._state.now)
        runners = self._state.runners.values()
        if self._state.checks.end(runners, self._state.now, self._state.some_may_return):
            self._state.catalog_changed = True
        self.save_withdrawn()
        self._state.effects += self._state.checks.orders(runners, self._state.now)
        self._state.effects += self._state.loads.replicas(runners, self._state.now)
        self._state.effects += self._state.template_loads.orders(runners, self._state.now)

    def save_withdrawn(self) -> None:
        """What serves no longer, because all runners have refused it, a successor must not serve."""
        if self._state.verdicts.take_withdrawn():
            self._state.catalog_changed = True
            self._state.emit(effects.SaveCatalog(outdates=True))

    def drop_unused_adapters(self) -> None:
        if self._state.adapters.retired or self._state.adapters.gone:
            self._state.effects += self._state.drops.orders(self._state.is_in_use, self._state.runners.values())

    def tell_changes(self) -> None:
        """Tell the operator and the gateways what has changed: at once, but changes of residency only now and then.
        With many runners, adapters come and go all the time. Of many that have changed together, each event tells the
        operator of some."""
        state = self._state
        if not state.catalog_changed:
            if not state.adapters.changed or state.now < self._residency_due:
                self._report_some()
                return
            self._residency_due = state.now + state.config.residency_pause
        changed = state.adapters.take_changed()
        for name in changed:
            self._to_report.setdefault(name, False)
        self._report_some()
        self._to_publish |= changed
        # After a takeover the catalog is unknown until the operator connects. An empty one would mislead gateways.
        if state.may_place and (state.catalog_known or state.pools) and not self._bases_awaited():
            self._publish()

    def _bases_awaited(self) -> bool:
        """Whether gateways know better than the first catalog would say which base model a group has."""
        if self._state.catalog is not None:
            return False
        return any(not self._state.bases.known(group) for group in self._groups_that_miss_runners())

    @property
    def more_to_tell(self) -> bool:
        return bool(self._to_report) or self._state.drops.more

    def _report_some(self) -> None:
        """Report some of those of which something has changed, and after the last one that a new operator has heard
        all. After a takeover, an adapter is not reported before a runner has reported it, or could have: the operator
        keeps the last report until then."""
        if not (self._to_report or self._complete):  # mostly, and each event asks
            return
        awaited, by_name = self._groups_that_miss_runners(), self._state.adapters.by_name
        for name in list(islice(self._to_report, MAX_REPORTED)):
            again, adapter = self._to_report.pop(name), by_name.get(name)
            if adapter is None:
                continue
            first = adapter.last_report is None and adapter.failure is None
            if first and adapter.serving is None:
                continue
            report = self._state.reports.report(adapter)
            restored = first and adapter.checked_at < self._began_at
            if restored and not report.replicas and adapter.spec.group in awaited:
                self._complete.discard(adapter.spec.group)
                continue
            if again or report != adapter.last_report:
                adapter.last_report = report
                self._state.emit(report)
        if self._complete and not self._to_report:
            self._end_groups()

    def _end_groups(self) -> None:
        complete, self._complete = self._complete & self._unreported, set()
        self._reported |= complete
        self._unreported -= complete
        if complete:
            self._state.emit(effects.ReportedAll(tuple(sorted(complete))))

    def _publish(self) -> None:
        state, entries = self._state, self._entries
        before, adapters = state.catalog, state.adapters.by_name
        state.catalog_changed = False
        changed = []
        for name in self._to_publish if before is not None else adapters:
            if (adapter := adapters.get(name)) is not None:
                entry = self._state.reports.entry(adapter, state.runners)
                if entries.get(name) != entry:
                    entries[name] = entry
                    changed.append(entry)
        # Only of what has changed: with thousands of adapters, a look at all took longer than the rest.
        removed = [entries.pop(name).ref for name in self._to_publish if name in entries and name not in adapters]
        self._to_publish.clear()
        groups = tuple(self._groups())
        alike = before is not None and before.namespaces == state.namespaces
        if before is not None and alike and not changed and not removed and groups == before.groups:
            return
        state.catalog = Catalog(groups=groups, adapters=tuple(entries.values()), namespaces=state.namespaces)
        changes = CatalogChanges(adapters=tuple(changed), removed=tuple(removed)) if alike else None
        state.emit(effects.PublishCatalog(state.catalog, changes=changes))

    def _groups(self) -> Iterator[CatalogGroup]:
        names: dict[GroupName, list[PoolSpec]] = {}
        for pool in self._state.pools.values():
            names.setdefault(pool.group, []).append(pool)
        for group, pools in sorted(names.items()):
            base = self._state.bases.of(group)
            yield CatalogGroup(
                group=group,
                served_name=pools[0].served_name,
                model_uri=pools[0].model_uri,
                pools=tuple(sorted(pool.pool for pool in pools)),
                tenants=pools[0].tenants,  # this and the next two are the same in each
                max_classes=pools[0].max_classes,
                chat=pools[0].chat,
                base_digest=base.model.digest,
                asset_digest=base.model.asset_digest,
                max_model_length=base.max_model_length,
                runners=tuple(
                    sorted(
                        (runner.instance, runner.address)
                        for runner in self._state.runners_of(group)
                        if runner.attached and not runner.unhealthy
                    )
                ),
            )

    def restore(self, saved: SavedCatalog) -> None:
        self._state.pools = {pool.pool: pool for pool in saved.pools}
        self._state.bases.current = {one.group: GroupBase(one.base, one.max_model_length) for one in saved.groups}
        for adapter in saved.adapters:
            self._state.adapters.restore(adapter.spec, adapter.serving)
        self._state.limits.state(adapter.spec for adapter in saved.adapters)
        self._state.weights.state(saved.pools)
        self._state.quotas.state(saved.pools, [adapter.spec for adapter in saved.adapters], self._state.now)
        self._state.namespaces = saved.namespaces

    def to_save(self) -> SavedCatalog:
        return SavedCatalog(
            pools=tuple(self._state.pools.values()),
            adapters=tuple(SavedAdapter(spec=one.spec, serving=one.serving) for one in self._state.adapters),
            groups=tuple(
                SavedGroup(group=group, base=base.model, max_model_length=base.max_model_length)
                for group, base in self._state.bases.current.items()
            ),
            runners=tuple(
                sorted(runner.instance for runner in self._state.runners.values() if runner.attached or runner.telling)
            ),
            namespaces=self._state.namespaces,
        )


def _models(pools: Iterable[PoolSpec]) -> Models:
    models: defaultdict[GroupName, set[str]] = defaultdict(set)
    for pool in pools:
        models[pool.group].add(pool.model_uri)
    return models
