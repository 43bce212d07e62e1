"""Structural tags in both ways to write them: what each allows, and what is wrong with its place."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, normalizers

from motet.errors import InvalidRequest
from motet.grammars.compiler import Grammars, _matcher
from motet.grammars.grammar import Grammar, GrammarForm
from testbed.tree import ROOT

TOKENIZER = LLTokenizer("byte")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OBJECT = {"type": "json_schema", "json_schema": SCHEMA}
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [
        {"begin": "<f=a>", "content": OBJECT, "end": ["</f>", "</g>"]},
        {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</f>"},
    ],
}
EARLIER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=b>", "schema": json.dumps({"type": "integer"}), "end": "</f>"},
    ],
    "triggers": ["<f="],
}
A, B = '<f=a>{"a": 1}</f>', "<f=b>12</f>"


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def of(form: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {**form, **fields}}


def repeated(kind: str, **fields: Any) -> dict[str, Any]:
    return of({"type": kind, "content": text("x"), **fields})


def compiled(tags: dict[str, Any]) -> Any:
    return _matcher(TOKENIZER, Grammar(GrammarForm.STRUCTURAL_TAG, json.dumps(tags)))


def allows(tags: dict[str, Any], said: str) -> bool:
    matcher, tokens = compiled(tags), list(said.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


SEPARATED = of({"type": "tags_with_separator", "separator": ",", "tags": CALLS["tags"]})


@pytest.mark.parametrize(
    ("tags", "right", "wrong"),
    [
        (EARLIER, ["x", f"x{A} y{B}", "<", "<f"], ["x<f=", "<f=c>", "<f=a>{}</f>", "<f=b>x</f>"]),
        (of(CALLS), ["", f"x{A}{B}y", '<f=a>{"a":1}</g>'], ["<f=a>", "<f=b>1</g>", "<f=a>1</f>"]),
        (of(CALLS, at_least_one=True), [A, f"{A} x{B}"], ["", "x", f"x{A}"]),
        (of(CALLS, stop_after_first=True), ["x", A, f"x{A}"], [f"{A}x", f"{A}{B}"]),
        (of(CALLS, at_least_one=True, stop_after_first=True), [A, B], ["x", f"x{A}", f"{A}x"]),
        (of(CALLS, excludes=["no"]), ["nx", f"x{A}"], ["no", f"{A}no", f"no{A}"]),
        (of(THOUGHT), ["<think>a\n</think>"], ["<think>", "a", "<think></think>a", "<think></think></think>"]),
        (of(THOUGHT, content=CALLS), [f"<think>x{A}y</think>", "<think></think>"], ["<think>x</think>y", "<think><f="]),
        (of(THOUGHT, content=CALLS, end=""), ["<think>", f"<think>x{A}"], ["x"]),
        (of({"type": "sequence", "elements": [THOUGHT, OBJECT]}), ['<think></think>{"a":1}'], ["<think></think>"]),
        (of({"type": "or", "elements": [text("yes"), OBJECT]}), ["yes", '{"a":1}'], ["no", ""]),
        (of({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}), ["b", "aab"], ["aa"]),
        (of({"type": "any_text", "excludes": ["bad", "ugly"]}), ["good", "ba", "ugl"], ["bad", "so ugly."]),
        (of({"type": "regex", "pattern": "a/b+"}), ["a/bb"], ["a/"]),
        (of({"type": "json_schema", "json_schema": True}), ["1", "[]"], ["x"]),
        (repeated("optional"), ["", "x"], ["xx"]),
        (repeated("star"), ["", "xx"], ["y"]),
        (repeated("plus"), ["x", "xx"], [""]),
        (repeated("repeat", min=2, max=3), ["xx", "xxx"], ["x", "xxxx"]),
        (repeated("repeat", min=2, max=-1), ["xx", "xxxxx"], ["x"]),
        (SEPARATED, ["", A, f"{A},{B},{A}"], [f"{A}{B}", f"{A},", f"x{A}"]),
        (of(SEPARATED["format"], at_least_one=True, stop_after_first=True), [A], ["", f"{A},{B}"]),
    ],
    ids=range(22),
)
def test_it_allows_what_it_says(tags: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert [said for said in right if not allows(tags, said)] == []
    assert [said for said in wrong if allows(tags, said)] == []


def nested(levels: int) -> dict[str, Any]:
    form: dict[str, Any] = text("x")
    for _ in range(levels):
        form = {"type": "optional", "content": form}
    return of(form)


@pytest.mark.parametrize(
    ("tags", "says"),
    [
        ({}, "structures: must be a list of objects"),
        ({**EARLIER, "structures": []}, "structures: must be a list that is not empty"),
        ({**EARLIER, "triggers": ["<g="]}, "structures[0].begin: must begin with exactly one of the triggers"),
        ({**EARLIER, "triggers": ["<f", "<"]}, "structures[0].begin: must begin with exactly one of the triggers"),
        ({**EARLIER, "triggers": [""]}, "triggers: must be a list of strings, none of them empty"),
        ({"structures": [{"begin": "<f", "schema": "{", "end": ""}]}, "structures[0].schema: is not JSON"),
        ({"format": {"type": "dispatch"}}, "format.type: it is not supported; use one of const_string"),
        ({"format": 5}, "format.type: it is not supported"),
        (of(THOUGHT, content=None), "format.content.type"),
        (of(THOUGHT, strict=True), "format.strict: a format of this type has no such field"),
        (of(THOUGHT, begin=["x"]), "format.begin: must be a string"),
        (of(THOUGHT, end=[]), "format.end: must be a string, or a list of strings"),
        (of(THOUGHT, content={"type": "grammar", "grammar": "root ::= x"}), "content.grammar: line 1, column 10"),
        (of({"type": "sequence", "elements": [{"type": "any_text"}, OBJECT]}), "format.elements[0]: any text can only"),
        (of({"type": "sequence", "elements": [CALLS, OBJECT]}), "format.elements[0]: it allows any text"),
        (repeated("star", content=CALLS), "format.content: it allows any text"),
        (of(OBJECT, style="qwen_xml"), "format.style: only JSON is supported"),
        (of(OBJECT, json_schema={"uniqueItems": True}), "uniqueItems"),
        (repeated("repeat", min=3, max=2), "format.max: must be an integer from min"),
        (of(CALLS, at_least_one=1), "format.at_least_one: must be true or false"),
        (of(SEPARATED["format"], tags=[text("x")]), "format.tags[0].type: must be 'tag'"),
        (nested(100), "more than 32 formats are nested"),
        (of(text("x" * 4097)), "format.value: must be at most 4096 bytes"),
        (of(THOUGHT, begin="\u00e9" * 2049), "format.begin: must be at most 4096 bytes"),
        (of(THOUGHT, end=["x", "y" * 4097]), "format.end: must be at most 4096 bytes"),
        ({**EARLIER, "triggers": ["x", "y" * 4097]}, "triggers[1]: must be at most 4096 bytes"),
    ],
    ids=range(26),
)
def test_what_is_wrong_is_said_with_its_place(tags: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)):
        compiled(tags)


def test_special_tokens_are_no_text() -> None:
    """`<|assistant|>` is one token of the bundled model, which no text has."""
    grammars = Grammars(ROOT / "cli/motet_cli/bundled/model/tokenizer.json", 4096, [0])
    tokenizer = grammars._tokenizer  # noqa: SLF001
    assert tokenizer is not None
    (sign,) = tokenizer.tokenize_str("<|assistant|>", parse_special=True)
    words = tokenizer.tokenize_str("well")
    triggered = {"begin": "<|assistant|>so ", "content": text(""), "end": ""}
    for form in (
        of(THOUGHT, begin="<|assistant|>so ", end="<|assistant|>"),
        of(CALLS, triggers=["<|assistant|>"], tags=[triggered]),
    ):
        mask = grammars.mask(Grammar(GrammarForm.STRUCTURAL_TAG, json.dumps(form)), ())
        said = [sign, *tokenizer.tokenize_str("so ")]
        said += [*words, sign] if form["format"]["type"] == "tag" else []
        assert all(mask.take(token, place) for place, token in enumerate(said))


@pytest.mark.parametrize("value", ["\u2460 of \ufb01", "Yes", "\u6f22"])
def test_texts_are_demanded_as_they_are_written(tmp_path: Path, value: str) -> None:
    """By a tokenizer with a normal form of texts, without capitals and with one token for unknown characters, too."""
    vocabulary = {one: at for at, one in enumerate(["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path / "tokenizer.json", len(vocabulary), [1])
    mask = grammars.mask(Grammar(GrammarForm.STRUCTURAL_TAG, json.dumps(of(text(value)))), ())
    said = [vocabulary[f"<0x{byte:02X}>"] for byte in value.encode()]
    assert all(mask.take(token, place) for place, token in enumerate(said))
