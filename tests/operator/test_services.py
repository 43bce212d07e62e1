"""How the local operator asks a gateway whether it listens."""

import asyncio

import pytest

from motet_operator.local.services import listens_http


@pytest.mark.parametrize(("status", "listens"), [("200 OK", True), ("503 Service Unavailable", True), (None, False)])
async def test_a_gateway_listens_once_it_answers_whatever_its_health(status: str | None, *, listens: bool) -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        if status is not None:
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        assert await listens_http("127.0.0.1", server.sockets[0].getsockname()[1]) is listens
    assert asked == [b"GET /health HTTP/1.1\r\n"]  # one of the two paths that need no API key
