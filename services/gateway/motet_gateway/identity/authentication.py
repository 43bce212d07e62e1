"""The layer that finds out who asks. Pure ASGI, around everything but probes, before a body is read."""

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from motet.errors import MotetError, NotAuthenticated
from motet_gateway.errors import error_response
from motet_gateway.identity.access import Access
from motet_gateway.identity.caller import ANYBODY, Caller, put
from motet_gateway.metrics import Metrics

FOR_EVERYBODY = frozenset({"/health", "/ping"})
"""Whoever looks after machines has no key."""
ELSEWHERE = (b"x-api-key", b"api-key", b"openai-api-key")
"""Where other services read theirs."""
HOW = "Send it as 'authorization: Bearer motet_…'."


class Authentication:
    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in FOR_EVERYBODY:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._caller(scope)
        except MotetError as error:
            self._metrics.refused_callers.labels(error.code).inc()
            await error_response(error)(scope, receive, send)
            return
        put(scope, caller)
        if caller.key:
            structlog.contextvars.bind_contextvars(tenant=caller.tenant, key=caller.key)
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        return self._access.open(_credential(scope)) if self._access.needs_key() else ANYBODY


def _credential(scope: Scope) -> str:
    """Raises NotAuthenticated when it is missing, elsewhere or there twice."""
    said = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(said) > 1:
        raise NotAuthenticated(f"There are {len(said)} authorization headers; send one.")
    if not said:
        if any(name in ELSEWHERE for name, _ in scope["headers"]):
            raise NotAuthenticated(f"The API key is in a header that Motet does not read. {HOW}")
        raise NotAuthenticated(f"This gateway needs an API key. {HOW}")
    scheme, _, credential = said[0].partition(b" ")
    if scheme.lower() != b"bearer":
        raise NotAuthenticated(f"The authorization header has no bearer token. {HOW}")
    return str(credential.strip(), "latin-1")
