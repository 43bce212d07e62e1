"""How clients ask for structured output: the words of OpenAI, vLLM and SGLang, as one grammar for the runner."""

import json
import re
from typing import Any

import orjson
import pytest

from motet.errors import InvalidRequest, MotetError, UnsupportedParameter
from motet.grammars.grammar import ANY_OBJECT, Grammar, GrammarForm
from motet_gateway.grammars.parameters import FIELDS, MAX_CHOICES
from motet_gateway.parameters import ChatBody, CompletionBody, parse
from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, serve

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
JSON = Grammar(GrammarForm.JSON_SCHEMA, TEXT)
ANY = Grammar(GrammarForm.JSON_SCHEMA, ANY_OBJECT)
EBNF, LARK = 'root ::= "a" | "b"', 'start: "a" | "b"'
TAGS: dict[str, Any] = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


def tags(said: dict[str, Any]) -> Grammar:
    return Grammar(GrammarForm.STRUCTURAL_TAG, orjson.dumps(said).decode())


def grammar_of(**fields: Any) -> Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    parsed = parse(ChatBody, orjson.dumps(body))
    parsed.refuse_unsupported()
    return None if parsed.grammar_asked is None else parsed.grammar_asked[1]


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": json.dumps(SCHEMA)}, JSON),
        ({"json_schema": TEXT}, JSON),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json": None, "json_object": True, "regex": None}}, ANY),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"guided_regex": "a+"}, Grammar(GrammarForm.REGEX, "a+")),
        ({"regex": "a+"}, Grammar(GrammarForm.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, Grammar(GrammarForm.REGEX, r"a\.b|c")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
        ({"response_format": {"type": "json", "value": SCHEMA}}, JSON),
        ({"response_format": {"type": "regex", "value": "a+"}}, Grammar(GrammarForm.REGEX, "a+")),
        ({"grammar": {"type": "regex", "value": "a+"}}, Grammar(GrammarForm.REGEX, "a+")),
        ({"structured_outputs": {"grammar": EBNF}}, Grammar(GrammarForm.EBNF, EBNF)),
        ({"structured_outputs": {"grammar": LARK}}, Grammar(GrammarForm.LARK, LARK)),
        ({"guided_grammar": LARK}, Grammar(GrammarForm.LARK, LARK)),
        ({"grammar": EBNF}, Grammar(GrammarForm.EBNF, EBNF)),
        ({"ebnf": EBNF}, Grammar(GrammarForm.EBNF, EBNF)),
        ({"response_format": {"type": "structural_tag", **TAGS}}, tags({"type": "structural_tag", **TAGS})),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, tags(TAGS)),
        ({"structural_tag": json.dumps(TAGS)}, tags(TAGS)),
    ],
)
def test_each_form_becomes_one_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert grammar_of(**fields) == grammar


def deep(levels: int) -> str:
    return '{"not":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"response_format": "json"}, "response_format: type must be", "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format: type must be", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema: this field is required", "response_format"),
        ({"guided_json": "{"}, "guided_json: is not JSON", "guided_json"),
        ({"guided_json": deep(300)}, "guided_json: is nested too deeply", "guided_json"),
        ({"guided_json": 5}, "guided_json: a JSON schema must be an object", "guided_json"),
        ({"guided_regex": ""}, "guided_regex: must be a regular expression", "guided_regex"),
        ({"guided_choice": []}, "guided_choice: must be a list of 1 to", "guided_choice"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice: must be a list of 1 to", "guided_choice"),
        ({"structured_outputs": []}, "structured_outputs: must be an object", "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "follows one grammar", "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag: is not JSON", None),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml: it is not supported; send one of json", None),
        ({"structural_tag": {}}, "structural_tag: must be an object with format, or structures", "structural_tag"),
        ({"guided_grammar": ""}, "guided_grammar: must be a grammar, as a string", "guided_grammar"),
        ({"grammar": {"type": "xml"}}, "grammar.type: must be 'json' or 'regex'", "grammar"),
        ({"guided_json": SCHEMA, "regex": "a"}, "regex: an answer follows one grammar", "regex"),
        ({"regex": "a" * 300_000}, "regex: has more than 262144 bytes", "regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos: an answer that follows a grammar ends", "ignore_eos"),
        ({"regex": "a", "min_tokens": 3}, "min_tokens: an answer that follows a grammar ends", "min_tokens"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], says: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)) as caught:
        grammar_of(**fields)
    assert caught.value.param == (param or "structured_outputs")


def test_null_asks_for_nothing() -> None:
    assert grammar_of(**dict.fromkeys(FIELDS)) is None


def test_an_unknown_form_is_an_unsupported_parameter() -> None:
    for fields in ({"grammar": {"type": "xml"}}, {"structured_outputs": {"xml": 1}}, {"response_format": {}}):
        with pytest.raises(UnsupportedParameter):
            grammar_of(**fields)


async def test_the_runner_gets_it(served: Served) -> None:
    body = {"model": "tiny", "prompt": "x", "guided_json": SCHEMA, "max_tokens": 4}
    assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    (submit,) = served.cluster.runners[0].submits
    assert submit.sampling.json_schema == TEXT


async def test_a_runners_refusal_of_a_grammar_is_a_400(served: Served) -> None:
    refusal = InvalidRequest("The grammar of this request cannot be served: no.", param="response_format")
    served.cluster.runners[0].declines.append(refusal.to_proto())
    answer = await served.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "regex": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("cannot be served: no.")


async def test_a_runner_that_would_ignore_a_grammar_never_answers(cluster: FakeServices) -> None:
    (runner,) = cluster.runners
    runner.fields = []  # so does one of an earlier version
    async with serve(cluster) as served:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4}
        assert (await served.http.post("/v1/completions", json=body | {"regex": "a*"})).status_code == 200
        answer = await served.http.post("/v1/completions", json=body | {"ebnf": EBNF})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "structured_output_unavailable"
    assert "do not know ebnf" in answer.json()["error"]["message"]
    assert len(runner.submits) == 1


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_any_value_is_understood_or_refused(kind: type) -> None:
    named = set()
    for name in FIELDS:
        for value in (1, True, "x", [], {}, [1], {"type": 1}, {"type": "json_schema", "json_schema": 1}):
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", name: value}
            try:
                parse(kind, orjson.dumps(body)).refuse_unsupported()
            except MotetError as error:
                named.add(error.param)
    assert named == FIELDS.keys()
