"""Pieces of streams that are written without their tasks, and how they mix with those that the tasks write."""

import asyncio
import json
from typing import Any, cast

import pytest
import uvloop
from starlette.types import Message

from motet_gateway import direct_writes
from motet_gateway.answers.answer import AnswerResponse
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.completions import COMPLETIONS
from motet_gateway.direct_writes import DirectWriter, WritesOfTurn
from motet_gateway.identity.caller import ANONYMOUS
from motet_gateway.parameters import CompletionBody, parse
from testbed.fake_services import fake_services
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import Served, serve
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
        self.answer = AnswerResponse(served.gateway, ANONYMOUS, COMPLETIONS, asked)
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
        if client.direct and self in client.answer.call.choices:
            raise ValueError("not a text")
        return take(self)

    monkeypatch.setattr(ChoiceText, "take", broken)
    failed, whole = await asyncio.gather(client.stream(), other.stream())
    assert failed.error is not None
    assert failed.error["type"] == "server_error"
    assert whole.text == expected(served.cluster, TOKENS)
    assert served.gateway.dispatcher.live == 0


async def leave_with_a_request_behind(served: Served) -> None:
    """A client asks for a stream, sends another request at once, and leaves in the middle of the stream."""
    port = int(served.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(long_request(TOKENS)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n"
    writer.write(head % len(body) + body + b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readuntil(b"data: ")
    writer.close()


def test_a_client_that_leaves_with_requests_behind_its_stream_ends_its_own_alone() -> None:
    """On the event loop of production, whose transports raise where asyncio's are silent"""

    async def stream_beside() -> None:
        async with fake_services() as cluster, serve(cluster) as served:
            cluster.runners[0].step_seconds = 0.02
            raised: list[object] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
            began = asyncio.get_running_loop().time()
            leaves = asyncio.create_task(leave_with_a_request_behind(served))
            others = await asyncio.gather(*(read(served, long_request(TOKENS)) for _ in range(2)))
            assert [one.text for one in others] == [expected(cluster, TOKENS)] * 2
            assert asyncio.get_running_loop().time() - began < 20
            assert not raised
            async with asyncio.timeout(PATIENCE_S):
                await leaves
            assert served.gateway.dispatcher.live == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(stream_beside())


async def test_an_answer_that_cannot_be_written_does_not_stop_the_others() -> None:
    written: list[str] = []

    class Failing:
        def write_now(self) -> None:
            raise RuntimeError("the handler is closed")

    class Working:
        def write_now(self) -> None:
            written.append("written")

    turn = WritesOfTurn()
    turn.add(Failing())
    turn.add(Working())
    await asyncio.sleep(0)
    assert written == ["written"]
