"""A proxy that breaks each event stream after some pieces, as a network does: the client gets no end."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from testbed.cut_connection import Cut, CutConnection

LAST_CHUNK = b"\r\n0\r\n\r\n"
PIECE = b"data: "
PIECES = 3


@contextmanager
def breaking_proxy(port: int) -> Iterator[str]:
    """A URL of this machine that leads to `port`."""
    began: Future[tuple[str, Callable[[], object]]] = Future()
    # On a slow machine one piece has many tokens, and an answer fewer pieces: its end never gets through.
    cut = Cut(_behind_the_pieces, before=LAST_CHUNK, reset=True)

    async def serve() -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        async with CutConnection(f"http://127.0.0.1:{port}", cut).serving() as connection:
            began.set_result((connection.url, partial(loop.call_soon_threadsafe, end.set)))
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="breaking-proxy", daemon=True)
    thread.start()
    here, end = began.result(10)
    try:
        yield here
    finally:
        end()
        thread.join(10)


def _behind_the_pieces(seen: bytes) -> int | None:
    at = -1
    for _ in range(PIECES + 1):
        if (at := seen.find(PIECE, at + 1)) < 0:
            return None
    return at
