"""The fields of a body by which a client asks for structured output, in the words of OpenAI, vLLM and SGLang. Pure."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from motet.errors import InvalidRequest, UnsupportedParameter
from motet.grammars.ebnf import is_ebnf
from motet.grammars.grammar import ANY_OBJECT, MAX_GRAMMAR_BYTES, Grammar, GrammarForm
from motet_gateway.model_not_found import shown

Reader = Callable[[str, Any], Grammar | None]
"""Of a field's name and value"""

MAX_CHOICES = 1000
TOO_LARGE = "has an integer of more than 64 bits; send a simpler schema"


def grammar_of(fields: Mapping[str, Any]) -> tuple[str, Grammar] | None:
    """The field that asks for it, too. None: the answer may be anything. Raises InvalidRequest, or
    UnsupportedParameter, which name the field."""
    asked: dict[str, Grammar] = {}
    for name in FIELDS.keys() & fields.keys():
        value = fields[name]
        if value is not None and (grammar := FIELDS[name](name, value)) is not None:
            asked[name] = grammar
    if len(asked) > 1:
        names = sorted(asked)
        raise InvalidRequest(
            f"{names[1]}: an answer follows one grammar, so it cannot be sent with {names[0]}", param=names[1]
        )
    for name, grammar in asked.items():
        return name, _not_too_large(name, grammar)
    return None


def grammar_of_schema(name: str, schema: Any) -> Grammar:
    """`name`: the field that has the schema. Raises InvalidRequest."""
    return _not_too_large(name, _json(name, schema))


def _not_too_large(name: str, grammar: Grammar) -> Grammar:
    if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{name}: has more than {MAX_GRAMMAR_BYTES} bytes; send a smaller one", param=_field(name))
    return grammar


def _response_format(name: str, value: Any) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object" if value.get("schema") is not None:  # of LoRAX
            return _json(f"{name}.schema", value["schema"])
        case "json_object":
            return Grammar(GrammarForm.JSON_SCHEMA, ANY_OBJECT)
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict) or "schema" not in inner:
                raise InvalidRequest(f"{name}.json_schema.schema: this field is required", param=name)
            return _json(f"{name}.json_schema.schema", inner["schema"])
        case "structural_tag":
            return _structural_tag(name, value)
        case "json" | "regex" if "value" in value:
            return _of_tgi(name, value)
    raise UnsupportedParameter(
        f"{name}: type must be 'text', 'json_object', 'json_schema' or 'structural_tag'", param=name
    )


def _json(name: str, value: Any) -> Grammar:
    if isinstance(value, str):  # vLLM's and SGLang's clients send a schema as text, too
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise InvalidRequest(f"{name}: is not JSON", param=_field(name)) from None
    if value is True:
        return Grammar(GrammarForm.JSON_SCHEMA, "{}")
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: a JSON schema must be an object", param=_field(name))
    try:
        text = orjson.dumps([value])[1:-1]  # with tools it stands one level deeper
    except TypeError:  # orjson reads what it cannot write again
        raise InvalidRequest(f"{name}: is nested too deeply, or {TOO_LARGE}", param=_field(name)) from None
    return Grammar(GrammarForm.JSON_SCHEMA, text.decode())


def _regex(name: str, value: Any) -> Grammar:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name}: must be a regular expression, as a string", param=_field(name))
    return Grammar(GrammarForm.REGEX, value)


def _choice(name: str, value: Any) -> Grammar:
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= MAX_CHOICES
        or not all(isinstance(one, str) for one in value)
    ):
        raise InvalidRequest(f"{name}: must be a list of 1 to {MAX_CHOICES} strings", param=_field(name))
    return Grammar(GrammarForm.REGEX, "|".join(map(re.escape, value)))


def _structured_outputs(name: str, value: Any) -> Grammar | None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: must be an object", param=name)
    said = {one: inner for one, inner in value.items() if inner is not None and inner is not False}
    for one in said:
        if one not in _OF_VLLM:
            raise UnsupportedParameter(
                f"{name}.{shown(one)}: it is not supported; send one of {', '.join(_OF_VLLM)}", param=name
            )
    if len(said) > 1:
        raise InvalidRequest(
            f"{name}: an answer follows one grammar; send one of {', '.join(sorted(said))}", param=name
        )
    return next((_OF_VLLM[one](f"{name}.{one}", inner) for one, inner in said.items()), None)


def _grammar(name: str, value: Any) -> Grammar:
    if isinstance(value, dict):
        return _of_tgi(name, value)
    grammar = _ebnf(name, value)
    return grammar if is_ebnf(grammar.text) else Grammar(GrammarForm.LARK, grammar.text)


def _ebnf(name: str, value: Any) -> Grammar:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name}: must be a grammar, as a string", param=_field(name))
    return Grammar(GrammarForm.EBNF, value)


def _of_tgi(name: str, value: Mapping[str, Any]) -> Grammar:
    match value.get("type"):
        case "json":
            return _json(f"{name}.value", value.get("value"))
        case "regex":
            return _regex(f"{name}.value", value.get("value"))
    raise UnsupportedParameter(f"{name}.type: must be 'json' or 'regex'", param=_field(name))


def _structural_tag(name: str, value: Any) -> Grammar:
    if isinstance(value, str):  # so vLLM's and SGLang's libraries send it
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise InvalidRequest(f"{name}: is not JSON", param=_field(name)) from None
    if not isinstance(value, dict) or not ("format" in value or "structures" in value):
        raise InvalidRequest(f"{name}: must be an object with format, or structures and triggers", param=_field(name))
    try:
        return Grammar(GrammarForm.STRUCTURAL_TAG, orjson.dumps(value).decode())
    except TypeError:  # orjson reads what it cannot write again
        raise InvalidRequest(f"{name}: is nested too deeply, or {TOO_LARGE}", param=_field(name)) from None


def _any_object(_name: str, _value: Any) -> Grammar:
    return Grammar(GrammarForm.JSON_SCHEMA, ANY_OBJECT)


def _field(name: str) -> str:
    """Of the body."""
    return name.partition(".")[0]


_OF_VLLM: Mapping[str, Reader] = {
    "json": _json,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
FIELDS: Mapping[str, Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "json_schema": _json,
    "regex": _regex,
    "guided_grammar": _grammar,
    "grammar": _grammar,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
}
