"""/v1/chat/completions and /v1/completions."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from motet_gateway.answers.answer import Answer
from motet_gateway.bodies import read_json
from motet_gateway.catalog import ANYBODY
from motet_gateway.gateway import Gateway
from motet_gateway.parameters import Body, ChatBody, CompletionBody, parse

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def generate_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    async def answer(request: Request, kind: type[Body]) -> Response:
        content = await read_json(request, limit=gateway.settings.max_body_bytes)
        body = parse(kind, content)
        body.refuse_what_is_not_there_yet()
        gateway.metrics.unknown_fields.inc(body.unknown_fields())
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            gateway.metrics.client_retries.inc()
        return Answer(gateway, ANYBODY, body, body_bytes=len(content))

    async def chat(request: Request) -> Response:
        return await answer(request, ChatBody)

    async def completions(request: Request) -> Response:
        return await answer(request, CompletionBody)

    # Plain routes: nothing is injected, and what FastAPI would do for each request is a good part of our budget.
    router.add_route(CHAT, chat, methods=["POST"])
    router.add_route(COMPLETIONS, completions, methods=["POST"])
    return router


def describe(schema: dict[str, Any]) -> dict[str, Any]:
    """Put both endpoints into an OpenAPI schema, which knows only what FastAPI validates by itself."""
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for path, kind, summary in ((CHAT, ChatBody, "Chat"), (COMPLETIONS, CompletionBody, "Plain completions")):
        body = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(body.pop("$defs", {}))
        schemas[kind.__name__] = body
        schema["paths"][path] = {
            "post": {
                "tags": ["answers"],
                "summary": summary,
                "operationId": kind.__name__.removesuffix("Body").lower(),
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}},
                },
                "responses": {
                    "200": {
                        "description": "One JSON object, or server-sent events with `stream: true`",
                        "content": {"application/json": {}, "text/event-stream": {}},
                    }
                },
            }
        }
    return schema
