"""Conditions as in Kubernetes: one of each type; the transition time changes only when the status does."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

from motet.resources.status import MAX_MESSAGE, Condition

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionResult:
    """A condition as this round found it. `with_transition_times` adds since when it has been so."""

    type: str
    status: Truth
    reason: str
    message: str = ""

    @property
    def holds(self) -> bool:
        return self.status == "True"


def yes(type_: str, reason: str, message: str = "") -> ConditionResult:
    return ConditionResult(type=type_, status="True", reason=reason, message=message)


def no(type_: str, reason: str, message: str) -> ConditionResult:
    return ConditionResult(type=type_, status="False", reason=reason, message=message)


def unknown(type_: str, reason: str, message: str) -> ConditionResult:
    return ConditionResult(type=type_, status="Unknown", reason=reason, message=message)


Answer = TypeVar("Answer", ConditionResult, Condition)


def condition_of(conditions: Iterable[Answer], type_: str) -> Answer | None:
    for condition in conditions:  # a loop: each round asks it of thousands of objects
        if condition.type == type_:
            return condition
    return None


def with_transition_times(
    found: Iterable[ConditionResult | Condition], before: Iterable[Condition], *, now: datetime, generation: int
) -> tuple[Condition, ...]:
    """Conditions with their transition times: the earlier time if the status is the same, else now. One that has not
    changed is the same object: to make it anew, and to compare it, costs more than all else."""
    earlier = {condition.type: condition for condition in before}
    dated = []
    for one in found:
        old, message = earlier.get(one.type), one.message[:MAX_MESSAGE]
        same = old is not None and old.status == one.status
        if (
            old is not None
            and same
            and (old.reason, old.message, old.observed_generation) == (one.reason, message, generation)
        ):
            dated.append(old)
            continue
        dated.append(
            Condition(
                type=one.type,
                status=one.status,
                reason=one.reason,
                message=message,
                last_transition_time=old.last_transition_time if old is not None and same else now,
                observed_generation=generation,
            )
        )
    return tuple(dated)


def not_evaluated(
    error: Exception, before: Iterable[Condition], *, now: datetime, generation: int
) -> tuple[Condition, ...]:
    """The earlier conditions of an object at which the operator fails. All other objects go on."""
    why = f"the operator fails at this object: {type(error).__name__}: {' '.join(str(error).split())}"
    ready = no("Ready", "EvaluationFailed", why)
    others = [one for one in before if one.type not in ("Ready", "Reconciling", "Stalled")]
    return with_transition_times((*others, ready, *progress(stalled=ready)), before, now=now, generation=generation)


def progress(
    *, working: ConditionResult | None = None, stalled: ConditionResult | None = None
) -> tuple[ConditionResult, ...]:
    """Reconciling ("wait") or Stalled ("somebody must act"), as tools read them; neither if there is nothing to do."""
    if stalled is not None:
        return (yes("Stalled", stalled.reason, stalled.message),)
    if working is not None:
        return (yes("Reconciling", working.reason, working.message),)
    return ()
