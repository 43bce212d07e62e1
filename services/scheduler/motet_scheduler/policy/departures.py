"""How fast a full queue empties, and so when one that it refused should come again."""

from collections import deque

from motet.domain import Tenant

COUNTED = 64
"""The last ones, by which the next are expected."""

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0

UNKNOWN_SECONDS = 2.0
"""As long as nobody has left: a queue fills while the first runner starts, and no rate is known then."""


class Departures:
    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=COUNTED + 1)
        """The first one is when the others began to be counted."""
        self._told_until: dict[Tenant, float] = {}
        """When the last one of each tenant comes again that was told a time."""

    def begin(self, now: float) -> None:
        """One begins to wait where nobody did. How many left before says how many came, not how many could leave."""
        self._times.clear()
        self._times.append(now)

    def note(self, now: float) -> None:
        """One has left the queue."""
        self._times.append(now)

    def retry_after(self, tenant: Tenant, now: float) -> float:
        """Seconds. Each is told a later time than the one before, as far apart as requests leave: if all came at once,
        one would find room. Tenants take turns: one that does not wait as long as it was told delays only itself."""
        if len(self._times) <= 1:
            return UNKNOWN_SECONDS
        apart = (now - self._times[0]) / (len(self._times) - 1)  # it grows while nobody leaves
        until = max(self._told_until.pop(tenant, now), now)
        while self._told_until and self._told_until[first := next(iter(self._told_until))] <= now:
            del self._told_until[first]
        until = min(until + apart * (len(self._told_until) + 1), now + MAX_RETRY_SECONDS)
        self._told_until[tenant] = until
        return max(until - now, MIN_RETRY_SECONDS)
