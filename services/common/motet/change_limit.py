"""Limits how often Motet reacts to changes of one object: three times at once, then once in each pause. Pure.

A tenant or a script may change an object more often than Motet should act on it. A change that has to wait is applied
later, in the newest state. Each pause without a change allows one more at once, up to three. (This is the generic cell
rate algorithm of ITU-T I.371.)
"""

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

AT_ONCE = 3

Name = TypeVar("Name", bound=Hashable)


class ChangeLimiter(Generic[Name]):
    """What has changed recently, by name. All times and the pause have the same unit and come from the same clock."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._over_at: dict[Name, float] = {}
        """When all changes so far would be over, if they had come one after the other and each had taken one pause."""

    def __len__(self) -> int:
        return len(self._over_at)

    def may_change(self, name: Name, now: float) -> bool:
        return self.next_at(name) <= now

    def next_at(self, name: Name) -> float:
        """The earliest time at which it may change; minus infinity if it has not changed recently."""
        return self._over_at.get(name, -math.inf) - (AT_ONCE - 1) * self._pause

    def changed(self, name: Name, now: float) -> None:
        """Note a change. It counts even if `may_change` was false."""
        self._over_at[name] = max(self._over_at.get(name, now), now) + self._pause

    def forget(self, name: Name) -> None:
        self._over_at.pop(name, None)

    def expire(self, now: float) -> None:
        """Forget old changes. After the clock was set back, nothing waits longer than one pause more than usual."""
        latest = now + AT_ONCE * self._pause
        self._over_at = {name: min(at, latest) for name, at in self._over_at.items() if at > now}
