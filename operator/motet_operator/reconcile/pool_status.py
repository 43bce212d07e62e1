"""The status of a pool: its conditions, and its runners, adapters and slots in numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from motet.domain import ObjectName
from motet.plurals import counted
from motet.resources.status import AdapterCounts, Condition, Slots
from motet_operator.reconcile.conditions import (
    ConditionResult,
    no,
    not_evaluated,
    progress,
    unknown,
    with_transition_times,
    yes,
)
from motet_operator.reconcile.plan import PoolStatus
from motet_operator.reconcile.pools import PoolRefusal
from motet_operator.reconcile.rollout_order import RolloutTarget
from motet_operator.reconcile.scaling import Scaling
from motet_operator.reconcile.view import PoolObject, RunnerInstance, View


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRunners:
    """The runners of a pool, and what they should be."""

    wanted: int
    members: Sequence[RunnerInstance]
    """All that exist."""

    ready: Sequence[RunnerInstance]
    """Those that serve."""

    target: RolloutTarget
    refusal: PoolRefusal | None
    trouble: str
    """Why one of them does not serve; empty if nothing is known."""

    @property
    def updated(self) -> int:
        """How many serve with the newest revision."""
        return sum(one.revision == self.target.newest for one in self.ready)

    @property
    def outdated(self) -> int:
        """How many exist with another revision."""
        return sum(one.revision != self.target.newest for one in self.members)

    @property
    def failing(self) -> bool:
        return any(one.failures > 1 for one in self.members)

    @property
    def so_far(self) -> str:
        """How many runners are ready, and what the next one waits for."""
        old = self.outdated
        if not old:
            return f"{self.updated} of {self.wanted} runners are ready{self.appended_trouble}"
        rest = f"{old} still {'has' if old == 1 else 'have'} the old one"
        return f"{self.updated} of {self.wanted} runners have the new revision, and {rest}{self.appended_trouble}"

    @property
    def appended_trouble(self) -> str:
        return f"; {self.trouble}" if self.trouble else ""


def pool_status(  # noqa: PLR0917
    view: View,
    pool: PoolObject,
    target: RolloutTarget,
    refusal: PoolRefusal | None,
    scaling: Scaling,
    adapters: AdapterCounts,
    *,
    decider: PoolObject | None,
) -> PoolStatus:
    name = pool.resource.object_name
    members = [instance for instance in view.instances if instance.pool == name]
    ready = [instance for instance in members if instance.ready and instance.draining_until is None]
    wanted = scaling.replicas
    if refusal:
        wanted = min(wanted, len(members)) if refusal.keeps_runners else 0
    runners = PoolRunners(
        wanted=wanted,
        members=members,
        ready=ready,
        target=target,
        refusal=refusal,
        trouble=_trouble(members) or _last_failure(view, name, ready),
    )
    draining = sum(instance.draining_until is not None for instance in members)
    complete = runners.updated >= wanted and not runners.outdated
    return PoolStatus(
        name=name,
        model=pool.resource.served_name,
        replicas=wanted,
        existing=len(members),
        staying=min(wanted, len(members) - draining),
        ready=len(ready),
        updated=runners.updated,
        draining=draining,
        revision=target.newest,
        target_revision=target.revision,
        current_revision=target.newest if complete or not pool.current_revision else pool.current_revision,
        decides=decider is pool,
        conditions=_conditions(view, pool, runners, scaling, adapters, decider=decider),
        observed_generation=pool.generation,
        adapters=adapters,
        slots=_slots(view, ready),
    )


def _conditions(
    view: View,
    pool: PoolObject,
    runners: PoolRunners,
    scaling: Scaling,
    adapters: AdapterCounts,
    *,
    decider: PoolObject | None,
) -> tuple[Condition, ...]:
    try:
        steps = (
            _accepted(runners.refusal),
            _available(runners),
            _progressing(runners),
            _adapters_healthy(adapters),
            _scaling_active(scaling, runners.refusal),
            _ready(runners),
        )
        found = (*steps, *_slo_kept(view, pool, runners), *_tenants_applied(pool, decider), *_progress(steps))
        return with_transition_times(found, pool.conditions, now=view.now, generation=pool.generation)
    except Exception as error:  # one pool must not stop the others
        return not_evaluated(error, pool.conditions, now=view.now, generation=pool.generation)


def _accepted(refusal: PoolRefusal | None) -> ConditionResult:
    return no("Accepted", refusal.reason, refusal.message) if refusal else yes("Accepted", "Valid")


def _available(runners: PoolRunners) -> ConditionResult:
    if runners.refusal and not runners.refusal.keeps_runners:
        return no("Available", runners.refusal.reason, f"no request reaches a runner: {runners.refusal.message}")
    if runners.ready:
        return yes("Available", "RunnersReady", _how_many_serve(len(runners.ready), runners.wanted))
    if not runners.members:
        return no("Available", "NoRunners", f"no runner exists{runners.appended_trouble}")
    return no(
        "Available",
        "RunnersNotReady",
        runners.trouble or f"no runner is ready; the pool has {counted(len(runners.members), 'runner')}",
    )


def _how_many_serve(ready: int, wanted: int) -> str:
    if ready <= wanted:
        return f"{ready} of {wanted} runners serve"
    return f"{counted(ready, 'runner')} {'serves' if ready == 1 else 'serve'}, and the pool needs {wanted}"


def _progressing(runners: PoolRunners) -> ConditionResult:
    if runners.refusal:
        return no("Progressing", runners.refusal.reason, runners.refusal.message)
    if runners.failing:
        return no("Progressing", "RunnerFailing", runners.trouble)
    if runners.target.waits:
        return yes("Progressing", "WaitingForTurn", runners.target.waiting_reason)
    if runners.outdated:
        return yes("Progressing", "RollingOut", runners.so_far)
    moving = sum(instance.node_is_leaving for instance in runners.members)
    if moving and runners.wanted:
        return yes(
            "Progressing",
            "RunnersMoving",
            f"{'1 runner is on a node that is' if moving == 1 else f'{moving} runners are on nodes that are'} being "
            "emptied; a runner leaves when its replacement on another node is ready"
            f"{runners.appended_trouble}",
        )
    if runners.updated < runners.wanted:
        return yes("Progressing", "RunnersStarting", runners.so_far)
    more = len(runners.members) - runners.wanted
    if more > 0:
        return yes("Progressing", "ScalingDown", f"the pool has {counted(more, 'runner')} more than it needs")
    return no("Progressing", "Complete", "nothing is left to do")


def _adapters_healthy(adapters: AdapterCounts) -> ConditionResult:
    if not adapters.failed:
        return yes("AdaptersHealthy", "NoneFailed")
    return no(
        "AdaptersHealthy",
        "AdaptersFailed",
        f"{adapters.failed} of {adapters.registered} adapters cannot be served; an adapter's own conditions say why",
    )


def _scaling_active(scaling: Scaling, refusal: PoolRefusal | None) -> ConditionResult:
    if refusal and not refusal.keeps_runners:
        return no("ScalingActive", refusal.reason, refusal.message)
    return scaling.condition


def _slo_kept(view: View, pool: PoolObject, runners: PoolRunners) -> Iterable[ConditionResult]:
    """Without the caps themselves: they change often, and a status is written only for what a person must know."""
    target = pool.resource.spec.tpot_milliseconds
    if target is None:
        return ()
    caps = [cap for one in runners.ready if (cap := view.batch_caps.get(one.name)) is not None and cap.sequences]
    if not caps:
        return (
            unknown("SloKept", "SloLearning", "the runners have computed too little to know how long a token takes"),
        )
    slowest = max(caps, key=lambda cap: cap.alone_seconds)
    if not slowest.too_slow:
        return (yes("SloKept", "BatchCapped"),)
    milliseconds = slowest.alone_seconds * 1000
    return (
        no(
            "SloKept",
            "SloTooShort",
            f"spec.slo.tpotMilliseconds is {target}, and a token takes {milliseconds:.2g} ms with one request alone, "
            f"{milliseconds / target:.2g} times as long; such runners compute one request at once",
        ),
    )


def _tenants_applied(pool: PoolObject, decider: PoolObject | None) -> Iterable[ConditionResult]:
    """Of a pool that grants something and does not decide."""
    if pool.resource.spec.tenants is None or decider is None or decider is pool:
        return ()
    if pool.resource.spec.granted.grants == decider.resource.spec.granted.grants:
        return (yes("TenantsApplied", "SameTenants"),)
    return (
        no(
            "TenantsApplied",
            "OtherPoolDecides",
            f"spec.tenants has no effect, because that of pool {decider.resource.object_name} counts for group "
            f"{pool.resource.group} and differs; change it there, and here remove it or use the same",
        ),
    )


def _ready(runners: PoolRunners) -> ConditionResult:
    if runners.refusal:
        return no("Ready", runners.refusal.reason, runners.refusal.message)
    if runners.wanted == 0:
        # True: this is what the pool asks for. Tools that wait for an object would wait for ever otherwise.
        return yes(
            "Ready",
            "ScaledToZero",
            "no runner is needed now; a request (mode Builtin) or a higher spec.replicas starts one",
        )
    if runners.updated >= runners.wanted:
        return yes("Ready", "AllRunnersReady", f"{runners.updated} of {runners.wanted} runners are ready")
    if runners.failing:
        return no("Ready", "RunnerFailing", runners.trouble)
    if runners.target.waits and len(runners.ready) >= runners.wanted:
        return no("Ready", "WaitingForTurn", runners.target.waiting_reason)
    return no("Ready", "RunnersStarting", runners.so_far)


def _progress(steps: Sequence[ConditionResult]) -> Iterable[ConditionResult]:
    accepted, _, progressing, *_ = steps
    if not accepted.holds:
        return progress(stalled=accepted)
    return progress(working=progressing) if progressing.holds or progressing.reason == "RunnerFailing" else progress()


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
