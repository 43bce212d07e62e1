"""A link between two processes that a test cuts: nothing comes through, and nobody hears that it is cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path


class CutLink:
    """Connections to the socket `path` reach `target`. While it is cut, new ones open, too, and all are silent."""

    def __init__(self, path: Path, target: str) -> None:
        self._path = path
        self._target = target.removeprefix("unix:")
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = f"unix:{path}"

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            await self._whole.wait()
            with suppress(OSError):
                there, to_there = await asyncio.open_unix_connection(self._target)
                writers.append(to_there)
                await asyncio.gather(self._forward(reader, to_there), self._forward(there, writer))
        finally:
            for one in writers:
                one.close()

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                await self._whole.wait()
                target.write(data)
                await target.drain()
        await self._whole.wait()  # nor is it told that an end has ended
        target.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["CutLink"]:
        server = await asyncio.start_unix_server(self._connected, self._path)
        try:
            yield self
        finally:
            server.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
