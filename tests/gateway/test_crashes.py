"""What a client sees when our own code fails: an error in the usual shape, or a broken body, never a clean end."""

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.responses import StreamingResponse

from motet.clock import monotonic
from motet_gateway.app import add_error_handlers
from motet_gateway.metrics import Metrics
from motet_gateway.middleware import RequestContext
from motet_gateway.server import HttpServer, listening
from motet_gateway.settings import Settings
from tests.gateway.conftest import eventually


def crashing_app() -> RequestContext:
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/before")
    async def before() -> None:
        raise RuntimeError("before the first byte")

    @app.get("/amid")
    async def amid() -> StreamingResponse:
        async def text() -> AsyncIterator[str]:
            yield "half an "
            raise RuntimeError("amid the answer")

        return StreamingResponse(text())

    @app.get("/number/{number}")
    async def number(number: int) -> int:
        return number

    return RequestContext(app)


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    settings = Settings(port=0)
    server = HttpServer(crashing_app(), settings, Metrics(CollectorRegistry(), clock=monotonic), grace=1)
    with listening(settings) as bound:
        running = asyncio.create_task(server.serve(sockets=[bound]))
        await eventually(lambda: server.started)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with httpx2.AsyncClient(base_url=url, timeout=60, verify=False) as client:
            yield client
        server.should_exit = True
        await running


async def test_a_crash_before_the_first_byte_is_an_error_with_an_id(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/before")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "before the first byte" not in answer.text
    assert answer.headers["x-request-id"]


async def test_a_crash_in_mid_answer_breaks_the_body(http: httpx2.AsyncClient) -> None:
    with pytest.raises(httpx2.RemoteProtocolError):
        await http.get("/amid")


async def test_errors_of_fastapis_validation_have_the_same_shape(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/number/seven")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "number"
