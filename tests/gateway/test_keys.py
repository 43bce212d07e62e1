"""Tenants with their own API keys on one gateway, over real sockets."""

import asyncio
import itertools
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from motet import keys
from motet.api.v1 import common_pb2
from motet.clock import monotonic
from motet.keys import ApiKey, KeyScope
from motet.store import keys as stored
from motet.store import migrate, open_store
from motet_gateway.http.connection import MAX_WAITING
from motet_gateway.identity.key_sources import DatabaseKeys
from testbed.fake_services import FakeServices
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import Served, eventually, serve
from tests.gateway.identity.memory_keys import MemoryKeySource, bearer, id_of
from tests.gateway.test_errors import error_of
from tests.support.postgresql import PostgreSQL

COMPLETIONS = "/v1/completions"
READ_SECONDS = 0.02
WITHIN_S = 5.0
"""The most seconds until every gateway knows a change of keys"""
BODY = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 4}
EVERY_PATH = [
    ("POST", COMPLETIONS),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing/here"),
]


@pytest.fixture
def kept() -> MemoryKeySource:
    return MemoryKeySource()


def with_keys(cluster: FakeServices, kept: MemoryKeySource, **settings: Any) -> Any:
    return serve(cluster, keys=kept, **{"auth": "keys", "keys_read_seconds": READ_SECONDS, **settings})


async def ask(served: Served, key: str, **body: Any) -> httpx2.Response:
    return await served.http.post(COMPLETIONS, json=BODY | body, headers=bearer(key))


def let_an_hour_pass(served: Served) -> None:
    served.gateway.access.today = lambda: datetime.now(UTC) + timedelta(hours=1)


def is_shut(served: Served, key: str) -> bool:
    return bool(served.gateway.access.keyring.refusal_reason(id_of(key), datetime.now(UTC)))


async def read_again(kept: MemoryKeySource) -> None:
    """Wait until the gateway knows all keys that exist now."""
    seen = kept.reads
    await eventually(lambda: kept.reads >= seen + 2)


# --------------------------------------------------------------------------------------------------------- who comes in


@pytest.mark.parametrize(("method", "path"), EVERY_PATH)
async def test_every_endpoint_needs_a_key(cluster: FakeServices, kept: MemoryKeySource, method: str, path: str) -> None:
    async with with_keys(cluster, kept) as served:
        answer = await served.http.request(method, path, json=BODY if method == "POST" else None)
        error = error_of(answer)
        assert answer.status_code == 401
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-should-retry"] == "false"


async def test_probes_need_no_key(cluster: FakeServices, kept: MemoryKeySource) -> None:
    async with with_keys(cluster, kept) as served:
        for path in ("/health", "/ping"):
            assert (await served.http.get(path)).status_code == 200


