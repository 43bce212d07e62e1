"""A thread for one component alone."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Answer = TypeVar("Answer")


class OwnThread:
    """Runs calls in order in its own thread. The event loop's threads tokenise prompts, so a call there could wait for
    many tenants' requests."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, do: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._executor, do)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
