"""gRPC as Motet uses it: few long-lived streams. After a stream breaks, both sides send their whole state again.

Each of these rules comes from a failure that we have seen:
- a cancelled handler raises CancelledError again, and a client call is cancelled by its context: otherwise grpc.aio
  leaks;
- the first attempt to reconnect comes after 50 ms, and no wait is longer than 500 ms (gRPC's own back-off takes more
  than a second); a client of a Unix socket reconnects as soon as the socket is served again;
- a message that cannot be handled ends its own request, never the stream, which is that of all tenants;
- messages are dropped while a stream is broken: the hello of the next connection has the whole state;
- each reconnect resolves the name again, and a peer whose machine is gone is noticed within ten seconds;
- channels are made after the process has started, never before a fork;
- use `asyncio.timeout`, never `wait_for`.
"""

from motet.rpc.channels import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, open_channel, socket_path
from motet.rpc.links import Backoff, Link, RedirectToLeader
from motet.rpc.message_failures import EndStream, known_error
from motet.rpc.outbox import Outbox
from motet.rpc.server import Server, is_healthy, serving
from motet.rpc.sessions import Session, Sessions, run_stream

__all__ = [
    "FIRST_RETRY_SECONDS",
    "LAST_RETRY_SECONDS",
    "Backoff",
    "EndStream",
    "Link",
    "Outbox",
    "RedirectToLeader",
    "Server",
    "Session",
    "Sessions",
    "is_healthy",
    "known_error",
    "open_channel",
    "run_stream",
    "serving",
    "socket_path",
]
