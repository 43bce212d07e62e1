"""/openapi.json describes what the gateway does: paths, bodies, answers, errors and headers."""

import asyncio
import json
import threading
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry

from motet_gateway import openapi
from motet_gateway.app import build_app
from motet_gateway.openapi import document
from motet_gateway.openapi.document import OPERATIONS
from motet_gateway.routes import generate, lorax
from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, serve
from tests.support.for_each import for_each

Json = dict[str, Any]

API = document(metrics=True)
SCHEMAS = API["components"]["schemas"]
CHAT, PLAIN, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
DETAILS = {"details": True, "return_k_alternatives": 1}
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def validator(schema: Json) -> Draft202012Validator:
    return Draft202012Validator(schema | {"components": API["components"]})


def complaints(schema: Json, value: object) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator(schema).iter_errors(value)]


def undescribed(schema: Json, value: object, where: str = "$") -> list[str]:
    """The fields that an answer has and the description lacks."""
    kinds = [one for one in resolved(schema).get("anyOf", []) if one != {"type": "null"}]
    if len(kinds) > 1:
        return min((undescribed(one, value, where) for one in kinds), key=len)
    schema = resolved(schema)
    if isinstance(value, list):
        return [one for item in value for one in undescribed(schema.get("items", {}), item, f"{where}[]")]
    if not isinstance(value, dict):
        return []
    if "additionalProperties" in schema:
        return []
    own = schema.get("properties", {})
    unknown = [f"{where}.{name}" for name in value.keys() - own.keys()]
    return unknown + [
        one for name in value.keys() & own.keys() for one in undescribed(own[name], value[name], f"{where}.{name}")
    ]


def resolved(schema: Json) -> Json:
    if "anyOf" in schema:
        kinds = [one for one in schema["anyOf"] if one != {"type": "null"}]
        schema = kinds[0] if len(kinds) == 1 else schema
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    return schema


def operation_of(path: str, method: str) -> Json:
    at = "/v1/models/{model}" if path.startswith("/v1/models/") else path
    found: Json = API["paths"][at][method.lower()]
    return found


def check(answer: httpx2.Response) -> None:
    """Check that the description has the answer's status, media type, body and headers."""
    request = answer.request
    described = operation_of(request.url.path, request.method)["responses"][str(answer.status_code)]
    headers = {
        name for name in answer.headers if name.startswith(("x-", "retry", "server-t", "www-", "allow", "cache"))
    }
    assert headers <= described["headers"].keys()
    media = answer.headers.get("content-type", "").partition(";")[0]
    if not media:
        assert "content" not in described or not answer.content
        return
    schema = described["content"][media].get("schema")
    for value in values(answer.text, media):
        if isinstance(value, dict) and isinstance(value.get("error"), dict):
            assert value["error"]["code"] in described["description"]
        if schema is not None:
            assert complaints(schema, value) == []
            assert undescribed(schema, value) == []


def values(text: str, media: str) -> list[Any]:
    if media == "application/json":
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_the_description_has_valid_schemas() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    ids = [one.id for one in OPERATIONS]
    assert len(ids) == len(set(ids))
    named = set(json.dumps(API).split('"#/components/schemas/')[1:])
    assert {name.partition('"')[0] for name in named} == SCHEMAS.keys(), "each is used, and each that is used is there"


def test_every_field_of_a_body_and_of_an_answer_is_explained_or_a_word_of_openais() -> None:
    for one in OPERATIONS:
        if one.body is not None:
            fields = SCHEMAS[one.body.__name__].get("properties", {})
            assert {name for name, field in fields.items() if not field.get("description")} == set(), one.path


async def test_every_path_is_described_and_no_other(served: Served) -> None:
    app: Any = build_app(served.gateway, CollectorRegistry())
    while not isinstance(app, FastAPI):
        app = app._app  # noqa: SLF001 - the layers around the application
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for router in [
            app.router,
            *[one.original_router for one in app.router.routes if hasattr(one, "original_router")],
        ]
        for route in router.routes
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD"
    }
    answering = {(path, "post") for path in (*generate.APIS, *lorax.OF_LORAX, lorax.INVOCATIONS)}
    assert routes | answering == {(one.path, one.method) for one in OPERATIONS}


