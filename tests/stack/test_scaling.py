"""A pool gets more runners under load and fewer after it, with real processes, and no request fails."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from testbed.local_stack import LocalStack, running_stack
from tests.runner.random_models import EIGHT, llama
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

CLIENTS = 3 * 3
TOKENS = 120
TWENTIETH = {
    "MOTET_SCHEDULER_CAPACITY_SECONDS": "0.05",
    "MOTET_SCHEDULER_QUEUE_PATIENCE_SECONDS": "0.25",
    "MOTET_SCHEDULER_GROWTH_SECONDS": "1.5",
    "MOTET_GATEWAY_KEEP_ALIVE_SECONDS": "0.5",
    "MOTET_GATEWAY_HOLD_SECONDS": "0.1",
}
STABILIZATION = 3


def scaled_pool(manifests: Path, *, low: int, high: int, replicas: int) -> tuple[Path, list[ServedModel]]:
    base, served_models = add_pool(
        manifests,
        "llama",
        engine={"kvCacheMiB": 32, "maxConcurrentSequences": PLACES},
        specs=EIGHT[:2],
        config=llama(context=2048),
        replicas=replicas,
    )
    path = manifests / "llama.json"
    pool = json.loads(path.read_text())
    pool["spec"]["autoscaling"] = {
        "mode": "Builtin",
        "minReplicas": low,
        "maxReplicas": high,
        "scaleDownStabilizationSeconds": STABILIZATION,
    }
    path.write_text(json.dumps(pool))
    return base, served_models


def pool_of(stack: LocalStack) -> dict[str, object]:
    (pool,) = stack.status()["pools"]
    return pool  # type: ignore[no-any-return]


def scaling_of(stack: LocalStack) -> tuple[str, str]:
    conditions = pool_of(stack)["conditions"]
    found = next(one for one in conditions if one["type"] == "ScalingActive")  # type: ignore[attr-defined]
    return found["reason"], found["message"]


async def reaches(stack: LocalStack, ready: int, *, seconds: float = 90) -> None:
    def there() -> bool:
        pool = pool_of(stack)
        return (pool["replicas"], pool["ready"]) == (ready, ready)

    await asyncio.to_thread(stack.until, there, seconds)


async def test_a_pool_grows_under_load_and_shrinks_after_it_without_a_failed_request(tmp_path: Path) -> None:
    base, served_models = scaled_pool(tmp_path / "manifests", low=1, high=3, replicas=1)
    answers: list[StreamedAnswer] = []
    busy, few = asyncio.Event(), asyncio.Event()

    async def client(number: int, leave: asyncio.Event) -> None:
        turn = 0
        while not leave.is_set():
            served_model = served_models[(number + turn) % len(served_models)]
            answers.append(
                await stream_without_library(
                    stack.url, served_model, prompt_of(number * 1000 + turn, spread=40), TOKENS
                )
            )
            turn += 1

    with running_stack(tmp_path, manifests=tmp_path / "manifests", env=TWENTIETH) as stack:
        await reaches(stack, 1)
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(client(number, few if number == 0 else busy))
            await reaches(stack, 3)
            assert scaling_of(stack)[0] == "FollowingDemand"
            served = len(answers)
            # After a restart, neither scheduler nor operator removes a runner that has not reported yet.
            for name in ("scheduler", "operator"):
                killed = stack.kill(name)
                while (found := stack.service(name))["pid"] == killed or not found["ready"]:
                    assert pool_of(stack)["replicas"] == 3
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(stack.until, lambda: len(answers) > served + CLIENTS, 60)
            assert pool_of(stack)["replicas"] == 3
            busy.set()  # one client stays: runners end while it is served
            await reaches(stack, 1)
            few.set()
        assert scaling_of(stack)[0] in ("FollowingDemand", "AtMinimum")
    print(f"{len(answers)} requests while the pool went from 1 to 3 runners and back")
    assert [len(answer.tokens) for answer in answers] == [TOKENS] * len(answers)
    assert [answer.reasons for answer in answers] == [["length"]] * len(answers)
    assert_right(base, answers[:: max(1, len(answers) // 20)])


async def test_a_pool_at_zero_starts_a_runner_for_a_request_and_ends_it_afterwards(tmp_path: Path) -> None:
    base, served_models = scaled_pool(tmp_path / "manifests", low=0, high=2, replicas=0)
    with running_stack(tmp_path, manifests=tmp_path / "manifests", env=TWENTIETH) as stack:
        assert pool_of(stack)["replicas"] == 0
        answers = []
        # At first the gateway holds the request, since it has no tokenizer yet; then it waits in the scheduler's queue.
        for comment in ("queued position=1 (waiting for a runner of base-llama)", "no runner of this model is up"):
            received: list[str] = []
            asked = asyncio.create_task(asyncio.to_thread(comments_and_words, stack, served_models[0], received))
            await asyncio.to_thread(
                stack.until, lambda received=received, comment=comment: comment in " ".join(received)
            )
            began = time.monotonic()
            words = await asked
            print(f"answered {time.monotonic() - began:.1f} s after it was seen to wait: a runner's start, mostly")
            answers.append(StreamedAnswer(served_models[0], prompt_of(1), [int(word[1:]) for word in words]))
            assert pool_of(stack)["replicas"] == 1
            await reaches(stack, 0)
            await asyncio.to_thread(
                stack.until, lambda: all(one["kind"] != "runner" for one in stack.status()["services"])
            )
    assert [len(answer.tokens) for answer in answers] == [TOKENS, TOKENS]
    assert answers[0].tokens == answers[1].tokens
    assert_right(base, answers)


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
