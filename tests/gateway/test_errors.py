"""Every refusal has OpenAI's shape, names the field, and says what would be right."""

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from testbed.fake_services import FakeServices, fake_services, model_assets
from tests.gateway.conftest import Served, eventually, serve
from tests.support.for_each import for_each

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    assert answer.headers["x-should-retry"] in ("true", "false")
    return error


WRONG_FIELDS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"messages": None}, "messages", "invalid_value", "array"),
    ({"messages": []}, "messages", "invalid_value", "at least 1"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value", "required"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "invalid_value", "string"),
    ({"messages": ["x"]}, "messages[0]", "invalid_value", "object"),
    ({"messages": [{"role": "forbidden", "content": ""}]}, "messages", "invalid_value", "roles must be user"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        "unsupported_parameter",
        "text parts",
    ),
    ({"temperature": "hot"}, "temperature", "invalid_value", "number"),
    ({"temperature": -1}, "temperature", "invalid_value", "a number from 0 to 10, not -1"),
    ({"top_p": 0}, "top_p", "invalid_value", "above 0 and at most 1, not 0"),
    ({"n": 129}, "n", "invalid_value", "128"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "1"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "invalid_value", "at most the 4"),
    ({"stop": 5}, "stop", "invalid_value", "string"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value", "up to 16"),
    ({"stop": ""}, "stop", "invalid_value", "1 to 256 characters"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "token id"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value", "vocabulary"),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "invalid_value", "vocabulary"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "logprobs"),
    ({"service_tier": "gold"}, "service_tier", "invalid_value", "priority"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "unsupported_parameter", "must be 'function'"),
    ({"response_format": {"type": "xml"}}, "response_format", "unsupported_parameter", "json_schema"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter", "text"),
    ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage", "invalid_value", "boolean"),
    ({"model": 0}, "model", "invalid_value", "string"),
    ({"model": "nobody/nothing"}, "model", "model_not_found", "Nearest names"),
    ({"max_tokens": 600}, "max_tokens", "context_length_exceeded", "512"),
    (
        {"continue_final_message": True},
        "continue_final_message",
        "invalid_value",
        "assistant",
    ),
]
"""Each with the field that the error names, its code, and what it says."""


async def test_a_wrong_field_is_named(served: Served) -> None:
    for body, param, code, says in WRONG_FIELDS:
        answer = await served.http.post(CHAT, json={"model": "tiny", "messages": HELLO} | body)
        error = error_of(answer)
        assert answer.status_code == (404 if code == "model_not_found" else 400), body
        assert (error["param"], error["code"]) == (param, code)
        assert says in error["message"]


@for_each(
    ("body", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({}, "prompt"),
    ],
)
async def test_a_wrong_prompt_is_named(served: Served, body: dict[str, Any], param: str) -> None:
    answer = await served.http.post("/v1/completions", json={"model": "tiny"} | body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


async def test_the_error_for_a_too_long_prompt_has_both_numbers(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await served.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "fox " * 600}], stream=True
        )
    assert caught.value.code == "context_length_exceeded"
    assert "prompt has 603 tokens" in caught.value.message
    assert "512 tokens" in caught.value.message


async def test_the_error_for_malformed_json_names_the_position(served: Served) -> None:
    answer = await served.http.post(CHAT, content=b'{"model": "tiny",,}', headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "line 1 column 18" in error_of(answer)["message"]


@for_each("content", [b"", b"[]", b"7", b'"x"', b"\xff"])
async def test_a_body_that_is_not_an_object_is_refused(served: Served, content: bytes) -> None:
    answer = await served.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


async def test_json_has_to_be_declared(served: Served) -> None:
    answer = await served.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert "application/json" in error_of(answer)["message"]


async def test_a_body_beyond_the_limit_is_refused(cluster: FakeServices) -> None:
    async def chunks():
        for _ in range(20):
            yield b"x" * 100

    async with serve(cluster, max_body_bytes=1000) as served:
        headers = {"content-type": "application/json"}
        declared = await served.http.post(CHAT, content=b"x" * 2000, headers=headers)
        streamed = await served.http.post(CHAT, content=chunks(), headers=headers)
        assert (declared.status_code, streamed.status_code) == (413, 413)
        assert error_of(declared)["code"] == "request_too_large"


async def test_an_unknown_path_and_a_wrong_method_have_the_same_shape(served: Served) -> None:
    missing = await served.http.get("/v1/nothing")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "not_found"
    wrong = await served.http.get(CHAT)
    assert wrong.status_code == 405
    assert error_of(wrong)["code"] == "method_not_allowed"
    assert "POST" in wrong.headers["allow"]


async def test_only_this_machines_names_are_answered_on_loopback(served: Served) -> None:
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1"):
        assert (await served.http.get("/version", headers={"host": host})).status_code == 200
    rebound = await served.http.get("/version", headers={"host": "evil.example"})
    assert rebound.status_code == 403
    assert "localhost" in error_of(rebound)["message"]


async def test_another_host_name_can_be_allowed(cluster: FakeServices) -> None:
    async with serve(cluster, allowed_hosts=("motet.test",)) as served:
        assert (await served.http.get("/version", headers={"host": "motet.test:80"})).status_code == 200


async def test_too_many_live_requests_are_refused_with_a_hint(cluster: FakeServices) -> None:
    async with serve(cluster, max_live_requests=2) as served:
        answer = await served.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "n": 3})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert error_of(answer)["code"] == "overloaded"


async def test_parallel_requests_never_have_more_choices_than_may_be_live(
    cluster: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: choices are only counted before their lengths are estimated."""
    live: list[int] = []
    async with serve(cluster, max_live_requests=4) as served:
        dispatcher, estimator = served.gateway.dispatcher, served.gateway.estimator
        start, estimate, all_ask = dispatcher.start, estimator.estimate, asyncio.Barrier(3)

        async def estimated(*arguments: Any, **more: Any) -> Any:
            found = await estimate(*arguments, **more)
            await all_ask.wait()
            return found

        def noted(*arguments: Any, **more: Any) -> None:
            start(*arguments, **more)
            live.append(dispatcher.live)

        monkeypatch.setattr(estimator, "estimate", estimated)
        monkeypatch.setattr(dispatcher, "start", noted)
        body = {"model": "tiny", "prompt": "x", "n": 3, "max_tokens": 100}
        answers = await asyncio.gather(*(served.http.post("/v1/completions", json=body) for _ in range(3)))
        assert max(live) <= 4
        assert sorted(answer.status_code for answer in answers) == [200, 503, 503]


async def test_a_model_without_a_tokenizer_holds_no_request() -> None:
    assets = model_assets()
    del assets["tokenizer.json"]
    async with fake_services(assets=assets) as cluster, serve(cluster, ready=False) as served:
        await eventually(lambda: served.gateway.catalog.known)
        answer = await served.http.post(CHAT, json={"model": "tiny", "messages": HELLO})
        assert answer.status_code == 500
        assert "has no tokenizer.json" in error_of(answer)["message"]


async def test_a_request_id_is_echoed_or_made(served: Served) -> None:
    echoed = await served.http.get("/version", headers={"x-request-id": "mine-1"})
    assert echoed.headers["x-request-id"] == "mine-1"
    made = await served.http.get("/version", headers={"x-request-id": "two words"})
    assert made.headers["x-request-id"].startswith("req-")


async def test_unknown_fields_are_ignored_and_counted(served: Served) -> None:
    body = {"model": "tiny", "prompt": "x", "no_such_field": 1, "another": 2, "user": "me"}
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-motet-ignored"] == "no_such_field, another"
    assert served.registry.get_sample_value("motet_unknown_request_fields_total") == 2


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], None),
        (["a: b\r\nset-cookie: x"], "1 fields"),
        ([f"n{i}" for i in range(200)], ", ".join([f"n{i}" for i in range(8)] + ["and 192 more"])),
        (["x" * 65, "known_to_nobody"], "known_to_nobody, and 1 more"),
    ],
)
async def test_the_header_of_ignored_fields_is_bounded(served: Served, names: list[str], said: str | None) -> None:
    body = {"model": "tiny", "prompt": "x", "stream": True} | dict.fromkeys(names, 1)
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.headers.get("x-motet-ignored") == said


async def test_answers_have_a_server_timing_header(served: Served) -> None:
    answer = await served.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert answer.headers["x-motet-length"] == "model:v1"
    assert {part.partition(";")[0].strip() for part in answer.headers["server-timing"].split(",")} == {
        "prepare",
        "queue",
        "prefill",
    }


async def test_the_api_describes_itself(served: Served) -> None:
    schema = (await served.http.get("/openapi.json")).json()
    assert {CHAT, "/v1/completions", "/v1/models", "/tokenize"} <= set(schema["paths"])


async def test_counting_the_tokens_of_no_messages_is_a_400(served: Served) -> None:
    answer = await served.http.post("/tokenize", json={"messages": []})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "messages"
