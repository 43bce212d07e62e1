"""A runner says something about a request that another one has: it counts for nothing."""

from typing import Any

import pytest

from motet.api.v1 import common_pb2, runner_pb2
from motet_gateway.dispatcher import Dispatcher
from motet_gateway.generation import EndReason
from motet_simulator.fake_engine import SlowEngines, tokens_of
from tests.support.in_process_runner import short_folder
from tests.support.in_process_services import until
from tests.support.in_process_system import InProcessSystem, in_process_system
from tests.support.real_dispatcher import SEED, ask, dispatcher_of

PROMPT = (1, 2, 3)
TOKENS = 40


def lies() -> dict[str, dict[str, Any]]:
    about: dict[str, Any] = {"request": "a", "epoch": 1}
    refusal = {"code": "adapter_incompatible", "message": "no"}
    step: dict[str, Any] = {
        "tokens": {"tokens": [5, 5, 5]},
        "an end": {"finish": common_pb2.FINISH_REASON_STOP},
        "a failure": {"finish": common_pb2.FINISH_REASON_FAILED, "failure": refusal},
        "a gap": {"index": 1000, "tokens": [5]},
    }
    steps = {name: {"step": {"sequences": [about | one]}} for name, one in step.items()}
    progress = {"progress": [about | {"state": common_pb2.SEQUENCE_STATE_PARKED, "alone": True}]}
    return steps | {"progress": {"step": progress}, "a decline": {"declined": about | {"term": 1, "failure": refusal}}}


@pytest.mark.parametrize("lie", lies())
async def test_a_runner_cannot_speak_for_another_one(lie: str) -> None:
    with short_folder() as folder:
        async with in_process_system(folder) as system, dispatcher_of(system) as dispatcher:
            await speak_for_another(system, dispatcher, lie)


async def speak_for_another(system: InProcessSystem, dispatcher: Dispatcher, lie: str) -> None:
    await system.runner("r0", SlowEngines())
    client = ask(dispatcher, "a", PROMPT, max_tokens=TOKENS)
    await until(lambda: client.tokens)
    live = dispatcher.choices["a"]
    message: dict[str, Any] = lies()[lie]
    for sequence in message.get("step", {}).get("sequences", ()):
        sequence.setdefault("index", len(live.generation.delivered))
    dispatcher.from_runner("another address", runner_pb2.GenerateDown(**message))
    assert not live.generation.alone
    assert await client.over() is EndReason.LENGTH
    assert (client.tokens, client.placed_times) == (tokens_of(PROMPT, SEED, TOKENS), 1)
