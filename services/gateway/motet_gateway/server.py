"""The HTTP server: uvicorn on a socket that is bound here, so that a port in use gives a clear error."""

import contextlib
import errno
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from motet.errors import SetupError
from motet_gateway.connection import bounded
from motet_gateway.settings import Settings

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open. Clients' pools keep connections longer than uvicorn's default of five seconds
and would send requests into connections that are being closed."""
LAST_SECONDS = 5
"""How long the last bytes of an ended answer may take before its connection is closed."""


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """A bound socket. Raises SetupError, with the port and what to do, if it can't be bound."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((settings.host, settings.port))
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
        bound.listen(BACKLOG)
        yield bound


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    def __init__(self, app: ASGIApp, settings: Settings, *, grace: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded(settings),
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
