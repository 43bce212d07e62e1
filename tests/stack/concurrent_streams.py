"""Streams that a test disturbs together, each of them in its middle, however fast or slow the machine and the streams.

A stream may be far behind the others: its adapter is still being loaded, or it went to another runner. Nobody can say
how long that takes, so nothing is timed: until the test disturbs them, whoever gets past the middle hangs up and begins
anew.
"""

import asyncio
import time
from collections.abc import Sequence

from tests.stack.served_models import ServedModel, StreamedAnswer, lean_stream, prompt_of


class PastTheMiddle(Exception):
    """Too far to be disturbed."""


class ConcurrentStreams:
    """Of `streams` streams in turn of the voices; the middle is from token `first` to token `last`."""

    def __init__(
        self, url: str, voices: Sequence[ServedModel], *, streams: int, tokens: int, first: int, last: int
    ) -> None:
        self._asks = [(voices[index % len(voices)], prompt_of(index, spread=40)) for index in range(streams)]
        self._url = url
        self._tokens = tokens
        self._first, self._last = first, last
        self._now: dict[int, StreamedAnswer] = {}
        self._disturbed = False
        self.begun_anew = 0

    async def run(self) -> list[StreamedAnswer]:
        async with asyncio.TaskGroup() as on:
            tasks = [on.create_task(self._stream(index)) for index in range(len(self._asks))]
        return [task.result() for task in tasks]

    async def in_the_middle(self) -> None:
        """Wait until all are."""
        while not self.all_in_the_middle:
            await asyncio.sleep(0.005)

    @property
    def all_in_the_middle(self) -> bool:
        told = self.told
        return len(told) == len(self._asks) and self._first <= min(told) and max(told) <= self._last

    def disturb(self) -> None:
        """To be called right before: from now on every stream goes on to its end."""
        assert self.all_in_the_middle
        self._disturbed = True

    @property
    def told(self) -> list[int]:
        """How many tokens each has heard."""
        return [len(answer.tokens) for _, answer in sorted(self._now.items())]

    async def _stream(self, index: int) -> StreamedAnswer:
        voice, prompt = self._asks[index]

        def heard(answer: StreamedAnswer) -> None:
            if not self._disturbed and len(answer.tokens) > self._last:
                raise PastTheMiddle
            self._now[index] = answer

        while True:
            try:
                return await lean_stream(self._url, voice, prompt, self._tokens, heard=heard)
            except PastTheMiddle:
                self._now.pop(index)
                self.begun_anew += 1
                print(f"stream {index} begins anew: {self._those_behind()}")

    def _those_behind(self) -> str:
        now = time.monotonic()
        silent = [index for index in range(len(self._asks)) if index not in self._now]
        behind = [
            f"{index} ({one.voice.model}) is at token {len(one.tokens)} after {now - one.asked:.1f} s, "
            f"placed after {one.placed_after}, first token after {one.arrivals[0] - one.asked:.1f} s"
            for index, one in sorted(self._now.items())
            if one.arrivals and len(one.tokens) < self._first
        ]
        return "; ".join([f"nothing is heard of {silent}", *behind])
