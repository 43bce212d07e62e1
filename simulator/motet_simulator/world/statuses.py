"""How a simulated stream may end, as gRPC says it."""

from motet.transport import StatusCode

Status = tuple[StatusCode, str]

OK: Status = (StatusCode.OK, "")
REFUSED: Status = (StatusCode.UNAVAILABLE, "connection refused")
RESET: Status = (StatusCode.UNAVAILABLE, "connection reset by peer")
UNANSWERED: Status = (StatusCode.UNAVAILABLE, "ping timeout")
SILENT: Status = (StatusCode.UNAVAILABLE, "connection timed out")
STOPPED: Status = (StatusCode.UNAVAILABLE, "the server stops")


class Aborted(Exception):
    """A handler has ended its stream with a status."""
