"""What an error ends: the request that the message was about, or the stream. This is the only place that decides it.

A stream carries the requests of all tenants. Opening it again costs all of them a pause, and the peer sends the message
that failed again. So a stream ends only when it cannot go on itself:

| what is wrong                                                       | what ends the stream                           |
|---------------------------------------------------------------------|------------------------------------------------|
| framing: bytes that are no message, or a message that is too large  | gRPC                                           |
| hello: it is missing, comes twice, or anything fails while it opens | `Sessions`, `Link`: any error until it is open |
| term: one that no scheduler or operator can have                    | `ImpossibleTerm`                               |
| protocol: this side begins again or does not lead                   | `EndStream`, `RedirectToLeader`                |
| the peer does not read                                              | `Session`, `Link`                              |
| the peer, or one with its name, has opened another stream           | `Sessions`: `REPLACED`, `OTHER_PROCESS`        |
| a state of which only changes are told: catalog, drains, residency  | `TOLD_ONCE`: the next stream begins with it    |

Every other error, of whatever kind, is a failure of one message: it is logged and counted, and `failed` of the service
gives the message's request its answer. The stream goes on.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from motet.errors import Internal, MotetError
from motet.rpc.finite_check import check_numbers
from motet.rpc.metrics import FAILED_MESSAGES
from motet.terms import ImpossibleTerm

log = structlog.get_logger(__name__)

Message = TypeVar("Message")

TOLD_ONCE = frozenset(
    {
        ("AttachDown", "drain"),
        ("AttachDown", "take_work"),
        ("AttachUp", "draining"),
        ("AttachUp", "residency"),
        ("ServeDown", "catalog"),
        ("ServeDown", "catalog_changes"),
        ("ServeUp", "live"),
        ("SyncUp", "delta"),
        ("SyncUp", "drains"),
        ("SyncUp", "snapshot"),
    }
)
"""Streams and kinds of messages that nobody sends again on the same stream, and for which no request gets an answer. If
one fails, its sender must not believe that it was heard."""


class EndStream(Exception):
    """The stream cannot go on. The peer gets the error as the stream's status, and opens another stream."""

    def __init__(self, error: MotetError) -> None:
        super().__init__(error.message)
        self.error = error


def handle(message: Message, receive: Callable[[Message], None], failed: Callable[[Message, MotetError], None]) -> None:
    """Give a message to `receive`. If that fails, `failed` gets the message with an error that its sender may read."""
    try:
        check_numbers(message)
        receive(message)
    except (EndStream, ImpossibleTerm):
        raise
    except Exception as error:
        stream, kind = type(message).__name__, _kind_of(message)
        FAILED_MESSAGES.labels(stream, kind).inc()
        known = known_error(error, stream=stream, kind=kind)
        if (stream, kind) in TOLD_ONCE:
            raise EndStream(known) from error
        try:
            failed(message, known)
        except Exception:
            log.exception("failure_not_answered", stream=stream, kind=kind)


def known_error(error: Exception, **about: str) -> MotetError:
    """Log the error of a message or a request, and return what its sender may know of it."""
    if isinstance(error, MotetError):
        log.warning("message_refused", reason=error.message, **about)
        return error
    log.error("message_failed", exc_info=error, **about)
    return Internal("This failed because of a defect of Motet. The log of the process that failed has the details.")


def _kind_of(message: Any) -> str:
    return (message.WhichOneof("message") or "") if hasattr(message, "WhichOneof") else ""
