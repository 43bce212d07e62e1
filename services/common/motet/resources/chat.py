"""How answers of chats are read. Pools and adapters declare it in the same words."""

from motet.chat_formats import UNDECLARED, ChatFormats
from motet.resources.fields import ResourceModel
from motet.tool_calls.formats import ToolFormatName


class Chat(ResourceModel):
    """How the model's answers in chats are read. What an adapter says goes before what its pool says."""

    tool_format: ToolFormatName | None = None
    """The format in which the model calls tools. Absent: the one that its chat template shows."""


def formats_of(chat: Chat | None) -> ChatFormats:
    return UNDECLARED if chat is None else ChatFormats(tool=chat.tool_format or "")
