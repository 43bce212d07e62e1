"""The grammar of an answer that calls tools, in llguidance's language: what `parser` reads as calls. Pure."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from motet.tool_calls.formats import FORMATS, ToolFormat, ToolFormatName

Schema = Mapping[str, Any]
TEXT = r"(.|\n)*"

_PLAIN_OBJECT = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description"}
)
"""Keywords of a schema whose properties may be written as a Python function's arguments, one by one."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What an answer may call, as requests carry it."""

    format: ToolFormatName
    tools: Mapping[str, Schema]
    """By name: the schema of the arguments."""
    must: bool
    """The answer is calls, and has no other text."""
    parallel: bool
    """It may have several."""
    content: Schema | None = None
    """The schema of an answer that calls nothing; None: it is any text."""

    @classmethod
    def from_text(cls, text: str) -> "CallRules":
        """Raises ValueError if another version has written it in another way."""
        try:
            return cls(**orjson.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None

    def to_text(self) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return orjson.dumps(fields).decode()


def call_grammar(rules: CallRules, *, special: Callable[[str], str], json_rule: Callable[[Schema], str]) -> str:
    """`special`: how a text is written that is one special token of the model; empty: it is none. `json_rule`: how a
    JSON schema is written."""
    form = FORMATS[rules.format]
    calls = [*_calls(form, rules.tools, json_rule)]
    lines = [_start(form, rules, special, json_rule), *_block(form, special, parallel=rules.parallel)]
    lines.append("call: " + " | ".join(f"call_{at}" for at in range(len(calls))))
    return "\n".join([*lines, *(line for lines in calls for line in lines)]) + "\n"


def _block(form: ToolFormat, special: Callable[[str], str], *, parallel: bool) -> Iterator[str]:
    more = f"({_said(form.between)} call)*" if parallel and form.between else ""
    end = special(form.end) or _said(form.end)
    yield f"inner: {_said(form.inside + form.opening)} call {more} {_said(form.closing + form.inside)} {end}"
    begin = "" if form.at_start else special(form.begin) or _said(form.begin)
    yield f"block: {begin} inner"
    yield f"blocks: block ({_said(form.before)} block)*" if parallel and form.before else "blocks: block"


def _start(
    form: ToolFormat, rules: CallRules, special: Callable[[str], str], json_rule: Callable[[Schema], str]
) -> str:
    if rules.must:
        return "start: blocks"
    if rules.content is not None:
        return f"start: blocks | content\ncontent: {json_rule(rules.content)}"
    # A block at the beginning has no sign before it but its own first character.
    sign = form.opening or "{"
    text = rf"\s*([^\s{re.escape(sign)}]{TEXT})?" if form.at_start else TEXT
    lines = [f"text: TEXT\nTEXT: /{text}/"]
    begins = []
    if form.begin:
        lines.append(f"begin[lazy]: TEXT {_said(form.begin)}")
        begins.append("begin")
        if token := special(form.begin):
            begins.append(f"TEXT {token}")
    behind = f"({' | '.join(begins)}) inner" if begins else ""
    if form.at_start:
        choices = ["blocks", "text", *([behind] if behind else [])]
        return "\n".join([f"start: {' | '.join(choices)}", *lines])
    return "\n".join([f"start: ({behind})* text" if rules.parallel else f"start: text | {behind}", *lines])


def _calls(form: ToolFormat, tools: Mapping[str, Schema], json_rule: Callable[[Schema], str]) -> Iterator[list[str]]:
    for at, (name, schema) in enumerate(tools.items()):
        if form.arguments:
            head = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
            yield [f'call_{at}: {_said(head)} args_{at} "}}"', f"args_{at}: {json_rule(schema)}"]
        elif _is_plain(schema):
            yield [f'call_{at}: {_said(name + "(")} first_{at}_0 ")"', *_python_arguments(at, schema, json_rule)]
        else:
            yield [f'call_{at}: {_said(name + "(**")} args_{at} ")"', f"args_{at}: {json_rule(schema)}"]


def _is_plain(schema: Schema) -> bool:
    """Whether its properties can be written one by one: what they refer to stays where it is."""
    properties = schema.get("properties")
    return (
        schema.keys() <= _PLAIN_OBJECT
        and schema.get("type") == "object"
        and isinstance(properties, dict)
        and all(_KEY.fullmatch(key) for key in properties)
        and isinstance(required := schema.get("required", []), list)
        and all(isinstance(one, str) and one in properties for one in required)
        and all(reference.startswith(tuple(f"#/{one}/" for one in _DEFINITIONS)) for reference in _references(schema))
    )


def _references(schema: Schema) -> Iterator[str]:
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if "$ref" in one:
                yield str(one["$ref"])
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _python_arguments(at: int, schema: Schema, json_rule: Callable[[Schema], str]) -> Iterator[str]:
    """For each property a rule of it and all behind it: as the first argument, and after another one."""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    required = schema.get("required", [])
    properties: Mapping[str, Any] = schema["properties"]
    for place, (key, own) in enumerate(properties.items()):
        one, behind = f"value_{at}_{place}", f"next_{at}_{place + 1}"
        for kind, comma in (("first", ""), ("next", ", ")):
            skipped = "" if key in required else f" | {kind}_{at}_{place + 1}"
            yield f"{kind}_{at}_{place}: {_said(f'{comma}{key}=')} {one} {behind}{skipped}"
        schema_here = own if isinstance(own, dict) else {"anyOf": [own]}
        yield f"{one}: {json_rule({**schema_here, **definitions})}"
    for kind in ("first", "next"):
        yield f'{kind}_{at}_{len(properties)}: ""'


def _said(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
