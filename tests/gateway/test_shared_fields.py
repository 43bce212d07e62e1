"""Fields that several APIs have: each path that describes one does what it says, or refuses it. None ignores it."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from motet.sampling import IN_BODIES
from motet_gateway.answers.messages.body import CountedMessages
from motet_gateway.answers.responses.body import ResponsesBody
from motet_gateway.openapi.document import OPERATIONS
from motet_gateway.parameters import Body, ForbiddingBody
from testbed.fake_services import fake_services, model_assets
from tests.gateway.conftest import Served, serve
from tests.gateway.test_openapi import SCHEMAS, operation_of

Json = dict[str, Any]

SAID = "one two<|other|> three four"
SAYS = [{"role": "user", "content": SAID}]
OF_LORAX: Json = {"inputs": SAID, "parameters": {"max_new_tokens": 30, "stop": ["three"]}}
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": SAYS, "max_tokens": 30, "stop": ["three"]},
    "/v1/completions": {"prompt": SAID, "max_tokens": 30, "stop": ["three"]},
    "/v1/responses": {"input": SAID, "max_output_tokens": 30},
    "/v1/messages": {"messages": SAYS, "max_tokens": 30, "stop_sequences": ["three"]},
    "/v1/messages/count_tokens": {"messages": SAYS},
    "/generate": OF_LORAX,
    "/generate_stream": OF_LORAX,
    "/": OF_LORAX,
}
CUT = "truncate_prompt_tokens"
ACTING: dict[str, list[Json]] = {
    "model": [{"model": "legal"}, {"model": "nobodys"}],
    "stream": [{"stream": True}],
    "seed": [{"seed": 7}],
    "include_stop_str_in_output": [{"include_stop_str_in_output": True}, {"include_stop_str_in_output": False}],
    "skip_special_tokens": [{"skip_special_tokens": False}],
    "truncate_prompt_tokens": [{"truncate_prompt_tokens": 3}],
    "truncation_side": [{"truncation_side": "right"}],
    "cache_salt": [{"cache_salt": "salt"}],
    "add_special_tokens": [{"add_special_tokens": True}, {"add_special_tokens": False}],
    "priority": [{"priority": 1}],
    "service_tier": [{"service_tier": "flex"}],
    "bad_words": [{"bad_words": ["four"]}],
}
"""Values that change something; of several, one does"""


@pytest.fixture
async def marked() -> AsyncIterator[Served]:
    """A model whose tokenizer begins each text with a token of its own."""
    assets = model_assets()
    tokenizer = Tokenizer.from_str(assets["tokenizer.json"].decode())
    tokenizer.add_special_tokens(["<|other|>", "<|begin|>"])
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    async with fake_services(assets=assets | {"tokenizer.json": tokenizer.to_str().encode()}) as cluster:
        cluster.add_adapter("legal")
        async with serve(cluster) as served:
            yield served


async def seen(served: Served, path: str, body: Json) -> Any:
    """What comes of a body: its answer, and what scheduler and runner get of it. None: it was refused."""
    enqueued, submits = served.cluster.scheduler.enqueued, served.cluster.runners[0].submits
    before = len(submits)
    answer = await served.http.post(path, json={"model": "tiny", **body})
    if answer.status_code != 200:
        assert answer.status_code in (400, 404), answer.text
        return None
    shown = re.sub(r"[0-9a-f]{24}|\b1\d{9}(\.\d+)?\b|\"seed\":\d+", "", answer.text)
    if len(submits) == before:
        return shown
    sent, asked = submits[-1], enqueued[-1]
    seed = sent.seed if "seed" in body else 0
    model = (asked.adapter, asked.request_class, sent.adapter_digest)
    return shown, list(sent.prompt_ids), str(sent.sampling), sent.cache_salt, seed, model


def described(path: str) -> set[str]:
    """The shared fields that its body has, as the description of the API says."""
    schema = operation_of(path, "post")["requestBody"]["content"]["application/json"]["schema"]
    while "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    return set(schema["properties"]) & ACTING.keys()


def test_every_shared_field_and_every_path_that_has_them_is_tried_here() -> None:
    assert ACTING.keys() == Body.model_fields.keys() | ForbiddingBody.model_fields.keys()
    assert BODIES.keys() <= {one.path for one in OPERATIONS if one.method == "post"}


@pytest.mark.parametrize("path", BODIES)
async def test_a_shared_field_acts_or_is_refused(marked: Served, path: str) -> None:
    ignored = []
    for field in sorted(described(path)):
        plain = BODIES[path]
        if field == "truncation_side":  # acts only with another one
            cut = {"parameters": {**plain["parameters"], "truncate": 3}} if plain is OF_LORAX else ACTING[CUT][0]
            plain = plain | cut
        without = await seen(marked, path, plain)
        if all([await seen(marked, path, plain | more) == without for more in ACTING[field]]):
            ignored.append(field)
    assert ignored == []


@pytest.mark.parametrize(
    ("path", "kind"), {"/v1/messages/count_tokens": CountedMessages, "/v1/responses": ResponsesBody}.items()
)
async def test_a_header_names_those_that_a_body_is_without(marked: Served, path: str, kind: type[Body]) -> None:
    assert not described(path) & kind.without
    values = {name: one for name in kind.without & ACTING.keys() for one in [ACTING[name][0][name]] if name != "stream"}
    answer = await marked.http.post(path, json={"model": "tiny", **BODIES[path], **values})
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-motet-ignored"]
    assert named.startswith(", ".join(sorted(values)[:8]))


async def test_a_count_names_every_option_of_sampling(served: Served) -> None:
    """None changes a prompt."""
    body = {"model": "tiny", **BODIES["/v1/messages/count_tokens"], "temperature": 0.5, "top_k": 5, "min_tokens": 2}
    answer = await served.http.post("/v1/messages/count_tokens", json=body | {"max_tokens": 10, "seed": 3})
    assert answer.headers["x-motet-ignored"] == "min_tokens, seed, temperature, top_k, max_tokens"
    said = CountedMessages.model_validate(body | dict.fromkeys(IN_BODIES, 1))
    assert set(said.unknown_fields()) == IN_BODIES.keys()
