"""Errors as OpenAI's clients expect them: the same body and headers for every error."""

import math
from typing import Any

import orjson
from starlette.responses import Response

from motet.errors import MotetError, NotAuthenticated

MAX_RETRY_AFTER_SECONDS = 60
"""Clients handle longer hints differently: one gives up, one ignores the hint, one waits all of it."""


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
        headers["retry-after-ms"] = str(math.ceil(min(MAX_RETRY_AFTER_SECONDS, error.retry_after) * 1000))
    return headers | dict(error.headers)


def error_response(error: MotetError, extra: dict[str, str] | None = None) -> Response:
    return Response(
        error_body(error),
        status_code=error.mapping.http,
        headers=error_headers(error) | (extra or {}),
        media_type="application/json",
    )
