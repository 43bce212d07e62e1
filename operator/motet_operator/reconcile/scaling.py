"""How many runners a pool should have, and who decides: a person, the scheduler, or an external autoscaler.

| mode     | replicas                                                                                |
|----------|-----------------------------------------------------------------------------------------|
| Disabled | `spec.replicas`                                                                         |
| Builtin  | the scheduler's advice within the bounds; the current number while there is no advice   |
| External | `spec.replicas`, which another client writes through the scale subresource, in bounds   |

Mode Builtin removes no runners on stale advice or during a rollout.
Only one client may decide: if the mode is Builtin and another client writes `spec.replicas` through the scale
subresource, the pool keeps its runners until one of the two stops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.plurals import counted
from motet.resources import ServingPool
from motet_operator.reconcile.conditions import ConditionResult, no, unknown, yes

CONFLICT = "ConflictingManager"
MAX_WRITERS_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingAdvice:
    """What the scheduler last said about a pool."""

    replicas: int
    code: str = ""
    """Why, in one word; `AtMinimum` and `AtMaximum` when a bound decided."""

    reason: str = ""
    """Why, in a sentence."""

    stale: bool = False
    """The scheduler lacks information or is not connected: no runner may leave because of this advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    replicas: int
    condition: ConditionResult
    """ScalingActive."""


def decide_replicas(
    pool: ServingPool,
    *,
    current: int | None,
    advice: ScalingAdvice | None = None,
    rolling_out: bool = False,
    writers: Sequence[str] = (),
) -> Scaling:
    """`current` is the wanted number of the last round, or of the runners that exist (None for a new pool). `writers`
    are the field managers that wrote `spec.replicas` through the scale subresource."""
    wanted = pool.spec.replicas
    match pool.spec.autoscaling.mode:
        case "Disabled":
            return Scaling(
                replicas=wanted, condition=_no("ScalingDisabled", "spec.replicas sets the number of runners")
            )
        case "External":
            return _external(pool, wanted)
        case "Builtin":
            held = _bounded(pool, wanted if current is None else current)
            if writers:
                return Scaling(replicas=held, condition=_no(CONFLICT, _conflict(writers, held)))
            return _builtin(pool, held, advice, rolling_out=rolling_out)


def _external(pool: ServingPool, wanted: int) -> Scaling:
    replicas = _bounded(pool, wanted)
    if replicas == wanted:
        return Scaling(replicas=replicas, condition=yes("ScalingActive", "External", f"spec.replicas is {wanted}"))
    word, bound = ("AtMinimum", "minReplicas") if replicas > wanted else ("AtMaximum", "maxReplicas")
    why = f"spec.replicas is {wanted}, but autoscaling.{bound} is {replicas}"
    return Scaling(replicas=replicas, condition=yes("ScalingActive", word, why))


def _builtin(pool: ServingPool, held: int, advice: ScalingAdvice | None, *, rolling_out: bool) -> Scaling:
    if advice is None:
        why = (
            f"the scheduler has not reported yet how many runners are needed; the pool keeps {counted(held, 'runner')}"
        )
        return Scaling(replicas=held, condition=unknown("ScalingActive", "HoldingStaleAdvice", why))
    asked = _bounded(pool, advice.replicas)
    if advice.stale:
        replicas = max(held, asked)
        why = advice.reason or "the scheduler is not connected"
        return Scaling(
            replicas=replicas,
            condition=unknown(
                "ScalingActive", "HoldingStaleAdvice", f"the pool keeps {counted(replicas, 'runner')}: {why}"
            ),
        )
    if rolling_out and asked < held:
        enough, kept = counted(asked, "runner"), counted(held, "runner")
        why = f"{enough} would be enough; the pool keeps {kept} until the rollout is complete"
        return Scaling(replicas=held, condition=yes("ScalingActive", "HoldingForRollout", why))
    return Scaling(replicas=asked, condition=yes("ScalingActive", _advice_message(asked, advice), advice.reason))


def _advice_message(asked: int, advice: ScalingAdvice) -> str:
    if advice.code == "AtMinimum" or asked > advice.replicas:
        return "AtMinimum"
    if advice.code == "AtMaximum" or asked < advice.replicas:
        return "AtMaximum"
    return "FollowingDemand"


def _bounded(pool: ServingPool, replicas: int) -> int:
    bounds = pool.spec.autoscaling
    if bounds.max_replicas is not None:
        replicas = min(replicas, bounds.max_replicas)
    return max(replicas, bounds.min_replicas or 0)


def _conflict(writers: Sequence[str], held: int) -> str:
    names = sorted(set(writers))
    if len(names) > MAX_WRITERS_NAMED:  # the end of the message says what to do
        names = [*names[:MAX_WRITERS_NAMED], counted(len(names) - MAX_WRITERS_NAMED, "other")]
    who = f"{' and '.join(names)} {'writes' if len(names) == 1 else 'write'}"
    return (
        f"{who} spec.replicas through the scale subresource, as a HorizontalPodAutoscaler and kubectl scale do; "
        f"the pool keeps {counted(held, 'runner')}. Either set autoscaling.mode to External. Or remove the other "
        "writer, set spec.replicas in the manifest to another number, and apply the manifest with --server-side "
        "--force-conflicts. The number must change; otherwise the other writer keeps the ownership of the field."
    )


def _no(reason: str, message: str) -> ConditionResult:
    return no("ScalingActive", reason, message)
