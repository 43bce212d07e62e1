"""Errors of HTTP requests, which only the gateway raises. Errors that services share are in `motet.errors`."""

from motet.errors import TABLE, ErrorMapping, InvalidRequest, MotetError
from motet.transport import StatusCode


class MethodNotAllowed(MotetError):
    """The path exists, but not for this method. The header `allow` names the right method."""

    mapping = ErrorMapping("method_not_allowed", 405, "invalid_request_error", StatusCode.UNIMPLEMENTED)


class HostNotAllowed(MotetError):
    """The Host header does not name this machine, and the gateway listens on a loopback address without keys. Use
    `http://localhost` or `http://127.0.0.1`, or allow the name with MOTET_GATEWAY_ALLOWED_HOSTS."""

    mapping = ErrorMapping("host_not_allowed", 403, "permission_error", StatusCode.PERMISSION_DENIED)


class ChangesNotAllowed(MotetError):
    """Adapters are not loaded or unloaded over HTTP here. The message says what to do instead: on a cluster, which
    manifest to apply; on your own machine, which command to use, or how to allow it."""

    mapping = ErrorMapping("changes_not_allowed", 403, "permission_error", StatusCode.PERMISSION_DENIED)


class HeadersTooLarge(MotetError):
    """The request line or the headers are too long, or there are too many headers. Send fewer or shorter headers."""

    mapping = ErrorMapping("headers_too_large", 431, "invalid_request_error", StatusCode.RESOURCE_EXHAUSTED)


class RequestTimeout(MotetError):
    """The headers or the body of the request did not arrive in time. Send it again over a faster connection."""

    mapping = ErrorMapping("request_timeout", 408, "invalid_request_error", StatusCode.DEADLINE_EXCEEDED)


def errors_by_code() -> dict[str, type[MotetError]]:
    """All errors that this module and `motet.errors` define."""
    return TABLE | {kind.mapping.code: kind for kind in MotetError.__subclasses__() if kind.__module__ == __name__}


def wrong(field: str, why: str) -> InvalidRequest:
    """Of a field of the body."""
    return InvalidRequest(f"{field}: {why}", param=field)


def forget_frames(error: BaseException | None) -> None:
    """Call it when an error becomes an answer. The frames that it came through hold the whole request. Some hold the
    error, too, in a cycle that stays until the garbage collector comes."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__, error = None, error.__context__


class ClientGone(Exception):
    """The client has disconnected, so there is no answer to send."""