@for_each(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 4}),
        (CHAT, {"messages": HELLO, "max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 1, **STREAMED}),
        (CHAT, {"messages": HELLO, "max_tokens": 4, "stream": True}),
        (PLAIN, {"prompt": "Hello", "max_tokens": 4, "echo": True}),
        (PLAIN, {"prompt": "Hello", "max_tokens": 4, "echo": True, "logprobs": 1}),
        (PLAIN, {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1, **STREAMED}),
        (PLAIN, {"prompt": ["a", "b"], "max_tokens": 4, "logprobs": 2}),
        (PLAIN, {"prompt": "Hello", "max_tokens": 4, "logprobs": 1, **STREAMED}),
        (MESSAGES, {"messages": HELLO, "max_tokens": 4}),
        (MESSAGES, {"messages": HELLO, "max_tokens": 4, "stream": True}),
        (f"{MESSAGES}/count_tokens", {"messages": HELLO}),
        (RESPONSES, {"input": "Hello", "max_output_tokens": 4, "text": {"format": {"type": "json_object"}}}),
        (RESPONSES, {"input": "Hello", "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        (RESPONSES, {"input": "Hello", "include": ["message.output_text.logprobs"], "stream": True}),
        ("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}),
        ("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 4, **DETAILS, "temperature": 0.5}}),
        ("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 4, **DETAILS}}),
        ("/", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}),
        ("/", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}, "stream": True}),
        ("/invocations", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}),
        ("/invocations", {"prompt": "Hello", "max_tokens": 4, "stream": True}),
        ("/invocations", {"messages": HELLO, "max_tokens": 4, "logprobs": True}),
        ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
async def test_an_answer_to_a_body_is_as_described(served: Served, path: str, body: Json) -> None:
    answer = await served.http.post(path, json={"model": "legal"} | body)
    assert answer.status_code == 200, answer.text
    check(answer)


@for_each("path", ["/v1/models", "/v1/models/tiny", "/v1/models/legal", "/version", "/health", "/ping"])
async def test_an_answer_to_a_get_is_as_described(served: Served, path: str) -> None:
    answer = await served.http.get(path)
    assert answer.status_code == 200
    check(answer)


async def test_the_gateway_serves_the_description(served: Served) -> None:
    answer = await served.http.get("/openapi.json")
    check(answer)
    assert answer.json() == document(metrics=False)
    assert answer.json()["paths"].keys() | {"/metrics"} == API["paths"].keys()


@for_each(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models/nobody", None, 404),
        ("POST", CHAT, {"model": "nobody", "messages": HELLO}, 404),
        ("POST", CHAT, {"model": "tiny", "messages": HELLO, "tools": [{}]}, 400),
        ("POST", CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "fox " * 600}]}, 400),
        ("POST", PLAIN, {"model": "tiny", "prompt": ""}, 400),
        ("POST", MESSAGES, {"model": "nobody", "max_tokens": 1, "messages": HELLO}, 404),
        ("POST", MESSAGES, {"model": "tiny", "messages": HELLO}, 400),
        ("POST", f"{MESSAGES}/count_tokens", {"model": "tiny", "messages": []}, 400),
        ("POST", RESPONSES, {"model": "nobody", "input": "x"}, 404),
        ("POST", RESPONSES, {"model": "tiny", "input": []}, 400),
        ("POST", "/generate", {"inputs": "x", "parameters": {"adapter_id": "nobody"}}, 404),
        ("POST", "/generate_stream", {"inputs": "x", "parameters": {"stop": ["x"] * 17}}, 400),
        ("POST", "/", {"inputs": ""}, 400),
        ("POST", "/invocations", {"text": "x"}, 400),
        ("POST", "/invocations", {"messages": []}, 400),
        ("POST", "/tokenize", {"model": "nobody", "prompt": "x"}, 404),
        ("POST", "/detokenize", {"model": "tiny", "tokens": [99999]}, 400),
    ],
)
async def test_a_refusal_is_as_described(
    served: Served, method: str, path: str, body: Json | None, status: int
) -> None:
    answer = await served.http.request(method, path, json=body)
    assert answer.status_code == status
    check(answer)


async def test_errors_of_connection_and_gateway_are_as_described(cluster: FakeServices) -> None:
    async with serve(cluster, max_live_requests=2, max_body_bytes=1000) as served:
        http = served.http
        answers = {
            403: await http.get("/version", headers={"host": "evil.example"}),
            413: await http.post(CHAT, json={"model": "x" * 1000}),
            415: await http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}),
            503: await http.post(PLAIN, json={"model": "tiny", "prompt": "x", "n": 3}),
        }
    for status, answer in answers.items():
        assert answer.status_code == status
        check(answer)


