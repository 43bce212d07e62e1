"""Waiting for something to become true, with a bound."""

import asyncio
from collections.abc import Callable


async def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)
