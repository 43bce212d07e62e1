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


async def test_while_a_request_waits_no_runner_speaks_for_it() -> None:
    with short_folder() as folder:
        async with in_process_system(folder) as system, dispatcher_of(system) as dispatcher:
            runner = await system.runner("r0", SlowEngines(pages=8))
            first = ask(dispatcher, "first", PROMPT, max_tokens=100)
            await until(lambda: first.tokens)
            client = ask(dispatcher, "a", PROMPT, max_tokens=100)
            live = dispatcher.choices["a"]
            heard_at, told = live.heard_at, client.told
            for lie, message in lies().items():
                for epoch in (0, 1):  # 0 is that of a request that was never placed, and of a message that names none
                    dispatcher.from_runner(runner.address, runner_pb2.GenerateDown(**about(message, epoch)))
                assert (client.tokens, client.told, live.heard_at) == ([], told, heard_at), lie
                assert (live.record.parks, live.generation.alone) == (0, False), lie


def about(message: dict[str, Any], epoch: int) -> dict[str, Any]:
    """The lie, of this epoch."""
    if "declined" in message:
        return {"declined": message["declined"] | {"epoch": epoch}}
    return {"step": {kind: [one | {"epoch": epoch} for one in said] for kind, said in message["step"].items()}}


async def speak_for_another(system: InProcessSystem, dispatcher: Dispatcher, lie: str) -> None:
    engines = SlowEngines()
    await system.runner("r0", engines)
    client = ask(dispatcher, "a", PROMPT, max_tokens=TOKENS)
    await until(lambda: client.tokens)
    live = dispatcher.choices["a"]
    message: dict[str, Any] = lies()[lie]
    for sequence in message.get("step", {}).get("sequences", ()):
        sequence.setdefault("index", len(live.generation.delivered))
    dispatcher.from_runner("another address", runner_pb2.GenerateDown(**message))
    assert not live.generation.alone
    engines.hurry()
    assert await client.over() is EndReason.LENGTH
    assert (client.tokens, client.placed_times) == (tokens_of(PROMPT, SEED, TOKENS), 1)
