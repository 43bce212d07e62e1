"""A connection of a client that breaks after some bytes of the answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Cut:
    at: Callable[[bytes], int | None]
    """How many bytes of an answer reach the client, by what of it has come. None: it goes on."""
    before: bytes = b""
    """The first of these bytes do not reach the client either, however they are divided when they come."""
    reset: bool = False
    """Whether the client hears of an error, and not of an end."""

    def place(self, seen: bytes) -> int | None:
        found = seen.find(self.before) if self.before else -1
        places = [at for at in (self.at(seen), found) if at is not None and at >= 0]
        return min(places, default=None)

    def begun(self, seen: bytes) -> int:
        """How many bytes at the end may be the first ones of `before`."""
        sizes = range(min(len(self.before) - 1, len(seen)), 0, -1)
        return next((size for size in sizes if seen.endswith(self.before[:size])), 0)


class CutConnection:
    """Forwards each connection to `target`, until it is cut."""

    def __init__(self, target: str, cut: Cut) -> None:
        self._target, self._cut = urlsplit(target), cut
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["CutConnection"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer, to_target = await asyncio.open_connection(self._target.hostname, self._target.port)
        asking = asyncio.create_task(self._ask(reader, to_target))
        try:
            with suppress(ConnectionError):
                await self._answer(answer, writer)
        finally:
            asking.cancel()
            to_target.close()
            if self._cut.reset:
                writer.transport.abort()
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, to_target: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            to_target.write(data)

    async def _answer(self, answer: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen, sent = b"", 0
        while data := await answer.read(1 << 16):
            seen += data
            end = self._cut.place(seen)
            through = len(seen) - self._cut.begun(seen) if end is None else end
            writer.write(seen[sent:through])
            await writer.drain()
            sent = max(sent, through)
            if end is not None:
                return
        writer.write(seen[sent:])
