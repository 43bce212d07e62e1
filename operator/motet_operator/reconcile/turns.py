"""Which revision each pool's runners are brought to: the newest, or while others roll, the one that they have.

A new release, or a change of what the platform says of all runners, is a new revision of many pools at once. Only so
many of them roll at a time: what is wrong with it shows on few, and spare machines are needed for few. The others keep,
scale and replace the runners of the revision that they have.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from motet.model import ObjectName
from motet_operator.reconcile.revisions import revision_of, template_of
from motet_operator.reconcile.view import Instance, PoolObject, RunnerTemplate, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    newest: str
    """The revision of what the pool says now."""

    revision: str
    """The one that its runners are brought to now."""

    template: RunnerTemplate
    """Of `revision`."""

    @property
    def waits(self) -> bool:
        return self.revision != self.newest


def aims(view: View, refused: Collection[ObjectName]) -> Mapping[ObjectName, Aim]:
    """Of all pools."""
    found = {pool.resource.object_name: _newest(pool) for pool in view.pools}
    if view.rolling_pools is None:
        return found
    members: dict[ObjectName, list[Instance]] = {}
    for one in view.instances:
        members.setdefault(one.pool, []).append(one)
    sets = {(each.pool, each.revision): each for each in view.runner_sets}
    rolling = 0
    waiting: list[tuple[ObjectName, str]] = []
    for name, aim in found.items():
        revisions = {one.revision for one in members.get(name, ())}
        if name in refused or revisions <= {aim.newest}:
            continue
        if len(revisions) > 1 or (name, aim.newest) in sets:
            rolling += 1
            continue
        (has,) = revisions
        if (name, has) in sets and _serves(members[name]):
            waiting.append((name, has))
    for name, revision in sorted(waiting)[max(0, view.rolling_pools - rolling) :]:
        found[name] = Aim(newest=found[name].newest, revision=revision, template=sets[name, revision].template)
    return found


def _newest(pool: PoolObject) -> Aim:
    template = template_of(pool)
    revision = revision_of(pool.resource.object_name, template)
    return Aim(newest=revision, revision=revision, template=template)


def _serves(members: Sequence[Instance]) -> bool:
    """One of which no runner serves has nothing to lose, and the change is perhaps what mends it."""
    return any(one.ready or one.attached for one in members)
