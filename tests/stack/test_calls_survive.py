"""A runner or a gateway is killed while a call of a tool is written: no client takes half a call for a whole one."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from testbed.local_stack import REPORTS_AT_ONCE, LocalStack, copy_of_bundled, running_stack
from tests.stack.second_gateway import second_gateway

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

NAMES = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 60, "maxItems": 60}
"""Of a call that is long: also a slow client reads its beginning before its end is written"""
SCHEMA = {"type": "object", "properties": {"names": NAMES}, "required": ["names"], "additionalProperties": False}
ASKED: dict[str, Any] = {
    "model": "motet-demo",
    "messages": [{"role": "user", "content": "Who lives where?"}],
    "tools": [{"type": "function", "function": {"name": "invite", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_tokens": 1800,
    "stream": True,
}
PIECES_BEFORE = 20
TRIES = 8


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """One for both tests: its start takes longer than they do."""
    folder = tmp_path_factory.mktemp("calls")
    manifests = copy_of_bundled(folder / "manifests", adapters=[])
    with running_stack(folder, manifests=manifests, runners=2, env=REPORTS_AT_ONCE) as stack:
        yield stack


@pytest.fixture
def stack(deployed: LocalStack) -> LocalStack:
    """The runner that a test has killed is back."""
    deployed.until(lambda: all(one["ready"] for one in deployed.status()["services"]))
    return deployed


def call_while(url: str, disturb: Callable[[], object]) -> tuple[str, str | None]:
    """The arguments and the finish reason of a streamed call. It is disturbed when some pieces have come."""
    pieces, reason = list[str](), None
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for chunk in client.chat.completions.create(**ASKED):
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                pieces += [call.function.arguments or "" for call in choice.delta.tool_calls or []]
            if len(pieces) == PIECES_BEFORE:
                disturb()
    return "".join(pieces), reason


def check(arguments: str, reason: str | None) -> None:
    assert reason == "tool_calls"
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_arguments_parse_after_their_runner_has_been_killed(stack: LocalStack) -> None:
    undisturbed = call_while(stack.url, lambda: None)
    check(*undisturbed)
    killed = list[int]()

    def kill() -> None:
        serving = [name for name, sequences in stack.sequences().items() if sequences]
        # A slow client may read the beginning of a call whose end is written already.
        if serving:
            killed.append(stack.kill(serving[0]))

    for _ in range(TRIES):
        check(*call_while(stack.url, kill))
        if killed:
            break
    assert killed, "every call was written before its client read its beginning"


def test_half_a_call_is_an_error_if_its_gateway_has_been_killed(stack: LocalStack, tmp_path: Path) -> None:
    for number in range(TRIES):
        folder = tmp_path / f"second-{number}"
        with second_gateway(stack, folder, log=folder.with_suffix(".log")) as (url, process):
            kill = partial(os.kill, process.pid, signal.SIGKILL)
            try:
                whole = call_while(url, kill)
            except (openai.APIError, httpx2.TransportError):
                break
        check(*whole)  # a slow client may read all of a call at once
    else:
        pytest.fail("every call was whole before its gateway was killed")
    stack.until(lambda: not any(stack.sequences().values()), 60)
    check(*call_while(stack.url, lambda: None))
