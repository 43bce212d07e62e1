"""The messages that wait to be written to one gateway. Steps that a slow gateway has not read become one message."""

from collections import deque
from collections.abc import Callable

from motet.api.v1 import runner_pb2
from motet.rpc import Outbox


class StepOutbox(Outbox[bytes | runner_pb2.GenerateDown]):
    """Holds encoded `GenerateDown` messages; the engine encodes the steps. If it is `full`, the service
    treats the gateway as lost.

    Two steps are merged by joining their bytes. For protobuf the result is one message, and its step has the sequences
    of both, in order: that is how protobuf merges a member of a oneof.
    """

    def __init__(self, limit_bytes: int, merged: Callable[[], None] = lambda: None) -> None:
        """`merged` is called for each step that joins another."""
        super().__init__(limit_bytes)
        self._merged = merged
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
        elif self._steps is None:
            self._steps = [message]
            self._append(self._steps)
        else:
            self._steps.append(message)
            self._bytes += len(message)
            self._merged()

    def get_nowait(self) -> bytes | None:
        if not self._groups:
            return None
        group = self._groups.popleft()
        if group is self._steps:
            self._steps = None
        message = group[0] if len(group) == 1 else b"".join(group)
        self._bytes -= len(message)
        return message

    def _append(self, group: list[bytes]) -> None:
        self._groups.append(group)
        self._bytes += sum(map(len, group))
        self._has_messages.set()
