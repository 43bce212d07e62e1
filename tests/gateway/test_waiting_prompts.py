"""Prompts that wait behind others before they are tokenised: their clients hear so, may leave, and wait no longer than
the deadline.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from motet_gateway.tokens.encoder import LANES
from motet_gateway.tokens.text_model import ModelTokenizer
from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, eventually, serve
from tests.gateway.test_streams import ReceivedStream, long_request, read
from tests.support.metric_values import value_of


@contextlib.contextmanager
def busy(served: Served) -> Iterator[threading.Event]:
    """All threads for short texts work until the event is set."""
    free = threading.Event()
    most, threads = LANES[0]
    work = [asyncio.ensure_future(served.gateway.encoder.run(most, free.wait, tenant="")) for _ in range(threads)]
    try:
        yield free
    finally:
        free.set()
        for one in work:
            one.cancel()


async def test_a_stream_whose_prompt_waits_begins_after_a_while_and_says_so(cluster: FakeServices) -> None:
    async with serve(cluster, threaded_prompt_bytes=1, hold_seconds=0.05, keep_alive_seconds=0.05) as served:
        with busy(served) as free:
            await asyncio.sleep(0)
            result = ReceivedStream()
            task = asyncio.create_task(read(served, long_request(), result))
            await eventually(lambda: result.comments.count("its prompt waits behind others for its tokens") >= 2)
            free.set()
            await task
            assert result.finishes == ["length"]


async def test_a_prompt_waits_no_longer_than_the_deadline(cluster: FakeServices) -> None:
    async with serve(cluster, threaded_prompt_bytes=1, deadline_seconds=0.2) as served:
        with busy(served):
            await asyncio.sleep(0)
            answer = await served.http.post("/v1/completions", json=long_request(stream=False))
            assert answer.status_code == 504
            assert "its prompt waits behind others" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", long_request(prompt="left")),
        ("/tokenize", {"prompt": "left"}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "left"}]}),
    ],
)
async def test_the_prompt_of_a_client_that_has_left_is_not_tokenised(
    cluster: FakeServices, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Mutation: who asks for a count is answered to the end."""
    encoded: list[Any] = []
    encode = ModelTokenizer.encode

    def noted(self: ModelTokenizer, texts: list[str], **more: Any) -> Any:
        encoded.append(texts)
        return encode(self, texts, **more)

    monkeypatch.setattr(ModelTokenizer, "encode", noted)
    async with serve(cluster, threaded_prompt_bytes=1) as served:
        with busy(served) as free:
            await asyncio.sleep(0)
            left = asyncio.create_task(served.http.post(path, json=body))
            await eventually(lambda: served.gateway.bodies.held and len(served.gateway.answers) == 1)
            left.cancel()
            await eventually(lambda: not served.gateway.answers)
            assert served.gateway.bodies.held == 0
            assert value_of(served.gateway.metrics.cancelled) == (path == "/v1/completions")
            free.set()
            stayed = await served.http.post("/v1/completions", json=long_request(prompt="stayed", stream=False))
            assert stayed.status_code == 200
    assert encoded == [["stayed"]]
