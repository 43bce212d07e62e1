"""Each parameter that clients of other servers send does what the page of parameters says."""

from typing import Any

import httpx2
import pytest

from motet.api.v1 import scheduler_pb2
from motet_gateway.parameter_table import BODIES, Effect, Row, rows
from tests.gateway.conftest import Served, eventually

SAMPLES: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "allowed_token_ids": [5],
    "audio": {"voice": "x"},
    "bad_words": ["fox"],
    "best_of": 2,
    "cache_salt": "mine",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"x": 1},
    "continue_final_message": False,
    "documents": [],
    "ebnf": 'root ::= "a"',
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "grammar": {"type": "regex", "value": "a"},
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "ignore_eos": True,
    "include_reasoning": True,
    "include_stop_str_in_output": True,
    "json_schema": '{"type": "object"}',
    "logit_bias": {"5": 1},
    "logprobs": 1,
    "max_completion_tokens": 4,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "x"}],
    "min_p": 0.1,
    "min_tokens": 1,
    "modalities": ["audio"],
    "model": "tiny",
    "n": 2,
    "parallel_tool_calls": True,
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt": "x",
    "prompt_logprobs": 1,
    "reasoning_effort": "low",
    "regex": "a",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "seed": 1,
    "separate_reasoning": False,
    "service_tier": "flex",
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [5],
    "stream": False,
    "stream_options": {"include_usage": True},
    "stream_reasoning": False,
    "structural_tag": '{"format": {"type": "const_string", "value": "a"}}',
    "structured_outputs": {"regex": "a"},
    "suffix": "x",
    "temperature": 0.5,
    "tool_choice": "none",
    "tools": [],
    "top_k": 5,
    "top_logprobs": 0,
    "top_p": 0.5,
    "truncate_prompt_tokens": 1,
    "truncation_side": "right",
}
"""Values that ask for something. Where there is none, any will do."""
OF_CHATS = {"logprobs": True}
LINES = [(path, row) for path, body in BODIES.items() for row in rows(body)]


async def ask(served: Served, path: str, name: str, value: object) -> httpx2.Response:
    content = SAMPLES["messages"] if path.endswith("chat/completions") else SAMPLES["prompt"]
    body = {"model": "tiny", "max_tokens": 4} | {BODIES[path].prompt_field: content}
    return await served.http.post(path, json=body | {name: value})


async def test_each_parameter_does_what_the_page_says(served: Served) -> None:
    served.cluster.scheduler.chat = scheduler_pb2.ChatFormats(request_templates=True)
    served.cluster.scheduler.publish()
    await eventually(lambda: served.gateway.catalog.current.groups[0].chat.request_templates)
    for path, row in LINES:
        answer = await ask(served, path, row.name, _sample(path, row))
        assert "x-motet-ignored" not in answer.headers, row
        if row.effect is Effect.REFUSED:
            assert answer.status_code == 400, row
            assert answer.json()["error"]["param"] == row.name
            assert answer.json()["error"]["message"] == f"{row.name}: {row.why}"
        else:
            assert answer.status_code == 200, (row, answer.text)
        for harmless in (*row.harmless, *([] if row.name in ("messages", "prompt") else [None])):
            assert (await ask(served, path, row.name, harmless)).status_code == 200, (row, harmless)


def _sample(path: str, row: Row) -> object:
    of_chat = OF_CHATS.get(row.name) if path.endswith("chat/completions") else None
    return SAMPLES.get(row.name, {"any": 1}) if of_chat is None else of_chat


def test_what_acts_is_sent_with_a_value_that_acts() -> None:
    assert {row.name for _, row in LINES if row.effect is Effect.ACTS} <= SAMPLES.keys()


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_parameter_is_named(served: Served, path: str) -> None:
    answer = await ask(served, path, "nobody_knows", 1)
    assert (answer.status_code, answer.headers["x-motet-ignored"]) == (200, "nobody_knows")
