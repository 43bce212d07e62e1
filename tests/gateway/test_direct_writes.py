"""Pieces of streams that are written without their tasks, and how they mix with those that the tasks write."""

import asyncio
import json
from typing import Any, cast

import pytest
from starlette.types import Message

from motet_gateway import direct_writes
from motet_gateway.answers.answer import AnswerResponse
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.direct_writes import DirectWriter
from motet_gateway.identity.caller import ANONYMOUS
from motet_gateway.parameters import CompletionBody, parse
from tests.gateway.conftest import Served
from tests.gateway.test_streams import ReceivedStream, expected, long_request, read

TOKENS = 60


class Client:
    """Gets the pieces of both ways in the order of their writing."""

    def __init__(self, served: Served, *, takes: int, **body: Any) -> None:
        """`takes`: how many pieces the connection takes one after the other, before the task has to wait for it."""
        self.direct = 0
        self.by_task = 0
        self.body = b""
        self._takes = takes
        self._taken = 0
        asked = parse(CompletionBody, json.dumps(long_request(TOKENS) | body).encode())
        self.answer = AnswerResponse(served.gateway, ANONYMOUS, asked)
        self._scope: dict[str, Any] = {"type": "http"}
        direct_writes.offer(self._scope, cast("DirectWriter", self))

    @property
    def ready(self) -> bool:
        return self._taken < self._takes

    def write(self, piece: bytes) -> None:
        self.direct += 1
        self._taken += 1
        self.body += piece

    async def stream(self) -> ReceivedStream:
        await self.answer(self._scope, self._receive, self._send)
        result = ReceivedStream()
        for line in self.body.decode().splitlines():
            result.line(line)
        return result

    async def _receive(self) -> Message:
        return await asyncio.Future()

    async def _send(self, message: Message) -> None:
        """Like the server, it waits before it writes, and the connection is ready again before the task goes on."""
        if message["type"] != "http.response.body":
            return
        if not self.ready:
            await asyncio.sleep(0.005)
            self._taken = 0
            await asyncio.sleep(0.005)
        self.by_task += 1
        self.body += message["body"]


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("takes", [1, 5, TOKENS])
async def test_no_token_is_lost_or_overtaken_between_the_two_ways(served: Served, takes: int, choices: int) -> None:
    served.cluster.runners[0].step_seconds = 0.001
    client = Client(served, takes=takes, n=choices, stream_options={"include_usage": True})
    stream = await client.stream()
    texts = [""] * choices
    for event in stream.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [expected(served.cluster, TOKENS)] * choices
    assert stream.finishes == ["length"] * choices
    assert stream.done
    assert client.direct > 0
    if takes < TOKENS:
        assert client.by_task > TOKENS // (20 * takes), "the task writes while the client is slow"


async def test_the_server_offers_it_to_each_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes] = []
    write = DirectWriter.write

    def noted(self: DirectWriter, piece: bytes) -> None:
        pieces.append(piece)
        write(self, piece)

    monkeypatch.setattr(DirectWriter, "write", noted)
    for _ in range(2):  # on one connection
        pieces.clear()
        stream = await read(served, long_request(TOKENS))
        assert stream.text == expected(served.cluster, TOKENS)
        assert len(pieces) > TOKENS // 4
        assert b"".join(pieces).count(b"data: ") <= TOKENS


async def test_a_text_that_cannot_be_made_ends_its_own_answer_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.cluster.runners[0].step_seconds = 0.001
    client, other = Client(served, takes=TOKENS), Client(served, takes=TOKENS)
    take = ChoiceText.take

    def broken(self: ChoiceText) -> str:
        if client.direct and self in client.answer._choices:
            raise ValueError("not a text")
        return take(self)

    monkeypatch.setattr(ChoiceText, "take", broken)
    failed, whole = await asyncio.gather(client.stream(), other.stream())
    assert failed.error is not None
    assert failed.error["type"] == "server_error"
    assert whole.text == expected(served.cluster, TOKENS)
    assert served.gateway.dispatcher.live == 0
