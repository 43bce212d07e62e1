"""/motet/requests/{request}: what happened to a request of the caller's tenant."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from motet.keys import KeyScope
from motet_gateway.gateway import Gateway
from motet_gateway.identity.caller import caller_of
from motet_gateway.routes.json_response import json_response


def request_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["requests"])

    @router.get("/motet/requests/{request_id}")
    async def request(request_id: str, request: Request) -> Response:
        caller = caller_of(request.scope)
        caller.needs(KeyScope.USER)
        gateway.admission.check_request()
        return json_response(await gateway.explanations.of(request_id, caller))

    @router.get("/load")
    async def load(request: Request) -> Response:
        """As in vLLM: how many requests are under way. Only those of the caller's tenant."""
        caller = caller_of(request.scope)
        caller.needs(KeyScope.USER)
        mine = sum(1 for answer in list(gateway.answers) if answer.caller.tenant == caller.tenant)
        return json_response({"server_load": mine})

    return router
