"""Run several coroutines at once, so that the first error is raised as it is, and end a task for certain."""

import asyncio
from collections.abc import Awaitable

import structlog

log = structlog.get_logger(__name__)


async def run_together(*work: Awaitable[object]) -> None:
    """Run everything until all is done. The first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def end(task: "asyncio.Task[None]", *, patience_seconds: float) -> None:
    """Cancel a task, and again as often as it has not ended within `patience_seconds`.

    One cancellation may be lost in a library below the task, and the task's own clean-up may hang.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=patience_seconds)
        if not task.done():
            log.warning("task_slow_to_end", task=task.get_name(), seconds=patience_seconds)
