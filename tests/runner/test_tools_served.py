"""The bundled model calls tools that it has never seen, in formats that it does not know.

Every call parses and fits its tool's schema, and a stream has the same calls as the whole answer. It goes through the
gateway's own parts, from a request's body to its answer.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator

from motet.chat_formats import ChatFormats
from motet.tool_calls.formats import FORMATS, TOOL_FORMATS, ToolFormatName
from motet.tool_calls.parser import CallDelta
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.parts import texts
from motet_gateway.generation import EndReason
from motet_gateway.parameters import ChatBody, parse
from motet_gateway.tokens.detokenizer import detokenizer
from motet_gateway.tokens.text_model import ModelTokenizer
from motet_gateway.tools.calls import CallableTools, callable_tools, grammar_of_answer
from motet_gateway.tools.written_out import written_out
from motet_runner.interface import Finish, NewSequence, Sampling
from motet_runner.offline import Answer, OfflineEngine, Request
from testbed.tree import ROOT
from tests.runner.random_tools import Tool, tool_sets

MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"
MODES = ("required", "named", "strict")
ENDS = ('"', "}", "]", '"}', '",', '"]', "'", ")", "')", "',")
"""A model that never meant to write calls ends few of its strings. So these tokens are made likely."""
LEAST_COMPLETE = 0.9

Calls = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    body: ChatBody
    tools: CallableTools
    begun: str
    """What the model has written already: one that knows no tools begins no call by itself."""
    temperature: float


class _BegunEngine(OfflineEngine):
    begun: str = ""

    def _sequence(self, request: Request, *place: Any) -> NewSequence:
        ids = self.tokenizer.encode(self.begun, add_special_tokens=False)
        return replace(super()._sequence(request, *place), delivered=tuple(ids))


def asked(tools: Sequence[Tool], form: ToolFormatName, mode: str, number: int) -> Asked:
    offered = [strict(tool) for tool in tools] if mode == "strict" else tools
    choice = {
        "required": "required",
        "named": {"type": "function", "function": {"name": tools[number % len(tools)]["function"]["name"]}},
        "strict": "auto",
    }[mode]
    fields = {"model": "m", "messages": [{"role": "user", "content": "How high is the tide?"}], "tools": offered}
    said = {**fields, "tool_choice": choice, "parallel_tool_calls": bool(number % 3 == 0)}
    body = parse(ChatBody, orjson.dumps(said))
    body.refuse_unsupported()
    found = callable_tools(body, ChatFormats(tool=form))
    assert found is not None
    begun = FORMATS[form].begin + FORMATS[form].opening if mode == "strict" else ""
    return Asked(body=body, tools=found, begun=begun, temperature=(0.0, 1.5)[number % 2])


def strict(tool: Tool) -> Tool:
    return {**tool, "function": {**tool["function"], "strict": True}}


def request(one: Asked, seed: int, bias: dict[int, float]) -> Request:
    grammar = grammar_of_answer(one.body, one.tools)
    assert grammar is not None
    messages = written_out(
        one.body.plain_messages(), one.tools.offered.said, FORMATS[one.tools.format], takes_system=True
    )
    sampling = Sampling(max_tokens=300, temperature=one.temperature, logit_bias=bias)
    return Request(prompt=[dict(message) for message in messages], grammar=grammar[1], seed=seed, sampling=sampling)


def read(one: Asked, text: ModelTokenizer, tokens: Sequence[int], finish: EndReason, size: int) -> Iterator[ChoiceText]:
    """As the gateway reads an answer that comes in steps of this size: at each step, and at the end."""
    begun = text.tokenizer.encode(one.begun, add_special_tokens=False).ids
    choice = ChoiceText(
        0,
        detokenizer(text.token_bytes, (), skip_special_tokens=False),
        None,
        hidden_ids=text.eos_ids | text.specials_but(one.tools.signs),
        min_tokens=0,
        logprobs=None,
        parser=one.tools.parser(),
        must_call=one.tools.offered.must,
        on_placed=lambda: None,
        changed=lambda _: None,
        stop_here=lambda: None,
        score=lambda _: None,
    )
    given = [*begun, *tokens]
    for start in range(0, len(given), size):
        choice.deliver(given[start : start + size], [])
        yield choice
    choice.end(finish)
    yield choice


def streamed(one: Asked, text: ModelTokenizer, tokens: Sequence[int], finish: EndReason) -> tuple[str, Calls]:
    content, calls = "", Calls()
    for choice in read(one, text, tokens, finish, 1):
        for delta in choice.take():
            assert isinstance(delta, str | CallDelta)
            if isinstance(delta, str):
                content += delta
                continue
            if delta.index == len(calls):
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = name, arguments + delta.arguments
    return content, calls


def checked(one: Asked, text: ModelTokenizer, answer: Answer) -> bool:
    """Whether it has a whole call."""
    finish = EndReason.STOP if answer.finish is Finish.STOP else EndReason.LENGTH
    (*_, whole) = read(one, text, answer.tokens, finish, len(answer.tokens) + 100)
    content, calls = "".join(texts(whole.take())), [(call.name, call.arguments) for call in whole.calls]
    assert streamed(one, text, answer.tokens, finish) == (content, calls), (one, answer.text)
    assert whole.error is None, (one, answer.text)
    assert whole.finish_reason in ("tool_calls", "length"), (one, answer.text)
    if one.tools.offered.must and whole.finish_reason == "tool_calls":  # one that is cut may have a call's beginning
        assert not content, (one, answer.text)
    assert len(calls) <= 1 or one.tools.offered.parallel, (one, answer.text)
    ended = [call for call in whole.calls if call.complete]
    assert len(calls) - len(ended) <= (whole.finish_reason == "length"), (one, answer.text)
    for call in ended:
        found = json.loads(call.arguments)
        assert Draft202012Validator(one.tools.offered.schemas[call.name]).is_valid(found), (call, one)
    return bool(ended)


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.soak)])
def test_what_is_called_parses_and_fits_its_schema(count: int) -> None:
    engine = _BegunEngine(MODEL, kernels="torch", threads=1)
    text = ModelTokenizer.from_folder(MODEL)
    bias = {token: 6.0 for one in ENDS if (token := text.tokenizer.token_to_id(one)) is not None}
    sets, complete = list(tool_sets(count, seed=count)), 0
    for form in TOOL_FORMATS:
        for mode in MODES:
            given = [asked(tools, form, mode, number) for number, tools in enumerate(sets)]
            engine.begun = given[0].begun
            for answer in engine.run([request(one, seed, bias) for seed, one in enumerate(given)]):
                assert answer.error is None, (answer.error, given[answer.number])
                complete += checked(given[answer.number], text, answer)
    total = count * len(TOOL_FORMATS) * len(MODES)
    print(f"tools_valid: 1, of {complete} answers with a whole call of {total}")
    assert complete >= LEAST_COMPLETE * total
