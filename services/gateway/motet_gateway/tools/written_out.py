"""Tools for models whose chat template reads none: tools, calls and results as plain text of the messages. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from motet.errors import InvalidRequest
from motet.tool_calls.formats import ToolFormat
from motet.tool_calls.written import written_calls

Message = dict[str, Any]

_SYSTEM = ("system", "developer")
_EXAMPLE = {"parameter": "value"}


def written_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: ToolFormat, *, takes_system: bool
) -> list[Message]:
    """The messages as text alone. The tools stand in the system message, behind its own text. Where the template does
    not show one (`takes_system`), or only a developer has said something, they stand before the user's first text."""
    names = {call.get("id"): call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    plain: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(_result(message, names))
            continue
        if results and message["role"] == "user":
            results.append(message["content"])
            continue
        _add_results(plain, results)
        plain.append(_with_calls(message, form))
    _add_results(plain, results)
    if not tools:
        return plain
    shown = _tools_text(tools, form)
    leading = next((at for at, one in enumerate(plain) if one["role"] not in _SYSTEM), len(plain))
    if takes_system and not leading:
        return [{"role": "system", "content": shown}, *plain]
    if takes_system and plain[0]["role"] == "system":
        return [_joined(plain[0], plain[0]["content"], shown), *plain[1:]]
    if leading < len(plain) and plain[leading]["role"] == "user":
        first = plain[leading]
        return [*plain[:leading], _joined(first, shown, first["content"]), *plain[leading + 1 :]]
    return [*plain[:leading], {"role": "user", "content": shown}, *plain[leading:]]


def _joined(message: Message, *texts: str) -> Message:
    return {**message, "content": "\n\n".join(filter(None, texts))}


def _with_calls(message: Message, form: ToolFormat) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    functions = [call["function"] for call in calls]
    try:
        text = written_calls(form, [(one["name"], one["arguments"]) for one in functions])
    except (TypeError, RecursionError) as error:  # they may be nested deeper than can be written again
        raise InvalidRequest(f"messages: the arguments of a call cannot be shown: {error}", param="messages") from None
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return plain | {"content": "\n".join(filter(None, (message["content"], text)))}


def _result(message: Message, names: Mapping[str | None, str]) -> str:
    name = message.get("name") or names.get(message.get("tool_call_id"))
    return f"Result of {name if isinstance(name, str) else 'the tool'}:\n{message['content']}"


def _add_results(plain: list[Message], results: list[str]) -> None:
    """As one message, with what the user says behind them: templates want user and assistant in turn."""
    if results:
        plain.append({"role": "user", "content": "\n\n".join(results)})
        results.clear()


def _tools_text(tools: Iterable[Mapping[str, Any]], form: ToolFormat) -> str:
    try:
        listed = "\n".join(orjson.dumps(tool["function"]).decode() for tool in tools)
    except TypeError as error:  # orjson reads what it cannot write again
        raise InvalidRequest(f"tools: cannot be shown to the model as JSON: {error}", param="tools") from None
    example = written_calls(form, [("name_of_the_tool", _EXAMPLE)])
    return f"You can call these tools:\n{listed}\n\nTo call one, write it like this:\n{example}"
