"""The middleware that finds the caller. Pure ASGI, around everything but probes, before a body is read."""

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from motet.errors import MotetError, NotAuthenticated
from motet_gateway.error_format import error_response
from motet_gateway.identity.access import KeyAccess
from motet_gateway.identity.caller import ANONYMOUS, Caller, put
from motet_gateway.metrics import Metrics

PUBLIC_PATHS = frozenset({"/health", "/ping"})
"""Probes have no key."""
KEY_HEADER = b"x-api-key"
"""Anthropic's clients send the key in it."""
OTHER_KEY_HEADERS = (b"api-key", b"openai-api-key")
"""Headers in which other services expect a key."""
HOW_TO_SEND_KEY = "Send it as 'authorization: Bearer motet_…' or as 'x-api-key: motet_…'."


class Authentication:
    def __init__(self, app: ASGIApp, access: KeyAccess, metrics: Metrics) -> None:
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._caller(scope)
        except MotetError as error:
            self._metrics.refused_callers.labels(error.code).inc()
            await error_response(error)(scope, receive, send)
            return
        put(scope, caller)
        if caller.key_id:
            structlog.contextvars.bind_contextvars(tenant=caller.tenant, key=caller.key_id)
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        return self._access.open(_credential(scope)) if self._access.needs_key() else ANONYMOUS


def _credential(scope: Scope) -> str:
    """Raises NotAuthenticated if it is missing, in another header or there twice."""
    said = [value for name, value in scope["headers"] if name == b"authorization"]
    keys = [value for name, value in scope["headers"] if name == KEY_HEADER]
    if len(said) + len(keys) > 1:
        raise NotAuthenticated(
            f"There are {len(said)} authorization headers and {len(keys)} x-api-key headers; send one of all."
        )
    if keys:
        return str(keys[0].strip(), "latin-1")
    if not said:
        if any(name in OTHER_KEY_HEADERS for name, _ in scope["headers"]):
            raise NotAuthenticated(f"The API key is in a header that Motet does not read. {HOW_TO_SEND_KEY}")
        raise NotAuthenticated(f"This gateway needs an API key. {HOW_TO_SEND_KEY}")
    scheme, _, credential = said[0].partition(b" ")
    if scheme.lower() != b"bearer":
        raise NotAuthenticated(f"The authorization header has no bearer token. {HOW_TO_SEND_KEY}")
    return str(credential.strip(), "latin-1")
