"""Connections between services: their options, and when a silent peer counts as gone."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from motet import tls
from motet.transport import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_BOTH: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer whose machine is gone sends nothing. Without pings its stream would look healthy for ever. Two options set
    # the timeout of a ping; gRPC uses the second one. Without the last option, gRPC would ping an idle stream only
    # twice and then once a minute.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH,
    # No channel takes over the back-off of an earlier channel to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", int(FIRST_RETRY_SECONDS * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(LAST_RETRY_SECONDS * 1000)),
    # A restarted pod has another address. By default a channel would resolve the name only twice a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.enable_http_proxy", 0),
]
_QUICK_PINGS: dict[str, int] = {
    # An answer stands still until its gateway notices that it is cut off from its runner. A runner that only pauses
    # must not look like that: its streams would break, which counts against their requests. Without heartbeats, the
    # supervisor takes it for lost after two seconds, too.
    "grpc.keepalive_time_ms": 1_000,
    "grpc.keepalive_timeout_ms": 2_000,
    "grpc.http2.ping_timeout_ms": 2_000,
}
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # half of the quickest, which may come a little early
    # Two processes on one port would share its requests at random.
    ("grpc.so_reuseport", 0),
]


@asynccontextmanager
async def open_channel(address: str, role: str = "", *, grace: float | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to `unix:/path` or `host:port`. It is closed when the context ends.

    With TLS, the certificate of the peer must have `role`; if `role` is empty, the name in `address`. Calls that still
    run when the channel is closed have `grace` seconds to end. Raises SetupError if this process's own TLS certificate
    is not valid.
    """
    identity = tls.current_identity()
    options = _CHANNEL_OPTIONS
    if role == "runner":
        options = [(name, _QUICK_PINGS.get(name, value)) for name, value in _CHANNEL_OPTIONS]
    if identity is None or socket_path(address) is not None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        name = [("grpc.ssl_target_name_override", tls.name_of(role))] if role else []
        channel = grpc.aio.secure_channel(address, identity.channel_credentials(), options=[*options, *name])
    try:
        yield channel
    finally:
        await channel.close(grace)


def socket_path(address: str) -> Path | None:
    """The path in a `unix:` address; None for TCP."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def is_served(path: Path) -> bool:
    """Whether a process listens on a Unix socket. This check takes microseconds, an attempt of gRPC milliseconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
