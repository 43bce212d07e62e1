"""How answers of chats are read. Pools and adapters declare it in the same words."""

from motet.chat_formats import UNDECLARED, ChatFormats
from motet.reasoning.formats import ReasoningFormatName
from motet.resources.fields import ResourceModel
from motet.tool_calls.formats import ToolFormatName


class Chat(ResourceModel):
    """How the model's answers in chats are read. What an adapter says goes before what its pool says."""

    tool_format: ToolFormatName | None = None
    """The format in which the model calls tools. Absent: the one that its chat template shows."""

    reasoning_format: ReasoningFormatName | None = None
    """The tags between which the model writes its reasoning. Absent: its answers are read as content alone."""


class PoolChat(Chat):
    request_templates: bool | None = None
    """Whether a request may bring a chat template of its own (`chat_template`), which the gateway then runs in the
    sandbox and within the bounds of all templates. Absent: it may not."""


def formats_of(chat: Chat | None) -> ChatFormats:
    if chat is None:
        return UNDECLARED
    return ChatFormats(
        tool=chat.tool_format or "",
        reasoning=chat.reasoning_format or "",
        request_templates=isinstance(chat, PoolChat) and bool(chat.request_templates),
    )
