"""16 streams of 1,000 tokens while processes are killed: every token right, none twice, and nobody waits for the dead.

Each kill comes while every stream is between its 8th and its 400th token. `make soak` tries more moments. What took how
long is compared with how long the victim was away, in the same run.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runner.random_models import EIGHT, llama
from tests.stack.crowd import Crowd
from tests.stack.harness import REPORTS_AT_ONCE, Stack, running_stack
from tests.stack.voices import Answer, Voice, add_pool, assert_right, lean_stream, prompt_of

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STREAMS = 16
TOKENS = 1000
LATEST = 400


@dataclass
class House:
    stack: Stack
    base: Path
    voices: list[Voice]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("survive")
    engine = {"kvCacheMiB": 64, "maxConcurrentSequences": 24}
    base, voices = add_pool(
        folder / "manifests", "llama", engine=engine, specs=EIGHT[:3], config=llama(context=2048), replicas=2
    )
    with running_stack(folder, manifests=folder / "manifests", env=REPORTS_AT_ONCE) as stack:
        yield House(stack, base, voices)


@dataclass
class Disturbance:
    """What happened in one run."""

    answers: list[Answer]
    killed: float
    probe: Answer
    """Of a request that came right after the kill."""
    back: float
    """When the victim was ready again."""


async def disturbed(house: House, victim: str, *, at: int) -> Disturbance:
    """Run 16 streams, kill the victim once each has `at` tokens, place a new request, wait for the victim's return.

    `runner` is the one that has the streams.
    """
    crowd = Crowd(house.stack.url, house.voices, streams=STREAMS, tokens=TOKENS, first=at, last=LATEST)
    async with asyncio.TaskGroup() as on:
        streams = on.create_task(crowd.run())
        while True:
            await crowd.in_the_middle()
            name = victim
            if victim == "runner":
                name, _ = await asyncio.to_thread(house.stack.busiest_runner)
            pid = int(house.stack.service(name)["pid"])
            if crowd.all_in_the_middle:  # still: to look took its time
                break
        crowd.disturb()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        probe = on.create_task(lean_stream(house.stack.url, house.voices[0], prompt_of(99), 2))
        back = None
        while back is None:
            found = await asyncio.to_thread(house.stack.service, name)
            back = time.monotonic() if found["ready"] and found["pid"] != pid else None
    return Disturbance(streams.result(), killed, probe.result(), back)


def assert_whole(house: House, run: Disturbance, victim: str) -> None:
    for answer in run.answers:
        assert len(answer.tokens) == TOKENS
        assert answer.reasons == ["length"]
    assert_right(house.base, run.answers)
    first, back = run.probe.arrivals[0] - run.killed, run.back - run.killed
    print(f"{victim}: a new request has its first token {first:.2f} s after the kill")
    print(f"{victim}: ready again after {back:.2f} s")
    # Who is dead is not waited for: only a scheduler is, which is as quick to place a request as it was to begin.
    assert first <= (2 * back if victim == "scheduler" else back)


def assert_nobody_waited(run: Disturbance) -> None:
    """Tokens came to every stream while the killed process was away."""
    ends = min(answer.arrivals[-1] for answer in run.answers)
    away = min(run.back, ends)
    assert all(any(run.killed < at <= away for at in answer.arrivals) for answer in run.answers)


@pytest.mark.parametrize("victim", ["scheduler", "predictor", "supervisor", "operator"])
async def test_the_control_plane_may_die_under_running_streams(house: House, victim: str) -> None:
    run = await disturbed(house, victim, at=20)
    assert_whole(house, run, victim)
    assert_nobody_waited(run)


async def test_the_streams_of_a_killed_runner_go_on_elsewhere(house: House) -> None:
    run = await disturbed(house, "runner", at=60)
    assert_whole(house, run, "runner")


@pytest.mark.soak
@pytest.mark.parametrize("at", [8, 90, 170, 250])
@pytest.mark.parametrize("victim", ["scheduler", "predictor", "supervisor", "operator", "runner"])
async def test_any_process_may_die_at_any_moment(house: House, victim: str, at: int) -> None:
    assert_whole(house, await disturbed(house, victim, at=at), victim)
