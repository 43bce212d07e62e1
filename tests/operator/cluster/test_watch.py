"""Which watches count: the ages by which a process is taken for dead are those of watches that could be alive."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from motet_operator.cluster.watch import Heard, _listening


class Server:
    """Answers each path as it is told, and a watch with one line."""

    def __init__(self) -> None:
        self.status = 200
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def handle(_: web.BaseRequest) -> web.Response:
            return web.Response(status=self.status, text="{}\n")

        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield
        finally:
            await runner.cleanup()


async def ask(session: aiohttp.ClientSession, server: Server, path: str, *, watch: bool = False) -> None:
    async with session.get(server.url + path, params={"watch": "true"} if watch else {}) as response:
        async for _ in response.content.iter_chunked(100):
            pass


@pytest.mark.parametrize("status", [403, 404])
async def test_a_watch_that_is_refused_or_whose_kind_is_gone_has_no_age_until_it_is_back(status: int) -> None:
    heard, server = Heard(), Server()
    async with server.running(), aiohttp.ClientSession(response_class=_listening(heard)) as session:
        await ask(session, server, "/apis/pools", watch=True)
        await ask(session, server, "/apis/pods", watch=True)
        assert heard.ages().keys() == {"/apis/pools", "/apis/pods"}
        server.status = status
        await ask(session, server, "/apis/pools", watch=True)  # the right to watch is gone, or its kind
        assert heard.ages().keys() == {"/apis/pods"}
        await ask(session, server, "/apis/pods")  # a watch begins with a list
        assert heard.ages() == {}
        server.status = 200
        await ask(session, server, "/apis/pools", watch=True)
        assert heard.ages().keys() == {"/apis/pools"}


@pytest.mark.parametrize("status", [429, 500, 504])
async def test_any_other_error_leaves_a_watch_its_age(status: int) -> None:
    heard, server = Heard(), Server()
    async with server.running(), aiohttp.ClientSession(response_class=_listening(heard)) as session:
        await ask(session, server, "/apis/pools", watch=True)
        server.status = status
        await ask(session, server, "/apis/pools", watch=True)
        assert heard.ages().keys() == {"/apis/pools"}
