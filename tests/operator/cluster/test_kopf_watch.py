"""Which watches count: the ages by which a process is taken for dead are those of watches that could be alive. And that
a watch comes back, whatever ended it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from motet.kube import KubeCredentials
from motet_operator.cluster.kinds import ADAPTERS, DECLARED_KINDS, Kind, Object
from motet_operator.cluster.kopf_watch import KopfEngine, LastHeard, _listening
from motet_operator.cluster.watch import Listener
from tests.common.waiting import until
from tests.operator.cluster.objects import adapter
from tests.support.fake_watch_api import FakeWatchApi, Watch


class Server:
    """Answers each path as it is told, and a watch with one line."""

    def __init__(self) -> None:
        self.status = 200
        self.headers = {"Audit-Id": "1"}
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def handle(_: web.BaseRequest) -> web.Response:
            return web.Response(status=self.status, text="{}\n", headers=self.headers)

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
    last_heard, server = LastHeard(), Server()
    async with (
        server.running(),
        aiohttp.ClientSession(response_class=_listening(last_heard, lambda *_: None)) as session,
    ):
        await ask(session, server, "/apis/pools", watch=True)
        await ask(session, server, "/apis/pods", watch=True)
        assert last_heard.ages().keys() == {"/apis/pools", "/apis/pods"}
        server.status = status
        await ask(session, server, "/apis/pools", watch=True)  # the right to watch is gone, or its kind
        assert last_heard.ages().keys() == {"/apis/pods"}
        await ask(session, server, "/apis/pods")  # a watch begins with a list
        assert last_heard.ages() == {}
        server.status = 200
        await ask(session, server, "/apis/pools", watch=True)
        assert last_heard.ages().keys() == {"/apis/pools"}


@pytest.mark.parametrize("status", [404, 429, 500, 504])
async def test_any_other_error_and_what_a_proxy_says_leave_a_watch_its_age(status: int) -> None:
    last_heard, server = LastHeard(), Server()
    server.headers = {}
    async with (
        server.running(),
        aiohttp.ClientSession(response_class=_listening(last_heard, lambda *_: None)) as session,
    ):
        await ask(session, server, "/apis/pools", watch=True)
        server.status = status
        await ask(session, server, "/apis/pools", watch=True)
        assert last_heard.ages().keys() == {"/apis/pools"}


@asynccontextmanager
async def watching(api: FakeWatchApi, folder: Path, seen: list[tuple[Kind, str]]) -> AsyncIterator[KopfEngine]:
    """Our own kinds, with timers at a twentieth."""
    engine = KopfEngine(
        "declared",
        DECLARED_KINDS,
        (),
        credentials=KubeCredentials(api.kubeconfig(folder / "kubeconfig"), "SETTING"),
        heard=LastHeard(),
        listener=Listener(
            seen=lambda kind, it: seen.append((kind, it["metadata"]["name"])),
            deleted=lambda *_: None,
            opened=lambda *_: None,
            restarted=lambda _: None,
        ),
        time_scale=0.05,
    )
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


EVERYTHING = {kind.path() for kind in DECLARED_KINDS}


def error(code: int) -> Object:
    return {"type": "ERROR", "object": {"kind": "Status", "code": code}}


@pytest.mark.parametrize("code", [410, 500])
@pytest.mark.parametrize("where", [ADAPTERS.path(), ""])
async def test_watches_restart_after_each_error(tmp_path: Path, code: int, where: str) -> None:
    api, seen = FakeWatchApi(), list[tuple[Kind, str]]()
    api.objects[ADAPTERS] = [adapter(f"adapter-{each}") for each in range(5)]
    failed: set[Watch] = set()

    def all_are_back() -> bool:
        return api.paths(but=failed) >= EVERYTHING

    async with api.running(), watching(api, tmp_path, seen):
        for _ in range(10):
            await until(all_are_back, seconds=30)
            failed |= api.say(error(code), of=where)
        await until(all_are_back, seconds=30)
        api.say({"type": "ADDED", "object": adapter("afterwards", version=200)})
        await until(lambda: (ADAPTERS, "afterwards") in seen)
