"""LoRAX's own API: what its clients send is done or refused by name, and answers have the fields that they read."""

import json
from typing import Any

import httpx2
import pytest

from motet.errors import Overloaded
from motet_gateway.answers.lorax.body import GenerateBody, GenerateParameters
from motet_gateway.parameters import parse
from tests.gateway.conftest import Served
from tests.support.for_each import for_each

PROMPT = "The quick brown fox"
OF_CLIENT = dict.fromkeys(GenerateParameters.model_fields) | {
    "adapter_source": None,
    "merged_adapters": None,
    "api_token": None,
    "do_sample": False,
    "ignore_eos_token": False,
    "return_full_text": False,
    "stop": [],
    "watermark": False,
    "decoder_input_details": False,
    "best_of": None,
    "typical_p": None,
}
"""What its client library sends if nobody asks for anything."""


@pytest.mark.parametrize("kept", [None, True, False])
async def test_what_all_bodies_have_acts_here_too(served: Served, kept: bool | None) -> None:
    body = {
        "inputs": "a fox",
        "parameters": {"stop": ["fox"], "max_new_tokens": 30},
        "include_stop_str_in_output": kept,
    }
    text = (await served.http.post("/generate", json=body)).json()["generated_text"]
    assert text.endswith("fox") is (kept is not False)


async def generate(served: Served, path: str = "/generate", **parameters: Any) -> httpx2.Response:
    return await served.http.post(path, json={"inputs": PROMPT, "parameters": parameters})


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert "[DONE]" not in answer.text, "a client of LoRAX reads each event as JSON"
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


async def test_an_answer_has_what_a_client_reads(served: Served) -> None:
    plain = await generate(served, **OF_CLIENT)
    assert plain.json() == {"generated_text": PROMPT}  # the fake runner echoes
    answer = (await generate(served, **OF_CLIENT | {"details": True, "max_new_tokens": 3, "seed": 5})).json()
    details = answer["details"]
    tokens = details.pop("tokens")
    assert details == {
        "finish_reason": "length",
        "prompt_tokens": details["prompt_tokens"],
        "generated_tokens": 3,
        "seed": 5,
        "skipped_tokens": 0,
        "prefill": [],
    }
    assert "".join(token["text"] for token in tokens) == answer["generated_text"]
    assert all(token.keys() == {"id", "text", "logprob", "special", "skipped"} for token in tokens)


async def test_its_client_library_asks_at_the_root_and_gets_a_list(served: Served) -> None:
    answer = await served.http.post("/", json={"inputs": PROMPT, "stream": False, "parameters": OF_CLIENT})
    assert answer.json() == [{"generated_text": PROMPT}]
    streamed = await served.http.post("/", json={"inputs": PROMPT, "stream": True, "parameters": None})
    assert events_of(streamed)[-1]["generated_text"] == PROMPT


async def test_a_stream_has_an_event_for_each_token(served: Served) -> None:
    events = events_of(await generate(served, "/generate_stream"))
    said = "".join(one["token"]["text"] for one in events if not one["token"]["special"])
    assert [one["details"] for one in events[:-1]] == [None] * (len(events) - 1)
    assert said == events[-1]["generated_text"] == PROMPT
    assert events[-1]["details"]["finish_reason"] == "eos_token"
    assert events[-1]["token"]["special"]
    assert events[-1]["details"]["generated_tokens"] == len(events)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_stop_sequence_is_part_of_the_text(served: Served, path: str) -> None:
    answer = await generate(served, path, stop=["brown"], details=True)
    last = events_of(answer)[-1] if path.endswith("stream") else answer.json()
    assert last["generated_text"] == "The quick brown"
    assert last["details"]["finish_reason"] == "stop_sequence"


async def test_the_adapter_is_named_in_the_parameters(served: Served) -> None:
    assert (await generate(served, adapter_id="legal")).status_code == 200
    assert served.cluster.runners[0].submits[-1].adapter == "default/legal"
    assert (await generate(served)).status_code == 200
    assert served.cluster.runners[0].submits[-1].adapter == ""
    unknown = await generate(served, adapter_id="none/such")
    assert unknown.status_code == 404
    assert unknown.json()["error_type"] == "validation"


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"typical_p": 1.0}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_k": 5}, {"temperature": 1.0, "top_k": 5}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"repetition_penalty": 1.2, "ignore_eos_token": True}, {"repetition_penalty": 1.2, "ignore_eos": True}),
    ],
)
def test_it_draws_only_if_it_is_asked_to(parameters: dict[str, Any], options: dict[str, Any]) -> None:
    body = parse(GenerateBody, json.dumps({"inputs": "x", "parameters": parameters}).encode())
    body.refuse_unsupported()
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert body.options == plain | options


