"""Requests that cannot be tokenised yet, because no runner is there or it still checks the adapter. They wait in order.

The gateway reports their number to the scheduler, so that a pool starts from zero and stays up while they wait.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from motet.clock import Clock

NUMBERED_SECONDS = 1.0
"""How old a position may be. Thousands of requests may wait, and each asks for its position repeatedly."""


@dataclass(slots=True)
class _GroupQueue:
    positions: dict[str, int] = field(default_factory=dict)
    """Position by request, the oldest first, as of the last numbering."""

    numbered_at: float | None = None
    moved: bool = False
    """Whether a request has left since the last numbering."""


class HeldRequests:
    def __init__(self, changed: Callable[[], None], clock: Clock) -> None:
        self._changed = changed
        self._clock = clock
        self._groups: dict[str, str] = {}
        """Group by request."""

        self._queues: dict[str, _GroupQueue] = {}
        """Queue by group; none is empty."""

        self._templates: Mapping[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request: str) -> bool:
        return request in self._groups

    def enter(self, request: str, group: str) -> None:
        """Wait for a runner of this group. No effect if the request already does."""
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
        """Its position in the group's queue, from 1; 0 if it does not wait here."""
        group = self._groups.get(request)
        if group is None:
            return 0
        queue, now = self._queues[group], self._clock()
        if queue.moved and (queue.numbered_at is None or now - queue.numbered_at >= NUMBERED_SECONDS):
            queue.positions = {one: number for number, one in enumerate(queue.positions, 1)}
            queue.numbered_at, queue.moved = now, False
        return queue.positions[request]

    def templates_missing(self, adapters: Mapping[str, list[str]]) -> None:
        """By group: adapters whose chat template no runner has, so that nothing is enqueued that would load them."""
        if self._templates != adapters:
            self._templates = adapters
            self._changed()

    def templates(self) -> Mapping[str, list[str]]:
        return self._templates

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