async def test_a_key_is_refused_before_anything_of_the_body_is_read(
    cluster: FakeServices, kept: MemoryKeySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_gateway.http.connection.BODY_LINGER_SECONDS", 0.1)
    async with with_keys(cluster, kept) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 1000000\r\n\r\n".encode())  # and nothing of it
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            await reader.read()  # to the end: the connection is closed, since nothing reads the rest of the body
        writer.close()


async def test_each_tenant_has_its_own_names_on_every_gateway(cluster: FakeServices, kept: MemoryKeySource) -> None:
    ours, theirs = kept.make("default"), kept.make("acme")
    tenants = ((ours, "legal", "acme/sql"), (theirs, "sql", "default/legal"))
    async with with_keys(cluster, kept) as one, with_keys(cluster, kept) as two:
        for served, (key, own, other) in itertools.product((one, two), tenants):
            async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
                assert {model.id async for model in client.models.list()} == {"tiny", own}
                answer = await client.completions.create(model=own, prompt="Hello", max_tokens=16)
                assert answer.choices[0].text == "Hello"
                with pytest.raises(openai.NotFoundError) as caught:
                    await client.completions.create(model=other, prompt="Hello")
                assert other.rpartition("/")[2] not in caught.value.message.partition("Nearest")[2]
        async with AsyncOpenAI(base_url=f"{one.url}/v1", api_key="sk-wrong", max_retries=2) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_tenant_and_class_go_with_the_request_to_every_service(
    cluster: FakeServices, kept: MemoryKeySource
) -> None:
    async with with_keys(cluster, kept, names=8) as served:
        key = kept.make("acme")
        await read_again(kept)
        assert (await ask(served, key, model="sql", service_tier="flex")).status_code == 200
        (enqueued,), (submitted,) = cluster.scheduler.enqueued, cluster.runners[0].submits
        for message in (enqueued, submitted):
            assert (message.tenant, message.request_class) == ("acme", common_pb2.REQUEST_CLASS_BATCH)
        assert [prompt.tenant for prompt in cluster.predictor.prompts] == ["acme"]
        await eventually(lambda: [outcome.tenant for outcome in cluster.predictor.outcomes] == ["acme"])
        count = served.registry.get_sample_value
        labels = {"tenant": "acme", "adapter": "acme/sql", "code": "200"}
        await eventually(lambda: count("motet_requests_total", labels) == 1)


async def test_a_new_scheduler_is_sent_the_tenants_of_running_requests(
    cluster: FakeServices, kept: MemoryKeySource
) -> None:
    cluster.runners[0].step_seconds = 0.01
    key = kept.make("acme")
    async with with_keys(cluster, kept) as served:
        running = asyncio.create_task(ask(served, key, max_tokens=400, ignore_eos=True, service_tier="priority"))
        await eventually(lambda: cluster.runners[0].running)
        await cluster.scheduler.restart()
        await eventually(lambda: len(cluster.scheduler.hellos) == 2)
        hello = cluster.scheduler.hellos[-1]
        assert [(one.tenant, one.request_class) for one in hello.live] == [
            ("acme", common_pb2.REQUEST_CLASS_INTERACTIVE)
        ]
        running.cancel()


# ---------------------------------------------------------------------------------------------------------- what is bad


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ([], "needs an API key"),
        ([("api-key", "KEY")], "does not read"),
        ([("x-api-key", "sk-something")], "isn't a Motet API key"),
        ([("x-api-key", "KEY"), ("x-api-key", "KEY")], "2 x-api-key headers"),
        ([("authorization", "Bearer KEY"), ("x-api-key", "KEY")], "1 authorization headers and 1 x-api-key"),
        ([("authorization", "KEY")], "no bearer token"),
        ([("authorization", "Basic KEY")], "no bearer token"),
        ([("authorization", "Bearer")], "isn't a Motet API key"),
        ([("authorization", "Bearer KEY KEY")], "isn't a Motet API key"),
        ([("authorization", "Bearer KEY"), ("authorization", "Bearer KEY")], "2 authorization headers"),
        ([("authorization", "Bearer sk-something")], "isn't a Motet API key"),
    ],
)
async def test_a_key_in_the_wrong_place_or_twice_is_refused_with_the_right_form(
    cluster: FakeServices, kept: MemoryKeySource, headers: list[tuple[str, str]], says: str
) -> None:
    key = kept.make("acme")
    async with with_keys(cluster, kept) as served:
        sent = [(name, value.replace("KEY", key)) for name, value in headers]
        answer = await served.http.get("/v1/models", headers=sent)
        assert answer.status_code == 401
        assert says in error_of(answer)["message"]
        assert key not in answer.text


async def test_the_header_of_anthropics_clients_has_the_key_too(cluster: FakeServices, kept: MemoryKeySource) -> None:
    key = kept.make("acme")
    async with with_keys(cluster, kept) as served:
        assert (await served.http.get("/v1/models", headers={"x-api-key": key})).status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_scheme_is_read_in_any_case(cluster: FakeServices, kept: MemoryKeySource, scheme: str) -> None:
    key = kept.make("acme")
    async with with_keys(cluster, kept) as served:
        assert (await served.http.get("/version", headers={"authorization": f"{scheme}  {key}"})).status_code == 200


async def test_a_key_of_a_megabyte_is_refused_and_the_next_request_is_served(
    cluster: FakeServices, kept: MemoryKeySource
) -> None:
    key = kept.make("acme")
    async with with_keys(cluster, kept) as served:
        assert (await ask(served, "motet_" + "a" * 1_000_000)).status_code == 431
        assert (await ask(served, "motet_" + "a" * 20_000)).status_code == 401
        assert (await ask(served, key)).status_code == 200


