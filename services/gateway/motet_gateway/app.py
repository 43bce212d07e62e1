"""The ASGI application: routes, middleware, and one shape for every error."""

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from motet.errors import Internal, InvalidRequest, MotetError, NotFound
from motet_gateway.error_format import error_response
from motet_gateway.errors import MethodNotAllowed
from motet_gateway.gateway import Gateway
from motet_gateway.identity.authentication import Authentication
from motet_gateway.middleware import CRASHED, LocalHostsOnly, RequestContext
from motet_gateway.routes.generate import GenerateRoutes
from motet_gateway.routes.json_response import json_response
from motet_gateway.routes.loras import lora_routes
from motet_gateway.routes.lorax import LoraxRoutes
from motet_gateway.routes.models import model_routes
from motet_gateway.routes.probes import probe_routes
from motet_gateway.routes.requests import request_routes
from motet_gateway.routes.tokens import token_routes

NOT_HERE = {
    "/v1/messages/batches": "Batches are not supported; send each request to /v1/messages.",
    "/v1/responses/": "No response is stored; POST /v1/responses gives the whole answer.",
} | {
    path: f"There are no {what} here yet."
    for what, paths in {
        "embeddings": ("/v1/embeddings", "/v2/embed", "/embed"),
        "scores of pairs of texts": ("/score", "/v1/score"),
        "rankings of texts": ("/rerank", "/v1/rerank", "/v2/rerank"),
        "poolings of texts": ("/pooling",),
        "classifications of texts": ("/classify",),
        "batches of requests": ("/v1/batches",),
        "files": ("/v1/files",),
    }.items()
    for path in paths
}
"""Paths of the APIs that clients may expect, and why they are not here."""


FOR_PAGES = (
    *("x-request-id", "x-motet-request", "x-motet-length", "x-motet-ignored", "server-timing"),
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
"""Headers of answers that scripts of other origins may read"""


def build_app(gateway: Gateway, registry: CollectorRegistry) -> ASGIApp:
    app = FastAPI(title="Motet", openapi_url=None, redirect_slashes=False)
    app.add_route("/openapi.json", partial(_description, metrics=gateway.settings.metrics_dir is not None), ["GET"])
    app.include_router(model_routes(gateway))
    app.include_router(token_routes(gateway))
    app.include_router(lora_routes(gateway))
    app.include_router(request_routes(gateway))
    app.include_router(probe_routes(gateway, registry))
    add_error_handlers(app)
    answering = LoraxRoutes(GenerateRoutes(app, gateway), gateway)
    guarded: ASGIApp = Authentication(answering, gateway.access, gateway.metrics)
    if gateway.settings.is_local:
        guarded = LocalHostsOnly(guarded, allowed=gateway.settings.allowed_hosts)
    if origins := gateway.settings.cors_origins:  # outside of what asks for keys: browsers send none with a preflight
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=FOR_PAGES,
        )
    return RequestContext(guarded)


async def _description(_: Request, *, metrics: bool) -> Response:
    # It takes a third of a second to make, which nobody should wait for, neither at the start nor behind who asks.
    return json_response(await asyncio.to_thread(_document, metrics=metrics))


def _document(*, metrics: bool) -> dict[str, Any]:
    from motet_gateway.openapi import document

    return document(metrics=metrics)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(MotetError, _motet_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _crash)


async def _motet_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, MotetError)
    return error_response(error)


async def _crash(_request: Request, _error: Exception) -> Response:
    return error_response(Internal(CRASHED))  # RequestContext, the outermost layer, logs it


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        why = next((why for path, why in NOT_HERE.items() if request.url.path.startswith(path)), "")
        return error_response(
            NotFound(f"There is nothing at {where}. {why or 'The API is described at /openapi.json.'}")
        )
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        hint = f" Use {allowed}." if allowed else ""
        return error_response(MethodNotAllowed(f"{where} is not allowed.{hint}"), dict(error.headers or {}))
    return error_response(InvalidRequest(str(error.detail)))


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    return error_response(InvalidRequest(f"{field}: {first['msg']}", param=field or None))
