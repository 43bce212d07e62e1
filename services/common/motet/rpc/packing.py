"""How messages leave and arrive: several that wait travel as one, where the message has room for them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import Descriptor

from motet.rpc.finite_check import Check, check_of
from motet.rpc.outbox import Outbox

log = structlog.get_logger(__name__)

MAX_PACK_MESSAGES = 64
LARGEST_PACK_BYTES = 1024 * 1024  # before its last message


async def write_all(outbox: Outbox[Any], write: Callable[[Any], Any]) -> None:
    # A broken stream is the reader's to report: it sees the status, a failed write does not. So this only stops.
    with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        while True:
            message = await outbox.get()
            await write(packed(message, outbox) if hasattr(message, "more") else message)


def packed(first: Any, outbox: Outbox[Any]) -> Any:
    """All that waits by now, as one message: under load, a write costs more than what it carries."""
    waiting, size = [first], first.ByteSize()
    while (
        len(waiting) < MAX_PACK_MESSAGES
        and size < LARGEST_PACK_BYTES
        and (following := outbox.get_nowait()) is not None
    ):
        waiting.append(following)
        size += following.ByteSize()
    return first if len(waiting) == 1 else type(first)(more=waiting)


def leader_redirect(message: Any) -> str | None:
    """Where a standby sends us; None from anybody else."""
    if not hasattr(message, "not_leader") or not message.HasField("not_leader"):
        return None
    return str(message.not_leader.address)


def unpacked(message: Any) -> Iterator[Any]:
    """What came as one message, without what only a newer peer understands: it says so by leaving its word empty.

    Raises InvalidRequest for a number that is none.
    """
    for one in getattr(message, "more", None) or (message,):
        if (descriptor := getattr(one, "DESCRIPTOR", None)) is not None:
            word = one.WhichOneof(_ONEOF)
            if word is None:
                _say_once(descriptor.full_name)
                continue
            if (check := _checks_of(descriptor)[word]) is not None:
                check(getattr(one, word))
        yield one


_ONEOF = "message"  # of every message of a stream
_newer: set[str] = set()
"""Kinds of streams on which a newer peer has been heard: worth a line each, not one a message."""


@cache
def _checks_of(descriptor: Descriptor) -> dict[str, Check | None]:
    """What looks at the numbers of each word that a message of a stream may hold."""
    return {field.name: check_of(field.message_type) for field in descriptor.oneofs_by_name[_ONEOF].fields}


def _say_once(stream: str) -> None:
    if stream not in _newer:
        _newer.add(stream)
        log.warning("unknown_message_ignored", stream=stream, hint="The peer has a newer version.")
