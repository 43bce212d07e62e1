"""Errors in the form of the Messages API. Pure."""

from typing import Any

from motet.errors import MotetError

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By HTTP status. Others: the request or the server is wrong."""
ERROR_TYPES = frozenset((*_TYPES.values(), "invalid_request_error", "api_error"))


def is_messages(path: str) -> bool:
    """Whether a path is of this API, so that its errors have this form."""
    return path == PATH or path.startswith(f"{PATH}/")


def messages_error(error: MotetError, request_id: str) -> dict[str, Any]:
    """`request_id`: of the HTTP request. `code` and `param` are ours."""
    status = error.mapping.http
    shown = {
        "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error"),
        "message": error.for_clients,
        "code": error.code,
        "param": error.param,
    }
    return {"type": "error", "error": shown, "request_id": request_id}
