"""Tasks that run together, and tasks that must end."""

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from motet.task_group import end, run_together


async def test_the_first_failure_is_raised_as_it_is_and_cancels_the_others() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_together(waits(), fails())
    assert cancelled.is_set()


async def test_a_task_ends_although_its_first_cancellation_was_lost_and_its_clean_up_hangs() -> None:
    async def stubborn() -> None:
        with contextlib.suppress(asyncio.CancelledError):  # lost
            await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    task = asyncio.create_task(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    with capture_logs() as logged:
        async with asyncio.timeout(5):
            await end(task, patience_seconds=0.02)
    assert task.cancelled()
    assert [(line["event"], line["task"]) for line in logged] == [("task_slow_to_end", "stubborn")] * 2


async def test_ending_a_task_that_has_ended_returns_at_once() -> None:
    async def done() -> None:
        pass

    task = asyncio.create_task(done())
    await task
    await end(task, patience_seconds=100)
