"""How a model's chats are written and its answers read, as pools and adapters declare it."""

from dataclasses import dataclass
from typing import Final, Self

from motet.api.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormats:
    """Empty: it is not declared. A newer operator may declare names that this version does not know."""

    tool: str = ""
    reasoning: str = ""
    request_templates: bool = False
    """Requests may bring a chat template of their own. Only pools permit it."""

    @classmethod
    def from_proto(cls, message: scheduler_pb2.ChatFormats) -> Self:
        return cls(tool=message.tool, reasoning=message.reasoning, request_templates=message.request_templates)

    def to_proto(self) -> scheduler_pb2.ChatFormats:
        return scheduler_pb2.ChatFormats(
            tool=self.tool, reasoning=self.reasoning, request_templates=self.request_templates
        )

    def over(self, others: "ChatFormats") -> "ChatFormats":
        """What this declares, and for the rest what the others do."""
        return ChatFormats(
            tool=self.tool or others.tool,
            reasoning=self.reasoning or others.reasoning,
            request_templates=self.request_templates or others.request_templates,
        )


UNDECLARED: Final = ChatFormats()
