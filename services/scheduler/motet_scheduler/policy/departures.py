"""How fast a full queue empties, and so when one that it refused should come again."""

from collections import deque
from math import inf

COUNTED = 64
"""The last ones, by which the next are expected."""

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0

UNKNOWN_SECONDS = 2.0
"""As long as nobody has left: a queue fills while the first runner starts, and no rate is known then."""


class Departures:
    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=COUNTED)
        self._told_until = -inf
        """When the last one comes again that was told a time."""

    def note(self, now: float) -> None:
        """One has left the queue."""
        self._times.append(now)

    def retry_after(self, now: float) -> float:
        """Seconds. Each is told a later time than the one before, as far apart as requests leave: if all came at once,
        one would find room."""
        if not self._times:
            return UNKNOWN_SECONDS
        first, last, count = self._times[0], self._times[-1], len(self._times)
        apart = max((last - first) / max(count - 1, 1), (now - first) / count)  # also when nobody leaves any more
        self._told_until = min(max(self._told_until, now) + apart, now + MAX_RETRY_SECONDS)
        return max(self._told_until - now, MIN_RETRY_SECONDS)
