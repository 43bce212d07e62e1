"""The paths that answer: /v1/chat/completions, /v1/completions, /v1/messages and /v1/responses."""

from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from motet.errors import MotetError
from motet.keys import KeyScope
from motet_gateway.answers.answer import AnswerResponse
from motet_gateway.answers.api import Api
from motet_gateway.answers.chat import CHAT
from motet_gateway.answers.completions import COMPLETIONS
from motet_gateway.answers.messages import errors as messages_errors
from motet_gateway.answers.messages.api import MESSAGES
from motet_gateway.answers.responses import api as responses_api
from motet_gateway.error_format import error_response
from motet_gateway.errors import MethodNotAllowed
from motet_gateway.gateway import Gateway
from motet_gateway.identity.caller import caller_of
from motet_gateway.parameters import parse
from motet_gateway.request_bodies import RequestBody
from motet_gateway.request_ids import request_id_of, traceparent_of_request

APIS: dict[str, Api[Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    messages_errors.PATH: MESSAGES,
    responses_api.PATH: responses_api.RESPONSES,
}


class GenerateRoutes:
    """Serves the endpoints that generate tokens and passes all other requests on.

    They do not use FastAPI: they need nothing of it, and its layers would cost time per request and per
    piece of a stream.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = APIS.get(scope["path"]) if scope["type"] == "http" else None
        if api is None:
            await self._app(scope, receive, send)
            return
        try:
            if scope["method"] != "POST":
                raise MethodNotAllowed(f"{scope['method']} {scope['path']} is not allowed. Use POST.")
            with self._gateway.bodies.hold() as held:
                await (await self._answer(scope, receive, held, api))(scope, receive, send)
        except MotetError as error:
            # An answer that has begun sends its errors itself, so no status was sent yet.
            allow = {"allow": "POST"} if isinstance(error, MethodNotAllowed) else None
            await error_response(error, allow)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, held: RequestBody, api: Api[Any]) -> AnswerResponse:
        gateway, caller = self._gateway, caller_of(scope)
        try:
            caller.needs(KeyScope.USER)
            gateway.admission.check_request()
            content = await held.read_json(scope, receive, limit=gateway.settings.max_body_bytes)
            body = parse(api.body, content)
            body.refuse_unsupported()
            body.model = body.model or gateway.catalog.current.only_base(caller)
            held.take(body.repeated_bytes)
        except MotetError as error:
            gateway.metrics.requests.labels(*gateway.metrics.who(caller.tenant, ""), str(error.mapping.http)).inc()
            raise
        if unknown := body.unknown_fields():
            gateway.metrics.unknown_fields.inc(len(unknown))
        if Headers(scope=scope).get("x-stainless-retry-count", "0") != "0":
            gateway.metrics.client_retries.inc()
        http = {"http_id": request_id_of(scope), "traceparent": traceparent_of_request(scope)}
        return AnswerResponse(gateway, caller, api, body, **http, take=held.take)
