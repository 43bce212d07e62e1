"""Errors as OpenAI's clients expect them: the same body and headers for every error."""

import math
from typing import Any

import grpc
import orjson
from starlette.responses import Response

from motet.errors import TABLE, ErrorMapping, MotetError, NotAuthenticated

MAX_RETRY_AFTER_SECONDS = 60
"""Clients handle longer hints differently: one gives up, one ignores the hint, one waits all of it."""


class MethodNotAllowed(MotetError):
    """The path exists, but not for this method. The header `allow` names the right method."""

    mapping = ErrorMapping("method_not_allowed", 405, "invalid_request_error", grpc.StatusCode.UNIMPLEMENTED)


class HostNotAllowed(MotetError):
    """The Host header does not name this machine, and the gateway listens on a loopback address without keys. Use
    `http://localhost` or `http://127.0.0.1`, or allow the name with MOTET_GATEWAY_ALLOWED_HOSTS."""

    mapping = ErrorMapping("host_not_allowed", 403, "permission_error", grpc.StatusCode.PERMISSION_DENIED)


class HeadersTooLarge(MotetError):
    """The request line or the headers are too long, or there are too many headers. Send fewer or shorter headers."""

    mapping = ErrorMapping("headers_too_large", 431, "invalid_request_error", grpc.StatusCode.RESOURCE_EXHAUSTED)


class RequestTimeout(MotetError):
    """The headers or the body of the request did not arrive in time. Send it again over a faster connection."""

    mapping = ErrorMapping("request_timeout", 408, "invalid_request_error", grpc.StatusCode.DEADLINE_EXCEEDED)


def errors_by_code() -> dict[str, type[MotetError]]:
    """All errors that this module and `motet.errors` define."""
    return TABLE | {kind.mapping.code: kind for kind in MotetError.__subclasses__() if kind.__module__ == __name__}


class ClientGone(Exception):
    """The client has disconnected, so there is no answer to send."""


def error_body(error: MotetError) -> bytes:
    content: dict[str, Any] = {
        "message": error.for_clients,
        "type": error.mapping.type,
        "param": error.param,
        "code": error.code,
    }
    return orjson.dumps({"error": content})


def error_headers(error: MotetError) -> dict[str, str]:
    makes_sense = error.retry_after > 0 and error.mapping.retry_after > 0
    headers = {"x-should-retry": "true" if makes_sense else "false"}
    if isinstance(error, NotAuthenticated):
        headers["www-authenticate"] = "Bearer"
    if makes_sense:
        headers["retry-after"] = str(min(MAX_RETRY_AFTER_SECONDS, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(int(min(MAX_RETRY_AFTER_SECONDS, error.retry_after) * 1000))
    return headers


def error_response(error: MotetError, extra: dict[str, str] | None = None) -> Response:
    return Response(
        error_body(error),
        status_code=error.mapping.http,
        headers=error_headers(error) | (extra or {}),
        media_type="application/json",
    )
