"""Conditions as Kubernetes has them: one of each type, and a time that moves only when the answer does."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from motet.resources.status import MAX_MESSAGE

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    type: str
    status: Truth
    reason: str
    message: str = ""
    last_transition_time: datetime | None = None
    observed_generation: int = 0

    @property
    def holds(self) -> bool:
        return self.status == "True"


def yes(type_: str, reason: str, message: str = "") -> Condition:
    return Condition(type=type_, status="True", reason=reason, message=message)


def no(type_: str, reason: str, message: str) -> Condition:
    return Condition(type=type_, status="False", reason=reason, message=message)


def unknown(type_: str, reason: str, message: str) -> Condition:
    return Condition(type=type_, status="Unknown", reason=reason, message=message)


def named(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == type_), None)


def settle(
    found: Iterable[Condition], before: Iterable[Condition], *, now: datetime, generation: int
) -> tuple[Condition, ...]:
    """Date what was found: the time of before where the status is the same, now where it has changed."""
    earlier = {condition.type: condition for condition in before}
    settled = []
    for condition in found:
        old = earlier.get(condition.type)
        since = old.last_transition_time if old is not None and old.status == condition.status else None
        settled.append(
            replace(
                condition,
                message=condition.message[:MAX_MESSAGE],
                last_transition_time=since or now,
                observed_generation=generation,
            )
        )
    return tuple(settled)


def progress(*, working: Condition | None = None, stalled: Condition | None = None) -> tuple[Condition, ...]:
    """The two that tools read to tell "wait" from "look at this". Both are absent when there is nothing to say."""
    if stalled is not None:
        return (yes("Stalled", stalled.reason, stalled.message),)
    if working is not None:
        return (yes("Reconciling", working.reason, working.message),)
    return ()
