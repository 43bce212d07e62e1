"""The HTTP server: uvicorn on a socket that is bound here, so that a port in use gives a clear error."""

import contextlib
import errno
import math
import resource
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import structlog
import uvicorn
from starlette.types import ASGIApp

from motet.addresses import bound_socket
from motet.errors import SetupError
from motet_gateway.http.connection import HttpConnection
from motet_gateway.http.connection_limit import ConnectionLimit
from motet_gateway.metrics import Metrics
from motet_gateway.settings import Settings

log = structlog.get_logger(__name__)

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open. Clients' pools keep connections longer than uvicorn's default of five seconds
and would send requests into connections that are being closed."""
OTHER_FILES = 256
"""Files that the gateway opens besides the connections of clients: to runners, of the model, logs."""
LAST_SECONDS = 5
"""How long the last bytes of an ended answer may take before its connection is closed."""


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """A bound socket. Raises SetupError, with the port and what to do, if it can't be bound."""
    try:
        found = bound_socket(settings.host, settings.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SetupError(
                f"port {settings.port} on {settings.host} is in use by another process. Stop that one, or choose "
                "another with --port."
            ) from None
        raise SetupError(
            f"cannot listen on {settings.host}, port {settings.port}: {error.strerror}. Choose another address "
            "with MOTET_GATEWAY_HOST, or another port with --port."
        ) from None
    with found as bound:
        bound.listen(BACKLOG)
        yield bound


def room_for(connections: int) -> int:
    """For how many connections this process may open files, at most for this number. Raises its own limit if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    room = max(1, allowed - OTHER_FILES)
    if room < connections:
        log.warning("few_open_files", allowed=allowed, connections=room)
    return room


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics, *, grace: float) -> None:
        limit = ConnectionLimit(
            room_for(settings.max_connections), most_per_address=settings.max_connections_per_address
        )
        metrics.connections.set_function(lambda: limit.open)
        connection = partial(HttpConnection, settings=settings, metrics=metrics, limit=limit)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("Any", connection),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                proxy_headers=False,  # callers are identified by API key, never by address
                timeout_graceful_shutdown=math.ceil(grace),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
