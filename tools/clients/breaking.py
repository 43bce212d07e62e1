"""A proxy that breaks each event stream after some pieces, as a network does: the client gets no end."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

LAST_CHUNK = b"\r\n0\r\n\r\n"
PIECES = 3


@contextmanager
def breaking_proxy(port: int) -> Iterator[int]:
    """A port of this machine that leads to `port`."""
    began: Future[tuple[int, Callable[[], object]]] = Future()

    async def serve() -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(lambda *ends: _through(port, *ends), "127.0.0.1", 0) as server:
            began.set_result((server.sockets[0].getsockname()[1], partial(loop.call_soon_threadsafe, end.set)))
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="breaking-proxy", daemon=True)
    thread.start()
    here, end = began.result(10)
    try:
        yield here
    finally:
        end()
        thread.join(10)


async def _through(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)

    async def ask() -> None:
        while data := await reader.read(65536):
            there_writer.write(data)
            await there_writer.drain()

    asking = asyncio.create_task(ask())
    pieces = 0
    try:
        while pieces <= PIECES and (data := await there_reader.read(1024)):
            pieces += data.count(b"data: ")
            # On a slow machine one piece has many tokens, and an answer fewer pieces: its end never gets through.
            told, ends, _ = data.partition(LAST_CHUNK)
            writer.write(told)
            await writer.drain()
            if ends:
                return
    finally:
        asking.cancel()
        for end in (writer, there_writer):
            end.transport.abort()
