"""The status of a pool: its conditions, and its runners, adapters and slots in numbers."""

from collections.abc import Iterable, Sequence

from motet.domain import ObjectName
from motet.plurals import counted
from motet.resources.status import AdapterCounts, Slots
from motet_operator.reconcile.conditions import ConditionResult, no, progress, with_transition_times, yes
from motet_operator.reconcile.plan import PoolStatus
from motet_operator.reconcile.pools import PoolRefusal
from motet_operator.reconcile.rollout_order import RolloutTarget
from motet_operator.reconcile.scaling import Scaling
from motet_operator.reconcile.view import PoolObject, RunnerInstance, View


def pool_status(  # noqa: PLR0917
    view: View,
    pool: PoolObject,
    target: RolloutTarget,
    refusal: PoolRefusal | None,
    scaling: Scaling,
    adapters: AdapterCounts,
    *,
    decides: bool,
) -> PoolStatus:
    name = pool.resource.object_name
    revision = target.newest
    members = [instance for instance in view.instances if instance.pool == name]
    ready = [instance for instance in members if instance.ready and instance.draining_until is None]
    updated = [instance for instance in ready if instance.revision == revision]
    trouble = _trouble(members) or _last_failure(view, name, ready)
    wanted = scaling.replicas
    if refusal:
        wanted = min(wanted, len(members)) if refusal.keeps_runners else 0
    steps = (
        _accepted(refusal),
        _available(wanted, ready, members, trouble),
        _progressing(wanted, updated, members, refusal, target, trouble),
        _adapters_healthy(adapters),
        scaling.condition,
        _ready(wanted, ready, updated, members, refusal, target, trouble),
    )
    draining = sum(instance.draining_until is not None for instance in members)
    complete = len(updated) >= wanted and all(instance.revision == revision for instance in members)
    return PoolStatus(
        name=name,
        model=pool.resource.served_name,
        replicas=wanted,
        existing=len(members),
        staying=min(wanted, len(members) - draining),
        ready=len(ready),
        updated=len(updated),
        draining=draining,
        revision=revision,
        target_revision=target.revision,
        current_revision=revision if complete or not pool.current_revision else pool.current_revision,
        decides=decides,
        conditions=with_transition_times(
            (*steps, *_progress(steps)), pool.conditions, now=view.now, generation=pool.generation
        ),
        observed_generation=pool.generation,
        adapters=adapters,
        slots=_slots(view, ready),
    )


def _accepted(refusal: PoolRefusal | None) -> ConditionResult:
    return no("Accepted", refusal.reason, refusal.message) if refusal else yes("Accepted", "Valid")


def _available(
    wanted: int, ready: Sequence[RunnerInstance], members: Sequence[RunnerInstance], trouble: str
) -> ConditionResult:
    if ready:
        return yes("Available", "RunnersReady", f"{len(ready)} of {wanted} runners serve")
    if not members:
        return no("Available", "NoRunners", f"no runner exists{_appended(trouble)}")
    return no(
        "Available",
        "RunnersNotReady",
        trouble or f"no runner is ready; the pool has {counted(len(members), 'runner')}",
    )


def _progressing(  # noqa: PLR0917
    wanted: int,
    updated: Sequence[RunnerInstance],
    members: Sequence[RunnerInstance],
    refusal: PoolRefusal | None,
    target: RolloutTarget,
    trouble: str,
) -> ConditionResult:
    if refusal:
        return no("Progressing", refusal.reason, refusal.message)
    if any(instance.failures > 1 for instance in members):
        return no("Progressing", "RunnerFailing", trouble)
    if target.waits:
        return yes("Progressing", "WaitingForTurn", target.waiting_reason)
    if any(instance.revision != target.newest for instance in members):
        return yes("Progressing", "RollingOut", _so_far(wanted, updated, members, target, trouble))
    moving = sum(instance.node_is_leaving for instance in members)
    if moving and wanted:
        return yes(
            "Progressing",
            "RunnersMoving",
            f"{'1 runner is on a node that is' if moving == 1 else f'{moving} runners are on nodes that are'} being "
            "emptied; a runner leaves when its replacement on another node is ready"
            f"{_appended(trouble)}",
        )
    if len(updated) < wanted:
        return yes("Progressing", "RunnersStarting", _so_far(wanted, updated, members, target, trouble))
    if len(members) > wanted:
        return yes(
            "Progressing", "ScalingDown", f"the pool has {counted(len(members) - wanted, 'runner')} more than it needs"
        )
    return no("Progressing", "Complete", "nothing is left to do")


