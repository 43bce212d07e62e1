"""A thread that belongs to one part alone."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Answer = TypeVar("Answer")


class OwnThread:
    """The event loop's threads count tokens and render prompts, of tenants who may send many: whoever waits for one of
    them waits for tenants. This one does what is asked of it in order."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, do: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._executor, do)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
