"""What waits to be written to one gateway. Steps that a slow gateway has not taken yet become one message."""

import asyncio
from collections import deque

from motet.api.v1 import runner_pb2
from motet.rpc import Outbox


class StepOutbox(Outbox[bytes]):
    """Encoded GenerateDowns. Never blocks who puts; `full` says that the gateway is as good as dead.

    Steps are merged by laying their bytes end to end: for protobuf that is one message whose step holds the sequences
    of both, in order (the merging rule for one member of a oneof).
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit = limit_bytes
        self._waiting: deque[list[bytes]] = deque()
        """Groups: the steps of one group leave as one message."""
        self._steps: list[bytes] | None = None
        """The last group, while it is open for more steps."""
        self._bytes = 0
        self._there = asyncio.Event()
        self.merged = 0

    @property
    def empty(self) -> bool:
        return not self._waiting

    @property
    def full(self) -> bool:
        return self._bytes > self._limit

    def put(self, message: bytes) -> None:
        self._steps = None
        self._append([message])

    def put_message(self, message: runner_pb2.GenerateDown) -> None:
        self.put(message.SerializeToString())

    def put_step(self, step: bytes) -> None:
        if self._steps is None:
            self._steps = [step]
            self._append(self._steps)
        else:
            self._steps.append(step)
            self._bytes += len(step)
            self.merged += 1

    async def get(self) -> bytes:
        while not self._waiting:
            self._there.clear()
            await self._there.wait()
        group = self._waiting.popleft()
        if group is self._steps:
            self._steps = None
        message = group[0] if len(group) == 1 else b"".join(group)
        self._bytes -= len(message)
        return message

    def _append(self, group: list[bytes]) -> None:
        self._waiting.append(group)
        self._bytes += sum(map(len, group))
        self._there.set()
