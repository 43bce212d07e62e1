"""Two tenants with their own keys use OpenAI's clients, unchanged, on two gateways of one stack.

Both gateways read keys from one database. Apart from it and the services behind them, they share nothing.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from motet import keys
from motet.keys import ApiKey, KeyScope
from motet.store import keys as kept
from motet.store import length_samples, open_store
from testbed.local_stack import BUNDLED, LocalStack, copy_of_bundled, running_stack, write_adapter
from testbed.tree import ROOT
from tests.docs.blocks import Python, Shell, blocks, type_page
from tests.stack.second_gateway import second_gateway

pytestmark = pytest.mark.stack

WITHIN_S = 5.0
"""The most seconds until every gateway knows a change of keys"""
BASE = "motet-demo"
QUESTION: list[Any] = [{"role": "user", "content": "Who rules Harrow?"}]
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
LONG: dict[str, Any] = {"max_tokens": 4000, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
MORE = 20
"""Tokens that must come after a stream has ended: more than can have been in buffers"""

ADAPTERS = {("acme", "pirate"): (), ("acme", "json"): ("zeta",), ("zeta", "shouting"): (), ("zeta", "oneword"): ("*",)}
"""The tenants that an adapter is shared with, by its tenant and name."""
MODELS = {
    "acme": {BASE, "pirate", "json", "zeta/oneword"},
    "zeta": {BASE, "shouting", "oneword", "acme/json"},
}
"""The models that each tenant may use, by the names that it uses."""
NOT_THERE = {
    "acme": [
        ("zeta/shouting", "zeta/shoutinq"),
        ("shouting", "shoutinq"),
        ("demo:zeta/shouting", "demo:zeta/shoutinq"),
    ],
    "zeta": [("acme/pirate", "acme/qirate"), ("pirate", "qirate"), ("demo:acme/pirate", "demo:acme/qirate")],
}
"""Adapters of the other tenant, each with a name that does not exist and is equally unlike all existing names."""
SHARED_UNDER_ITS_SHORT_NAME = {"acme": "oneword", "zeta": "json"}


class RequestCounter:
    """Counts the requests that a client has sent, with those that it repeated."""

    def __init__(self) -> None:
        self.sent = 0

    def here(self, _request: httpx2.Request) -> None:
        self.sent += 1

    async def there(self, request: httpx2.Request) -> None:
        self.here(request)

    def http(self) -> httpx2.Client:
        # Do not load authorities for plain HTTP: that takes longer than an answer.
        return openai.DefaultHttpxClient(event_hooks={"request": [self.here]}, trust_env=False, verify=False)

    def async_http(self) -> httpx2.AsyncClient:
        return openai.DefaultAsyncHttpxClient(event_hooks={"request": [self.there]}, trust_env=False, verify=False)


@dataclass
class Deployed:
    stack: LocalStack
    urls: tuple[str, str]
    """The URLs of the gateways."""
    keys: dict[str, str]
    """The keys by tenant; the key `<tenant>-<scope>` has only that scope."""

    def client(self, who: str, at: int, *, counter: RequestCounter | None = None) -> OpenAI:
        http = (counter or RequestCounter()).http()
        return OpenAI(base_url=f"{self.urls[at]}/v1", api_key=self.keys.get(who, who), http_client=http)

    def async_client(self, who: str, at: int, *, counter: RequestCounter | None = None) -> AsyncOpenAI:
        http = (counter or RequestCounter()).async_http()
        return AsyncOpenAI(base_url=f"{self.urls[at]}/v1", api_key=self.keys.get(who, who), http_client=http)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("tenants")
    manifests = copy_of_bundled(folder / "manifests", adapters=[], engine='{"maxModelLength": 4096}')
    for (tenant, name), share in ADAPTERS.items():
        uri = (BUNDLED / "adapters" / name).as_uri()
        write_adapter(manifests, name, uri=uri, namespace=tenant, share=list(share))
    env = {"MOTET_METRICS_NAMES": "9", "MOTET_LOG_LEVEL": "debug"}
    with (
        running_stack(folder, manifests=manifests, env=env) as stack,
        second_gateway(stack, folder / "second", log=folder / "second.log") as (url, _),
    ):
        made = asyncio.run(make_keys(stack))
        deployed = Deployed(stack, (stack.url, url), made)
        # Before a gateway knows the first key, it admits every request.
        stack.until(lambda: not any(opens(deployed, "nobody", at) for at in (0, 1)))
        yield deployed


async def make_keys(stack: LocalStack) -> dict[str, str]:
    """Create keys as `motet key create` does."""
    scopes = {"acme": KeyScope.USER, "zeta": KeyScope.USER}
    scopes |= {"acme-admin": KeyScope.ADMIN, "acme-monitor": KeyScope.MONITOR}
    made = {who: keys.new_key() for who in scopes}
    async with open_store(database(stack)) as store:
        for who, key in made.items():
            tenant, now = who.partition("-")[0], datetime.now(UTC)
            only = frozenset({scopes[who]})
            await kept.add(store, ApiKey(id=key.id, tenant=tenant, scopes=only, hash=key.hash, created=now))
    return {who: str(key) for who, key in made.items()}


def database(stack: LocalStack) -> str:
    return f"sqlite+aiosqlite:///{stack.data}/motet.db"


def opens(deployed: Deployed, who: str, at: int) -> bool:
    with deployed.client(who, at) as client:
        try:
            client.models.list()
        except openai.AuthenticationError:
            return False
        return True


on_either = pytest.mark.parametrize("at", [0, 1], ids=["first", "second"])
of_either = pytest.mark.parametrize("tenant", ["acme", "zeta"])

# ------------------------------------------------------------------------------------------------------ what each sees


@on_either
@of_either
def test_a_tenant_lists_and_uses_its_own_and_shared_adapters_and_the_base(
    deployed: Deployed, tenant: str, at: int
) -> None:
    with deployed.client(tenant, at) as client:
        assert {model.id for model in client.models.list()} == MODELS[tenant]
        for name in MODELS[tenant]:
            assert client.models.retrieve(name).id == name
            chat = client.chat.completions.create(model=name, messages=QUESTION, **SHORT)
            assert chat.choices[0].message.content
            assert chat.model == name
        completion = client.completions.create(model=name, prompt="Harrow", **SHORT)
        assert completion.choices[0].text


@on_either
async def test_two_tenants_stream_from_their_own_adapters_at_once(deployed: Deployed, at: int) -> None:
    """The streams begin together; each has the same answer as when it runs alone."""
    asked = [(tenant, name) for tenant, names in MODELS.items() for name in sorted(names)]
    async with deployed.async_client("acme", at) as acme, deployed.async_client("zeta", at) as zeta:
        clients = {"acme": acme, "zeta": zeta}
        streams = await asyncio.gather(*(joined(chunks(clients[who], name)) for who, name in asked))
        answer_of = dict(zip(asked, streams, strict=True))
        whole = await clients["zeta"].chat.completions.create(model="shouting", messages=QUESTION, **SHORT)
    assert answer_of["zeta", "shouting"] == whole.choices[0].message.content
    assert answer_of["zeta", "shouting"].isupper()
    assert not answer_of["acme", "pirate"].isupper()
    assert answer_of["acme", "json"] == answer_of["zeta", "acme/json"]
    assert answer_of["zeta", "oneword"] == answer_of["acme", "zeta/oneword"]
    assert answer_of["acme", BASE] == answer_of["zeta", BASE]


async def chunks(client: AsyncOpenAI, model: str) -> AsyncIterator[str]:
    async for chunk in await client.chat.completions.create(model=model, messages=QUESTION, stream=True, **SHORT):
        yield chunk.choices[0].delta.content or ""


async def joined(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


CALLS: dict[str, Callable[[OpenAI, str], object]] = {
    "chat": lambda client, name: client.chat.completions.create(model=name, messages=QUESTION, **SHORT),
    "stream": lambda client, name: client.chat.completions.create(
        model=name, messages=QUESTION, stream=True, max_tokens=8
    ),
    "completion": lambda client, name: client.completions.create(model=name, prompt="Harrow", **SHORT),
    "model": lambda client, name: client.models.retrieve(name),
}
by_every_call = pytest.mark.parametrize("call", CALLS)


@on_either
@of_either
@by_every_call
def test_names_of_another_tenant_look_like_unknown_ones(deployed: Deployed, tenant: str, at: int, call: str) -> None:
    with deployed.client(tenant, at) as client:
        for name, nobodys in NOT_THERE[tenant]:
            theirs, missing = refused(CALLS[call], client, name), refused(CALLS[call], client, nobodys)
            assert type(theirs) is openai.NotFoundError
            assert theirs.status_code == missing.status_code == 404
            assert theirs.response.text.replace(name, "NAME") == missing.response.text.replace(nobodys, "NAME")
        with pytest.raises(openai.NotFoundError):
            CALLS[call](client, SHARED_UNDER_ITS_SHORT_NAME[tenant])


def refused(ask: Callable[..., object], *how: object) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(*how)
    return caught.value


def test_the_client_guide_does_what_it_says(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenant acme follows the guide."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{deployed.urls[0]}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", deployed.keys["acme"])
    here, scratch = tmp_path / "reader", tmp_path / "scratch"
    here.mkdir()
    scratch.mkdir()
    with Shell(here, scratch=scratch, env=os.environ, timeout_s=60) as shell:
        type_page(blocks(ROOT / "docs" / "guides" / "client.md"), shell, Python())


# ------------------------------------------------------------------------------------------------------ who is refused


@on_either
@by_every_call
def test_a_wrong_key_is_refused_and_not_sent_again(deployed: Deployed, at: int, call: str) -> None:
    known = keys.parse_key(deployed.keys["acme"])
    assert known is not None
    wrong = ("sk-of-somebody-else", str(keys.new_key()), str(keys.PresentedKey(known.id, keys.new_key().secret)))
    counter = RequestCounter()
    for key in wrong:
        with deployed.client(key, at, counter=counter) as client:
            error = refused(CALLS[call], client, "pirate")
            assert type(error) is openai.AuthenticationError
            assert error.code == "invalid_api_key"
            assert error.response.headers["x-should-retry"] == "false"
    assert counter.sent == len(wrong)


@on_either
async def test_the_async_client_does_not_send_a_wrong_key_again_either(deployed: Deployed, at: int) -> None:
    counter = RequestCounter()
    async with deployed.async_client(str(keys.new_key()), at, counter=counter) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="pirate", messages=QUESTION)
    assert counter.sent == 1


@on_either
@by_every_call
@pytest.mark.parametrize("who", ["acme-admin", "acme-monitor"])
def test_a_key_without_the_scope_to_call_models_is_refused_and_not_sent_again(
    deployed: Deployed, who: str, at: int, call: str
) -> None:
    """Also with every other scope; and the error does not tell which names exist."""
    counter = RequestCounter()
    with deployed.client(who, at, counter=counter) as client:
        errors = [refused(CALLS[call], client, name) for name in ("pirate", "zeta/shouting", "nobodys")]
        errors.append(refused(client.models.list))
    assert {type(error) for error in errors} == {openai.PermissionDeniedError}
    assert {error.code for error in errors} == {"insufficient_scope"}
    assert len({error.response.text for error in errors}) == 1
    assert "motet key create --tenant acme --scopes user" in errors[0].message
    assert counter.sent == len(errors)


@on_either
def test_the_scope_monitor_alone_reads_figures(deployed: Deployed, at: int) -> None:
    with httpx2.Client(base_url=deployed.urls[at], trust_env=False, verify=False) as http:
        answers = {
            who: http.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code
            for who, key in deployed.keys.items()
        }
        assert http.get("/metrics").status_code == 401
    assert answers == {"acme": 403, "zeta": 403, "acme-admin": 403, "acme-monitor": 200}


# ------------------------------------------------------------------------------------------------- what goes along


def test_the_tenant_is_sent_to_scheduler_predictor_metrics_and_logs(deployed: Deployed) -> None:
    """The runner gets it, too, and names it nowhere."""
    stack, adapter = deployed.stack, "acme/json"
    before = len(learned(stack))
    answers = {}
    for tenant, name in (("acme", "json"), ("zeta", "acme/json")):
        with deployed.client(tenant, 0) as client:
            response = client.chat.completions.with_raw_response.create(model=name, messages=QUESTION, **SHORT)
        answers[response.headers["x-motet-request"]] = tenant

    stack.until(lambda: answers.keys() <= noted(stack, "gateway", "request_answered", "id").keys())
    answered, placed = (
        noted(stack, "gateway", "request_answered", "id"),
        noted(stack, "scheduler", "request_placed", "request"),
    )
    for request, tenant in answers.items():
        written = keys.parse_key(deployed.keys[tenant])
        assert written is not None
        line = answered[request]
        assert (line["tenant"], line["adapter"], line["key"]) == (tenant, adapter, written.id)
        assert placed[request]["tenant"] == tenant

    stack.until(lambda: len(learned(stack)) >= before + 2)
    assert {(tenant, adapter) for tenant in answers.values()} <= set(learned(stack))

    with stack.http(headers={"authorization": f"Bearer {deployed.keys['acme-monitor']}"}) as http:
        figures = http.get("/metrics").text
    for tenant in answers.values():
        assert f'motet_requests_total{{adapter="{adapter}",code="200",service="gateway",tenant="{tenant}"}}' in figures


def noted(stack: LocalStack, service: str, event: str, named: str) -> dict[str, dict[str, Any]]:
    """The lines of a log, by their request."""
    lines = [json.loads(line) for line in stack.log(service).splitlines()]
    return {line[named]: line for line in lines if line.get("event") == event}


def learned(stack: LocalStack) -> list[tuple[str, str]]:
    """The tenant and adapter of each answer that the predictor has learned."""

    async def read() -> list[tuple[str, str]]:
        async with open_store(database(stack)) as store:
            return [(one.tenant, one.adapter) for one in await length_samples.newest_samples(store, 1000)]

    return asyncio.run(read())


# ------------------------------------------------------------------------------------------- keys that come and go


@dataclass
class Stream:
    """A stream that runs until its key is revoked, or until the test ends it."""

    client: AsyncOpenAI
    model: str
    tokens: int = 0
    error: openai.APIError | None = None
    ended: float = 0.0
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        try:
            async with await self.client.completions.create(model=self.model, prompt="Harrow", **LONG) as chunks:
                async for chunk in chunks:
                    self.tokens += bool(chunk.choices[0].text)
                    assert not chunk.choices[0].finish_reason, "the stream ended too early"
                    if self.enough.is_set():
                        return
        except openai.APIError as error:
            self.error = error
        self.ended = time.monotonic()


async def test_a_key_is_valid_on_both_gateways_until_it_is_revoked(deployed: Deployed) -> None:
    """Streams with the revoked key end on both gateways; those of the other tenant on the same runner continue."""
    made = await asyncio.to_thread(deployed.stack.motet, "key", "create", "--tenant", "acme")
    assert made.returncode == 0, made.stderr
    since, key = time.monotonic(), made.stdout.strip()
    while not all([await asyncio.to_thread(opens, deployed, key, at) for at in (0, 1)]):
        assert time.monotonic() - since < WITHIN_S
        await asyncio.sleep(0.1)

    clients = {(who, at): deployed.async_client(who, at) for who in (key, "zeta") for at in (0, 1)}
    ours = [Stream(clients[key, at], "pirate") for at in (0, 1)]
    theirs = [Stream(clients["zeta", at], "shouting") for at in (0, 1)]
    running = [asyncio.create_task(one.run()) for one in (*ours, *theirs)]
    await at_least([*ours, *theirs], [1] * 4)

    revoked = await asyncio.to_thread(deployed.stack.motet, "key", "revoke", key.split("_")[1])
    assert revoked.returncode == 0, revoked.stderr
    since = time.monotonic()
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*running[:2])
    for one in ours:
        assert one.error is not None
        assert one.ended - since < WITHIN_S
        assert one.error.code == "invalid_api_key"
        assert "was revoked during the answer" in one.error.message
    for at in (0, 1):
        with deployed.client(key, at) as client:
            for call in CALLS.values():
                error = refused(call, client, "pirate")
                assert type(error) is openai.AuthenticationError
                assert "revoked" in error.message

    await at_least(theirs, [one.tokens + MORE for one in theirs])
    for one in theirs:
        one.enough.set()
    await asyncio.gather(*running)
    assert [one.error for one in theirs] == [None, None]
    for one_client in clients.values():
        await one_client.close()


async def at_least(streams: Sequence[Stream], tokens: Sequence[int]) -> None:
    async with asyncio.timeout(60):
        while any(one.tokens < least for one, least in zip(streams, tokens, strict=True)):
            assert not any(one.ended for one in streams), [one.error for one in streams]
            await asyncio.sleep(0.02)
