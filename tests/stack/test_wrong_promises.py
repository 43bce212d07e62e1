"""Live, in exact mode: every third promise is far too small, and no stream has another token than alone."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.local_stack import LocalStack, running_stack
from tests.runner.random_models import EIGHT, llama
from tests.stack.served_models import ServedModel, StreamedAnswer, add_pool, prompt_of, stream_without_library
from tests.stack.test_memory_pressure import counter_by_method

pytestmark = [
    pytest.mark.soak,
    pytest.mark.stack,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STREAMS = 500
AT_ONCE = 32
SHAPES = 25
"""Different requests; each is asked for many times."""
DRAWN = {"temperature": 0.8, "top_p": 0.95}


@dataclass
class Deployed:
    stack: LocalStack
    served_models: list[ServedModel]

    async def ask(self, shape: int) -> StreamedAnswer:
        """Half of them are drawn. Logprobs show what the tokens hide: the last digits of the logits."""
        served = self.served_models[shape % len(self.served_models)]
        how: dict[str, Any] = {"logprobs": 1} | (DRAWN | {"seed": shape} if shape % 2 else {})
        return await stream_without_library(
            self.stack.url, served, prompt_of(shape, spread=40), tokens_of(shape), **how
        )


def tokens_of(shape: int) -> int:
    """Most are longer than a promise of one page."""
    return 20 + 37 * shape % 140


@pytest.fixture(
    params=[{}, {"preset": "s3"}, {"preset": "s3", "contiguous": True}], ids=["paged-chunk", "s3", "contiguous"]
)
def deployed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployed]:
    engine = {"kvCacheMiB": 2, "maxConcurrentSequences": AT_ONCE, "maxResidentAdapters": 4} | request.param
    _, served_models = add_pool(
        tmp_path / "manifests", "llama", engine=engine, specs=EIGHT[:3], config=llama(context=2048)
    )
    env = {
        "MOTET_RUNNER_KERNELS": "exact",
        "MOTET_RUNNER_HOST_KV_MIB": "1",
        "MOTET_SCHEDULER_FORCE_PROMISE_PAGES": "1",
        "MOTET_SCHEDULER_FORCE_PROMISE_EACH": "3",
        "MOTET_SUPERVISOR_HANG_SECONDS": "120",
    }
    with running_stack(tmp_path, manifests=tmp_path / "manifests", env=env) as stack:
        yield Deployed(stack, served_models)


async def test_500_streams_have_the_tokens_that_they_have_alone(deployed: Deployed) -> None:
    alone = [await deployed.ask(shape) for shape in range(SHAPES)]
    places = asyncio.Semaphore(AT_ONCE)

    async def beside_others(number: int) -> StreamedAnswer:
        async with places:
            return await deployed.ask(number % SHAPES)

    answers = await asyncio.gather(*map(beside_others, range(STREAMS)))
    for number, answer in enumerate(answers):
        expected = alone[number % SHAPES]
        assert len(answer.tokens) == tokens_of(number % SHAPES)
        assert (answer.tokens, answer.logprobs, answer.reasons) == (
            expected.tokens, expected.logprobs, expected.reasons,
        ), f"stream {number}"  # fmt: skip
    parks = counter_by_method(deployed.stack, "motet_parks_total")
    print(f"{STREAMS} streams, parks {parks}")
    assert sum(parks.values()) > 0
