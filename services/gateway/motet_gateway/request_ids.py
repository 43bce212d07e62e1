"""The id of an HTTP request, as its client and the log have it, and its trace. The outermost middleware gives each
one."""

import re
import secrets

from starlette.types import Scope

from motet.trace_context import traceparent_of

REQUEST_ID = b"x-request-id"
TRACEPARENT = b"traceparent"
_IN_SCOPE = "motet.request_id"
_TRACE_IN_SCOPE = "motet.traceparent"
_ACCEPTABLE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def give_id(scope: Scope) -> bytes:
    """The client's own, or a new one."""
    given = [value for name, value in scope["headers"] if name == REQUEST_ID and _ACCEPTABLE.fullmatch(value)]
    id_ = bytes(given[0]) if given else b"req-" + secrets.token_hex(12).encode()
    scope[_IN_SCOPE] = id_.decode()
    return id_


def request_id_of(scope: Scope) -> str:
    id_: str = scope.get(_IN_SCOPE, "")
    return id_


def take_traceparent(scope: Scope) -> str:
    """The client's; empty: it sent none that counts."""
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == TRACEPARENT]
    traceparent: str = scope.setdefault(_TRACE_IN_SCOPE, traceparent_of(given))
    return traceparent


def traceparent_of_request(scope: Scope) -> str:
    traceparent: str = scope.get(_TRACE_IN_SCOPE, "")
    return traceparent
