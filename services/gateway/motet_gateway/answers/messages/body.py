"""The body of a request to /v1/messages. Every error names the field and what would be right. Pure."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from motet.errors import UnsupportedParameter
from motet.grammars.grammar import Grammar
from motet.sampling import IN_BODIES
from motet_gateway.answers.conversation import ConversationBody, Json, string
from motet_gateway.answers.messages.conversation import chat_messages
from motet_gateway.errors import wrong
from motet_gateway.grammars.parameters import grammar_of_schema
from motet_gateway.model_not_found import shown
from motet_gateway.parameters import Body, Messages, checked_stops, same_as
from motet_gateway.tools.parameters import MAX_TOOLS, OfferedTools, named_functions, offer

TOOL_CHOICES = ("auto", "any", "tool", "none")
THINKING = ("disabled", "adaptive", "enabled")
SERVICE_TIER = "standard_only"
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}


class CountedMessages(ConversationBody):
    """What `/v1/messages` and `/v1/messages/count_tokens` have in common."""

    hints: ClassVar[frozenset[str]] = ConversationBody.hints | {"cache_control", "inference_geo", "context_management"}
    without = frozenset(
        {*Body.model_fields, *IN_BODIES, "bad_words", "stop_sequences"} - {"model", "add_special_tokens"}
    )
    """They change an answer, and not how many tokens there are before it."""
    prompt_field = "messages"
    grammar_field = "output_config.format"
    other_names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "functions": "tools",
        "mcp_servers": "tools, and call them yourself",
        "container": "tools, and run them yourself",
    }

    messages: Messages
    """The conversation, of the roles `user` and `assistant`. `content` is a string, or a list of blocks: `text`,
    `tool_use` and `tool_result`. If the last message is the assistant's, the answer goes on with it."""
    system: Any = None
    """What the model should know and do: a string, or a list of `text` blocks."""
    tools: Any = None
    """Functions that the model may call, up to 128. Its chat template has to know tools."""
    tool_choice: Any = None
    """`{"type": "auto"}`: the model decides. `none`: it gets no tools. `any`: it has to call one. `{"type": "tool",
    "name": …}`: it has to call this one. `disable_parallel_tool_use: true`: the answer ends with its first call."""
    stop_sequences: Any = None
    """The answer ends before the first of these strings: up to 16, each of 1 to 256 characters."""
    thinking: Any = None
    """`{"type": "enabled"}` and `{"type": "adaptive"}`: the answer begins with a block of the type `thinking`, if the
    model reasons. `enabled` needs one that is declared to. Otherwise, as with `disabled`, a model is told not to
    reason."""
    output_config: Any = None
    """`{"format": {"type": "json_schema", "schema": …}}`: the answer is JSON that the schema allows. `effort` has no
    effect."""

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        kind = _object(self.thinking, "thinking").get("type", "disabled")
        if kind not in THINKING:
            raise wrong("thinking.type", f"must be one of {', '.join(THINKING)}")
        if self.grammar_asked is not None and self.continue_final_message:
            raise wrong(
                self.grammar_field,
                "its JSON would begin anew behind the assistant's last message; leave that message out",
            )

    @cached_property
    def chat(self) -> list[Json]:
        """Raises InvalidRequest for a wrong one."""
        return chat_messages(self.system, self.messages)

    def plain_messages(self) -> list[Json]:
        return self.chat

    @property
    def continue_final_message(self) -> bool | None:
        return bool(self.chat[-1]["role"] == "assistant")

    @property
    def turns(self) -> int:
        return len(self.messages)

    @property
    def continued(self) -> str:
        return str(self.chat[-1]["content"]) if self.continue_final_message else ""

    @property
    def thinks(self) -> bool:
        """Whether the client wants to see what the model thinks."""
        return self.thinking is not None and self.thinking.get("type") in ("adaptive", "enabled")

    @property
    def shows_reasoning(self) -> bool:
        return self.thinks

    @property
    def effort(self) -> str | None:
        if not self.thinks:
            return "none"
        said = (self.output_config or {}).get("effort")
        return _EFFORTS.get(said) if isinstance(said, str) else None

    @cached_property
    def grammar_asked(self) -> tuple[str, Grammar] | None:
        config = _object(self.output_config, "output_config")
        if (form := config.get("format")) is None:
            return None
        where = self.grammar_field
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise UnsupportedParameter(f"{where}.type: must be 'json_schema'", param=f"{where}.type")
        if "schema" not in form:
            raise wrong(f"{where}.schema", "this field is required")
        return where, grammar_of_schema(f"{where}.schema", form["schema"])

    @cached_property
    def tools_offered(self) -> OfferedTools | None:
        choice = _object(self.tool_choice, "tool_choice")
        kind, alone = choice.get("type", "auto"), choice.get("disable_parallel_tool_use")
        if kind not in TOOL_CHOICES:
            raise wrong("tool_choice.type", f"must be one of {', '.join(TOOL_CHOICES)}")
        if not isinstance(alone, bool | None):
            raise wrong("tool_choice.disable_parallel_tool_use", "must be true or false")
        if self.tools in (None, []):
            if kind in ("any", "tool"):
                raise wrong("tool_choice", "needs tools; send them, or leave it out")
            return None
        if not isinstance(self.tools, list) or len(self.tools) > MAX_TOOLS:
            raise wrong("tools", f"must be a list of up to {MAX_TOOLS} tools")
        functions = named_functions(
            ((f"tools[{at}]", _function(tool, f"tools[{at}]")) for at, tool in enumerate(self.tools)),
            schema_field="input_schema",
        )
        names: Collection[str] = functions.keys()
        if kind == "none":
            return None
        if kind == "tool":
            name = string(choice, "name", "tool_choice")
            if name not in functions:
                raise wrong("tool_choice.name", f"no tool of the request is called {shown(name)!r}")
            names = [name]
        said = [{"type": "function", "function": dict(function)} for function in functions.values()]
        return offer(functions, names, said=said, must=kind in ("any", "tool"), parallel=not alone and kind != "tool")

    @property
    def top_logprobs_wanted(self) -> int | None:
        return None


class MessagesBody(CountedMessages):
    without = frozenset()
    fills_context = True
    """Clients of this API have to name a limit, and many name one that is larger than a context here."""

    max_tokens: Annotated[int, Field(ge=1), same_as("max_tokens")]
    """The most tokens of the answer. It may be more than the context has left: if the answer fills that, `stop_reason`
    is `model_context_window_exceeded`."""
    service_tier: Annotated[str | None, BeforeValidator(lambda tier: "default" if tier == SERVICE_TIER else tier)] = (
        None
    )
    """As in `/v1/chat/completions`; `standard_only` is as usual."""

    def stops(self) -> list[str]:
        return checked_stops("stop_sequences", self.stop_sequences)

    @property
    def output_limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens


def _function(tool: Any, where: str) -> Mapping[str, Any]:
    """In the words of a chat."""
    if not isinstance(tool, dict):
        raise wrong(where, "must be an object with name and input_schema")
    if (kind := tool.get("type")) not in (None, "custom"):
        raise UnsupportedParameter(
            f"{where}.type: {shown(str(kind))!r} is not supported; describe your own tool with name and input_schema",
            param=f"{where}.type",
        )
    written = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {name: value for name, value in (written | {"strict": tool.get("strict")}).items() if value is not None}


def _object(value: Any, field: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise wrong(field, "must be an object")
    return value or {}
