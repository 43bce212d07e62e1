"""The service's part of a fetch: it starts the fetch process, reads its progress, and ends it on cancellation."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
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

END_SECONDS = 5.0
"""How long the service waits for a killed process. A process that waits for a hanging disk ends when the disk
answers."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes that have arrived, and the bytes in total (0 if the source does not say)."""


Room = Callable[[int], Awaitable[None]]
"""Awaited before a fetch writes files of this many bytes in all. Raises AdapterFetchFailed if there is no room."""


class FetchProcessPool:
    def __init__(self, metrics: FetchMetrics, *, max_processes: int) -> None:
        self._metrics = metrics
        self._limit = asyncio.Semaphore(max_processes)
        self._max_per_namespace = max(1, max_processes - 1)
        self._namespace_limits: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """One per namespace that has running or waiting fetches"""

    async def fetch(
        self, order: FetchOrder, on_progress: OnProgress, *, namespace: str = "", room: Room | None = None
    ) -> None:
        """Fetch an order's files into its folder. Raises AdapterFetchFailed. Cancelling ends the fetch process."""
        namespace_limit = self._namespace_limits.setdefault(namespace, asyncio.Semaphore(self._max_per_namespace))
        async with namespace_limit, self._limit:
            self._metrics.under_way.labels(order.what).inc()
            try:
                await self._run_in_time(order, on_progress, room)
            except AdapterFetchFailed as failure:
                self._metrics.failures.labels(order.what, failure.reason or "FetchFailed").inc()
                raise
            finally:
                self._metrics.under_way.labels(order.what).dec()

    async def _run_in_time(self, order: FetchOrder, on_progress: OnProgress, room: Room | None) -> None:
        seconds = order.max_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._run(order, on_progress, room)
        except TimeoutError:
            raise temporary(
                f"{order.uri} did not arrive completely in {seconds:.0f} s. Motet continues the fetch later. Put the "
                "files on a faster server, or the platform can lower MOTET_RUNNER_FETCH_KIB_PER_SECOND."
            ) from None

    async def _run(self, order: FetchOrder, on_progress: OnProgress, room: Room | None) -> None:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # a library's warning may hold a signed URL
            env=_environment(),
            limit=MAX_LINE_BYTES,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(order.encoded())
            if room is None:
                process.stdin.close()
            if not await self._listen(process, order, on_progress, room):
                raise temporary(
                    f"{order.uri} was not fetched: the fetch process ended with status {await process.wait()}. Motet "
                    "tries again automatically."
                )
        except (ConnectionError, TimeoutError):
            raise temporary(
                f"{order.uri} was not fetched: the fetch process does not answer. Motet tries again automatically."
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()

    async def _listen(
        self, process: asyncio.subprocess.Process, order: FetchOrder, on_progress: OnProgress, room: Room | None
    ) -> bool:
        """Read the messages of a fetch process. Returns True if it reported that it is done."""
        assert process.stdin is not None
        assert process.stdout is not None
        fetched = total = 0
        first = True
        while True:
            async with asyncio.timeout(3 * order.stall_seconds + 30):
                line = await process.stdout.readline()
            if not line:
                return False
            message = orjson.loads(line)
            if "failure" in message:
                raise AdapterFetchFailed(
                    message["failure"], reason=message["reason"], retry_after=message["retry_after"]
                )
            if "needs" in message and room is not None:
                await room(message["needs"])
                process.stdin.write(b"\n")
            if "total" in message:
                total = message["total"]
            if "bytes" in message:
                # The first number includes what an earlier fetch has left in the folder.
                if not first or message.get("done"):
                    self._metrics.bytes.labels(order.what).inc(max(0, message["bytes"] - fetched))
                fetched, first = message["bytes"], False
                on_progress(fetched, total)
            if message.get("done"):
                return True


def _environment() -> dict[str, str]:
    """The environment without variables that the hub's library reads, and without Motet's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "MOTET_"))}
