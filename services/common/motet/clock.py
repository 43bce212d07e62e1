"""The clock is a parameter, so that tests and simulations of a policy need not wait."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)


class Clock(Protocol):
    """Seconds that never go back. The value 0 has no meaning."""

    def __call__(self) -> float: ...


monotonic: Clock = time.monotonic


class FakeClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        self.now += seconds
        return self.now


async def every(seconds: float, do: Callable[[], Awaitable[None] | None], *, name: str) -> None:
    """Call `do` every `seconds` until cancelled. An error of `do` is logged, and the next call comes nevertheless."""
    while True:
        await asyncio.sleep(seconds)
        try:
            result = do()
            if result is not None:
                await result
        except Exception:
            log.exception("periodic_task_failed", work=name)
