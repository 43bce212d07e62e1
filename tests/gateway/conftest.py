"""A gateway in a real uvicorn server, which uses fake services."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx2
import pytest
import uvicorn.server
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry

from motet.clock import monotonic
from motet.settings import Addresses, ProcessSettings
from motet_gateway.app import build_app
from motet_gateway.gateway import Gateway
from motet_gateway.identity.key_sources import KeySource
from motet_gateway.metrics import Metrics
from motet_gateway.routes import probes
from motet_gateway.server import HttpServer, listening
from motet_gateway.settings import Settings
from testbed.fake_services import FakeServices, fake_services
from tests.common.waiting import PATIENCE_S, until
from tests.support.forked_renderers import ForkedRenderParent
from tests.support.given_settings import given
from tests.support.surroundings import REAL

Heard = Callable[[str], Awaitable[None]]
"""Called with the type of each event of a stream, and before that, with "", once its headers have come."""


async def sleep_a_tenth(seconds: float) -> None:
    await asyncio.sleep(seconds / 10)


# uvicorn looks ten times a second whether it should end, and then waits for a tenth of one: that was most of what the
# ends of two thousand tests took.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": sleep_a_tenth})


# Of each gateway it read and parsed the metadata of the package: a twentieth of a small test.
probes.version = functools.cache(probes.version)


async def hear_nothing(_: str) -> None:
    pass


class LateClock:
    """The real one, and `ahead` of it if a test says so."""

    ahead = 0.0

    def __call__(self) -> float:
        return monotonic() + self.ahead


@dataclass
class Served:
    """The gateway and the fake services of a test."""

    url: str
    gateway: Gateway
    cluster: FakeServices
    http: httpx2.AsyncClient
    registry: CollectorRegistry
    server: HttpServer
    clock: LateClock

    @cached_property
    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    @cached_property
    def anthropic(self) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0, timeout=PATIENCE_S)

    def pass_the_deadline(self) -> None:
        """What gets no token ends at its next comment. A deadline of less than a second could pass before a stream has
        begun."""
        self.clock.ahead += self.gateway.settings.deadline_seconds

    def breaks_at(self, event: str) -> Heard:
        """The only runner dies at this event, and no other one comes in time."""

        async def heard(what: str) -> None:
            if what == event:
                await self.cluster.runners[0].stop()
                self.pass_the_deadline()

        return heard

    async def typed_events(self, path: str, body: dict[str, Any], heard: Heard = hear_nothing) -> list[dict[str, Any]]:
        """Those of a stream whose events are named by their type."""
        names, events = [], []
        async with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            await heard("")
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    names.append(line.removeprefix("event: "))
                elif line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                    await heard(events[-1]["type"])
                else:
                    assert not line or line.startswith(":")
        assert names == [event["type"] for event in events]
        return events


async def eventually(holds: Callable[[], object], *, seconds: float = PATIENCE_S) -> None:
    await until(holds, seconds)


@asynccontextmanager
async def serve(
    cluster: FakeServices, *, ready: bool = True, names: int = 0, keys: KeySource | None = None, **settings: Any
) -> AsyncIterator[Served]:
    own = given(Settings)(port=0, **{"drain_seconds": 0.5, "predict_budget_seconds": PATIENCE_S, **settings})
    process = given(ProcessSettings)(data_dir=cluster.folder, time_scale=0.1)
    addresses = given(Addresses)(
        scheduler_address=cluster.scheduler.address,
        predictor_address=cluster.predictor.address,
        supervisor_address="unix:/nowhere",
    )
    registry, clock = CollectorRegistry(), LateClock()
    metrics, around = Metrics(registry, names=names, clock=clock), replace(REAL, clock=clock)
    with patch("motet_gateway.tokens.render_pool.RenderParent", ForkedRenderParent):
        gateway = Gateway(own, process, addresses, metrics, keys=keys, surroundings=around)
    await gateway.access.begin()
    server = HttpServer(build_app(gateway, registry), own, gateway.metrics, grace=1)
    with listening(own) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        running = asyncio.create_task(gateway.run())
        serving_http = asyncio.create_task(server.serve(sockets=[bound]))
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False, trust_env=False) as http:
            served = Served(url, gateway, cluster, http, registry, server, clock)
            try:
                await eventually(lambda: server.started)
                if ready:
                    await eventually(lambda: _ready(gateway))
                yield served
            finally:
                if "openai" in vars(served):
                    await served.openai.close()
                if "anthropic" in vars(served):
                    await served.anthropic.close()
                server.should_exit = True
                await gateway.drain()
                await serving_http
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


def _ready(gateway: Gateway) -> bool:
    if not gateway.catalog.known or not gateway.estimator.up:
        return False
    return all(gateway.assets.get(group.asset_digest) is not None for group in gateway.catalog.current.groups)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeServices]:
    async with fake_services() as running:
        running.add_adapter("legal")
        running.add_adapter("sql", tenant="acme")
        yield running


@pytest.fixture
async def served(cluster: FakeServices) -> AsyncIterator[Served]:
    async with serve(cluster) as running:
        yield running
