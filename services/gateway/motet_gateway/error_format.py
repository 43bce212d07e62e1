"""Errors as clients of each API expect them: the same body and headers for every error."""

import math
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.errors import MotetError, NotAuthenticated
from motet_gateway.answers.messages.errors import is_messages, messages_error
from motet_gateway.errors import forget_frames
from motet_gateway.request_ids import request_id_of

MAX_RETRY_AFTER_SECONDS = 60
"""Clients handle longer hints differently: one gives up, one ignores the hint, one waits all of it."""


def error_content(error: MotetError) -> dict[str, Any]:
    """In OpenAI's form."""
    return {
        "message": error.for_clients,
        "type": error.mapping.type,
        "param": error.param,
        "code": error.code,
    }


def error_body(error: MotetError) -> bytes:
    return orjson.dumps({"error": error_content(error)})


def error_headers(error: MotetError) -> dict[str, str]:
    makes_sense = error.retry_after > 0 and error.mapping.retry_after > 0
    headers = {"x-should-retry": "true" if makes_sense else "false"}
    if isinstance(error, NotAuthenticated):
        headers["www-authenticate"] = "Bearer"
    if makes_sense:
        headers["retry-after"] = str(min(MAX_RETRY_AFTER_SECONDS, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(math.ceil(min(MAX_RETRY_AFTER_SECONDS, error.retry_after) * 1000))
    return headers | dict(error.headers)


class ErrorResponse(Response):
    """In the form of the API that the request's path belongs to."""

    media_type = "application/json"

    def __init__(self, error: MotetError, extra: dict[str, str]) -> None:
        forget_frames(error)
        self._error = error
        super().__init__(error_body(error), status_code=error.mapping.http, headers=error_headers(error) | extra)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_messages(scope["path"]):
            self.body = orjson.dumps(messages_error(self._error, request_id_of(scope)))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: MotetError, extra: dict[str, str] | None = None) -> Response:
    return ErrorResponse(error, extra or {})
