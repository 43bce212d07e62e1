"""Groups of runners with vLLM, and of runners with vLLM and with Motet's engine, on vLLM's build for CPUs.

Unmodified clients ask them, streams go on when a runner dies, and what vLLM refuses is served where it can be.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import openai
import pytest
from jsonschema import Draft202012Validator

from testbed.local_stack import REPORTS_AT_ONCE, LocalStack, copy_of_bundled, running_stack
from tests.runner.external.vllm_itself import ENVIRONMENT, needs_vllm
from tools.clients.breaking import breaking_proxy
from tools.clients.clients import CLIENTS
from tools.clients.trial import ADAPTER, CALLER, questions, try_one
from tools.peers.environment import python_of

pytestmark = [pytest.mark.stack, pytest.mark.soak, needs_vllm, pytest.mark.timeout(900)]

ENGINE = {"backend": "vllm", "maxLoraRank": 16, "maxResidentAdapters": 4, "kvCacheMiB": 64}
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 999},
    "minItems": 60,
    "maxItems": 60,
}
SCHEMA = {"type": "object", "properties": {"n": NUMBERS}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA, "strict": True}}
PLAIN, MASKED = 4, 3
"""With the one that chooses the runner, as many as the least knee lets in: an eighth of the places."""
TOKENS = 400
PIECES_BEFORE = 15


@pytest.fixture(scope="module")
def of_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Two runners with vLLM"""
    folder = tmp_path_factory.mktemp("two")
    manifests = copy_of_bundled(folder / "manifests", adapters=[ADAPTER, CALLER], engine=json.dumps(ENGINE))
    with running_stack(folder, manifests=manifests, runners=2, env=environment()) as stack:
        yield stack


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A runner with vLLM, and one with Motet's engine. The one with vLLM has the higher name: while both are idle, the
    scheduler takes that one."""
    folder = tmp_path_factory.mktemp("mixed")
    manifests = copy_of_bundled(folder / "manifests", adapters=[ADAPTER], engine=json.dumps(ENGINE))
    pool = json.loads((manifests / "pool.json").read_text())
    pool["metadata"]["name"] = "also"
    pool["spec"]["group"] = "demo"
    pool["spec"]["engine"] = ENGINE | {"backend": "motet", "dtype": "float32"}
    (manifests / "also.json").write_text(json.dumps(pool))
    with running_stack(folder, manifests=manifests, env=environment()) as stack:
        yield stack


def environment() -> dict[str, str]:
    """One thread for each runner: threads that wait for each other are slow beside other work."""
    return REPORTS_AT_ONCE | {
        "MOTET_RUNNER_ENGINE_PYTHON": str(python_of(ENVIRONMENT)),
        "MOTET_RUNNER_THREADS": "1",
    }


class Streams:
    """Greedy answers of the base model and of an adapter, and JSON answers, half of them drawn"""

    def __init__(self, stack: LocalStack) -> None:
        self.texts = [""] * (PLAIN + MASKED)
        self.pieces = [0] * (PLAIN + MASKED)
        self.reasons = [""] * (PLAIN + MASKED)
        self.requests = [""] * (PLAIN + MASKED)
        self._stack = stack

    def _asked(self, number: int) -> dict[str, Any]:
        masked = number >= PLAIN
        model = ADAPTER if number % 2 else "motet-demo"
        asked = {"model": model, "messages": [{"role": "user", "content": f"Who lives in house {number}?"}]}
        if masked:
            return asked | {
                "response_format": FORMAT,
                "max_tokens": 1200,
                "temperature": number % 4 // 2,
                "seed": number,
            }
        return asked | {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}

    async def run(self) -> None:
        async with (
            openai.AsyncOpenAI(base_url=f"{self._stack.url}/v1", api_key="none", max_retries=0, timeout=300) as client,
            asyncio.TaskGroup() as on,
        ):
            for number in range(len(self.texts)):
                on.create_task(self._one(client, number))

    async def _one(self, client: openai.AsyncOpenAI, number: int) -> None:
        chunks: Any = await client.chat.completions.create(stream=True, **self._asked(number))
        self.requests[number] = chunks.response.headers["x-request-id"]
        async for chunk in chunks:
            for choice in chunk.choices:
                self.texts[number] += choice.delta.content or ""
                self.pieces[number] += bool(choice.delta.content)
                self.reasons[number] = choice.finish_reason or self.reasons[number]

    async def in_the_middle(self) -> None:
        while min(self.pieces) < PIECES_BEFORE:
            await asyncio.sleep(0.005)
        assert not any(self.reasons)


@asynccontextmanager
async def a_long_one(stack: LocalStack, **options: float) -> AsyncIterator[str]:
    """The runner that has it is filled before one that is idle."""
    body = {"model": "motet-demo", "prompt": "The sea", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=60, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body | options) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        while not (await anext(lines)).startswith("data:"):  # comments come while it waits
            pass
        yield answer.headers["x-request-id"]


async def killed(stack: LocalStack, **options: float) -> Streams:
    """What comes if their runner is killed when each answer is in its middle, once it is back. `options`: of a request
    that is there before them, and chooses the runner"""
    streams = Streams(stack)
    async with a_long_one(stack, **options) as first, asyncio.TaskGroup() as on:
        on.create_task(streams.run())
        found = (await asyncio.to_thread(placements, stack, first))[-1]
        service = next(one for one in stack.status()["services"] if one["name"] == found)
        await streams.in_the_middle()
        os.kill(service["pid"], signal.SIGKILL)

    def has_returned() -> bool:
        again = next(one for one in stack.status()["services"] if one["name"] == found)
        return bool(again["ready"] and again["pid"] != service["pid"])

    await asyncio.to_thread(stack.until, has_returned)
    placed = [await asyncio.to_thread(placements, stack, one) for one in streams.requests]
    assert [one[0] for one in placed] == [found] * len(placed)
    assert all(len(one) > 1 for one in placed), placed
    return streams


def placements(stack: LocalStack, request: str) -> list[str]:
    """The runners to which the scheduler has sent this request, in their order"""
    with stack.http() as client:
        document = client.get(f"/motet/requests/{request}").json()
    (choice,) = document["choices"]
    details = [line["detail"] for line in choice["timeline"] if (line["by"], line["event"]) == ("scheduler", "placed")]
    return [re.findall(r"on runner (\S+)", one)[0] for one in details]


def assert_whole(streams: Streams, undisturbed: Streams) -> None:
    assert streams.texts[:PLAIN] == undisturbed.texts[:PLAIN]
    assert streams.reasons == ["length"] * PLAIN + ["stop"] * MASKED
    valid = Draft202012Validator(SCHEMA)
    assert [valid.is_valid(json.loads(text)) for text in streams.texts[PLAIN:]] == [True] * MASKED


def runner_of(stack: LocalStack, pool: str) -> str:
    (name,) = [one["name"] for one in stack.status()["services"] if one["kind"] == "runner" and pool in one["name"]]
    return name


@pytest.mark.parametrize("name", ["openai", "curl"])
def test_a_client_does_all_that_it_can(of_vllm: LocalStack, name: str) -> None:
    tried = CLIENTS[name]
    with breaking_proxy(of_vllm.port) as broken:
        command = [sys.executable, "-m", f"tools.clients.drivers.{tried.driver}"]
        found = try_one(command, tried.does, questions(of_vllm, broken), of_vllm)
    assert found == dict.fromkeys(tried.does, "")


async def test_answers_go_on_when_one_of_two_runners_with_vllm_dies(of_vllm: LocalStack) -> None:
    undisturbed = Streams(of_vllm)
    await undisturbed.run()
    assert_whole(await killed(of_vllm), undisturbed)


async def test_answers_go_on_between_runners_with_vllm_and_with_motets_engine(mixed: LocalStack) -> None:
    undisturbed = Streams(mixed)
    await undisturbed.run()
    assert_whole(await killed(mixed), undisturbed)  # idle ones are taken by their names: vLLM's
    assert_whole(await killed(mixed, temperature=2.5), undisturbed)  # which vLLM refuses: Motet's


REFUSED = {
    "temperature must be at most 2": {"temperature": 2.5},
    "logit_bias and repetition_penalty together": {"logit_bias": {"300": 5}, "repetition_penalty": 1.2},
    "prompt_logprobs is not supported": {"prompt_logprobs": 1},
}
AT_ONCE = 12


@pytest.mark.parametrize("refusal", REFUSED)
def test_an_option_that_vllm_refuses_is_served_by_motets_engine(
    mixed: LocalStack, of_vllm: LocalStack, refusal: str
) -> None:
    """The one with vLLM is asked once, if the scheduler tries it first."""
    body = {"model": "motet-demo", "prompt": "The sea", "max_tokens": 60, "ignore_eos": True} | REFUSED[refusal]
    with mixed.http() as client, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(AT_ONCE)))
        assert [one.status_code for one in answers] == [200] * AT_ONCE, answers[-1].text
        placed = [placements(mixed, one.headers["x-request-id"]) for one in answers]
    unable, able = runner_of(mixed, "demo"), runner_of(mixed, "also")
    assert [one[-1] for one in placed] == [able] * AT_ONCE
    assert {one.count(unable) for one in placed} <= {0, 1}
    assert any(unable in one for one in placed), "nobody has moved"
    with of_vllm.http() as client:
        answer = client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "parameter_unavailable")
