"""Streams as Motet uses them: few and long-lived. After a stream breaks, both sides send their whole state again.

Each of these rules comes from a failure that we have seen:
- the first attempt to reconnect comes after 50 ms, and no wait is longer than 500 ms;
- a message that cannot be handled ends its own request, never the stream, which is that of all tenants;
- messages are dropped while a stream is broken: the hello of the next connection has the whole state;
- use `asyncio.timeout`, never `wait_for`.

`motet.transport` carries the messages.
"""

from motet.rpc.links import Backoff, Link, RedirectToLeader
from motet.rpc.message_failures import EndStream, known_error
from motet.rpc.outbox import Outbox
from motet.rpc.sessions import REPLACED, Session, Sessions, run_stream
from motet.transport import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS

__all__ = [
    "FIRST_RETRY_SECONDS",
    "LAST_RETRY_SECONDS",
    "REPLACED",
    "Backoff",
    "EndStream",
    "Link",
    "Outbox",
    "RedirectToLeader",
    "Session",
    "Sessions",
    "known_error",
    "run_stream",
]
