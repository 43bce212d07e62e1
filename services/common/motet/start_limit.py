"""How often something may begin: three times at once, then once in each pause. Pure.

For what may change faster than it should be followed: whoever waits for its turn takes it as it is by then. Each pause
without a beginning gives one of the three back. (The generic cell rate algorithm of ITU-T I.371.)
"""

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

AT_ONCE = 3

Name = TypeVar("Name", bound=Hashable)


class StartLimiter(Generic[Name]):
    """What has begun of late, by name. All times, and the pause, are in the same unit of the same clock."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._over_at: dict[Name, float] = {}
        """When all that has begun so far would be over, had one begun after the other and taken a pause each."""

    def __len__(self) -> int:
        return len(self._over_at)

    def may_begin(self, name: Name, now: float) -> bool:
        return self.next_at(name) <= now

    def next_at(self, name: Name) -> float:
        """From when on it may begin; long ago where nothing holds it up."""
        return self._over_at.get(name, -math.inf) - (AT_ONCE - 1) * self._pause

    def begun(self, name: Name, now: float) -> None:
        """It counts, whether or not it was its turn."""
        self._over_at[name] = max(self._over_at.get(name, now), now) + self._pause

    def forget(self, name: Name) -> None:
        self._over_at.pop(name, None)

    def expire(self, now: float) -> None:
        """Forget what is over; and after a clock has been set back, hold nothing up for longer than one more pause."""
        latest = now + AT_ONCE * self._pause
        self._over_at = {name: min(at, latest) for name, at in self._over_at.items() if at > now}
