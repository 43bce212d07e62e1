"""Turns the texts of all requests into tokens, and many tokens into text. That takes so much memory for each byte that
only a few texts are in work at once: long ones wait for each other, and never stand before short ones.
"""

import asyncio
import sys
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from motet.room_per_tenant import RoomPerTenant
from motet_gateway.tokens.text_model import KEEP_ALL, Keep, ModelTokenizer

LANES = ((64 * 1024, 4), (1024 * 1024, 1), (1 << 63, 1))
"""For each lane, the most characters of a request's texts, and its number of threads. In each lane tenants have their
turns, and texts of one tenant begin in the order in which they came. A thread keeps a part of the memory of its longest
text, so it is always the same few threads."""

Result = TypeVar("Result")


class Encoder:
    def __init__(self, *, threaded_bytes: int) -> None:
        """Texts of up to `threaded_bytes` are encoded on the event loop."""
        self._threaded_bytes = threaded_bytes
        self._lanes = [(most, _Lane(most, threads)) for most, threads in LANES]

    async def encode(
        self, texts: Sequence[str], model: ModelTokenizer, *, special: bool, tenant: str, keep: Keep = KEEP_ALL
    ) -> "list[array[int]]":
        size = sum(map(len, texts))
        encode = partial(model.encode, texts, add_special_tokens=special, keep=keep)
        return encode() if size <= self._threaded_bytes else await self.run(size, encode, tenant=tenant)

    async def run(self, size: int, work: Callable[[], Result], *, tenant: str) -> Result:
        """Work for a text of about `size` characters, in its lane. Cancelled before it begins, it leaves the lane."""
        lane = next(lane for most, lane in self._lanes if size <= most)
        return await lane.run(tenant, work)

    def close(self) -> None:
        for _, lane in self._lanes:
            lane.close()


@dataclass(slots=True)
class _Job:
    tenant: str
    work: Callable[[], Any] | None
    """None: it was cancelled, and holds no text any more."""
    result: "asyncio.Future[Any]"


class _Lane:
    def __init__(self, most: int, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"encode-{most}")
        self._free = threads
        self._waiting = RoomPerTenant[_Job](sys.maxsize)

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        job = _Job(tenant, work, result)
        self._waiting.add(job)
        self._begin()
        try:
            return await result
        finally:
            job.work = None

    def close(self) -> None:
        for job in self._waiting.take(len(self._waiting)):
            job.result.cancel()
        self._threads.shutdown(wait=False)

    def _begin(self) -> None:
        while self._free and (taken := self._waiting.take(1)):
            (job,) = taken
            if job.work is not None:
                self._free -= 1
                running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
                running.add_done_callback(partial(self._ended, job.result))

    def _ended(self, result: "asyncio.Future[Any]", running: "asyncio.Future[Any]") -> None:
        self._free += 1
        self._begin()
        error = running.exception()
        if result.done():  # cancelled meanwhile
            return
        if error is None:
            result.set_result(running.result())
        else:
            result.set_exception(error)
