"""The clients of `benchmarks.served` notice an answer that is not whole."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.engine_run import Ask
from benchmarks.served_stack import StreamingClient, text_of
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
async def server(parts: list[bytes], status: bytes = b"200 OK") -> AsyncIterator[tuple[StreamingClient, list[Any]]]:
    """Answers every request with these parts; what was asked is kept, by connections."""
    asked: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = len(asked)
        asked.append([])
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            asked[connection].append(json.loads(await reader.readexactly(length)))
            writer.write(b"HTTP/1.1 " + status + b"\r\ntransfer-encoding: chunked\r\n\r\n")
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
        yield client, asked
    finally:
        await client.close()
        listening.close()


async def test_each_request_has_a_connection_which_the_next_ones_use_again() -> None:
    async with server(WHOLE) as (client, asked):
        for _ in range(2):
            answers = await client.ask_all([Ask((5, 6), 3), Ask((7,), 3, ADAPTERS[1])])
            assert [text_of(answer).split() for answer in answers] == [["w1", "w2", "w3"]] * 2
        bodies = sorted((body["model"], *body["prompt"]) for of_connection in asked for body in of_connection)
        assert bodies == [("adapter-1", 7)] * 2 + [("base", 5, 6)] * 2
        assert len(asked) == 2


@pytest.mark.parametrize(
    ("parts", "status", "says"),
    [
        (WHOLE[:-1], b"200 OK", "not all of 3 tokens came"),
        ([WHOLE[0], WHOLE[-1]], b"200 OK", "not all of 3 tokens came"),
        (WHOLE, b"503 Service Unavailable", "the server answered b'HTTP/1.1 503"),
    ],
)
async def test_an_answer_that_is_not_whole_is_no_measurement(parts: list[bytes], status: bytes, says: str) -> None:
    async with server(parts, status) as (client, _):
        with pytest.raises(RuntimeError, match=says):
            await client.ask_all([Ask((5,), 3)])
