"""The tools that a request offers, and the fields of a chat that say so: `tools`, `tool_choice` and
`parallel_tool_calls`. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from motet.errors import UnsupportedParameter
from motet.grammars.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarForm
from motet.tool_calls.formats import ToolFormatName
from motet.tool_calls.grammar import CallRules, Schema
from motet_gateway.errors import wrong
from motet_gateway.grammars.parameters import TOO_LARGE
from motet_gateway.model_not_found import shown

MAX_TOOLS = 128
NAME: Final = "^[A-Za-z0-9_-]{1,64}$"
MODES: Final = ("none", "auto", "required")

_NAME = re.compile(NAME)
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    said: list[dict[str, Any]]
    """As the client wrote them, for the chat template."""
    schemas: Mapping[str, Schema]
    """Of the arguments, by name: of the tools that may be called."""
    must: bool
    """The answer has to be calls."""
    parallel: bool
    bound: bool
    """The calls have to follow the schemas, or some tools may not be called."""

    def grammar(self, form: ToolFormatName, content: Schema | None) -> Grammar | None:
        """None: the answer may be anything. `content`: the schema of an answer that calls nothing."""
        if not self.bound and content is None:
            return None
        rules = CallRules(
            format=form,
            tools=self.schemas,
            must=self.must,
            parallel=self.parallel,
            content=None if self.must else content,
        )
        try:
            text = rules.to_text()
        except TypeError:  # how deep they are is bounded where the body is read
            raise wrong("tools", TOO_LARGE) from None
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            raise wrong("tools", f"their schemas have more than {MAX_GRAMMAR_BYTES} bytes; send smaller ones")
        return Grammar(GrammarForm.TOOL_CALLS, text)


def offered_tools(tools: Any, choice: Any, parallel: Any) -> OfferedTools | None:
    """None: the answer calls nothing. Raises InvalidRequest, or UnsupportedParameter, which name the field."""
    if parallel is not None and not isinstance(parallel, bool):
        raise wrong("parallel_tool_calls", "must be true or false")
    if tools in (None, []):
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "needs tools; send them, or leave it out")
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise wrong("tools", f"must be a list of up to {MAX_TOOLS} tools")
    functions = named_functions(_function(tool, f"tools[{at}]") for at, tool in enumerate(tools))
    mode, names = _choice(choice, functions.keys())
    if mode == "none":
        return None
    parallel = parallel is not False and not _is_named(choice)
    return offer(functions, names, said=tools, must=mode == "required", parallel=parallel)


def offer(
    functions: Mapping[str, Mapping[str, Any]],
    names: Collection[str],
    *,
    said: list[dict[str, Any]],
    must: bool,
    parallel: bool,
) -> OfferedTools:
    """`functions`: as `named_functions` gives them. `names`: of those that may be called."""
    may = {name: one for name, one in functions.items() if name in names}
    return OfferedTools(
        said=said,
        schemas={name: _schema(one, exact=must or one.get("strict") is True) for name, one in may.items()},
        must=must,
        parallel=parallel,
        bound=must or len(may) < len(functions) or any(one.get("strict") is True for one in may.values()),
    )


def named_functions(
    functions: Iterable[tuple[str, Mapping[str, Any]]], *, schema_field: str = "parameters"
) -> dict[str, Mapping[str, Any]]:
    """By name. Each comes behind the field that has it, in the words of a chat. `schema_field`: what the client calls
    `parameters`. Raises InvalidRequest."""
    named: dict[str, Mapping[str, Any]] = {}
    for where, function in functions:
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise wrong(f"{where}.name", "must be 1 to 64 letters, digits, '_' and '-'")
        if not isinstance(function.get("description"), str | None):
            raise wrong(f"{where}.description", "must be a string")
        if not isinstance(function.get("strict"), bool | None):
            raise wrong(f"{where}.strict", "must be true or false")
        if schema is not None and not isinstance(schema, dict):
            raise wrong(f"{where}.{schema_field}", "must be a JSON schema of an object")
        if schema is not None and schema.get("type", "object") != "object":
            raise wrong(f"{where}.{schema_field}.type", "must be 'object': arguments have names")
        if name in named:
            raise wrong(f"{where}.name", f"another tool is called {name}, too; rename one")
        named[name] = function
    return named


def _function(tool: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise UnsupportedParameter(
            f"{where}.type: must be 'function'{f', not {shown(str(kind))!r}' if kind else ''}", param=f"{where}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", "must be an object with name and parameters")
    return f"{where}.function", function


def _schema(function: Mapping[str, Any], *, exact: bool) -> Schema:
    if not exact:
        return _ANY_ARGUMENTS
    schema: Schema | None = function.get("parameters")
    return _NO_ARGUMENTS if schema is None else {"type": "object", **schema}


def _choice(choice: Any, names: Collection[str]) -> tuple[str, Collection[str]]:
    """The mode, and the tools that may be called."""
    if choice is None or choice in MODES:
        return choice or "auto", names
    where = "tool_choice"
    if _is_named(choice):
        return "required", [_named(choice, where, names)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        where = f"{where}.allowed_tools"
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
            raise wrong(f"{where}.mode", "must be 'auto' or 'required'")
        tools = allowed.get("tools")
        if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
            raise wrong(f"{where}.tools", f"must be a list of 1 to {MAX_TOOLS} tools")
        return allowed["mode"], [_named(tool, f"{where}.tools[{at}]", names) for at, tool in enumerate(tools)]
    raise wrong(where, f"must be one of {', '.join(MODES)}, or name a function or allowed_tools")


def _is_named(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "function"


def _named(one: Any, where: str, names: Collection[str]) -> str:
    function = one.get("function") if _is_named(one) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise wrong(f"{where}.function.name", "this field is required")
    if name not in names:
        raise wrong(f"{where}.function.name", f"no tool of the request is called {shown(name)!r}")
    return name
