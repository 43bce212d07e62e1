"""Streams whose clients read slowly: each way to end, while a chunk still waits to be written."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from motet.errors import AdapterFetchFailed, NotAuthenticated
from motet_gateway.answers.answer import AnswerResponse
from motet_gateway.answers.completions import COMPLETIONS
from motet_gateway.identity.caller import ANONYMOUS
from motet_gateway.parameters import CompletionBody, parse
from tests.gateway.conftest import Served, eventually
from tests.gateway.test_streams import ReceivedStream, expected, long_request

TOKENS = 60


class SlowReader:
    """A client that reads nothing of the answer's body until the test lets it continue."""

    def __init__(self, served: Served, **body: Any) -> None:
        asked = parse(CompletionBody, json.dumps(long_request(TOKENS) | body).encode())
        self.answer = AnswerResponse(served.gateway, ANONYMOUS, COMPLETIONS, asked)
        self.waits = asyncio.Event()
        self.read_on = asyncio.Event()
        self.leaves = asyncio.Event()
        self.messages: list[Message] = []
        self.task = asyncio.create_task(self.answer({"type": "http"}, self._receive, self._send))

    async def _receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Like the server, it waits before it writes."""
        if message["type"] == "http.response.body":
            self.waits.set()
            await self.read_on.wait()
        self.messages.append(message)

    async def rest(self) -> ReceivedStream:
        self.read_on.set()
        await self.task
        _, *bodies = self.messages
        assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
        result = ReceivedStream()
        for line in b"".join(body["body"] for body in bodies).decode().splitlines():
            result.line(line)
        return result


def over(served: Served) -> bool:
    return served.gateway.dispatcher.live == 0


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_stream_that_ends_during_a_slow_write_is_written_to_its_end(served: Served, choices: int) -> None:
    served.cluster.runners[0].step_seconds = 0.001
    client = SlowReader(served, n=choices, stream_options={"include_usage": True})
    await client.waits.wait()
    await eventually(lambda: over(served))
    stream = await client.rest()
    texts = [""] * choices
    for event in stream.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [expected(served.cluster, TOKENS)] * choices
    assert stream.finishes == ["length"] * choices
    assert stream.events[-1]["usage"]["completion_tokens"] == TOKENS * choices
    assert stream.done


async def test_a_failure_during_a_slow_write_is_written(served: Served) -> None:
    runner = served.cluster.runners[0]
    runner.step_seconds = 0.001
    runner.fails_after = (TOKENS // 2, AdapterFetchFailed("gone").to_proto())
    client = SlowReader(served)
    await client.waits.wait()
    await eventually(lambda: over(served))
    stream = await client.rest()
    assert stream.text == expected(served.cluster, TOKENS // 2)
    assert stream.error is not None
    assert stream.error["code"] == "adapter_fetch_failed"
    assert stream.finishes == []
    assert stream.done


@pytest.mark.parametrize("ends", [False, True])
async def test_an_answer_that_is_ended_during_a_slow_write_has_an_error(served: Served, ends: bool) -> None:
    """Also if the last token came before."""
    served.cluster.runners[0].step_seconds = 0.001 if ends else 0.05
    client = SlowReader(served)
    await client.waits.wait()
    if ends:
        await eventually(lambda: over(served))
    client.answer.abort(NotAuthenticated("The API key of this request was revoked."))
    stream = await client.rest()
    assert stream.error is not None
    assert stream.error["code"] == "invalid_api_key"
    assert stream.finishes == []
    assert stream.done


async def test_an_answer_that_is_ended_frees_its_runner_before_its_client_reads_on(served: Served) -> None:
    runner = served.cluster.runners[0]
    runner.step_seconds = 0.05
    client = SlowReader(served, max_tokens=400, n=2)
    await client.waits.wait()
    client.answer.abort(NotAuthenticated("The API key of this request was revoked."))
    assert over(served)
    await eventually(lambda: len(runner.cancels) == 2 and not runner.running)
    assert not client.task.done()
    assert (await client.rest()).done


async def test_a_choice_that_fails_frees_the_runner_of_the_others_before_the_client_reads_on(served: Served) -> None:
    """Mutation: the others go on until the error is written."""
    (runner,), scheduler = served.cluster.runners, served.cluster.scheduler
    runner.step_seconds = 0.05
    client = SlowReader(served, max_tokens=400, n=2)
    await client.waits.wait()
    scheduler.say(scheduler.refusal(scheduler.enqueued[-1].request, 1, AdapterFetchFailed("gone").to_proto()))
    await eventually(lambda: len(runner.cancels) == 2 and not runner.running, seconds=10)
    assert not client.task.done()
    stream = await client.rest()
    assert stream.error is not None
    assert stream.error["code"] == "adapter_fetch_failed"


async def test_an_answer_whose_client_sends_no_more_frees_its_runner_before_the_client_reads_on(served: Served) -> None:
    runner = served.cluster.runners[0]
    runner.step_seconds = 0.05
    client = SlowReader(served, max_tokens=400)
    await client.waits.wait()
    client.leaves.set()
    await eventually(lambda: over(served) and runner.cancels and not runner.running)
    assert not client.task.done()
    client.read_on.set()
    await client.task
