"""Whether an engine that has work gets on with it. Slow is fine; standing still is not."""

from motet.clock import Clock, monotonic


class HangDetector:
    def __init__(self, seconds: float, clock: Clock = monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._steps = -1
        self._moved_at: float | None = None

    def observe(self, steps: int, *, work: bool) -> None:
        """The number of steps so far, and whether there is anything to do."""
        if steps != self._steps or not work or self._moved_at is None:
            self._steps, self._moved_at = steps, self._clock()

    def hung_reason(self) -> str:
        """Empty while it gets on, and before it was heard of."""
        if self._moved_at is None:
            return ""
        still = self._clock() - self._moved_at
        return f"no engine step for {still:.0f} s while work waits" if still > self._seconds else ""
