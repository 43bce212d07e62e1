"""A pool gets more runners under load and fewer after it, with real processes, and no request fails."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.local_stack import LocalStack, running_stack
from tests.runner.random_models import EIGHT
from tests.stack.served_models import (
    ServedModel,
    StreamedAnswer,
    add_pool,
    assert_right,
    prompt_of,
    stream_without_library,
)

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

PLACES = 4
"""How many sequences fit into a runner's batch. The scheduler plans with three."""

CLIENTS = 2 * 3
TOKENS = 120
TWENTIETH = {
    "MOTET_SCHEDULER_CAPACITY_SECONDS": "0.05",
    "MOTET_SCHEDULER_QUEUE_PATIENCE_SECONDS": "0.25",
    "MOTET_SCHEDULER_GROWTH_SECONDS": "1.5",
    "MOTET_GATEWAY_KEEP_ALIVE_SECONDS": "0.5",
    "MOTET_GATEWAY_HOLD_SECONDS": "0.1",
}
STABILIZATION = 3


def scaled_pool(manifests: Path, family: str, *, low: int) -> tuple[Path, list[ServedModel]]:
    """Of at most two runners"""
    base, served_models = add_pool(
        manifests,
        family,
        engine={"kvCacheMiB": 32, "maxConcurrentSequences": PLACES},
        specs=EIGHT[:2],
        replicas=low,
    )
    path = manifests / f"{family}.json"
    pool = json.loads(path.read_text())
    pool["spec"]["autoscaling"] = {
        "mode": "Builtin",
        "minReplicas": low,
        "maxReplicas": 2,
        "scaleDownStabilizationSeconds": STABILIZATION,
    }
    path.write_text(json.dumps(pool))
    return base, served_models


@dataclass
class ScaledPool:
    stack: LocalStack
    family: str
    base: Path
    served_models: list[ServedModel]

    @property
    def status(self) -> dict[str, object]:
        return next(one for one in self.stack.status()["pools"] if one["name"] == self.family)  # type: ignore[no-any-return]

    @property
    def scaling(self) -> tuple[str, str]:
        found = next(one for one in self.status["conditions"] if one["type"] == "ScalingActive")  # type: ignore[attr-defined]
        return found["reason"], found["message"]

    @property
    def runners(self) -> list[dict[str, object]]:
        of_it = [one for one in self.stack.status()["services"] if one["kind"] == "runner"]
        return [one for one in of_it if one["name"].startswith(f"{self.family}-")]

    async def reaches(self, ready: int, *, seconds: float = 90) -> None:
        def there() -> bool:
            pool = self.status
            return (pool["replicas"], pool["ready"]) == (ready, ready)

        await asyncio.to_thread(self.stack.until, there, seconds)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, ScaledPool]]:
    """By the fewest runners: a pool for each test in one stack, since a start takes as long as a test."""
    folder = tmp_path_factory.mktemp("scaling")
    families = {0: "qwen2", 1: "llama"}
    made = {low: scaled_pool(folder / "manifests", family, low=low) for low, family in families.items()}
    with running_stack(folder, manifests=folder / "manifests", env=TWENTIETH) as stack:
        yield {low: ScaledPool(stack, families[low], base, served) for low, (base, served) in made.items()}


async def test_a_pool_grows_under_load_and_shrinks_after_it_without_a_failed_request(
    pools: dict[int, ScaledPool],
) -> None:
    pool = pools[1]
    stack = pool.stack
    answers: list[StreamedAnswer] = []
    busy, few = asyncio.Event(), asyncio.Event()

    async def client(number: int, leave: asyncio.Event) -> None:
        turn = 0
        while not leave.is_set():
            served_model = pool.served_models[(number + turn) % len(pool.served_models)]
            answers.append(
                await stream_without_library(
                    stack.url, served_model, prompt_of(number * 1000 + turn, spread=40), TOKENS
                )
            )
            turn += 1

    await pool.reaches(1)
    async with asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(client(number, few if number == 0 else busy))
        await pool.reaches(2)
        assert pool.scaling[0] == "FollowingDemand"
        served = len(answers)
        # After a restart, neither scheduler nor operator removes a runner that has not reported yet.
        for name in ("scheduler", "operator"):
            killed = stack.kill(name)
            while (found := stack.service(name))["pid"] == killed or not found["ready"]:
                assert pool.status["replicas"] == 2
                await asyncio.sleep(0.05)
        await asyncio.to_thread(stack.until, lambda: len(answers) > served + CLIENTS, 60)
        assert pool.status["replicas"] == 2
        busy.set()  # one client stays: a runner ends while it is served
        await pool.reaches(1)
        few.set()
    assert pool.scaling[0] in ("FollowingDemand", "AtMinimum")
    print(f"{len(answers)} requests while the pool went from 1 to 2 runners and back")
    assert [len(answer.tokens) for answer in answers] == [TOKENS] * len(answers)
    assert [answer.reasons for answer in answers] == [["length"]] * len(answers)
    assert_right(pool.base, answers[:: max(1, len(answers) // 20)])


async def test_a_pool_at_zero_starts_a_runner_for_a_request_and_ends_it_afterwards(
    pools: dict[int, ScaledPool],
) -> None:
    pool = pools[0]
    stack, served_model = pool.stack, pool.served_models[0]
    assert pool.status["replicas"] == 0
    answers = []
    # At first the gateway holds the request, since it has no tokenizer yet; then it waits in the scheduler's queue.
    for comment in (
        f"queued position=1 (waiting for a runner of {served_model.model})", "no runner of this model is up"
    ):  # fmt: skip
        received: list[str] = []
        asked = asyncio.create_task(asyncio.to_thread(comments_and_words, stack, served_model, received))
        await asyncio.to_thread(stack.until, lambda received=received, comment=comment: comment in " ".join(received))
        began = time.monotonic()
        words = await asked
        print(f"answered {time.monotonic() - began:.1f} s after it was seen to wait: a runner's start, mostly")
        answers.append(StreamedAnswer(served_model, prompt_of(1), [int(word[1:]) for word in words]))
        assert pool.status["replicas"] == 1
        await pool.reaches(0)
        await asyncio.to_thread(stack.until, lambda: not pool.runners)
    assert [len(answer.tokens) for answer in answers] == [TOKENS, TOKENS]
    assert answers[0].tokens == answers[1].tokens
    assert_right(pool.base, answers)


def comments_and_words(stack: LocalStack, served_model: ServedModel, received: list[str]) -> list[str]:
    """The text of one answer. Comments of the stream go to `received` as they arrive."""
    body = {"model": served_model.model, "prompt": prompt_of(1), "max_tokens": TOKENS, "temperature": 0, "stream": True}
    words: list[str] = []
    with (
        stack.http() as client,
        client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith(":"):
                received.append(line)
            elif line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                words += event["choices"][0]["text"].split() if event["choices"] else []
    return words