def _adapters_healthy(adapters: AdapterCounts) -> ConditionResult:
    if not adapters.failed:
        return yes("AdaptersHealthy", "NoneFailed")
    return no(
        "AdaptersHealthy",
        "AdaptersFailed",
        f"{adapters.failed} of {adapters.registered} adapters cannot be served; an adapter's own conditions say why",
    )


def _ready(  # noqa: PLR0917
    wanted: int,
    ready: Sequence[RunnerInstance],
    updated: Sequence[RunnerInstance],
    members: Sequence[RunnerInstance],
    refusal: PoolRefusal | None,
    target: RolloutTarget,
    trouble: str,
) -> ConditionResult:
    if refusal:
        return no("Ready", refusal.reason, refusal.message)
    if wanted == 0:
        # True: this is what the pool asks for. Tools that wait for an object would wait for ever otherwise.
        return yes(
            "Ready",
            "ScaledToZero",
            "no runner is needed now; a request (mode Builtin) or a higher spec.replicas starts one",
        )
    if len(updated) >= wanted:
        return yes("Ready", "AllRunnersReady", f"{len(updated)} of {wanted} runners are ready")
    if any(instance.failures > 1 for instance in members):
        return no("Ready", "RunnerFailing", trouble)
    if target.waits and len(ready) >= wanted:
        return no("Ready", "WaitingForTurn", target.waiting_reason)
    return no("Ready", "RunnersStarting", _so_far(wanted, updated, members, target, trouble))


def _progress(steps: Sequence[ConditionResult]) -> Iterable[ConditionResult]:
    accepted, _, progressing, *_ = steps
    if not accepted.holds:
        return progress(stalled=accepted)
    return progress(working=progressing) if progressing.holds or progressing.reason == "RunnerFailing" else progress()


def _so_far(
    wanted: int,
    updated: Sequence[RunnerInstance],
    members: Sequence[RunnerInstance],
    target: RolloutTarget,
    trouble: str,
) -> str:
    """How many runners are ready, and what the next one waits for."""
    old = sum(instance.revision != target.newest for instance in members)
    if not old:
        return f"{len(updated)} of {wanted} runners are ready{_appended(trouble)}"
    rest = f"{old} still {'has' if old == 1 else 'have'} the old one"
    return f"{len(updated)} of {wanted} runners have the new revision, and {rest}{_appended(trouble)}"


def _appended(trouble: str) -> str:
    return f"; {trouble}" if trouble else ""


def _trouble(members: Sequence[RunnerInstance]) -> str:
    """Why a runner does not serve that should: a draining runner is not ready on purpose."""
    troubled = [one for one in members if one.reason and not one.ready and one.draining_until is None]
    worst = max(troubled, key=lambda one: one.failures, default=None)
    return f"{worst.name}: {worst.reason}" if worst is not None else ""


def _last_failure(view: View, name: ObjectName, ready: Sequence[RunnerInstance]) -> str:
    """Why the pool last lost a runner, unless another one has become ready since."""
    last = max((one for one in view.failed if one.pool == name), key=lambda one: one.at, default=None)
    # Times are whole seconds: a successor may have been created in the same one.
    if last is None or any(one.ordinal >= last.at for one in ready):
        return ""
    return f"{last.name}: {last.reason}"


def _slots(view: View, ready: Sequence[RunnerInstance]) -> Slots:
    names = {instance.name for instance in ready}
    held = {
        (place.runner, place.digest)
        for known in view.adapter_reports.values()
        for place in known.replicas
        if place.tier == "device" and place.runner in names
    }
    return Slots(total=sum(view.slots.get(name, 0) for name in names), used=len(held))
