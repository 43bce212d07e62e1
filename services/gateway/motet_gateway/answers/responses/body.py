"""The body of a request to /v1/responses. Every error names the field and what would be right. Pure."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field

from motet.errors import UnsupportedParameter
from motet.grammars.grammar import Grammar
from motet.sampling import MAX_TOP_LOGPROBS
from motet_gateway.answers.conversation import ConversationBody, Json
from motet_gateway.answers.responses.conversation import chat_messages
from motet_gateway.answers.responses.tools import offered_tools
from motet_gateway.errors import wrong
from motet_gateway.grammars.parameters import TOO_LARGE, grammar_of, grammar_of_schema
from motet_gateway.model_not_found import shown
from motet_gateway.parameters import same_as
from motet_gateway.reasoning import EFFORTS
from motet_gateway.tools.parameters import OfferedTools

LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
OF_TEXT = ("format", "verbosity")
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_WRITTEN = (1 << 63) - 1
"""The answer repeats these integers."""
NOT_STORED: Mapping[str, str] = {
    "previous_response_id": "nothing is stored here; send the whole conversation in input",
    "conversation": "nothing is stored here; send the whole conversation in input",
    "prompt": "no prompts are stored here; send its text in instructions and input",
    "background": "nothing is stored here; wait for the answer, or stream it",
}


class ResponsesBody(ConversationBody):
    hints: ClassVar[frozenset[str]] = ConversationBody.hints | {"context_management"}
    without = frozenset({"include_stop_str_in_output"})
    """This API has no stop strings."""
    prompt_field = "input"
    grammar_field = "text.format"
    other_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "logprobs": f"top_logprobs, and include with {LOGPROBS!r}",
        "stop": "/v1/chat/completions, which has it",
        "functions": "tools",
        "function_call": "tool_choice",
    }

    input: Any
    """The conversation: a string, or a list of messages, calls of tools and their outputs. Items of the type
    `reasoning` have no effect."""
    instructions: str | None = None
    """What the model should know and do. It comes before `input`."""
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_WRITTEN), same_as("max_tokens")] = None
    """The most tokens of the answer. Unset, it may fill the context."""
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_WRITTEN)] | None = None
    """Of tools that OpenAI runs. There are none here, so it has no effect."""
    tools: Any = None
    """Functions and custom tools that the model may call, up to 128. Its chat template has to know tools."""
    tool_choice: Any = None
    """`auto`: the model decides. `none`: it gets no tools. `required`: it has to call one. `{"type": "function",
    "name": …}`: it has to call this one. `{"type": "allowed_tools", …}`: it may call, or with the mode `required` has
    to call, one of these."""
    parallel_tool_calls: bool | None = None
    """False: the answer ends with its first call."""
    text: Any = None
    """`{"format": …}`: the answer is JSON. A format is `{"type": "json_object"}`, `{"type": "json_schema", "name": …,
    "schema": …}` or `{"type": "text"}`."""
    include: list[str] | None = None
    """`message.output_text.logprobs`: return the log probability of each token. `reasoning.encrypted_content` has no
    effect."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS), same_as("top_logprobs")] = None
    """How many alternatives are given for each token. Only with `include`."""
    truncation: Any = None
    """Only `disabled`: input that is too long for the context is an error."""
    metadata: dict[str, Any] | None = None
    """Comes back as it is: up to 16 strings."""
    user: str | None = None
    """Comes back as it is, and has no other effect."""
    safety_identifier: str | None = None
    """Comes back as it is, and has no other effect."""
    prompt_cache_key: str | None = None
    """Comes back as it is, and has no other effect."""
    store: bool | None = None
    """Without effect: nothing is stored, and the answer says `store: false`."""
    reasoning: Any = None
    """`{"effort": …}`: how much a model should reason that is declared to. Its reasoning is an item of its own."""
    stream_options: Any = None
    """Without effect: events are never padded."""
    previous_response_id: Any = None
    """Not supported, since nothing is stored. Send the whole conversation in `input`."""
    conversation: Any = None
    """Not supported, since nothing is stored."""
    prompt: Any = None
    """Not supported, since nothing is stored."""
    background: bool | None = None
    """Only false."""

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name, why in NOT_STORED.items():
            if getattr(self, name) not in (None, False):
                raise UnsupportedParameter(f"{name}: {why}", param=name)
        if self.truncation not in (None, "disabled"):
            raise UnsupportedParameter(
                "truncation: must be 'disabled'; send what fits into the context", param="truncation"
            )
        for at, one in enumerate(self.include or ()):
            if one not in INCLUDES:
                raise UnsupportedParameter(
                    f"include[{at}]: {shown(one)!r} is not supported; only {' and '.join(INCLUDES)}",
                    param=f"include[{at}]",
                )
        if self.top_logprobs and self.top_logprobs_wanted is None:
            raise wrong("top_logprobs", f"needs include with {LOGPROBS!r}; send it, or leave this out")
        if self.reasoning is not None and not isinstance(self.reasoning, dict):
            raise wrong("reasoning", "must be an object")
        if self.effort not in (None, *EFFORTS):
            raise wrong("reasoning.effort", f"must be one of {', '.join(EFFORTS)}")
        self._check_metadata()
        _ = self.echo  # checks that it can be written

    def _check_metadata(self) -> None:
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise wrong("metadata", f"must have at most {MAX_METADATA} entries")
        for name, value in metadata.items():
            if len(name) > MAX_METADATA_KEY or not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
                bounds = f"{MAX_METADATA_VALUE} characters, under names of up to {MAX_METADATA_KEY}"
                raise wrong("metadata", f"must have strings of up to {bounds}")

    @cached_property
    def echo(self) -> dict[str, bytes]:
        """What each response says of the request, as JSON, by field."""
        said = {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": self.service_tier or "auto",
            "store": False,
            "text": {"format": {"type": "text"}}
            | {name: one for name, one in (self.text or {}).items() if one and name in OF_TEXT},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "user": self.user,
        }
        return {name: _written(name, value) for name, value in said.items()}

    def unknown_fields(self) -> list[str]:
        return [*super().unknown_fields(), *(f"text.{name}" for name in self.text or () if name not in OF_TEXT)]

    @property
    def repeated_bytes(self) -> int:
        return 4 * sum(map(len, self.echo.values()))  # there, and in up to three events

    @cached_property
    def chat(self) -> list[Json]:
        """Raises InvalidRequest for a wrong input."""
        return chat_messages(self.instructions, self.input)

    def plain_messages(self) -> list[Json]:
        return self.chat

    @property
    def effort(self) -> str | None:
        return (self.reasoning or {}).get("effort")

    @property
    def turns(self) -> int:
        return len(self.input) if isinstance(self.input, list) else 1

    @cached_property
    def grammar_asked(self) -> tuple[str, Grammar] | None:
        if self.text is not None and not isinstance(self.text, dict):
            raise wrong("text", "must be an object")
        form, where = (self.text or {}).get("format"), self.grammar_field
        kind = form.get("type") if isinstance(form, dict) else None
        if form is None or kind == "text":
            return None
        if kind == "json_object":
            asked = grammar_of({"response_format": form})
            return asked and (where, asked[1])
        if kind != "json_schema":
            raise UnsupportedParameter(
                f"{where}.type: must be 'text', 'json_object' or 'json_schema'", param=f"{where}.type"
            )
        if "schema" not in form:
            raise wrong(f"{where}.schema", "this field is required")
        return where, grammar_of_schema(f"{where}.schema", form["schema"])

    @cached_property
    def tools_offered(self) -> OfferedTools | None:
        return offered_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    @property
    def custom_tools(self) -> frozenset[str]:
        """Their names. Only after the tools were checked."""
        return frozenset(tool["name"] for tool in self.tools or () if tool["type"] == "custom")

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def alternatives_field(self) -> str:
        return "top_logprobs" if self.top_logprobs else "include"

    @property
    def output_limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens


def _written(field: str, value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # orjson reads what it cannot write again
        raise wrong(field, f"is nested too deeply, or {TOO_LARGE}") from None
