"""The id of an HTTP request, as its client and the log have it. The outermost middleware gives each one."""

import re
import secrets

from starlette.types import Scope

REQUEST_ID = b"x-request-id"
_IN_SCOPE = "motet.request_id"
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
