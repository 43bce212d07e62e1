"""Requests that cannot even be read yet, because it takes a runner that is not there, or that still checks their
adapter: they wait here, in order.

The scheduler is told how many there are: that is what brings a pool back from zero, and keeps it up meanwhile.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from motet.clock import Clock, monotonic

NUMBERED_SECONDS = 1.0
"""Those who move up hear of it so much later at most. Thousands may wait, and each asks again and again."""


@dataclass(slots=True)
class _GroupQueue:
    positions: dict[str, int] = field(default_factory=dict)
    """By request, the oldest first, as last numbered."""

    numbered_at: float | None = None
    moved: bool = False
    """Somebody has left since."""


class HeldRequests:
    def __init__(self, changed: Callable[[], None], clock: Clock = monotonic) -> None:
        self._changed = changed
        self._clock = clock
        self._groups: dict[str, str] = {}
        """By request."""

        self._queues: dict[str, _GroupQueue] = {}
        """By group; none is empty."""

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request: str) -> bool:
        return request in self._groups

    def enter(self, request: str, group: str) -> None:
        """Wait for a runner of this group. Says nothing when it does already."""
        if self._groups.get(request) == group:
            return
        self._take_out(request)
        self._groups[request] = group
        positions = self._queues.setdefault(group, _GroupQueue()).positions
        positions[request] = len(positions) + 1
        self._changed()

    def leave(self, request: str) -> None:
        if self._take_out(request):
            self._changed()

    def position(self, request: str) -> int:
        """Where it stands among those of its group, from 1; 0 when it does not wait here."""
        group = self._groups.get(request)
        if group is None:
            return 0
        queue, now = self._queues[group], self._clock()
        if queue.moved and (queue.numbered_at is None or now - queue.numbered_at >= NUMBERED_SECONDS):
            queue.positions = {one: number for number, one in enumerate(queue.positions, 1)}
            queue.numbered_at, queue.moved = now, False
        return queue.positions[request]

    def by_group(self) -> Mapping[str, int]:
        return {group: len(queue.positions) for group, queue in self._queues.items()}

    def _take_out(self, request: str) -> bool:
        group = self._groups.pop(request, None)
        if group is None:
            return False
        queue = self._queues[group]
        del queue.positions[request]
        queue.moved = True
        if not queue.positions:
            del self._queues[group]
        return True
