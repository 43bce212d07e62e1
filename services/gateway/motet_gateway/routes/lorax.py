"""The paths of LoRAX and of SageMaker: /generate, /generate_stream, / and /invocations."""

from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from motet.errors import InvalidRequest, MotetError
from motet.json_object import json_object
from motet.keys import KeyScope
from motet_gateway.answers.api import Api
from motet_gateway.answers.chat import CHAT
from motet_gateway.answers.completions import COMPLETIONS
from motet_gateway.answers.lorax.api import GENERATE, GENERATE_STREAM, ROOT
from motet_gateway.answers.lorax.writer import error_body
from motet_gateway.error_format import error_headers, error_response
from motet_gateway.errors import forget_frames
from motet_gateway.identity.caller import caller_of
from motet_gateway.routes.generate import GenerateRoutes

OF_LORAX: dict[str, Api[Any]] = {"/generate": GENERATE, "/generate_stream": GENERATE_STREAM, "/": ROOT}
INVOCATIONS = "/invocations"
_BY_FIELD: dict[str, Api[Any]] = {"messages": CHAT, "prompt": COMPLETIONS, "inputs": ROOT}


class LoraxRoutes(GenerateRoutes):
    """Passes all other requests on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        if path not in OF_LORAX and path != INVOCATIONS:
            await self._app(scope, receive, send)
            return
        api = OF_LORAX.get(path)
        try:
            of_body = receive
            if api is None:
                caller_of(scope).needs(KeyScope.USER)
                self._gateway.admission.check_request()
                with self._gateway.bodies.hold() as held:
                    limit = self._gateway.settings.max_body_bytes
                    content = await held.read_json(scope, receive, limit=limit)
                api, of_body = _api_of(content), _again(content)
            with self._gateway.bodies.hold() as held:
                await (await self._answer(scope, of_body, held, api))(scope, receive, send)
        except MotetError as error:
            # An answer that has begun sends its errors itself, so no status was sent yet.
            response = _lorax_error(error) if api in OF_LORAX.values() else error_response(error)
            await response(scope, receive, send)


def _api_of(content: bytes) -> Api[Any]:
    said = json_object(content)
    for field, api in _BY_FIELD.items():
        if field in said:
            return api
    raise InvalidRequest(f"The body has to be a JSON object with one of the fields {', '.join(_BY_FIELD)}.")


def _again(content: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": content, "more_body": False}

    return receive


def _lorax_error(error: MotetError) -> Response:
    forget_frames(error)
    return Response(
        error_body(error),
        status_code=error.mapping.http,
        headers=error_headers(error),
        media_type="application/json",
    )
