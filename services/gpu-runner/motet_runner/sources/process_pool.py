"""The service's part of a fetch: it starts the fetch process, reads its progress, and ends it on cancellation."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakValueDictionary

import orjson
import structlog

from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import temporary
from motet_runner.sources.fetch_order import FetchOrder
from motet_runner.sources.metrics import FetchMetrics

log = structlog.get_logger(__name__)

COMMAND = (sys.executable, "-P", "-m", "motet_runner.sources.fetch_process")

MAX_LINE_BYTES = 1 << 16

OnProgress = Callable[[int, int], None]
"""Called with the bytes that have come, and the bytes in total (0 if the source does not say)."""


class FetchProcessPool:
    def __init__(self, metrics: FetchMetrics, *, at_once: int) -> None:
        self._metrics = metrics
        self._turn = asyncio.Semaphore(at_once)
        self._most_of_one = max(1, at_once - 1)
        self._own_turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """One per namespace, while it has fetches that run or wait."""

    async def fetch(self, order: FetchOrder, heard: OnProgress, *, whose: str = "") -> None:
        """Bring an order's files into its folder. Raises AdapterFetchFailed. Cancelling ends the fetch process."""
        own_turn = self._own_turns.setdefault(whose, asyncio.Semaphore(self._most_of_one))
        async with own_turn, self._turn:
            self._metrics.under_way.labels(order.what).inc()
            try:
                await self._run_in_time(order, heard)
            except AdapterFetchFailed as failure:
                self._metrics.failures.labels(order.what, failure.reason or "FetchFailed").inc()
                raise
            finally:
                self._metrics.under_way.labels(order.what).dec()

    async def _run_in_time(self, order: FetchOrder, heard: OnProgress) -> None:
        longest = order.longest_seconds
        try:
            async with asyncio.timeout(longest):
                await self._run(order, heard)
        except TimeoutError:
            raise temporary(
                f"{order.uri} did not come whole in {longest:.0f} s; what came is gone on with later. Put it where it "
                "is served faster; how slow a source may be is the platform's MOTET_RUNNER_FETCH_KIB_PER_SECOND."
            ) from None

    async def _run(self, order: FetchOrder, heard: OnProgress) -> None:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # a library's warning may hold a signed URL
            env=_environment(),
            limit=MAX_LINE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(replace(order, parent=os.getpid()).encoded())
            process.stdin.close()
            if not await self._listen(process.stdout, order, heard):
                raise temporary(
                    f"{order.uri} was not fetched: the process that did it ended (status {await process.wait()})."
                )
        except (ConnectionError, TimeoutError):
            raise temporary(f"{order.uri} was not fetched: the process that did it says nothing any more.") from None
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _listen(self, lines: asyncio.StreamReader, order: FetchOrder, heard: OnProgress) -> bool:
        """Read the messages of a fetch process. Returns whether it said that it is done."""
        here = total = 0
        first = True
        while True:
            async with asyncio.timeout(3 * order.stall_seconds + 30):
                line = await lines.readline()
            if not line:
                return False
            message = orjson.loads(line)
            if "failure" in message:
                raise AdapterFetchFailed(
                    message["failure"], reason=message["reason"], retry_after=message["retry_after"]
                )
            if "total" in message:
                total = message["total"]
            if "bytes" in message:
                # The first number includes what an earlier fetch has left in the folder.
                if not first or message.get("done"):
                    self._metrics.bytes.labels(order.what).inc(max(0, message["bytes"] - here))
                here, first = message["bytes"], False
                heard(here, total)
            if message.get("done"):
                return True


def _environment() -> dict[str, str]:
    """The environment without variables that the hub's library reads, and without Motet's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "MOTET_"))}
