"""Errors as OpenAI's clients expect them: one body, one set of headers, whatever went wrong."""

import math
from typing import Any

import grpc
import orjson
from starlette.responses import Response

from motet.errors import MotetError, Row

LONGEST_RETRY_HINT = 60
"""Clients disagree about hints above a minute: one gives up, one ignores it, one sleeps for all of it."""


class MethodNotAllowed(MotetError):
    row = Row("method_not_allowed", 405, "invalid_request_error", grpc.StatusCode.UNIMPLEMENTED)


class HostNotAllowed(MotetError):
    row = Row("host_not_allowed", 403, "permission_error", grpc.StatusCode.PERMISSION_DENIED)


class ClientGone(Exception):
    """Nobody is listening any more; there is nobody to tell."""


def error_body(error: MotetError) -> bytes:
    content: dict[str, Any] = {
        "message": error.message,
        "type": error.row.type,
        "param": error.param,
        "code": error.code,
    }
    return orjson.dumps({"error": content})


def error_headers(error: MotetError) -> dict[str, str]:
    headers = {"x-should-retry": "true" if error.retry_after > 0 else "false"}
    if error.retry_after > 0:
        headers["retry-after"] = str(min(LONGEST_RETRY_HINT, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(int(min(LONGEST_RETRY_HINT, error.retry_after) * 1000))
    return headers


def error_response(error: MotetError, extra: dict[str, str] | None = None) -> Response:
    return Response(
        error_body(error),
        status_code=error.row.http,
        headers=error_headers(error) | (extra or {}),
        media_type="application/json",
    )
