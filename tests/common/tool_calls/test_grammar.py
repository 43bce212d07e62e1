"""What the grammar of each format allows, the parser reads as calls of the request's tools, with valid arguments."""

import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from motet.errors import InvalidRequest
from motet.grammars.compiler import Grammars
from motet.grammars.grammar import Grammar, GrammarForm
from motet.tool_calls.formats import FORMATS, TOOL_FORMATS, ToolFormatName
from motet.tool_calls.grammar import CallRules
from motet.tool_calls.parser import CallParser
from testbed.tree import ROOT

MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"
WORD = {"type": "string", "pattern": "^[a-z\"']{0,3}$"}
TOOLS: dict[str, Any] = {
    "look_up": {
        "type": "object",
        "properties": {"q": WORD, "n": {"type": "integer", "minimum": 0, "maximum": 20}, "deep": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "nothing": {"type": "object", "properties": {}, "additionalProperties": False},
    "2fa": {"type": "object", "properties": {"n": {"type": "boolean"}}, "additionalProperties": False},
    "-a": {"type": "object", "properties": {}, "additionalProperties": False},
    "send": {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/who"}, "parts": {"type": "array", "items": WORD, "maxItems": 2}},
        "required": ["to", "parts"],
        "additionalProperties": False,
        "$defs": {"who": {"enum": ["Ann", "Bob"]}},
    },
    "either": {"anyOf": [{"type": "object", "properties": {"a-b": WORD}, "additionalProperties": False}]},
}
END = 1


@pytest.fixture(scope="module", params=[(), ("[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<|python_tag|>")])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Grammars]:
    """Of the bundled model, also with the signs of the formats as special tokens."""
    made = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    made.add_special_tokens([AddedToken(text, special=True) for text in request.param])
    file: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(file))
    return made, Grammars(file, made.get_vocab_size(), [END])


def rules(form: ToolFormatName, **changed: Any) -> Grammar:
    said: dict[str, Any] = {"format": form, "tools": TOOLS, "must": True, "parallel": True} | changed
    return Grammar(GrammarForm.TOOL_CALLS, CallRules(**said).to_text())


def drawn(made: Tokenizer, grammars: Grammars, grammar: Grammar, seed: int, *, most: int = 400) -> str:
    """An answer whose tokens are drawn from what the grammar allows; it ends as soon as it may after some tokens."""
    mask, chance, tokens = grammars.mask(grammar, ()), random.Random(seed), list[int]()
    size = made.get_vocab_size()
    while True:
        bits = np.unpackbits(np.frombuffer(mask.allowed(), np.uint8), count=size, bitorder="little")
        (allowed,) = np.nonzero(bits)
        assert len(allowed), made.decode(tokens, skip_special_tokens=False)
        if bits[END] and (len(tokens) > 100 or chance.random() < 0.5 or len(allowed) == 1):
            return str(made.decode(tokens, skip_special_tokens=False))
        token = int(chance.choice([one for one in allowed if one != END]))
        assert mask.take(token, len(tokens))
        tokens.append(token)
        assert len(tokens) < most


def read(form: ToolFormatName, text: str) -> tuple[str, CallParser]:
    ids = count()
    parser = CallParser(FORMATS[form], TOOLS, lambda: f"id{next(ids)}")
    said = parser.feed(text) + parser.flush()
    return "".join(one for one in said if isinstance(one, str)), parser


def check(parser: CallParser) -> None:
    for call in parser.calls:
        jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_parse_and_validate(
    tokenizer: tuple[Tokenizer, Grammars], form: ToolFormatName, parallel: bool
) -> None:
    numbers, called = set[int](), set[str]()
    for seed in range(60):
        text = drawn(*tokenizer, rules(form, parallel=parallel), seed)
        content, parser = read(form, text)
        assert (content, parser.complete) == ("", True), text
        check(parser)
        numbers.add(len(parser.calls))
        called |= {call.name for call in parser.calls}
    assert called == TOOLS.keys()
    assert (max(numbers) > 1) is parallel


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_named_tool_is_the_only_one_that_is_called(
    tokenizer: tuple[Tokenizer, Grammars], form: ToolFormatName
) -> None:
    grammar = rules(form, tools={"send": TOOLS["send"]}, parallel=False)
    for seed in range(10):
        content, parser = read(form, drawn(*tokenizer, grammar, seed))
        assert (content, [call.name for call in parser.calls]) == ("", ["send"])
        check(parser)


ANSWERS = ["Yes.", "  It is {so}.", "Once\nupon [a time]", ""]


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_may_be_made_are_bound_from_their_beginning_on(
    tokenizer: tuple[Tokenizer, Grammars], form: ToolFormatName, parallel: bool
) -> None:
    made, grammars = tokenizer
    grammar, kind = rules(form, must=False, parallel=parallel), FORMATS[form]
    for text in ANSWERS:
        mask = grammars.mask(grammar, made.encode(text, add_special_tokens=False).ids)
        assert mask.take(END, len(made.encode(text, add_special_tokens=False).ids))
    before = "" if kind.at_start else "Well. "
    for seed in range(10):
        call = drawn(made, grammars, rules(form, parallel=False), seed)
        grammars.mask(grammar, made.encode(before + call, add_special_tokens=False).ids)
    begin = before + kind.begin + kind.inside + kind.opening
    broken = [begin + "x", begin + ('{"name": "other"' if kind.arguments else "other("), begin + "{}"]
    for text in broken:
        with pytest.raises(InvalidRequest, match="does not follow it"):
            grammars.mask(grammar, made.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_an_answer_without_calls_may_have_a_schema_of_its_own(
    tokenizer: tuple[Tokenizer, Grammars], form: ToolFormatName
) -> None:
    made, grammars = tokenizer
    schema = {"type": "object", "properties": {"a": WORD}, "required": ["a"], "additionalProperties": False}
    grammar = rules(form, must=False, content=schema)
    kinds = set[bool]()
    for seed in range(15):
        content, parser = read(form, drawn(made, grammars, grammar, seed))
        kinds.add(bool(parser.calls))
        check(parser)
        if not parser.calls:
            jsonschema.validate(json.loads(content), schema)
    with pytest.raises(InvalidRequest, match="does not follow it"):
        grammars.mask(grammar, made.encode("Yes.", add_special_tokens=False).ids)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_the_tool_is_named_whose_schema_cannot_be_served(
    tokenizer: tuple[Tokenizer, Grammars], form: ToolFormatName
) -> None:
    tools = {"look_up": TOOLS["look_up"], "odd": {"type": "object", "properties": {"x": {"uniqueItems": True}}}}
    with pytest.raises(InvalidRequest, match=r"the parameters of the tool odd: .*uniqueItems"):
        tokenizer[1].try_grammar(rules(form, tools=tools))


def test_another_versions_rules_are_an_error_of_their_request(tokenizer: tuple[Tokenizer, Grammars]) -> None:
    for text in ("{}", "[]", '{"format":"other","tools":{},"must":true,"parallel":true}', "x"):
        with pytest.raises(InvalidRequest, match="another version"):
            tokenizer[1].try_grammar(Grammar(GrammarForm.TOOL_CALLS, text))
