"""Two tenants with their own keys on one gateway: which adapters of the other one each may use, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from motet.api.v1 import scheduler_pb2
from motet.errors import AdapterFetchFailed
from testbed.fake_services import GROUP, FakeServices, fake_services
from tests.gateway.conftest import Served, eventually, serve
from tests.gateway.identity.memory_keys import MemoryKeySource, bearer

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"prompt": "Hello"}
POOL = GROUP.rpartition("/")[2]
FAILED = scheduler_pb2.ADAPTER_READINESS_FAILED


@dataclass
class Tenants:
    """acme has adapters, and zeta sends requests."""

    served: Served
    cluster: FakeServices
    acme: str
    zeta: str
    sql: scheduler_pb2.CatalogAdapter

    async def share(self, *tenants: str) -> None:
        self.sql.share[:] = tenants
        await self.publish()

    async def publish(self) -> None:
        catalog = self.served.gateway.catalog
        before = catalog.current
        self.cluster.scheduler.publish()
        await eventually(lambda: catalog.current is not before)

    async def ask(self, path: str, model: str, key: str = "", **more: Any) -> httpx2.Response:
        headers = bearer(key or self.zeta)
        if path == "/v1/models":
            return await self.served.http.get(f"{path}/{model}", headers=headers)
        return await self.served.http.post(path, json={"model": model} | more, headers=headers)

    async def models(self, key: str) -> dict[str, Any]:
        answer = await self.served.http.get("/v1/models", headers=bearer(key))
        return {card["id"]: card for card in answer.json()["data"]}


@pytest.fixture
async def tenants() -> AsyncIterator[Tenants]:
    kept = MemoryKeySource()
    acme, zeta = kept.make("acme"), kept.make("zeta")
    async with fake_services(runners=2) as cluster:
        sql = cluster.add_adapter("sql", tenant="acme")
        cluster.add_adapter(
            "broken", tenant="acme", digest="", state=FAILED, failure=AdapterFetchFailed("x").to_proto()
        )
        async with serve(cluster, keys=kept, auth="keys") as served:
            yield Tenants(served, cluster, acme, zeta, sql)


EVERY_WAY_TO_NAME_A_MODEL = [
    ("/v1/models", {}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", PROMPT),
    ("/tokenize", PROMPT),
    ("/tokenize", CHAT),
    ("/detokenize", {"tokens": [1, 2]}),
]


FORBIDDEN_AND_MISSING = [
    ("acme/sql", "acme/sqx"),
    ("acme/broken", "acme/brokex"),
    (f"{POOL}:acme/sql", f"{POOL}:acme/sqx"),
    (f"{GROUP}:acme/sql", f"{GROUP}:acme/sqx"),
    ("sql", "sqx"),
    ("acme/sql", "none/sql"),
]


@pytest.mark.parametrize(("path", "more"), EVERY_WAY_TO_NAME_A_MODEL)
async def test_a_forbidden_model_is_answered_like_an_unknown_one(
    tenants: Tenants, path: str, more: dict[str, Any]
) -> None:
    """Body, status and headers of any request."""
    for names in FORBIDDEN_AND_MISSING:
        answers = [await tenants.ask(path, name, **more) for name in names]
        assert [answer.status_code for answer in answers] == [404, 404], names
        bodies = [answer.text.replace(name, "NAME") for answer, name in zip(answers, names, strict=True)]
        assert bodies[0] == bodies[1]
        headers = [{name for name in answer.headers if name != "content-length"} for answer in answers]
        assert headers[0] == headers[1], names
    assert not tenants.cluster.scheduler.enqueued


async def test_the_digest_of_a_foreign_adapter_is_not_a_model_name(tenants: Tenants) -> None:
    for name in (tenants.sql.digest, f"acme/{tenants.sql.digest}"):
        assert (await tenants.ask("/v1/models", name)).status_code == 404
        assert (await tenants.ask("/v1/models", name, tenants.acme)).status_code == 404


@pytest.mark.parametrize(("path", "more"), EVERY_WAY_TO_NAME_A_MODEL)
async def test_a_shared_adapter_is_served(tenants: Tenants, path: str, more: dict[str, Any]) -> None:
    await tenants.share("zeta")
    for name in ("acme/sql", f"{POOL}:acme/sql", f"{GROUP}:acme/sql"):
        assert (await tenants.ask(path, name, **more)).status_code == 200
    assert (await tenants.ask(path, "sql", **more)).status_code == 404, "the short name is its owner's"


async def test_each_tenant_lists_what_it_may_use(tenants: Tenants) -> None:
    assert set(await tenants.models(tenants.zeta)) == {"tiny"}
    for share in (["zeta"], ["*"]):
        await tenants.share(*share)
        assert set(await tenants.models(tenants.zeta)) == {"tiny", "acme/sql"}
    assert set(await tenants.models(tenants.acme)) == {"tiny", "sql", "broken"}
    tenants.cluster.scheduler.tenants = ["acme"]
    await tenants.publish()
    assert set(await tenants.models(tenants.zeta)) == set(), "neither base nor adapter of a pool that does not admit it"
    assert set(await tenants.models(tenants.acme)) == {"tiny", "sql", "broken"}


async def test_a_tenant_that_may_only_use_an_adapter_does_not_learn_its_source(tenants: Tenants) -> None:
    await tenants.share("zeta")
    assert (await tenants.models(tenants.zeta))["acme/sql"]["root"] is None
    assert (await tenants.models(tenants.acme))["sql"]["root"] == "file:///adapters/sql"


async def test_without_an_allowed_model_a_request_must_name_one(tenants: Tenants) -> None:
    async def count(key: str) -> int:
        return (await tenants.served.http.post("/tokenize", json=PROMPT, headers=bearer(key))).status_code

    assert await count(tenants.zeta) == 200
    tenants.cluster.scheduler.tenants = ["acme"]
    await tenants.publish()
    assert (await count(tenants.zeta), await count(tenants.acme)) == (400, 200)


@pytest.mark.parametrize(("path", "more"), [("/tokenize", PROMPT), ("/detokenize", {"tokens": [1, 2]})])
async def test_an_empty_model_name_is_refused(tenants: Tenants, path: str, more: dict[str, Any]) -> None:
    """An empty name means neither the base nor, for a tenant that may use no base, anything else."""
    tenants.cluster.scheduler.tenants = ["acme"]
    await tenants.publish()
    for key in (tenants.acme, tenants.zeta):
        answer = await tenants.ask(path, "", key, **more)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("model", "invalid_value")
        assert "at least 1 character" in error["message"]


async def test_usage_is_counted_for_the_caller(tenants: Tenants) -> None:
    """Queue, usage, lengths and the prompt cache depend on the tenant in these messages."""
    await tenants.share("zeta")
    assert (await tenants.ask("/v1/completions", "acme/sql", **PROMPT)).status_code == 200
    (enqueued,) = tenants.cluster.scheduler.enqueued
    (submitted,) = [submit for runner in tenants.cluster.runners for submit in runner.submits]
    (asked,) = tenants.cluster.predictor.prompts
    assert enqueued.tenant == submitted.tenant == asked.tenant == "zeta"
    assert enqueued.adapter_digest == submitted.adapter_digest == tenants.sql.digest
    assert asked.adapter == enqueued.adapter == submitted.adapter == "acme/sql", "whose adapter, of all with its bytes"


async def test_an_unshared_adapter_ends_no_running_request(tenants: Tenants) -> None:
    """It also continues on another runner when its own one dies."""
    await tenants.share("zeta")
    first, second = tenants.cluster.runners
    first.step_seconds = 0.01
    tenants.cluster.scheduler.places_at = first
    body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
    running = asyncio.create_task(tenants.ask("/v1/completions", "acme/sql", **body))
    await eventually(lambda: first.submits)
    await tenants.share()
    assert (await tenants.ask("/v1/completions", "acme/sql", **body)).status_code == 404
    assert not running.done()
    tenants.cluster.scheduler.places_at = second
    await first.stop()
    answer = await running
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 200
    assert [submit.tenant for submit in second.submits] == ["zeta"]
