"""What a chat template needs of a body, and what the bodies of APIs have in common that are answered as chats. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from motet.errors import UnsupportedParameter
from motet_gateway.errors import wrong
from motet_gateway.grammars.parameters import FIELDS as GRAMMAR_FIELDS
from motet_gateway.model_not_found import shown
from motet_gateway.parameters import Body, ForbiddingBody
from motet_gateway.tools.parameters import OfferedTools

Json = dict[str, Any]


class Conversation(Protocol):
    prompt_field: ClassVar[str]

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def tools_offered(self) -> OfferedTools | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def add_special_tokens(self) -> bool | None: ...
    @property
    def effort(self) -> str | None: ...
    def plain_messages(self) -> list[Json]:
        """In the words of chat templates: all content is one string for each message."""


class ConversationBody(ForbiddingBody):
    """Of an API whose conversations become those of a chat."""

    hints: ClassVar[frozenset[str]] = Body.hints - {"best_of", "suffix"}
    may_reason = True
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""

    grammar_field: ClassVar[str]
    """The one by which this API asks for structured output."""
    other_names: ClassVar[Mapping[str, str]]
    """Fields of other APIs, and those of this one that do the same."""

    @property
    def add_generation_prompt(self) -> bool | None:
        return not self.continue_final_message

    @property
    def continue_final_message(self) -> bool | None:
        return False

    def plain_messages(self) -> list[Json]:
        raise NotImplementedError

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        extra = {name: value for name, value in (self.model_extra or {}).items() if value not in (None, [])}
        for name in extra:
            if name in GRAMMAR_FIELDS:
                raise UnsupportedParameter(f"{name}: use {self.grammar_field}", param=name)
            if (own := self.other_names.get(name)) is not None:
                raise UnsupportedParameter(f"{name}: use {own}", param=name)
        if extra.get("n", 1) != 1:
            raise UnsupportedParameter("n: there is one answer to a request; send it several times", param="n")


class ChatMessages:
    """Collects the messages of a conversation. Texts of one role that follow each other become one message, as some
    templates want it."""

    def __init__(self) -> None:
        self._leading: list[str] = []
        self._messages: list[Json] = []

    def system(self, text: str) -> None:
        """At the beginning. Templates know no other place for it, so later it is the user's."""
        if self._messages:
            self.text("user", text)
        elif text:
            self._leading.append(text)

    def text(self, role: str, text: str) -> None:
        self._last(role)["content"].append(text)

    def reasoning(self, text: str) -> None:
        """Of the assistant, before what it then said."""
        self._last("assistant").setdefault("reasoning", []).append(text)

    def call(self, name_of_call: str, tool: str, arguments: Any) -> None:
        """`arguments`: an object, or JSON as the model wrote it."""
        function = {"name": tool, "arguments": arguments}
        calls = self._last("assistant").setdefault("tool_calls", [])
        calls.append({"id": name_of_call, "type": "function", "function": function})

    def result(self, name_of_call: str, text: str) -> None:
        self._messages.append({"role": "tool", "tool_call_id": name_of_call, "content": [text]})

    def all(self) -> list[Json]:
        leading = [{"role": "system", "content": self._leading}] if self._leading else []
        return [_joined(one) for one in [*leading, *self._messages]]

    def _last(self, role: str) -> Json:
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]


def _joined(message: Json) -> Json:
    """By both names of reasoning: templates read one or the other."""
    reasoning = dict.fromkeys(("reasoning_content", "reasoning"), "\n".join(message.get("reasoning", ())))
    return {**message, **(reasoning if "reasoning" in message else {}), "content": "\n".join(message["content"])}


def texts(content: Any, where: str, kinds: Sequence[str]) -> list[str]:
    """Of a string, or of a list of parts of these types. Raises InvalidRequest, or UnsupportedParameter, which name the
    field."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of parts")
    return [text_of(part, f"{where}[{at}]", kinds) for at, part in enumerate(content)]


def text_of(part: Any, where: str, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        said = shown(str(kind)) if kind is not None else type(part).__name__
        raise UnsupportedParameter(
            f"{where}.type: {said!r} is not supported here; send text as {' or '.join(map(repr, kinds))}",
            param=f"{where}.type",
        )
    if not isinstance(text := part.get("text"), str):
        raise wrong(f"{where}.text", "must be a string")
    return text


def string(holder: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(value := holder.get(name), str) or not value:
        raise wrong(f"{where}.{name}", "must be a string, and not empty")
    return value