async def test_all_wrong_keys_get_the_same_answer_and_other_requests_continue(
    cluster: FakeServices, kept: MemoryKeySource
) -> None:
    key = kept.make("acme")
    known = keys.parse_key(key)
    assert known is not None
    async with with_keys(cluster, kept) as served:
        wrong = [
            keys.new_key() if odd % 2 else keys.PresentedKey(known.id, keys.new_key().secret) for odd in range(200)
        ]
        answers = await asyncio.gather(*(ask(served, str(one)) for one in wrong), ask(served, key))
        *refused, served_well = answers
        assert served_well.status_code == 200
        seen = {(a.status_code, a.content, tuple(n for n, _ in a.headers.multi_items())) for a in refused}
        assert len(seen) == 1
        assert refused[0].status_code == 401
        count = served.registry.get_sample_value("motet_authentication_failures_total", {"code": "invalid_api_key"})
        assert count == len(wrong)


async def test_any_number_of_wrong_keys_blocks_no_other_client(cluster: FakeServices, kept: MemoryKeySource) -> None:
    """On separate connections, as many requests as may wait for their answers, again and again."""
    key, made = kept.make("acme"), keys.new_key()
    known = keys.PresentedKey(id_of(key), made.secret)
    refused, ended = 0, False

    async def send_wrong_keys(served: Served, wrong: keys.PresentedKey) -> None:
        nonlocal refused
        port = int(served.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        one = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {wrong}\r\n\r\n".encode()
        while not ended:
            writer.write(one * MAX_WAITING)
            for _ in range(MAX_WAITING):
                assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 401 ")
                refused += 1
        writer.close()

    async with with_keys(cluster, kept) as served, asyncio.timeout(PATIENCE_S):
        flooding = [asyncio.create_task(send_wrong_keys(served, wrong)) for wrong in (made, known) * 4]
        await eventually(lambda: refused > 100)
        before = refused
        for _ in range(20):
            answer = await ask(served, key)
            assert answer.status_code == 200
        assert refused > before + 100, "they came meanwhile"
        ended = True
        await asyncio.gather(*flooding)
        count = served.registry.get_sample_value("motet_authentication_failures_total", {"code": "invalid_api_key"})
        assert count == refused


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        ((KeyScope.USER,), {COMPLETIONS, "/v1/models", "/tokenize"}),
        ((KeyScope.MONITOR,), {"/metrics"}),
        ((KeyScope.ADMIN,), set()),
        (tuple(KeyScope), {COMPLETIONS, "/v1/models", "/tokenize", "/metrics"}),
    ],
)
async def test_a_key_does_what_its_scopes_allow(
    cluster: FakeServices, kept: MemoryKeySource, scopes: tuple[KeyScope, ...], allowed: set[str]
) -> None:
    key = kept.make("acme", *scopes)
    async with with_keys(cluster, kept) as served:
        for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/metrics")):
            answer = await served.http.request(
                method, path, headers=bearer(key), json=BODY if method == "POST" else None
            )
            if path in allowed:
                assert answer.status_code == 200, answer.text
            else:
                assert answer.status_code == 403
                assert error_of(answer)["code"] == "insufficient_scope"
                assert answer.headers["x-should-retry"] == "false"
        assert (await served.http.get("/version", headers=bearer(key))).status_code == 200


# ------------------------------------------------------------------------------------------------- while something runs


