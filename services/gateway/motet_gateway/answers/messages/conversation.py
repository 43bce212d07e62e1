"""A conversation of the Messages API in the words of chat templates. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from motet_gateway.answers.conversation import ChatMessages, Json, string, text_of, texts
from motet_gateway.errors import wrong
from motet_gateway.parameters import MAX_MESSAGES
from motet_gateway.tools.messages import EarlierArguments

TEXT = ("text",)


def chat_messages(system: Any, messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Raises InvalidRequest, or UnsupportedParameter, which name the field."""
    chat = ChatMessages()
    for text in texts(system, "system", TEXT) if system is not None else ():
        chat.system(text)
    earlier = EarlierArguments()
    for at, message in enumerate(messages):
        _add(message, f"messages[{at}]", chat, earlier, last=at == len(messages) - 1)
    if not (made := chat.all()):
        raise wrong("messages", "have no content")
    if len(made) > MAX_MESSAGES:  # each result of a call is one
        raise wrong("messages", f"must have at most {MAX_MESSAGES} results of calls and other messages together")
    return made


def _add(message: Mapping[str, Any], where: str, chat: ChatMessages, earlier: EarlierArguments, *, last: bool) -> None:
    role, content = message.get("role"), message.get("content")
    where_content = f"{where}.content"
    if role != "assistant" and content in ("", []):  # without it, the message before would be the last
        raise wrong(where_content, "must not be empty")
    match role:
        case "system":
            for text in texts(content, where_content, TEXT):
                chat.system(text)
        case "user":
            for block, at in _blocks(content, where_content):
                if block.get("type") == "tool_result":
                    _result(block, at, chat)
                else:
                    chat.text("user", text_of(block, at, (*TEXT, "tool_result")))
        case "assistant":
            for block, at in _blocks(content, where_content):
                _said(block, at, chat, earlier, last=last)
        case _:
            raise wrong(f"{where}.role", "must be 'user' or 'assistant'")


def _blocks(content: Any, where: str) -> list[tuple[Any, str]]:
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of blocks")
    for at, block in enumerate(content):
        if not isinstance(block, dict):
            raise wrong(f"{where}[{at}]", "must be an object with a type")
    return [(block, f"{where}[{at}]") for at, block in enumerate(content)]


def _result(block: Mapping[str, Any], where: str, chat: ChatMessages) -> None:
    content = block.get("content")
    text = "" if content is None else "\n".join(texts(content, f"{where}.content", TEXT))
    chat.result(string(block, "tool_use_id", where), text)


def _said(block: Mapping[str, Any], where: str, chat: ChatMessages, earlier: EarlierArguments, *, last: bool) -> None:
    match block.get("type"):
        case "tool_use":
            if last:
                raise wrong(where, "the results of the last calls have to follow, in a message of the user")
            if not isinstance(arguments := block.get("input"), dict):
                raise wrong(f"{where}.input", "must be an object")
            exact = earlier.exact(arguments, f"{where}.input")
            chat.call(string(block, "id", where), string(block, "name", where), exact)
        case "thinking":
            chat.reasoning(string(block, "thinking", where))
        case "redacted_thinking":
            pass  # nobody here can read it
        case _:
            text = text_of(block, where, (*TEXT, "tool_use"))
            if text or not last:  # an empty last one begins no answer
                chat.text("assistant", text)
