"""Conditions as Kubernetes has them: one of each type, and a time that moves only when the answer does."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

from motet.resources.status import MAX_MESSAGE, Condition

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionResult:
    """The answer of this round. `settle` makes a condition of it, which knows since when."""

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
    return next((condition for condition in conditions if condition.type == type_), None)


def with_transition_times(
    found: Iterable[ConditionResult | Condition], before: Iterable[Condition], *, now: datetime, generation: int
) -> tuple[Condition, ...]:
    """Date what was found: the time of before where the status is the same, now where it has changed."""
    earlier = {condition.type: condition for condition in before}
    settled = []
    for one in found:
        old = earlier.get(one.type)
        settled.append(
            Condition(
                type=one.type,
                status=one.status,
                reason=one.reason,
                message=one.message[:MAX_MESSAGE],
                last_transition_time=old.last_transition_time if old is not None and old.status == one.status else now,
                observed_generation=generation,
            )
        )
    return tuple(settled)


def progress(
    *, working: ConditionResult | None = None, stalled: ConditionResult | None = None
) -> tuple[ConditionResult, ...]:
    """The two that tools read to tell "wait" from "look at this". Both are absent when there is nothing to say."""
    if stalled is not None:
        return (yes("Stalled", stalled.reason, stalled.message),)
    if working is not None:
        return (yes("Reconciling", working.reason, working.message),)
    return ()
