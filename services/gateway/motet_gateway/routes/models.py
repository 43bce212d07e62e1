"""/v1/models: the models that the caller may use."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from motet.api.v1 import scheduler_pb2
from motet.keys import KeyScope
from motet_gateway.catalog import Target
from motet_gateway.gateway import Gateway
from motet_gateway.identity.caller import Caller, caller_of
from motet_gateway.routes.json_response import json_response

LISTED_AT_ONCE = 250
"""Models. Ten thousand take a tenth of a second."""

STATES = {
    scheduler_pb2.ADAPTER_READINESS_UNSPECIFIED: "cold",
    scheduler_pb2.ADAPTER_READINESS_COLD: "cold",
    scheduler_pb2.ADAPTER_READINESS_READY: "ready",
    scheduler_pb2.ADAPTER_READINESS_LOADING: "loading",
    scheduler_pb2.ADAPTER_READINESS_FAILED: "failed",
}


def model_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"])
    started = int(time.time())

    @router.get("")
    async def models(request: Request) -> Response:
        caller = caller_of(request.scope)
        caller.needs(KeyScope.USER)
        visible: list[tuple[str, Target]] = []
        async for some in _in_parts(gateway.catalog.current.visible(caller)):
            visible += some
        visible.sort(key=lambda pair: pair[0])
        cards = [
            orjson.dumps([model_card(name, target, started, caller) for name, target in some])[1:-1]
            async for some in _in_parts(visible)
        ]
        return Response(b'{"object":"list","data":[%b]}' % b",".join(cards), media_type="application/json")

    @router.get("/{model:path}")
    async def model(model: str, request: Request) -> Response:
        caller = caller_of(request.scope)
        caller.needs(KeyScope.USER)
        target = gateway.catalog.current.resolve(model, caller)
        return json_response(model_card(model, target, started, caller))

    return router


async def _in_parts(models: Iterable[tuple[str, Target]]) -> AsyncIterator[list[tuple[str, Target]]]:
    """Others are answered between two of them."""
    left = iter(models)
    while some := list(islice(left, LISTED_AT_ONCE)):
        yield some
        await asyncio.sleep(0)


def model_card(name: str, target: Target, created: int, caller: Caller) -> dict[str, Any]:
    """OpenAI's fields, those that vLLM added, and ours."""
    group, adapter = target.group, target.adapter
    source = adapter.source if adapter is not None else group.model_uri
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": adapter.ref.namespace if adapter is not None else "motet",
        "root": source if target.is_owned_by(caller) else None,
        "parent": group.served_name if adapter is not None else None,
        "max_model_len": group.max_model_length or None,
        "permission": [],
        "tenant": adapter.ref.namespace if adapter is not None else None,
        "revision": adapter.ref.generation if adapter is not None else None,
        "digest": (adapter.digest if adapter is not None else group.base_digest) or None,
        "state": _state(target),
        "rank": adapter.rank or None if adapter is not None else None,
    }
    return card


def _state(target: Target) -> str:
    if target.adapter is None:
        return "ready" if target.group.runners else "cold"
    return STATES.get(
        target.adapter.state, "unknown"
    )  # a state of a newer scheduler; requests wait as for a cold adapter
