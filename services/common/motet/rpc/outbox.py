"""What waits to be written to a stream: bounded, and without what a newer message has made worthless."""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from motet.rpc.coalescing import coalescing_key

Message = TypeVar("Message")

LARGEST_OUTBOX_BYTES = 64 * 1024 * 1024
"""What may wait for one peer. The most that is ever said at once is a full runner's prompts, sent to another after a
loss: ten million tokens take half of this. A peer that leaves more unread is too slow to be served on this stream."""

MESSAGE_BYTES = 512
"""What a waiting message takes in memory beside its bytes, so that a million tiny ones are bounded too."""


class Outbox(Generic[Message]):
    """`put` never blocks; `full` says that the reader is too far behind, and that its stream should end.

    `subject` tells what a message gives the whole state of (a catalog, the place of one request in the queue), and None
    for one that says something of its own. A message takes the place of one that still waits about the same subject,
    and goes to the end: it may speak of what was said after the older one. So the order in which things were said stays
    as it is, as if the older message had never been said.
    """

    def __init__(
        self,
        limit_bytes: int = LARGEST_OUTBOX_BYTES,
        *,
        subject: Callable[[Message], Hashable | None] = coalescing_key,
    ) -> None:
        self._limit = limit_bytes
        self._subject = subject
        self._waiting: OrderedDict[Hashable, tuple[Message, int]] = OrderedDict()
        self._numbers = itertools.count()
        """For messages about nothing else; no subject is a number."""
        self._bytes = 0
        self._there = asyncio.Event()

    @property
    def empty(self) -> bool:
        return not self._waiting

    @property
    def full(self) -> bool:
        return self._bytes > self._limit

    def put(self, message: Message) -> None:
        subject = self._subject(message)
        if subject is None:
            subject = next(self._numbers)
        elif (older := self._waiting.pop(subject, None)) is not None:
            self._bytes -= older[1]
        size = MESSAGE_BYTES + _size_of(message)
        self._waiting[subject] = message, size
        self._bytes += size
        self._there.set()

    async def get(self) -> Message:
        while (message := self.get_nowait()) is None:
            self._there.clear()
            await self._there.wait()
        return message

    def get_nowait(self) -> Message | None:
        """The next one if it is here already."""
        if not self._waiting:
            return None
        _, (message, size) = self._waiting.popitem(last=False)
        self._bytes -= size
        return message


def _size_of(message: Any) -> int:
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())
