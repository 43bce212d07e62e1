"""Others take the cores, four busy processes for each of them: everything is slow, and no runner counts as lost.

The short run has a time scale of a half: a runner that sends nothing for one second would be lost, instead of two.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testbed.local_stack import LocalStack, running_stack

BUSY_FOR_EACH_CORE = 4
BUSY = "while True: pass"
STREAMS = 16
PATIENCE_S = 120.0

pytestmark = pytest.mark.stack


@contextmanager
def busy_processes() -> Iterator[None]:
    """Each has a session of its own, so that the kernel gives each as much time as a whole service."""
    processes = [
        subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
        for _ in range(BUSY_FOR_EACH_CORE * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def stream_for(stack: LocalStack, seconds: float) -> int:
    """Streams follow each other for so long. Returns how many were answered."""
    end = time.monotonic() + seconds
    numbers = itertools.count()

    async def one_after_the_other() -> None:
        while time.monotonic() < end:
            question = f"Who keeps lighthouse number {next(numbers)}?"
            await asyncio.to_thread(stack.ask, "motet-demo", question, max_tokens=64, timeout=PATIENCE_S)

    async with asyncio.TaskGroup() as on:
        for _ in range(STREAMS):
            on.create_task(one_after_the_other())
    return next(numbers)


def lines_of(stack: LocalStack, name: str, event: str) -> list[dict[str, object]]:
    return [line for text in stack.log(name).splitlines() if (line := json.loads(text)).get("event") == event]


async def no_runner_is_condemned(folder: Path, *, seconds: float, time_scale: float) -> None:
    env = {"MOTET_TIME_SCALE": str(time_scale)}
    with running_stack(folder, runners=2, env=env) as stack:
        with busy_processes():
            answered = await stream_for(stack, seconds)
        assert answered >= STREAMS
        assert lines_of(stack, "supervisor", "runner_unhealthy") == []
        assert lines_of(stack, "gateway", "request_lost") == []
        assert {one["name"]: one["restarts"] for one in stack.status()["services"] if one["restarts"]} == {}
        await asyncio.to_thread(a_frozen_runner_is_found, stack)


def a_frozen_runner_is_found(stack: LocalStack) -> None:
    """Else the run has shown nothing."""
    stack.kill("runner", signal.SIGSTOP)
    stack.until(lambda: lines_of(stack, "supervisor", "runner_unhealthy"))


@pytest.mark.timeout(400)
async def test_busy_neighbours_condemn_no_runner(tmp_path: Path) -> None:
    await no_runner_is_condemned(tmp_path, seconds=10, time_scale=0.5)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_busy_neighbours_condemn_no_runner_in_twenty_minutes(tmp_path: Path) -> None:
    await no_runner_is_condemned(tmp_path, seconds=1200, time_scale=1.0)
