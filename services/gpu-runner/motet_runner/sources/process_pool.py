"""The service's part of a fetch: it starts the fetch process, reads its progress, and ends it on cancellation."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
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


ROOM_SECONDS = 0.5
"""A process waits for room on the disk for so long. Then it ends as soon as another fetch wants its place, which may be
the one that has the room. Its own fetch goes on when there is room."""

Room = Callable[[int], Awaitable[None]]
"""Awaited before a fetch writes files of this many bytes in all. Raises AdapterFetchFailed if there is no room."""


class FetchProcessPool:
    def __init__(self, metrics: FetchMetrics, *, max_processes: int) -> None:
        self._metrics = metrics
        self._places = _Places(max_processes)
        self._max_per_namespace = max(1, max_processes - 1)
        self._of_namespaces: WeakValueDictionary[str, _Places] = WeakValueDictionary()
        """One per namespace that has running or waiting fetches"""

    async def fetch(
        self, order: FetchOrder, on_progress: OnProgress, *, namespace: str = "", room: Room | None = None
    ) -> None:
        """Fetch an order's files into its folder. Raises AdapterFetchFailed. Cancelling ends the fetch process."""
        places = (self._of_namespaces.setdefault(namespace, _Places(self._max_per_namespace)), self._places)
        under_way = self._metrics.under_way.labels(order.what)
        asked = None if room is None else _Asked(room, places)
        time = _TimeLeft(order.max_seconds)
        try:
            while True:
                try:
                    async with places[0], places[1]:
                        with under_way.track_inprogress():
                            return await self._run_in_time(order, on_progress, asked, time)
                except _WaitsForRoom as waits:
                    await waits.granted
        except AdapterFetchFailed as failure:
            self._metrics.failures.labels(order.what, failure.reason or "FetchFailed").inc()
            raise
        finally:
            if asked is not None:
                asked.close()

    async def _run_in_time(
        self, order: FetchOrder, on_progress: OnProgress, room: "_Asked | None", time: "_TimeLeft"
    ) -> None:
        try:
            async with time.runs():
                await self._run(order, on_progress, room, time)
        except TimeoutError:
            raise temporary(
                f"{order.uri} did not arrive completely in {order.max_seconds:.0f} s. Motet continues the fetch later. "
                "Put the files on a faster server, or the platform can lower MOTET_RUNNER_FETCH_KIB_PER_SECOND."
            ) from None

    async def _run(self, order: FetchOrder, on_progress: OnProgress, room: "_Asked | None", time: "_TimeLeft") -> None:
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
            if not await self._listen(process, order, on_progress, room, time):
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
        self,
        process: asyncio.subprocess.Process,
        order: FetchOrder,
        on_progress: OnProgress,
        room: "_Asked | None",
        time: "_TimeLeft",
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
                with time.stands():
                    granted = await room.before_end_of(process, message["needs"])
                if granted is None:
                    continue  # it has said why it ended
                process.stdin.write(b"%d\n" % granted)
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


class _Places:
    """For fetch processes"""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self.wanted = 0
        """How many fetches wait for one"""

    async def __aenter__(self) -> None:
        self.wanted += 1
        try:
            await self._free.acquire()
        finally:
            self.wanted -= 1

    async def __aexit__(self, *_: object) -> None:
        self._free.release()


class _Asked:
    """The room that a fetch has asked for, in all its processes."""

    def __init__(self, room: Room, places: Sequence[_Places]) -> None:
        """`places`: those that its processes take"""
        self._room = room
        self._places = places
        self._size = 0
        self._asking: asyncio.Task[int] | None = None

    async def before_end_of(self, process: asyncio.subprocess.Process, sizes: Sequence[int]) -> int | None:
        """The bytes that there is room for: the first of the sizes that is not refused, or more. None: the process has
        ended meanwhile. Raises _WaitsForRoom if others want its place."""
        granted = self._asking = asyncio.create_task(self._ask(sizes), name="ask for room")
        ends = asyncio.ensure_future(process.wait())
        try:
            while True:
                done, _ = await asyncio.wait((granted, ends), timeout=ROOM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return granted.result() if granted in done else None
                if any(each.wanted for each in self._places):
                    raise _WaitsForRoom(granted)
        finally:
            ends.cancel()
            await asyncio.wait((ends,))

    async def _ask(self, sizes: Sequence[int]) -> int:
        for size in sizes:
            if size <= self._size:
                break
            try:
                await self._room(size)
            except AdapterFetchFailed:
                if size == sizes[-1]:
                    raise
            else:
                self._size = size
                break
        return self._size

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()


class _TimeLeft:
    """To a fetch, in all its processes. It stands while the fetch waits for room."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._timeout = asyncio.timeout(None)

    @asynccontextmanager
    async def runs(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._left) as self._timeout:
                yield
        finally:
            self._note()

    @contextmanager
    def stands(self) -> Iterator[None]:
        self._note()
        self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left)

    def _note(self) -> None:
        if (ends := self._timeout.when()) is not None:
            self._left = ends - asyncio.get_running_loop().time()


class _WaitsForRoom(Exception):
    def __init__(self, granted: "asyncio.Task[int]") -> None:
        super().__init__()
        self.granted = granted


def _environment() -> dict[str, str]:
    """The environment without variables that the hub's library reads, and without Motet's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "MOTET_"))}
