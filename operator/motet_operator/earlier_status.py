"""What the last written statuses still say as long as a new leader waits for the scheduler's reports. Pure.

Statuses are documents here: both operators write the same conditions.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from motet.domain import ObjectName
from motet_operator.reconcile import AdapterObject, AdapterStatus, Plan, PoolObject, View
from motet_operator.reconcile.conditions import condition_of

Document = dict[str, Any]


class AwaitedKnowledge(Protocol):
    @property
    def reported_groups(self) -> Collection[ObjectName] | None:
        """The groups of which the scheduler has reported everything: of the others, adapters that it has not named may
        be served. None: all groups."""

    @property
    def advice_is_awaited(self) -> bool:
        """Advice that has not come yet may still come."""


def unheard_adapters(view: View, plan: Plan, awaited: AwaitedKnowledge) -> Mapping[ObjectName, bool]:
    """Adapters of which only the last written status says what a runner found, because the scheduler has not reported
    yet. True: all of that status stays. False: no runner serves their group, so only `with_earlier_checks` does."""
    reported = awaited.reported_groups
    # A ready runner that the scheduler has not reported may hold any adapter.
    unheard = _groups_of(view, {one.pool for one in view.instances if one.ready and one.name not in view.slots})
    if reported is None and not unheard:
        return {}
    served = _groups_of(view, {one.pool for one in view.instances if one.ready and one.draining_until is None})
    return {
        status.name: group in served or not _may_be_served(adapter)
        for adapter, status in zip(view.adapters, plan.adapters, strict=True)
        for group in (adapter.resource.group,)
        if group in unheard or (reported is not None and group not in reported)
        if status.name not in view.adapter_reports and _was_reported(adapter, status)
    }


def _groups_of(view: View, pools: Collection[ObjectName]) -> frozenset[ObjectName]:
    return frozenset(pool.resource.group for pool in view.pools if pool.resource.object_name in pools)


def _was_reported(adapter: AdapterObject, status: AdapterStatus) -> bool:
    """Whether the last written status has what only a scheduler can report, about an adapter that is still the same."""
    before, now = (condition_of(one.conditions, "Accepted") for one in (adapter, status))
    if before is None or now is None:
        return False
    # Not by its message: another version of the operator says the same in other words.
    if (before.status, before.reason, before.observed_generation) != (now.status, now.reason, now.observed_generation):
        return False
    return any(one.type in ("ArtifactReady", "Certified") and one.status != "Unknown" for one in adapter.conditions)


def _may_be_served(adapter: AdapterObject) -> bool:
    """Whether the last written status leaves that open."""
    ready = condition_of(adapter.conditions, "Ready")
    return ready is None or ready.status != "False"


def with_earlier_checks(document: Document, before: Document) -> Document:
    """An adapter's new status with what was found in its files: without a runner it is not served, but they stay as
    they were."""
    kept = {name: before[name] for name in ("artifact", "certificate", "revisions") if name in before}
    return _with_conditions_of(before, document, {"ArtifactReady", "Certified"}) | kept


def pool_with_earlier_reports(
    document: Document, before: Document, pool: PoolObject, awaited: AwaitedKnowledge
) -> Document:
    """A pool's new status with what the scheduler reported last, where a new leader has not heard as much."""
    if awaited.advice_is_awaited:
        document = with_earlier_advice(document, before, pool.generation)
    reported = awaited.reported_groups
    if reported is not None and pool.resource.group not in reported and _registered(before) == _registered(document):
        counts = {name: before[name] for name in ("adapters", "slots") if name in before}
        document = _with_conditions_of(before, document, {"AdaptersHealthy"}) | counts
    return document


def with_earlier_advice(document: Document, before: Document, generation: int) -> Document:
    """A pool's new status, in which it follows the advice of before as long as a new leader has not heard any."""
    followed = {one["type"] for one in _conditions(before) if _followed_advice(one, generation)}
    held = {one["type"] for one in document["conditions"] if one["reason"] == "HoldingStaleAdvice"}
    return _with_conditions_of(before, document, held & followed)


def _followed_advice(condition: Document, generation: int) -> bool:
    """Others say what has changed since then: a conflict that is over, another mode."""
    return bool(condition["status"] == "True" and condition.get("observedGeneration") == generation)


def _registered(status: Document) -> object:
    return (status.get("adapters") or {}).get("registered")


def _with_conditions_of(before: Document, document: Document, types: Collection[str]) -> Document:
    kept = {one["type"]: one for one in _conditions(before) if one["type"] in types}
    return document | {"conditions": [kept.get(one["type"], one) for one in document["conditions"]]}


def _conditions(status: Document) -> Iterable[Document]:
    return status.get("conditions") or ()
