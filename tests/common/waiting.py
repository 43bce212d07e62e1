"""Waits until something becomes true. The limit ends tests that wait in vain; it is long enough for slow machines."""

import asyncio
from collections.abc import Callable

PATIENCE_S = 60.0


async def until(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)
