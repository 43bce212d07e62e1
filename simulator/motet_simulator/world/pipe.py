"""One direction of a simulated stream: what is sent arrives in its order, later, or never."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from motet_simulator.world.wires import FASTEST_SECONDS, Wires

if TYPE_CHECKING:
    from motet_simulator.world.ends import End

MAX_ATTEMPT_SECONDS = 3.0
"""By then TCP has sent again what waited in a partition. Its pauses double: each is as long as it has waited so far."""


class Pipe:
    """One direction of a stream."""

    __slots__ = ("_lost", "_numbers", "_queue", "_source", "_target", "_wires", "label", "unread")

    def __init__(self, wires: Wires, label: str, source: "End", target: "End") -> None:
        self.label = label
        self._wires = wires
        self._source = source
        self._target = target
        self._queue: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()
        self._numbers = 0
        self._lost = False
        self.unread = 0

    def send(self, do: Callable[..., None], *args: Any, by_kernel: bool = False) -> None:
        """Have the process on the other side do this, after all that was sent before."""
        if self._lost or (self._source.loop.dead and not by_kernel):
            return
        self._numbers += 1
        source, target = self._source.host, self._target.host
        arrives = self._wires.world.now + self._wires.delay(source, target, self.label, self._numbers)
        if self._queue:
            arrives = max(arrives, self._queue[-1][0])
        self._queue.append((arrives, do, args))
        self._wires.world.at(arrives, self._arrive)

    def lose(self) -> None:
        self._lost = True
        self._queue.clear()

    def _arrive(self) -> None:
        queue, now = self._queue, self._wires.world.now
        while queue and queue[0][0] <= now:
            free_at = self._wires.blocked_until(self._source.host, self._target.host)
            if free_at > now:
                self._wires.world.on_met("partition", f"{self._source.host} {self._target.host}")
                pause = min(free_at - queue[0][0], MAX_ATTEMPT_SECONDS)
                attempt = free_at + FASTEST_SECONDS + pause * self._wires.world.draw("attempt", self.label, free_at)
                self._wires.world.at(attempt, self._arrive)
                return
            _, do, args = queue.popleft()
            self._target.loop.call_soon(do, *args)
