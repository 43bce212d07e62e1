"""Unmodified clients ask the bundled model, through the whole stack. `make clients` tries more of them."""

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import lookups
import openai
import pytest
import styles
import world

from testbed.local_stack import REPORTS_AT_ONCE, LocalStack, copy_of_bundled, running_stack
from tools.clients.breaking import breaking_proxy
from tools.clients.clients import CLIENTS
from tools.clients.trial import ADAPTER, CALLER, questions, try_one

pytestmark = pytest.mark.stack

TOOLS: list[Any] = [tool.described() for tool in lookups.TOOLS]
EACH = 6
"""Every sixth of the held-out questions: two of each relation"""
RIGHT = 17
"""Of 20. test_bundled_model.py asks all 120 questions."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("stack")
    manifests = copy_of_bundled(folder / "manifests", adapters=[ADAPTER, CALLER])
    with running_stack(folder, manifests=manifests, env=REPORTS_AT_ONCE) as stack:
        yield stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    with stack.openai(max_retries=0) as client:
        yield client


@pytest.mark.parametrize("name", ["openai", "curl"])
def test_a_client_does_all_that_it_can(stack: LocalStack, name: str) -> None:
    tried = CLIENTS[name]
    with breaking_proxy(stack.port) as broken:
        command = [sys.executable, "-m", f"tools.clients.drivers.{tried.driver}"]
        found = try_one(command, tried.does, questions(stack, broken), stack)
    assert found == dict.fromkeys(tried.does, "")


def call_in(client: openai.OpenAI, messages: list[Any], *, stream: bool) -> dict[str, Any] | None:
    """What the model asks for, as a message of the history. None: it calls nothing."""
    asked: dict[str, Any] = {"model": CALLER, "messages": messages, "tools": TOOLS, "temperature": 0}
    if not stream:
        message = client.chat.completions.create(**asked).choices[0].message
        return message.model_dump(exclude_none=True) if message.tool_calls else None
    with client.chat.completions.stream(**asked) as events:
        message = events.get_final_completion().choices[0].message
    return message.model_dump(exclude_none=True, exclude={"parsed"}) if message.tool_calls else None


def test_the_loop_ends_with_what_the_tools_said(client: openai.OpenAI) -> None:
    rng, right, mistakes = random.Random(5), 0, []
    questions = world.held_out_questions()[::EACH]
    for number, question in enumerate(questions):
        history: list[Any] = [{"role": "user", "content": question.text}]
        told = lookups.told_by_a_tool(question.fact, rng)
        asked = call_in(client, history, stream=number % 2 == 1)
        called = asked["tool_calls"][0]["function"] if asked else {"arguments": "null"}
        if asked is None or {**called, "arguments": json.loads(called["arguments"])} != lookups.call_of(question.fact):
            mistakes.append(f"{question.text} -> {called}")
            continue
        result = lookups.result_of(told, rng)
        history += [asked, {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": result}]
        answer = client.chat.completions.create(model=CALLER, messages=history, tools=TOOLS, temperature=0)
        said = answer.choices[0].message.content or ""
        if styles.PLAIN.is_right(said, told):
            right += 1
        else:
            mistakes.append(f"{result} -> {said}")
    assert len(questions) == 20
    assert right >= RIGHT, mistakes


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "person"}}])
def test_a_call_that_must_come_fits_its_schema(client: openai.OpenAI, choice: Any) -> None:
    """Also where the model has nothing to look up."""
    answer = client.chat.completions.create(
        model=CALLER,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=TOOLS,
        tool_choice=choice,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    topics = {tool.name: tool.topics for tool in lookups.TOOLS}
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"name", "topic"}
    assert arguments["topic"] in topics[call.function.name]
    assert call.function.name == "person" or choice == "required"
