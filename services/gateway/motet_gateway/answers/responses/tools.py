"""The fields by which a request to /v1/responses offers tools. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from motet.errors import UnsupportedParameter
from motet_gateway.answers.conversation import string
from motet_gateway.answers.responses.conversation import CUSTOM_INPUT
from motet_gateway.errors import wrong
from motet_gateway.model_not_found import shown
from motet_gateway.tools.parameters import MAX_TOOLS, MODES, OfferedTools, named_functions, offer

KINDS = ("function", "custom")


def offered_tools(tools: Any, choice: Any, *, parallel: bool) -> OfferedTools | None:
    """None: the answer calls nothing. Raises InvalidRequest, or UnsupportedParameter, which name the field."""
    if tools in (None, []):
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "needs tools; send them, or leave it out")
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise wrong("tools", f"must be a list of up to {MAX_TOOLS} tools")
    functions = named_functions((f"tools[{at}]", _function(tool, f"tools[{at}]")) for at, tool in enumerate(tools))
    mode, names = _choice(choice, functions.keys())
    if mode == "none":
        return None
    said = [{"type": "function", "function": dict(function)} for function in functions.values()]
    parallel = parallel and not _is_named(choice)
    return offer(functions, names, said=said, must=mode == "required", parallel=parallel)


def _function(tool: Any, where: str) -> Mapping[str, Any]:
    """In the words of a chat."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in KINDS:
        raise UnsupportedParameter(
            f"{where}.type: {shown(str(kind))!r} is not supported here; send a tool of the type 'function' or 'custom' "
            "and run it yourself",
            param=f"{where}.type",
        )
    if kind == "function":
        kept = ("name", "description", "parameters", "strict")
        return {name: tool[name] for name in kept if tool.get(name) is not None}
    said = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    pattern = _pattern(tool.get("format"), f"{where}.format")
    given = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: given},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return said | {"parameters": parameters, "strict": pattern is not None}


def _pattern(form: Any, where: str) -> str | None:
    """The regular expression that the input of a custom tool has to follow."""
    kind = form.get("type") if isinstance(form, dict) else form
    if kind is None or kind == "text":
        return None
    if kind != "grammar":
        raise UnsupportedParameter(f"{where}.type: must be 'text' or 'grammar'", param=f"{where}.type")
    if form.get("syntax") != "regex":
        raise UnsupportedParameter(
            f"{where}.syntax: must be 'regex': the model writes the input as a string of JSON, which no other grammar "
            "describes",
            param=f"{where}.syntax",
        )
    return string(form, "definition", where)


def _choice(choice: Any, names: Collection[str]) -> tuple[str, Collection[str]]:
    """The mode, and the tools that may be called."""
    if choice is None or choice in MODES:
        return choice or "auto", names
    if _is_named(choice):
        return "required", [_named(choice, "tool_choice", names)]
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        raise wrong(
            "tool_choice", f"must be one of {', '.join(MODES)}, or name a function, a custom tool or allowed_tools"
        )
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise wrong("tool_choice.mode", "must be 'auto' or 'required'")
    if not isinstance(allowed, list) or not 1 <= len(allowed) <= MAX_TOOLS:
        raise wrong("tool_choice.tools", f"must be a list of 1 to {MAX_TOOLS} tools")
    return mode, [_named(tool, f"tool_choice.tools[{at}]", names) for at, tool in enumerate(allowed)]


def _is_named(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") in KINDS


def _named(one: Any, where: str, names: Collection[str]) -> str:
    if not _is_named(one):
        raise wrong(f"{where}.type", "must be 'function' or 'custom'")
    if (name := string(one, "name", where)) not in names:
        raise wrong(f"{where}.name", f"no tool of the request is called {shown(name)!r}")
    return name
