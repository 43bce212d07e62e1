"""Turns the texts of all requests into tokens, and many tokens into text. That takes so much memory for each byte that
only a few texts are in work at once: long ones wait for each other, and never stand before short ones.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from motet_gateway.tokens.text_model import KEEP_ALL, Keep, ModelTokenizer

LANES = ((64 * 1024, 4), (1024 * 1024, 1), (1 << 63, 1))
"""For each lane, the most characters of a request's texts, and its number of threads. In each lane texts begin in the
order in which they came. A thread keeps a part of the memory of its longest text, so it is always the same few
threads."""


Result = TypeVar("Result")


class Encoder:
    def __init__(self, *, threaded_bytes: int) -> None:
        """Texts of up to `threaded_bytes` are encoded on the event loop."""
        self._threaded_bytes = threaded_bytes
        self._lanes = [
            (most, ThreadPoolExecutor(threads, thread_name_prefix=f"encode-{most}")) for most, threads in LANES
        ]

    async def encode(
        self, texts: Sequence[str], model: ModelTokenizer, *, special: bool, keep: Keep = KEEP_ALL
    ) -> "list[array[int]]":
        size = sum(map(len, texts))
        encode = partial(model.encode, texts, add_special_tokens=special, keep=keep)
        return encode() if size <= self._threaded_bytes else await self.run(size, encode)

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Work for a text of about `size` characters, in its lane. Cancelled before it begins, it leaves the lane."""
        lane = next(lane for most, lane in self._lanes if size <= most)
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        for _, lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
