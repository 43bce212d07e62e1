"""Which revision each pool's runners get: the newest, or, while other pools roll out, the one that they have.

A new release or a change of the platform's pod template is a new revision of many pools at once. Only a few of them
roll out at a time: an error then affects few pools, and few spare machines are needed. The other pools keep, scale and
replace runners of their current revision. So does a pool whose template changes all the time: otherwise each rollout
would start runners that the next one ends.

A group's change of its base model is one rollout of all its pools: they begin together, and the group's next model
waits until they are done, so that the group never serves more than two.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from motet.change_limit import ChangeLimiter
from motet.domain import ObjectName
from motet_operator.reconcile.revisions import revision_of, template_of
from motet_operator.reconcile.view import ExistingSet, PoolObject, RunnerInstance, RunnerTemplate, View

EPOCH = datetime.fromtimestamp(0, UTC)
MICROSECOND = timedelta(microseconds=1)

WAITING_FOR_OTHER_POOLS = (
    "the new revision waits until fewer pools roll out at the same time; the current runners keep serving"
)
CHANGED_TOO_OFTEN = (
    "the new revision waits, because the pool has changed three times in a row; the current runners keep serving"
)


WAITING_FOR_GROUP = (
    "the new model waits until no runner of the group has the model before the last; the current runners keep serving"
)
MISMATCHED = "the pool starts no runners, because its group serves another model"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTarget:
    newest: str
    """The revision of the current spec."""

    revision: str
    """The revision that its runners get now."""

    template: RunnerTemplate | None
    """Of `revision`; None if only its existing set can be scaled."""

    base: str
    """Of `revision`: its base model."""

    waiting_reason: str = ""
    """Why that is not the newest; empty if it is."""

    @property
    def waits(self) -> bool:
        return self.revision != self.newest


class RolloutLimiter:
    """Counts how often pools have started a rollout lately. After a restart of the operator a few more may start."""

    def __init__(self, pause: timedelta = timedelta(0)) -> None:
        self._targets: dict[ObjectName, str] = {}
        self._rollouts = ChangeLimiter[ObjectName](pause / MICROSECOND)

    def held(self, name: ObjectName, newest: str, members: Sequence[RunnerInstance], now: datetime) -> str | None:
        """The revision that a pool must keep for now; None if it may go on to the newest."""
        before = self._targets.get(name)
        if before is None or not _starts_runners(before, newest, members):
            return None
        if self._rollouts.may_change(name, _microseconds(now)):
            return None
        return before

    def note(
        self,
        targets: Mapping[ObjectName, RolloutTarget],
        members: Mapping[ObjectName, list[RunnerInstance]],
        now: datetime,
    ) -> None:
        """Remember the targets of this round."""
        for name, target in targets.items():
            before = self._targets.get(name)
            if before is not None and _starts_runners(before, target.revision, members.get(name, ())):
                self._rollouts.changed(name, _microseconds(now))
        for gone in self._targets.keys() - targets.keys():
            self._rollouts.forget(gone)
        self._targets = {name: target.revision for name, target in targets.items()}
        self._rollouts.expire(_microseconds(now))

    def due(self, targets: Mapping[ObjectName, RolloutTarget]) -> list[datetime]:
        """When the held pools may start their rollouts."""
        held = [name for name, target in targets.items() if target.waiting_reason == CHANGED_TOO_OFTEN]
        return [EPOCH + self._rollouts.next_at(name) * MICROSECOND for name in held]


def _microseconds(at: datetime) -> int:
    """Whole microseconds: seconds as floats are rounded, and a pool must be due at exactly its time."""
    return (at - EPOCH) // MICROSECOND


def _starts_runners(before: str, after: str, members: Sequence[RunnerInstance]) -> bool:
    """Whether the change needs new runners. Going back to the revision of most ready runners does not."""
    if before == after:
        return False
    ready = Counter(one.revision for one in members if one.ready)
    return ready[after] <= ready[before]


def rollout_targets(
    view: View, refused: Collection[ObjectName], limiter: RolloutLimiter
) -> Mapping[ObjectName, RolloutTarget]:
    """The target of each pool."""
    found = {pool.resource.object_name: _newest(pool) for pool in view.pools}
    group_of = {pool.resource.object_name: pool.resource.group for pool in view.pools}
    members: dict[ObjectName, list[RunnerInstance]] = {}
    for one in view.instances:
        members.setdefault(one.pool, []).append(one)
    sets = {(each.pool, each.revision): each for each in view.runner_sets}
    for name, target in found.items():
        held = limiter.held(name, target.newest, members.get(name, ()), view.now)
        if held is not None and (name, held) in sets:
            found[name] = _stays(target, sets[name, held], CHANGED_TOO_OFTEN)
    _hold_models(found, group_of, refused, members, sets)
    if view.rolling_pools is not None:
        _take_turns(view.rolling_pools, found, group_of, refused, members, sets)
    limiter.note(found, members, view.now)
    return found


def _hold_models(
    found: dict[ObjectName, RolloutTarget],
    group_of: Mapping[ObjectName, ObjectName],
    refused: Collection[ObjectName],
    members: Mapping[ObjectName, Sequence[RunnerInstance]],
    sets: Mapping[tuple[ObjectName, str], ExistingSet],
) -> None:
    """Pools of another model stay as they are, and no pool brings a third model to its group."""
    serving: defaultdict[ObjectName, set[str]] = defaultdict(set)
    moving: set[ObjectName] = set()
    failing: set[ObjectName] = set()
    for name, runners in members.items():
        if (group := group_of.get(name)) is None:
            continue
        bases = {sets[name, one.revision].base for one in runners if (name, one.revision) in sets and _serves([one])}
        serving[group] |= bases
        # A change that fails must not keep the one that mends it.
        failing |= {group for one in runners if one.failures > 1}
        if len(bases) > 1 or (bases and name in refused):
            moving.add(group)
    for name, target in found.items():
        latest = max(members.get(name, ()), key=lambda one: one.ordinal, default=None)
        if latest is None or latest.revision == target.newest or (name, latest.revision) not in sets:
            continue
        group = group_of[name]
        third = target.base not in serving[group] and len(serving[group]) > 1
        if name in refused:
            found[name] = _stays(target, sets[name, latest.revision], MISMATCHED)
        elif third and group in moving - failing:
            found[name] = _stays(target, sets[name, latest.revision], WAITING_FOR_GROUP)


def _take_turns(  # noqa: PLR0917
    limit: int,
    found: dict[ObjectName, RolloutTarget],
    group_of: Mapping[ObjectName, ObjectName],
    refused: Collection[ObjectName],
    members: Mapping[ObjectName, Sequence[RunnerInstance]],
    sets: Mapping[tuple[ObjectName, str], ExistingSet],
) -> None:
    rolling = 0
    changing: set[tuple[ObjectName, str]] = set()
    """Groups that change their model, and to which."""
    waiting: list[tuple[ObjectName, str]] = []
    for name, target in found.items():
        revisions = {one.revision for one in members.get(name, ())}
        if name in refused or revisions <= {target.revision}:
            continue
        if len(revisions) > 1 or (name, target.revision) in sets:
            rolling += 1
            changing.add((group_of[name], target.base))
            continue
        (has,) = revisions
        if (name, has) in sets and _serves(members[name]):
            waiting.append((name, has))
    for name, revision in sorted(waiting):
        change = group_of[name], found[name].base
        if sets[name, revision].base != found[name].base and change in changing:
            continue  # its group's rollout, which has begun
        if rolling < limit:
            rolling += 1
            changing.add(change)
        else:
            found[name] = _stays(found[name], sets[name, revision], WAITING_FOR_OTHER_POOLS)


def _stays(target: RolloutTarget, at: ExistingSet, why: str) -> RolloutTarget:
    return RolloutTarget(
        newest=target.newest, revision=at.revision, template=at.template, base=at.base, waiting_reason=why
    )


def _newest(pool: PoolObject) -> RolloutTarget:
    template = template_of(pool)
    revision = revision_of(pool.resource.object_name, template)
    return RolloutTarget(newest=revision, revision=revision, template=template, base=template.base)


def _serves(members: Sequence[RunnerInstance]) -> bool:
    """Whether one of them may have work. A pool without such a runner has nothing to lose, and a change may fix it."""
    return any(one.ready or one.attached for one in members)