FIELDS: list[tuple[str, Json]] = [
    *((CHAT, {"stop": stop}) for stop in (None, "a", ["a", "b"], [], "", [""], ["a"] * 17, 5, "x" * 257)),
    *((CHAT, {"service_tier": tier}) for tier in (None, "auto", "priority", "gold")),
    *((CHAT, {"tools": tools}) for tools in (None, [], [{"type": "function"}])),
    *((CHAT, {"tool_choice": choice}) for choice in (None, "none", "auto", "any")),
    *((CHAT, {"modalities": modalities}) for modalities in (None, ["text"], ["audio"], [], ["text", "text"])),
    *((CHAT, {"response_format": form}) for form in (None, {"type": "text"}, {"type": "json_object"}, {})),
    *((CHAT, {"response_format": {"type": "json_schema"} | more}) for more in ({}, {"json_schema": {"schema": {}}})),
    *((CHAT, {"n": n}) for n in (1, 8, 9, 0, "1")),
    *((CHAT, {"temperature": value}) for value in (0, 10, 10.1, -1, "hot")),
    *((CHAT, {"top_p": value}) for value in (0, 0.1, 1)),
    *((CHAT, {"messages": [message]}) for message in ({"role": "user"}, {"content": "x"}, "x", HELLO[0])),
    *(
        (CHAT, {"messages": [{"role": "user", "content": content}]})
        for content in ("x", [{"type": "text", "text": "x"}])
    ),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    *(
        (PLAIN, {"prompt": prompt})
        for prompt in ("x", ["x"], [1], [[1], [2]], "", [], [-1], ["a", [1]], {}, ["a"] * 129)
    ),
    *((PLAIN, {"logprobs": value}) for value in (0, 20, 21)),
    *((MESSAGES, {"max_tokens": value}) for value in (1, 5000, 0, None)),
    *((MESSAGES, {"stop_sequences": stop}) for stop in (None, ["a"], "a", [""], ["a"] * 17)),
    *(
        (MESSAGES, {"system": system})
        for system in (None, "x", [{"type": "text", "text": "x"}], [{"type": "image"}], 5)
    ),
    *((MESSAGES, {"service_tier": tier}) for tier in (None, "standard_only", "flex", "gold")),
    *((MESSAGES, {"thinking": {"type": kind}}) for kind in ("disabled", "adaptive", "deep")),
    *(
        (MESSAGES, {"tool_choice": choice})
        for choice in (None, {"type": "auto"}, {"type": "none"}, {"type": "x"}, "auto")
    ),
    *((MESSAGES, {"output_config": {"format": form}}) for form in (None, {"type": "json_schema", "schema": {}}, {})),
    *((MESSAGES, {"tools": tools}) for tools in (None, [], [{}], [{"name": "a b"}])),
    *(
        (MESSAGES, {"messages": [message]})
        for message in (HELLO[0], {"role": "user"}, {"role": "tool", "content": "x"})
    ),
    *((RESPONSES, {"input": said}) for said in ("x", HELLO, [], 5, [5], [{"role": "user", "content": 5}])),
    *((RESPONSES, {"tool_choice": choice}) for choice in (None, "none", "auto", "any", {})),
    *((RESPONSES, {"tools": tools}) for tools in (None, [], [{}], [{"type": "web_search"}])),
    *(
        (RESPONSES, {"text": {"format": form}})
        for form in (None, {"type": "text"}, {"type": "json_schema"}, {"type": "x"})
    ),
    *((RESPONSES, {"truncation": value}) for value in (None, "disabled", "auto")),
    *((RESPONSES, {"background": value}) for value in (None, False, True)),
    *((RESPONSES, {name: "x"}) for name in ("previous_response_id", "conversation", "prompt")),
    *((RESPONSES, {"max_output_tokens": value}) for value in (None, 1, 0)),
    *(("/generate", {"inputs": said}) for said in ("x", "", None, ["x"])),
    *(("/generate", {"parameters": said}) for said in (None, {}, [], "x")),
    *(
        ("/generate", {"parameters": {"max_new_tokens": 1, **said}})
        for said in (
            *({"temperature": value} for value in (0.5, None, -1, "hot")),
            *({"stop": stop} for stop in (None, [], ["a"], "a", [""], ["a"] * 17)),
            *({"return_k_alternatives": value} for value in (None, 0, 20, 21)),
            *({"max_new_tokens": value} for value in (1, 0, "1")),
            {"details": "yes"},
        )
    ),
]
ASKED: dict[str, Json] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    PLAIN: {"prompt": "x", "max_tokens": 1},
    MESSAGES: {"messages": HELLO, "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    "/generate": {"inputs": "x", "parameters": {"max_new_tokens": 1}},
}
ROLE_ALONE = {"messages": [{"role": "user"}]}
"""The schema allows it: whether content is required depends on the role."""


async def test_the_description_takes_what_the_gateway_takes(served: Served) -> None:
    unlike = []
    for path, body in FIELDS:
        whole = {"model": "tiny"} | ASKED[path] | body
        (content,) = operation_of(path, "post")["requestBody"]["content"].values()
        allowed = not complaints(content["schema"], whole)
        status = (await served.http.post(path, json=whole)).status_code
        assert status in (200, 400), body
        if allowed is not (status == 200 or (path, body) == (CHAT, ROLE_ALONE)):
            unlike.append((path, body, status))
    assert unlike == []


async def test_others_are_answered_while_the_description_is_made(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: it is made on the event loop."""
    begun, goes_on = threading.Event(), threading.Event()

    def made(**_: bool) -> Json:
        begun.set()
        return {"in time": goes_on.wait(10)}

    monkeypatch.setattr(openapi, "document", made)
    description = asyncio.create_task(served.http.get("/openapi.json"))
    await asyncio.to_thread(begun.wait)
    assert (await served.http.get("/version")).status_code == 200
    goes_on.set()
    assert (await description).json() == {"in time": True}
