"""Waits until something becomes true. The limit ends tests that wait in vain; it is long enough for slow machines."""

import asyncio
from collections.abc import Callable
from typing import Any

from testbed.last_seen import last_seen

PATIENCE_S = 60.0


async def until(
    condition: Callable[[], Any], seconds: float = PATIENCE_S, *, every: float = 0.005, why: str = ""
) -> Any:
    """Wait until `condition` gives something true, and return it. If it never does, the error says what it saw."""
    try:
        async with asyncio.timeout(seconds) as limit:
            while not (value := condition()):
                await asyncio.sleep(every)
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"not within {seconds:g} s: {why or last_seen(condition)}") from None
    return value
