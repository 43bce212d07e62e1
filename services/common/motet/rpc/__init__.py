"""gRPC as Motet uses it: few long-lived streams, each one told everything again after it broke.

Rules, each learnt from a failure seen in practice:
- a handler that is cancelled re-raises, a client call lives in a context that cancels it: grpc.aio leaks otherwise;
- reconnecting starts after 50 ms and never waits longer than 500 ms (gRPC's own back-off costs over a second), nor
  longer than a Unix socket takes to be served again;
- what is said while a stream is down is dropped: the greeting of the next connection tells the whole truth again;
- a name is resolved anew at each reconnect, and a peer that vanished without a word is noticed within ten seconds;
- channels are made after the process has started, never before a fork;
- `asyncio.timeout`, never `wait_for`.
"""

from motet.rpc.channels import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, open_channel, socket_path
from motet.rpc.links import Backoff, Link, RedirectToLeader
from motet.rpc.outbox import Outbox
from motet.rpc.server import Server, is_healthy, serving
from motet.rpc.sessions import Session, Sessions, run_stream

__all__ = [
    "FIRST_RETRY_SECONDS",
    "LAST_RETRY_SECONDS",
    "Backoff",
    "Link",
    "Outbox",
    "RedirectToLeader",
    "Server",
    "Session",
    "Sessions",
    "is_healthy",
    "open_channel",
    "run_stream",
    "serving",
    "socket_path",
]
