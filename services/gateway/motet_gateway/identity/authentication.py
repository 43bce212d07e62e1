"""The layer that finds out who asks. Pure ASGI, around everything but probes, before a body is read."""

from collections.abc import Callable
from datetime import UTC, datetime

from starlette.types import ASGIApp, Receive, Scope, Send

from motet.clock import Clock, monotonic
from motet.errors import MotetError, NotAuthenticated
from motet_gateway.errors import error_response
from motet_gateway.identity.caller import ANYBODY, Caller, put
from motet_gateway.identity.keyring import Keyring

FOR_EVERYBODY = frozenset({"/health", "/ping"})
"""Whoever looks after machines has no key."""
ELSEWHERE = (b"x-api-key", b"api-key", b"openai-api-key")
"""Where other services read theirs."""
HOW = "Send it as 'authorization: Bearer motet_…'."


class Authentication:
    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        *,
        required: Callable[[], bool],
        clock: Clock = monotonic,
        today: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._app, self._keyring, self._required = app, keyring, required
        self._clock, self._today = clock, today

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in FOR_EVERYBODY:
            await self._app(scope, receive, send)
            return
        try:
            put(scope, self._caller(scope))
        except MotetError as error:
            extra = {"www-authenticate": "Bearer"} if isinstance(error, NotAuthenticated) else None
            await error_response(error, extra)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        if not self._required():
            return ANYBODY
        return self._keyring.open(_credential(scope), now=self._today(), at=self._clock())


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
