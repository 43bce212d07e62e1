"""The messages that wait to be written to one stream. It is bounded, and a newer state replaces an older one."""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from motet.rpc.coalescing import CHANGES, IN_PLACE, coalescing_key

Message = TypeVar("Message")

MAX_OUTBOX_BYTES = 64 * 1024 * 1024
"""How many bytes may wait for one peer. The most that Motet sends at once are the prompts of a full runner that died:
ten million tokens take half of this. A peer with more unread messages is too slow, and its stream ends."""

MESSAGE_BYTES = 512
"""The memory of a waiting message beside its own bytes. It counts, so that many tiny messages are bounded, too."""


class Outbox(Generic[Message]):
    """`put` never blocks. `full` says that the peer reads too slowly and that its stream should end.

    `subject` returns what a message has the whole state of (such as the catalog, or the queue position of one request),
    and None for other messages. A new message removes a waiting one with the same subject and goes to the end of the
    outbox, because it may refer to messages that were put in between. One of `IN_PLACE` refers to none, and takes the
    place of the older one. The others keep their order.
    """

    def __init__(
        self,
        limit_bytes: int = MAX_OUTBOX_BYTES,
        *,
        subject: Callable[[Message], Hashable | None] = coalescing_key,
    ) -> None:
        self._limit = limit_bytes
        self._subject = subject
        self._waiting: OrderedDict[Hashable, tuple[Message, int]] = OrderedDict()
        self._numbers = itertools.count()
        """Keys for messages without a subject. No subject is a number."""
        self._bytes = 0
        self._has_messages = asyncio.Event()

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
        elif (older := self._waiting.get(subject)) is not None:
            self._bytes -= older[1]
            if not (isinstance(subject, tuple) and subject[0] in IN_PLACE):
                del self._waiting[subject]
            self._remove_changes_of(subject)
        size = MESSAGE_BYTES + _size_of(message)
        self._waiting[subject] = message, size
        self._bytes += size
        self._has_messages.set()

    def _remove_changes_of(self, subject: Hashable) -> None:
        """A state was removed before it was read, and the changes or parts that wait begin with it."""
        if (kind := CHANGES.get(subject)) is not None:
            for key in [key for key, (one, _) in self._waiting.items() if one.WhichOneof("message") == kind]:  # type: ignore[attr-defined]
                self._bytes -= self._waiting.pop(key)[1]

    async def get(self) -> Message:
        while (message := self.get_nowait()) is None:
            self._has_messages.clear()
            await self._has_messages.wait()
        return message

    def get_nowait(self) -> Message | None:
        """The next message, or None if none is waiting."""
        if not self._waiting:
            return None
        _, (message, size) = self._waiting.popitem(last=False)
        self._bytes -= size
        return message


def _size_of(message: Any) -> int:
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())
