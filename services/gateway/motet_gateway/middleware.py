"""Middleware around every route. Pure ASGI: decorator middleware would turn a crash in mid-stream into a clean end."""

from collections.abc import Collection

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.errors import Internal
from motet.trace_context import in_log
from motet_gateway.answers.messages.errors import is_messages
from motet_gateway.error_format import error_response
from motet_gateway.errors import ClientGone, HostNotAllowed, forget_frames
from motet_gateway.request_ids import REQUEST_ID, give_id, take_traceparent

log = structlog.get_logger(__name__)

MESSAGES_REQUEST_ID = b"request-id"
"""Anthropic's clients read it there."""
CRASHED = "The gateway failed on this request; its log says why, under the id in x-request-id."
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class RequestContext:
    """Gives every request an id in logs and answer, and sends an error for a crash if no answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = give_id(scope)
        own_headers = [(REQUEST_ID, request_id)]
        if is_messages(scope["path"]):
            own_headers.append((MESSAGES_REQUEST_ID, request_id))
        started = ended = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, ended
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *own_headers]
            else:
                ended = not message.get("more_body", False)
            await send(message)

        trace = in_log(take_traceparent(scope))
        structlog.contextvars.bind_contextvars(request=request_id.decode(), path=scope["path"], **trace)
        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            log.debug("client_disconnected_early")
        except Exception as error:
            log.exception("request_crashed")
            if started and not ended:
                raise  # the server closes the connection, so that the client does not take this for the end
            forget_frames(error)
            if not started:
                await error_response(Internal(CRASHED))(scope, receive, send_with_id)
        finally:
            structlog.contextvars.unbind_contextvars("request", "path", "trace", "tenant", "key")


class LocalHostsOnly:
    """On a loopback address without keys, the Host header has to name this machine.

    Otherwise any web page could reach the gateway through a browser, by pointing a name of its own at 127.0.0.1.
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = {name.lower() for name in (*_LOOPBACK_NAMES, *allowed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if _name_of(host) not in self._allowed and "*" not in self._allowed:
                error = HostNotAllowed(
                    f"The Host header says {host!r}, which is not this machine. Use http://localhost or "
                    "http://127.0.0.1, or allow the name with MOTET_GATEWAY_ALLOWED_HOSTS."
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")
