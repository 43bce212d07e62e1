"""A runner hangs, stops reporting or loses its device while it has streams: they continue on another runner, and it is
restarted."""

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from testbed.local_stack import REPORTS_AT_ONCE, LocalStack, running_stack
from tests.runner.random_models import EIGHT, llama
from tests.stack.concurrent_streams import ConcurrentStreams
from tests.stack.served_models import (
    ServedModel,
    StreamedAnswer,
    add_pool,
    assert_right,
    prompt_of,
    stream_without_library,
)
from tests.support.lost_device import LOST, devices_can_be_lost, lose_the_device_of

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STREAMS = 4
TOKENS = 800
HANG_S = 2.0


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalStack, Path, list[ServedModel]]]:
    folder = tmp_path_factory.mktemp("hung")
    engine = {"kvCacheMiB": 64, "maxConcurrentSequences": STREAMS}
    base, served_models = add_pool(
        folder / "manifests", "llama", engine=engine, specs=EIGHT[:2], config=llama(context=2048), replicas=2
    )
    patience = REPORTS_AT_ONCE | {
        "MOTET_SUPERVISOR_HANG_SECONDS": str(HANG_S),
        "MOTET_SUPERVISOR_HEARTBEAT_SECONDS": "3",
        "MOTET_OPERATOR_UNHEALTHY_SECONDS": "1",
    }
    env = patience | devices_can_be_lost(folder)
    with running_stack(folder, manifests=folder / "manifests", env=env) as stack:
        yield stack, base, served_models


def longest_silence(answer: StreamedAnswer) -> float:
    return max(later - earlier for earlier, later in pairwise(answer.arrivals))


# A device that is lost: also in tests/runner_service.
@pytest.mark.parametrize("part", ["engine", "service", pytest.param("device", marks=pytest.mark.soak)])
async def test_a_runner_that_stands_still_is_replaced_and_its_streams_continue_elsewhere(
    deployed: tuple[LocalStack, Path, list[ServedModel]], part: str
) -> None:
    stack, base, served_models = deployed
    await asyncio.to_thread(stack.until, lambda: all(one["ready"] for one in stack.status()["services"]))
    restarts = {one["name"]: one["restarts"] for one in stack.status()["services"]}
    concurrent = ConcurrentStreams(stack.url, served_models, streams=STREAMS, tokens=TOKENS, first=20, last=TOKENS // 2)
    async with asyncio.TaskGroup() as on:
        streams = on.create_task(concurrent.run())
        while True:
            await concurrent.in_the_middle()
            restarted = concurrent.restarted
            sequences = await asyncio.to_thread(stack.sequences)
            # Only what all streams hold: a report may still count one that has just been closed.
            if sum(sequences.values()) != STREAMS:
                continue
            name, served = max(sequences.items(), key=lambda one: one[1])
            victim = stack.service(name)
            runner = int(victim["pid"])
            stands_still = runner if part == "service" else LocalStack.engine_of(runner)
            # The look-ups took time. A stream that began again meanwhile may have gone to another runner.
            if concurrent.all_in_the_middle and concurrent.restarted == restarted:
                break
        concurrent.disturb()
        if part == "device":
            lose_the_device_of(stands_still, stack.data.parent)
        else:
            os.kill(stands_still, signal.SIGSTOP)
    answers = streams.result()
    if part == "device":
        assert "device_failed" in stack.log(name)
        assert LOST in stack.log(name)
    else:
        stood = [answer for answer in answers if longest_silence(answer) > HANG_S / 2]
        assert len(stood) >= served, "streams of the stopped runner received tokens"
    assert [len(answer.tokens) for answer in answers] == [TOKENS] * STREAMS
    assert [answer.reasons for answer in answers] == [["length"]] * STREAMS
    assert_right(base, answers)

    def replaced() -> bool:
        found = stack.service(name)
        return bool(found["ready"] and found["pid"] != runner and found["restarts"] == victim["restarts"] + 1)

    await asyncio.to_thread(stack.until, replaced)
    others = [one for one in stack.status()["services"] if one["kind"] == "runner" and one["name"] != name]
    assert [one["restarts"] for one in others] == [restarts[one["name"]] for one in others]
    assert len((await stream_without_library(stack.url, served_models[0], prompt_of(99), 4)).tokens) == 4