async def test_the_runner_gets_what_was_asked(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"response_format": {"type": "json_object", "schema": schema}, "max_new_tokens": 7, "truncate": 2}
    assert (await generate(served, **asked)).status_code == 200
    submit = served.cluster.runners[0].submits[-1]
    assert json.loads(submit.sampling.json_schema) == schema
    assert (submit.sampling.max_tokens, len(submit.prompt_ids)) == (7, 2)
    full = await generate(served, return_full_text=True, grammar={"type": "regex", "value": "a*"})
    assert full.json()["generated_text"].startswith(PROMPT)
    assert served.cluster.runners[0].submits[-1].sampling.regex == "a*"


async def test_alternatives_are_shown(served: Served) -> None:
    answer = await generate(served, details=True, return_k_alternatives=2, max_new_tokens=1)
    (token,) = answer.json()["details"]["tokens"]
    assert [one.keys() for one in token["alternative_tokens"]] == [{"id", "text", "logprob"}] * 2


@for_each(
    ("more", "param"),
    [
        ({"inputs": ""}, "inputs"),
        ({"inputs": 5}, "inputs"),
        ({"parameters": {"seed": 1 << 64}}, "parameters.seed"),
        *(
            ({"parameters": {name: value}}, f"parameters.{name}")
            for name, value in {
                "max_new_tokens": 0,
                "temperature": "hot",
                "top_p": 0,
                "top_k": -2,
                "stop": "x",
                "seed": -1,
                "adapter_id": 5,
                "adapter_source": "hub",
                "api_token": "secret",
                "merged_adapters": {"ids": ["a"]},
                "best_of": 2,
                "watermark": True,
                "decoder_input_details": True,
                "typical_p": 0.5,
                "return_k_alternatives": 21,
                "response_format": {"type": "xml"},
                "grammar": {"type": "regex", "value": "("},
            }.items()
        ),
    ],
)
async def test_a_wrong_field_is_named(served: Served, more: dict[str, Any], param: str) -> None:
    answer = await served.http.post("/generate", json={"inputs": PROMPT} | more)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["error_type"] == "validation"
    assert param in error["error"]
    assert "secret" not in error["error"]


@for_each(
    ("name", "value"),
    [("temperature", 2), ("regex", "a+"), ("max_new_tokens", 3), ("seed", 5), ("guided_json", {})],
)
async def test_what_belongs_into_the_parameters_is_refused_beside_them(served: Served, name: str, value: Any) -> None:
    answer = await served.http.post("/generate", json={"inputs": PROMPT, name: value})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].startswith(f"{name}: ")
    assert "put it into parameters" in answer.json()["error"]


async def test_a_drawn_answer_names_its_seed(served: Served) -> None:
    details = (await generate(served, details=True, do_sample=True)).json()["details"]
    submit = served.cluster.runners[0].submits[-1]
    assert submit.seed == details["seed"]
    assert not submit.seed_is_drawn, "the same seed must give the same answer"
    largest = (1 << 64) - 1
    assert (await generate(served, details=True, seed=largest)).json()["details"]["seed"] == largest
    greedy = (await generate(served, details=True)).json()["details"]
    assert greedy["seed"] is None


async def test_unknown_fields_are_named_in_a_header(served: Served) -> None:
    answer = await generate(served, nobody_knows=1)
    assert answer.headers["x-motet-ignored"] == "parameters.nobody_knows"


async def test_errors_have_the_form_of_lorax(served: Served) -> None:
    refusal = Overloaded("too much")
    served.cluster.scheduler.refuses = refusal.to_proto()
    answer = await generate(served)
    assert answer.status_code == refusal.mapping.http
    assert answer.json() == {"error": "too much", "error_type": "overloaded"}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "chat.completion"),
        ({"prompt": "x"}, "text_completion"),
        ({"inputs": "x"}, None),
    ],
)
async def test_invocations_take_any_of_the_bodies(served: Served, body: dict[str, Any], kind: str | None) -> None:
    answer = (await served.http.post("/invocations", json=body)).json()
    assert answer == [{"generated_text": "x"}] if kind is None else answer["object"] == kind


async def test_invocations_refuse_other_bodies(served: Served) -> None:
    for content in (b"{}", b"[]", b"{", b'{"input": 1}'):
        answer = await served.http.post("/invocations", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "inputs" in answer.json()["error"]["message"]
    assert served.gateway.bodies.held == 0


async def test_invocations_ask_for_room_before_they_read_the_body(served: Served, monkeypatch: Any) -> None:
    def full(_new: int) -> None:
        raise Overloaded("full")

    monkeypatch.setattr(served.gateway.admission, "check_choices", full)
    answer = await served.http.post("/invocations", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == Overloaded.mapping.http


async def test_the_load_counts_the_tenants_own_requests(served: Served) -> None:
    assert (await served.http.get("/load")).json() == {"server_load": 0}


@for_each("path", ["/v1/embeddings", "/score", "/v1/rerank", "/pooling", "/v1/batches"])
async def test_what_is_not_there_yet_says_so(served: Served, path: str) -> None:
    answer = await served.http.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith(" here yet.")
