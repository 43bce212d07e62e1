"""Run several coroutines at once. The first error is raised as it is, not inside an exception group."""

import asyncio
from collections.abc import Awaitable


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
