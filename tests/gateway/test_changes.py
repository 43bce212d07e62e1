"""What wakes the task of an answer."""

import asyncio
from typing import Any

import pytest

from motet_gateway.answers.changes import MIN_DUE_SECONDS, Changes
from tests.common.waiting import PATIENCE_S


async def test_a_time_that_comes_while_the_task_is_busy_costs_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may not read for minutes. Mutation: the timer is set again until the task waits."""
    loop, timers = asyncio.get_running_loop(), 0
    call_later = loop.call_later

    def counted(*arguments: Any) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return call_later(*arguments)

    changes = Changes()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_later", counted)
        changes.due_in(0)
        until = loop.time() + 10 * MIN_DUE_SECONDS
        while loop.time() < until:
            await asyncio.sleep(0)
    assert timers == 1


async def test_what_was_due_while_the_task_was_busy_is_done_when_it_waits() -> None:
    changes, done = Changes(), 0

    async def when_due() -> None:
        nonlocal done
        done += 1
        changes.wake()

    changes.due_in(0)
    await asyncio.sleep(2 * MIN_DUE_SECONDS)
    changes.wake()
    await changes.wait(when_due)
    assert done == 0, "something had changed"
    async with asyncio.timeout(PATIENCE_S):
        await changes.wait(when_due)
    assert done == 1