async def stream_until(served: Served, key: str, then: Any, **body: Any) -> list[str]:
    """The lines of a long stream; `then` is called once tokens have arrived."""
    lines: list[str] = []
    asked = BODY | {"max_tokens": 400, "ignore_eos": True, "stream": True} | body
    async with (
        asyncio.timeout(PATIENCE_S),
        served.http.stream("POST", COMPLETIONS, json=asked, headers=bearer(key)) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not lines:
                then()
            lines.append(line)
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


async def test_a_stream_whose_key_is_revoked_ends_and_says_so(cluster: FakeServices, kept: MemoryKeySource) -> None:
    cluster.runners[0].step_seconds = 0.01
    revoked, stays = kept.make("acme"), kept.make("acme")
    async with with_keys(cluster, kept) as served:
        other = asyncio.create_task(stream_until(served, stays, lambda: None, max_tokens=60))
        *_, error, done = await stream_until(served, revoked, lambda: kept.revoke(revoked))
        found = json.loads(error)["error"]
        assert (found["code"], done) == ("invalid_api_key", "[DONE]")
        assert "was revoked" in found["message"]
        assert '"finish_reason":"length"' in (await other)[-2]  # the tenant's other key stays valid
        await eventually(lambda: not cluster.runners[0].running)
        assert (await ask(served, revoked)).status_code == 401


async def test_a_key_that_expires_while_the_store_is_away_ends_its_stream_too(
    cluster: FakeServices, kept: MemoryKeySource
) -> None:
    cluster.runners[0].step_seconds = 0.01
    key = kept.make("acme", expires_in=3600)
    async with with_keys(cluster, kept) as served:

        def leave() -> None:
            kept.away = True
            let_an_hour_pass(served)

        *_, error, _done = await stream_until(served, key, leave)
        assert "has expired" in json.loads(error)["error"]["message"]


async def test_a_whole_answer_whose_key_is_revoked_is_a_401(cluster: FakeServices, kept: MemoryKeySource) -> None:
    cluster.runners[0].step_seconds = 0.01
    key = kept.make("acme")
    async with with_keys(cluster, kept) as served:
        waiting = asyncio.create_task(ask(served, key, max_tokens=400, ignore_eos=True))
        await eventually(lambda: cluster.runners[0].running)
        kept.revoke(key)
        answer = await waiting
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "was revoked" in error_of(answer)["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/detokenize"])
async def test_a_key_that_becomes_invalid_during_the_upload_gets_no_answer(
    cluster: FakeServices, kept: MemoryKeySource, path: str
) -> None:
    key = kept.make("acme")
    async with with_keys(cluster, kept) as served:
        read_on = asyncio.Event()

        async def body() -> Any:
            yield json.dumps(BODY | {"tokens": [1, 2]}).encode()[:-1]
            await read_on.wait()
            yield b"}"

        headers = bearer(key) | {"content-type": "application/json"}
        waiting = asyncio.create_task(served.http.post(path, content=body(), headers=headers))
        await eventually(served.gateway.access.keyring.take_used)
        kept.revoke(key)
        await read_again(kept)
        kept.make("acme")  # also when other changes came since
        await read_again(kept)
        read_on.set()
        assert (await waiting).status_code == 401


async def test_while_the_store_is_away_only_known_keys_are_valid(cluster: FakeServices, kept: MemoryKeySource) -> None:
    known = kept.make("acme")
    async with with_keys(cluster, kept) as served:
        kept.away = True
        made_meanwhile = kept.make("acme")
        await eventually(lambda: served.gateway.access.keyring.store_is_down)
        assert (await ask(served, known)).status_code == 200
        unknown = await ask(served, made_meanwhile)
        assert unknown.status_code == 503
        assert error_of(unknown)["code"] == "store_unavailable"
        assert unknown.headers["x-should-retry"] == "true"
        assert (await served.http.get("/v1/models")).status_code == 401
        kept.away = False
        await eventually(lambda: not served.gateway.access.keyring.store_is_down)
        assert (await ask(served, made_meanwhile)).status_code == 200


# ------------------------------------------------------------------------------------------- before and after the first


async def test_on_loopback_all_requests_are_accepted_until_the_first_key_is_made(
    cluster: FakeServices, kept: MemoryKeySource
) -> None:
    async with with_keys(cluster, kept, auth=None) as served:
        assert (await served.http.post(COMPLETIONS, json=BODY)).status_code == 200
        key = kept.make("acme")
        await read_again(kept)
        assert (await served.http.post(COMPLETIONS, json=BODY)).status_code == 401
        assert (await ask(served, key)).status_code == 200
        kept.revoke(key)
        await read_again(kept)
        assert (await served.http.post(COMPLETIONS, json=BODY)).status_code == 401


async def test_with_auth_none_every_caller_is_tenant_default(cluster: FakeServices, kept: MemoryKeySource) -> None:
    kept.make("acme")
    async with with_keys(cluster, kept, auth="none") as served:
        for headers in ({}, bearer("sk-anything")):
            assert (await served.http.post(COMPLETIONS, json=BODY, headers=headers)).status_code == 200
        assert {enqueue.tenant for enqueue in cluster.scheduler.enqueued} == {"default"}


