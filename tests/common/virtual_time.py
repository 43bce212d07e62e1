"""An event loop whose time jumps to the next timer when all tasks wait. Hours take no time, also on a busy machine.

What is tested `in_virtual_time` gets the loop's `time` as its clock. Threads and processes keep real time.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now

    def pass_by(self, seconds: float) -> None:
        self._now += seconds


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """`timeout` is the time until the next timer. If None, there is no timer: only another thread can continue."""
        ready = super().select(timeout if timeout is None else 0)
        if not ready and timeout is not None and timeout > 0:
            self._loop.pass_by(timeout)
        return ready


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
