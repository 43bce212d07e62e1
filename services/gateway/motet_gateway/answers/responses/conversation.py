"""The input of the Responses API in the words of chat templates. Pure."""

from collections.abc import Mapping
from typing import Any

from motet.errors import UnsupportedParameter
from motet_gateway.answers.conversation import ChatMessages, Json, string, texts
from motet_gateway.errors import wrong
from motet_gateway.model_not_found import shown
from motet_gateway.parameters import MAX_MESSAGES
from motet_gateway.tools.messages import EarlierArguments, arguments_of

TEXT = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")
CUSTOM_INPUT = "input"
"""The argument of a custom tool: for the model it is a function with this one string."""


def chat_messages(instructions: str | None, said: Any) -> list[Json]:
    """Raises InvalidRequest, or UnsupportedParameter, which name the field."""
    chat = ChatMessages()
    if instructions:
        chat.system(instructions)
    items = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_MESSAGES:
        raise wrong("input", f"must be a string, or a list of 1 to {MAX_MESSAGES} items")
    earlier = EarlierArguments()
    for at, item in enumerate(items):
        _add(item, f"input[{at}]", chat, earlier)
    if not (made := chat.all()):
        raise wrong("input", "has no content")
    return made


def _add(item: Any, where: str, chat: ChatMessages, earlier: EarlierArguments) -> None:
    if not isinstance(item, dict):
        raise wrong(where, "must be an object with a type or a role")
    match item.get("type", "message" if "role" in item else None):
        case "message":
            _message(item, where, chat)
        case "function_call":
            arguments = arguments_of(item, where, earlier)
            chat.call(string(item, "call_id", where), string(item, "name", where), arguments)
        case "custom_tool_call":
            if not isinstance(given := item.get("input"), str):
                raise wrong(f"{where}.input", "must be a string")
            chat.call(string(item, "call_id", where), string(item, "name", where), {CUSTOM_INPUT: given})
        case "function_call_output" | "custom_tool_call_output":
            output = "\n".join(texts(item.get("output"), f"{where}.output", TEXT))
            chat.result(string(item, "call_id", where), output)
        case "reasoning":
            said = item.get("content") or item.get("summary") or []
            if reasoning := texts(said, f"{where}.content", ("reasoning_text", "summary_text", "text")):
                chat.reasoning("\n".join(reasoning))
        case "item_reference":
            raise UnsupportedParameter(f"{where}: nothing is stored here; send the item itself", param=where)
        case kind:
            raise UnsupportedParameter(
                f"{where}.type: {shown(str(kind))!r} is not supported here; input has messages, calls of functions and "
                "custom tools, and their outputs",
                param=f"{where}.type",
            )


def _message(item: Mapping[str, Any], where: str, chat: ChatMessages) -> None:
    if (role := item.get("role")) not in ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    for text in texts(item.get("content"), f"{where}.content", TEXT):
        if role in ("system", "developer"):
            chat.system(text)
        else:
            chat.text(role, text)