async def test_a_key_in_postgresql_counts_on_two_gateways_within_5_s_of_being_made_and_of_being_revoked(
    cluster: FakeServices, postgresql: PostgreSQL
) -> None:
    """Gateways read keys at the default interval. The tenant's streams end on both; the other tenant's continue."""
    runner = cluster.runners[0]
    runner.step_seconds = 0.02  # 400 tokens take 8 s
    url = await postgresql.new_database()
    await migrate(url)
    acmes, others = keys.new_key(), keys.new_key()
    begun = 0

    def begin() -> None:
        nonlocal begun
        begun += 1

    async with (
        open_store(url) as store,
        serve(cluster, keys=DatabaseKeys(url, clock=monotonic), auth="keys") as one,
        serve(cluster, keys=DatabaseKeys(url, clock=monotonic), auth="keys") as two,
    ):
        for tenant, made in (("acme", acmes), ("zeta", others)):
            only, now = frozenset({KeyScope.USER}), datetime.now(UTC)
            await stored.add(store, ApiKey(id=made.id, tenant=tenant, scopes=only, hash=made.hash, created=now))
        for served in (one, two):
            await eventually(lambda on=served: not is_shut(on, str(others)), seconds=WITHIN_S)
            assert (await ask(served, str(acmes))).status_code == 200

        ending, staying = (
            [asyncio.create_task(stream_until(served, str(made), begin)) for served in (one, two)]
            for made in (acmes, others)
        )
        await eventually(lambda: begun == 4)
        await stored.revoke(store, acmes.id, tenant="acme", at=datetime.now(UTC))
        async with asyncio.timeout(WITHIN_S):
            ended = await asyncio.gather(*ending)
        for *_, error, done in ended:
            assert (json.loads(error)["error"]["code"], done) == ("invalid_api_key", "[DONE]")
            assert "was revoked" in error
        for served in (one, two):
            assert (await ask(served, str(acmes))).status_code == 401
        assert not any(stream.done() for stream in staying)
        runner.step_seconds = 0.0
        for lines in await asyncio.gather(*staying):
            assert '"finish_reason":"length"' in lines[-2]


# ------------------------------------------------------------------------------------------------------------- limits


async def test_the_scheduler_hears_the_limits_of_a_key_that_has_some_and_new_ones_end_nothing(
    cluster: FakeServices, kept: MemoryKeySource
) -> None:
    limited, free = kept.make("acme"), kept.make("acme")
    id_ = id_of(limited)
    kept.keys[id_] = replace(kept.keys[id_], limits=keys.KeyLimits(requests_per_minute=6))
    async with with_keys(cluster, kept) as served:
        for key in (limited, free):
            assert (await ask(served, key)).status_code == 200
        first, second = cluster.scheduler.enqueued
        assert (first.key.id, first.key.limits.requests_per_minute) == (id_, 6)
        assert not second.HasField("key")
        cluster.runners[0].step_seconds = 0.01
        running = asyncio.create_task(ask(served, limited, max_tokens=100, ignore_eos=True))
        await eventually(lambda: cluster.runners[0].running)
        kept.keys[id_] = replace(kept.keys[id_], limits=keys.KeyLimits(concurrency=1))
        await eventually(lambda: served.gateway.access.keyring.callers[id_].limits.concurrency == 1)
        assert (await running).status_code == 200


# ------------------------------------------------------------------------------------------------- bound to a namespace


async def test_a_bound_key_ends_with_its_namespace_and_does_not_serve_the_next_one(
    cluster: FakeServices, kept: MemoryKeySource
) -> None:
    scheduler = cluster.scheduler
    scheduler.namespaces = {"acme": "first"}
    cluster.runners[0].step_seconds = 0.01
    bound, unbound = kept.make("acme", tenant_uid="first"), kept.make("acme")
    async with with_keys(cluster, kept) as served:
        assert (await ask(served, bound)).status_code == 200
        running = asyncio.create_task(ask(served, bound, max_tokens=400, ignore_eos=True))
        await eventually(lambda: cluster.runners[0].running)
        scheduler.namespaces = {"acme": "second"}
        scheduler.publish()
        ended = await running
        assert ended.status_code == 401
        assert "deleted with its namespace" in error_of(ended)["message"]
        refused = await ask(served, bound)
        unknown = await ask(served, str(keys.new_key()))
        assert (refused.status_code, error_of(refused)["message"]) == (401, error_of(unknown)["message"])
        assert (await ask(served, unbound)).status_code == 200
        scheduler.namespaces = {}  # an operator of an earlier version, which does not say them
        before = served.gateway.catalog.current
        scheduler.publish()
        await eventually(lambda: served.gateway.catalog.current is not before)
        assert (await ask(served, bound)).status_code == 401, "what was said before still holds"
