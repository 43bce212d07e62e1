"""The messages that wait to be written to one gateway. Steps that a slow gateway has not read become one message."""

import asyncio
from collections import deque
from collections.abc import Callable

from motet.api.v1 import runner_pb2
from motet.clock import Clock
from motet.rpc import Outbox


class StepOutbox(Outbox[bytes | runner_pb2.GenerateDown]):
    """Holds encoded `GenerateDown` messages; the engine encodes the steps. If the outbox is `full`, the service treats
    the gateway as lost.

    Two steps are merged by concatenating their bytes. Protobuf reads the result as one message whose step has the
    sequences of both steps, in order.

    With an interval, a step waits for later steps until the interval since the last message has passed. Other messages
    do not wait, and earlier steps are then sent at once, too.
    """

    def __init__(
        self,
        limit_bytes: int,
        merged: Callable[[], None] = lambda: None,
        *,
        clock: Clock,
        interval_seconds: float = 0.0,
    ) -> None:
        """`merged` is called for each step that joins an earlier step."""
        super().__init__(limit_bytes)
        self._merged = merged
        self._interval = interval_seconds
        self._clock = clock
        self._next_at = 0.0
        """With an interval: the time from which steps may be sent."""
        self._timer: asyncio.TimerHandle | None = None
        """Set while steps wait for others."""
        self._groups: deque[list[bytes]] = deque()
        """The steps of one group are sent as one message."""
        self._steps: list[bytes] | None = None
        """The last group, while more steps may join it."""

    @property
    def empty(self) -> bool:
        return not self._groups

    def put(self, message: bytes | runner_pb2.GenerateDown) -> None:
        if not isinstance(message, bytes):
            self._steps = None
            self._append([message.SerializeToString()])
            self._release()
        elif self._steps is None:
            self._steps = [message]
            self._append(self._steps)
            if self._timer is None:
                self._release_in_time()
        else:
            self._steps.append(message)
            self._bytes += len(message)
            self._merged()

    def get_nowait(self) -> bytes | None:
        if not self._groups or self._timer is not None:
            return None
        group = self._groups.popleft()
        if group is self._steps:
            self._steps = None
        message = group[0] if len(group) == 1 else b"".join(group)
        self._bytes -= len(message)
        if self._interval:
            self._next_at = self._clock() + self._interval
        return message

    def _append(self, group: list[bytes]) -> None:
        self._groups.append(group)
        self._bytes += sum(map(len, group))

    def _release_in_time(self) -> None:
        # If an earlier group may already be sent, this group does not wait either.
        alone = len(self._groups) == 1
        wait = self._next_at - self._clock() if self._interval and alone else 0.0
        if wait > 0:
            self._timer = asyncio.get_running_loop().call_later(wait, self._release)
        else:
            self._has_messages.set()

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._has_messages.set()
