"""The clients of `benchmarks.served` notice an answer that is not whole."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.engine_run import Ask
from benchmarks.served_stack import StreamingClient
from motet.domain import Digest

ADAPTERS = [Digest("sha256:0"), Digest("sha256:1")]


def event(choices: list[dict[str, str]], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


WHOLE = [
    event([{"text": "w1"}]),
    event([{"text": " w2 w3"}]),
    event([], usage={"prompt_tokens": 2, "completion_tokens": 3}),
    b"data: [DONE]\n\n",
]


@asynccontextmanager
async def server(parts: list[bytes]) -> AsyncIterator[StreamingClient]:
    """Answers every request with these parts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for part in [*parts, b""]:
                writer.write(b"%x\r\n" % len(part) + part + b"\r\n")
                await asyncio.sleep(0)

    async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    listening = await asyncio.start_server(until_closed, "127.0.0.1", 0)
    client = StreamingClient(listening.sockets[0].getsockname()[1], ADAPTERS)
    try:
        yield client
    finally:
        await client.close()
        listening.close()


@pytest.mark.parametrize("parts", [WHOLE[:-1], [WHOLE[0], WHOLE[-1]]])
async def test_an_answer_that_is_not_whole_is_no_measurement(parts: list[bytes]) -> None:
    async with server(parts) as client:
        with pytest.raises(RuntimeError, match="not all of 3 tokens came"):
            await client.ask_all([Ask((5,), 3)])
