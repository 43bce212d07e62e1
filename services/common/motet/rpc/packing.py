"""Packs and unpacks messages of streams. Messages that wait are sent as one, where their type has a field `more`."""

from collections.abc import Iterator
from typing import Any

import structlog

from motet.rpc.outbox import Outbox

log = structlog.get_logger(__name__)

MAX_PACK_MESSAGES = 64
MAX_PACK_BYTES = 32 * 1024
"""Before its last message. What comes as one message is handled as one: nothing else happens meanwhile."""


async def next_packed(outbox: Outbox[Any]) -> Any:
    """Wait for a message, and take all that wait."""
    message = await outbox.get()
    return packed(message, outbox) if hasattr(message, "more") else message


def packed(first: Any, outbox: Outbox[Any]) -> Any:
    """All waiting messages as one message: under load, a write costs more than the bytes in it."""
    waiting, size = [first], first.ByteSize()
    while len(waiting) < MAX_PACK_MESSAGES and size < MAX_PACK_BYTES and (following := outbox.get_nowait()) is not None:
        waiting.append(following)
        size += following.ByteSize()
    return first if len(waiting) == 1 else type(first)(more=waiting)


def leader_redirect(message: Any) -> str | None:
    """The leader's address, if `message` is NotLeader (empty if it names none); None for other messages."""
    if not hasattr(message, "not_leader") or not message.HasField("not_leader"):
        return None
    return str(message.not_leader.address)


def unpacked(message: Any) -> Iterator[Any]:
    """The messages in one packed message. Leaves out those of a newer version: their oneof is empty for us."""
    for one in getattr(message, "more", None) or (message,):
        descriptor = getattr(one, "DESCRIPTOR", None)
        if descriptor is not None and one.WhichOneof("message") is None:
            _warn_once(descriptor.full_name)
        else:
            yield one


_warned: set[str] = set()
"""Kinds of messages for which the warning about a newer peer has been logged: one line each is enough."""


def _warn_once(stream: str) -> None:
    if stream not in _warned:
        _warned.add(stream)
        log.warning("unknown_message_ignored", stream=stream, hint="The peer has a newer version.")
