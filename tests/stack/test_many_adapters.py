"""32 streams over nine adapters and the base through the OpenAI client, against transformers + PEFT one at a time."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from motet.domain import PAGE_TOKENS, pages_for
from testbed.local_stack import LocalStack, running_stack
from tests.stack.served_models import ServedModel, StreamedAnswer, add_pool, assert_right, prompt_of, stream

pytestmark = [
    pytest.mark.stack,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STREAMS = 32
DECODED = 40
PAIRS = [("llama", "gpt2"), pytest.param(("qwen2", "gpt_neox"), marks=pytest.mark.soak)]
"""Model families, of which each pair has a stack. tests/runner compares each family with PEFT."""


@dataclass
class Served:
    base: Path
    answers: list[StreamedAnswer]
    trace: list[dict[str, Any]]


async def ask_all(stack: LocalStack, served_models: list[ServedModel]) -> list[StreamedAnswer]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return await asyncio.gather(
            *(
                stream(client, served_models[index % len(served_models)], prompt_of(index), DECODED)
                for index in range(STREAMS)
            )
        )


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    """Pools of model families in one stack. 32 clients send requests to each at the same time."""
    folder = tmp_path_factory.mktemp("adapters")
    manifests = folder / "manifests"
    engine = {"kvCacheMiB": 32, "maxConcurrentSequences": 32, "prefillChunkTokens": 64}
    pools = {family: add_pool(manifests, family, engine=engine) for family in request.param}
    found = []
    with running_stack(
        folder, manifests=manifests, env={"MOTET_STEP_TRACE": str(folder / "trace.{instance}")}
    ) as stack:
        for family, (base, served_models) in pools.items():
            asyncio.run(ask_all(stack, served_models))  # loads every adapter onto the device
            answers = asyncio.run(ask_all(stack, served_models))
            [written] = folder.glob(f"trace.{family.replace('_', '-')}-*")
            found.append(Served(base, answers, [json.loads(line) for line in written.read_text().splitlines()]))
    return found


def test_32_streams_of_ten_models_equal_peft(served: list[Served]) -> None:
    for one in served:
        assert all(len(answer.tokens) == DECODED and answer.reasons == ["length"] for answer in one.answers)
        assert all(pages_for(len(answer.prompt) + DECODED, PAGE_TOKENS) >= 3 for answer in one.answers)
        assert_right(one.base, one.answers)


def test_an_iteration_is_one_model_call_over_many_adapters_without_padding(served: list[Served]) -> None:
    for one in served:
        # The others only tell of requests that wait, as for an adapter that is still read.
        lines = [line for line in one.trace if line["prefill"] + line["decode"]]
        layers = max(line["attention"] for line in lines)
        others = [line for line in lines if (line["calls"], line["attention"], line["padding"]) != (1, layers, 0)]
        assert others == []
        assert any(line["adapters"] >= 8 for line in lines)
        assert any(line["prefill"] and line["decode"] for line in lines)
