"""Streams that a test disturbs at a moment when all of them are in their middle, also on a slow machine.

A stream may be far behind the others: its adapter is still being loaded, or it went to another runner. How long that
takes is unknown, so there is no timing: until the test disturbs them, a stream that gets past the middle is closed and
starts again.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from tests.stack.served_models import ServedModel, StreamedAnswer, prompt_of, stream_without_library


class PastTheMiddle(Exception):
    """The stream is past its middle, before the disturbance."""


class ConcurrentStreams:
    """`streams` streams that use the models in turn. Their middle is from token `first` to token `last`.

    `sampling`: how the tokens of each are chosen, by its number; greedily if nothing is said.
    """

    def __init__(
        self,
        url: str,
        served_models: Sequence[ServedModel],
        *,
        streams: int,
        tokens: int,
        first: int,
        last: int,
        sampling: Callable[[int], Mapping[str, float]] = lambda _: {},
    ) -> None:
        self._asks = [
            (served_models[index % len(served_models)], prompt_of(index, spread=40)) for index in range(streams)
        ]
        self._sampling = sampling
        self._url = url
        self._tokens = tokens
        self._first, self._last = first, last
        self._now: dict[int, StreamedAnswer] = {}
        self._disturbed = False
        self.restarted = 0

    async def run(self) -> list[StreamedAnswer]:
        async with asyncio.TaskGroup() as on:
            tasks = [on.create_task(self._stream(index)) for index in range(len(self._asks))]
        return [task.result() for task in tasks]

    async def undisturbed(self) -> list[StreamedAnswer]:
        """Run all of them to their ends."""
        self._disturbed = True
        return await self.run()

    async def in_the_middle(self) -> None:
        """Wait until all streams are in their middle."""
        while not self.all_in_the_middle:
            await asyncio.sleep(0.005)

    @property
    def all_in_the_middle(self) -> bool:
        tokens_received = self.tokens_received
        return (
            len(tokens_received) == len(self._asks)
            and self._first <= min(tokens_received)
            and max(tokens_received) <= self._last
        )

    def disturb(self) -> None:
        """Call this right before the disturbance: from now on every stream runs to its end."""
        assert self.all_in_the_middle
        self._disturbed = True

    @property
    def tokens_received(self) -> list[int]:
        """How many tokens each stream has received."""
        return [len(answer.tokens) for _, answer in sorted(self._now.items())]

    async def _stream(self, index: int) -> StreamedAnswer:
        served_model, prompt = self._asks[index]

        def on_chunk(answer: StreamedAnswer) -> None:
            if not self._disturbed and len(answer.tokens) > self._last:
                raise PastTheMiddle
            self._now[index] = answer

        while True:
            try:
                return await stream_without_library(
                    self._url, served_model, prompt, self._tokens, on_chunk=on_chunk, **self._sampling(index)
                )
            except PastTheMiddle:
                self._now.pop(index, None)  # a slow client may get all up to there at once
                self.restarted += 1
                print(f"stream {index} starts again: {self._describe_slow_streams()}")

    def _describe_slow_streams(self) -> str:
        now = time.monotonic()
        silent = [index for index in range(len(self._asks)) if index not in self._now]
        behind = [
            f"{index} ({one.served_model.model}) is at token {len(one.tokens)} after {now - one.asked:.1f} s, "
            f"placed after {one.placed_after}, first token after {one.arrivals[0] - one.asked:.1f} s"
            for index, one in sorted(self._now.items())
            if one.arrivals and len(one.tokens) < self._first
        ]
        return "; ".join([f"no token yet on {silent}", *behind])
