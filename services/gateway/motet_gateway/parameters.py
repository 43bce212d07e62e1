"""Checks request bodies. Every error names the field and what would be right. Pure."""

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from motet.api.v1 import common_pb2, runner_pb2
from motet.described_model import DescribedModel
from motet.errors import InvalidRequest, UnsupportedParameter
from motet.grammars.grammar import Grammar, GrammarForm
from motet.sampling import IN_BODIES, MAX_TOP_LOGPROBS, OPTIONS, USUAL, Sampling, check_min_tokens, whole
from motet_gateway.grammars.parameters import FIELDS as GRAMMAR_FIELDS
from motet_gateway.grammars.parameters import grammar_of
from motet_gateway.model_not_found import shown
from motet_gateway.reasoning import EFFORTS, read_reasoning
from motet_gateway.tokens.text_model import ModelTokenizer
from motet_gateway.tools.messages import EarlierArguments, read_calls
from motet_gateway.tools.parameters import OfferedTools, offered_tools
from motet_gateway.unsupported_parameters import UNSUPPORTED, refuse_known_to_others

MAX_CHOICES = 128
MAX_ANSWERS = 1024
"""Choices of all prompts of one request"""
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
"""Every piece of text is compared with every stop string. OpenAI takes 4 strings, harnesses send more; with these two
bounds a token costs less than 0.1 ms, whatever the strings are."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES, MAX_BAD_WORDS_BYTES = 1000, 4096
"""Of one, and of all together: a word may be a token for each byte, and the engine reads them for each choice."""
MAX_SALT_LENGTH = 128
MAX_MODEL_NAME_LENGTH = 512
"""Longer than the names of a pool, a tenant and an adapter together may be."""
MAX_MESSAGES = 4096
"""Chat templates loop over the messages, some of them several times. This number of messages fills any context."""
MAX_PROMPTS = 128
MAX_TEMPLATE_LENGTH = 64 * 1024
"""Templates of models have up to 20,000 characters."""
MAX_SCORES = 1 << 19
"""The most log probabilities of prompts in one answer, and the most of its own tokens: of each token and its
alternatives, for each choice. They are about 15 MB of JSON, for a chat 40 MB."""

Tokens = Sequence[int]
"""A prompt as an `array`: a list takes nine times the memory."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Integer = Annotated[int, BeforeValidator(whole)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
"""The first error ends the check of a list: a complaint for each of four million elements takes longer than the rest of
the request."""


def same_as(option: str, *others: int) -> BeforeValidator:
    """Checks a field as the option of sampling whose values it has, or that it has one of the others."""

    def check(value: Any, info: ValidationInfo) -> Any:
        value = whole(value)
        if value is not None and not (type(value) is int and value in others):
            OPTIONS[option].check(info.field_name or option, value)
        return value

    return BeforeValidator(check)


_KNOWN = frozenset().union(IN_BODIES, UNSUPPORTED, GRAMMAR_FIELDS)
"""Fields that no class below has, and that act or are refused"""


def _or_empty(name: Any) -> Any:
    return "" if name is None else name


class StreamOptions(DescribedModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False
    """One more event before `[DONE]` has the usage of the whole answer."""
    continuous_usage_stats: bool = False
    """Every event has the usage so far."""


_NO_USAGE = StreamOptions()


class Body(DescribedModel):
    """What all requests for an answer have in common."""

    model_config = ConfigDict(extra="allow", strict=True)

    hints: ClassVar[frozenset[str]] = frozenset({
        "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata", "store", "verbosity",
        "reasoning_effort", "spaces_between_special_tokens", "best_of", "suffix", "request_id", "rid", "prediction",
        "guided_decoding_backend", "data_parallel_rank",
    })  # fmt: skip
    """Known, and without effect here or checked elsewhere: no reason to count them as unknown."""
    without: ClassVar[frozenset[str]] = frozenset()
    """Fields of other bodies that change nothing here. The description of the API leaves them out, and a header names
    those that a request has."""
    refused_here: ClassVar[Mapping[str, str]] = {}
    """What of these, and of the fields below, this body refuses unless it asks for nothing: the reasons"""
    tells_seed: ClassVar[bool] = False
    """The answer names the seed, so that the client can have it again."""

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME_LENGTH), BeforeValidator(_or_empty)] = ""
    """A name that `GET /v1/models` lists. May be left out where only one base model is served."""
    stream: bool | None = None
    """Send the answer as server-sent events."""
    seed: Integer | None = None
    """Makes sampling repeatable: any integer."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string in the answer."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Unset: true."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1), BeforeValidator(whole)] = None
    """Keep only this number of the prompt's tokens, with those that the tokenizer adds. -1: as many as fit into the
    context beside an answer of `max_tokens`, or of 16."""
    truncation_side: Literal["left", "right"] | None = None
    """Where `truncate_prompt_tokens` cuts. Unset: left, so that the end of the prompt is kept."""
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_LENGTH)] | None = None
    """Only requests with the same text here share cached prompts."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens to the prompt. Unset: true for a completion and for `/tokenize` with a
    prompt, false for a chat, whose template has them."""
    priority: Integer | None = None
    """Below 0: before others. Above 0: after others. Never above what adapter and pool grant."""
    service_tier: str | None = None
    """`priority` goes first; `flex` and `batch` go last; the others are as usual. Never above what adapter and
    pool grant."""

    prompt_field: ClassVar[str]
    """The field that has the prompt."""
    usual_tokens: ClassVar[int | None] = None
    """The most tokens of an answer if the client does not say. None: as many as the context has left."""
    fills_context: ClassVar[bool] = False
    """Whether an answer may fill the context if the client allows it more tokens than that. Otherwise this is an
    error."""

    @property
    def turns(self) -> int:
        """Of a conversation."""
        return 0

    may_reason: ClassVar[bool] = False
    """Whether reasoning is taken out of the answer's text, where the model is declared to reason. Such a request has
    one prompt."""

    @property
    def shows_reasoning(self) -> bool:
        return True

    @property
    def separates_reasoning(self) -> bool:
        """Whether what a model that reasons has thought stands beside the content."""
        return True

    @property
    def streams_reasoning(self) -> bool:
        """Whether a stream has it while it is written."""
        return True

    @property
    def effort(self) -> str | None:
        """How much the model should reason, one of `EFFORTS`."""
        return None

    @property
    def continued(self) -> str:
        """The beginning of the answer, if the prompt has it."""
        return ""

    @property
    def prompt_comes_back(self) -> bool:
        """Before its answers."""
        return False

    @cached_property
    def options(self) -> dict[str, Any]:
        """What the client says of sampling by options for which nothing here is special. Their fields are not listed
        above: `motet.sampling` declares them. Raises InvalidRequest for a wrong value."""
        said = [(name, value) for name, value in (self.model_extra or {}).items() if value is not None]
        return {name: IN_BODIES[name].check(name, value) for name, value in said if name in IN_BODIES}

    @property
    def grammar_asked(self) -> tuple[str, Grammar] | None:
        """The grammar that the answer has to follow, behind the field that asks for it. Raises InvalidRequest for a
        wrong value."""
        return None

    def unknown_fields(self) -> list[str]:
        """That have no effect: those that it is `without`, and those that nobody here knows."""
        unknown = [name for name in self.model_extra or () if name not in _KNOWN and name not in self.hints]
        return [*sorted(self.without & self.model_fields_set), *unknown]

    def refuse_unsupported(self) -> None:
        _ = self.options  # checks them
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens: must be -1 or from 1", param="truncate_prompt_tokens")
        self.forbidden_words()
        if self.grammar_asked is not None:
            self._refuse_with_grammar()
        if self.tools_offered is not None:
            self._check_with_tools(self.tools_offered)
        refuse_known_to_others(self.model_extra or {})

    def _refused(self, name: str) -> UnsupportedParameter:
        return _unsupported(name, self.refused_here[name])

    def _check_with_tools(self, offered: OfferedTools) -> None:
        if self.grammar_asked is not None and self.grammar_asked[1].form is not GrammarForm.JSON_SCHEMA:
            name = self.grammar_asked[0]
            raise InvalidRequest(f"{name}: with tools only a JSON schema can be sent; leave it out", param=name)
        if offered.bound:
            self._refuse_with_grammar()

    def _refuse_with_grammar(self) -> None:
        for name in ("ignore_eos", "min_tokens"):
            if self.options.get(name):
                raise InvalidRequest(
                    f"{name}: an answer that follows a grammar ends where the grammar does; leave it out", param=name
                )

    @property
    def tools_offered(self) -> OfferedTools | None:
        """The tools that the answer may call. Raises InvalidRequest for wrong ones."""
        return None

    def stops(self) -> list[str]:
        """Raises InvalidRequest for a wrong value."""
        return []

    def forbidden_words(self) -> list[str]:
        """That the answer has nowhere. Raises InvalidRequest for a wrong value."""
        return []

    @property
    def choices(self) -> int:
        """Of each prompt."""
        return 1

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many alternatives beside each token; None: no logprobs at all."""
        raise NotImplementedError

    @property
    def tokens_as_ids(self) -> bool:
        """In log probabilities"""
        return False

    @property
    def token_ids_wanted(self) -> bool:
        """Of prompt and answer"""
        return False

    @property
    def alternatives_field(self) -> str:
        """The field that says how many alternatives to return."""
        return "logprobs"

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """How many alternatives beside each token of the prompt; None: no logprobs of the prompt."""
        return None

    @property
    def scores_of_prompts(self) -> int | None:
        """How many alternatives beside each token of the prompt, in vLLM's form; None: none in this form."""
        return None

    @property
    def scores_for(self) -> Sequence[str]:
        """The fields that ask for log probabilities of the prompt."""
        return ()

    @property
    def repeated_bytes(self) -> int:
        """About what the answer repeats of the request."""
        return 0

    @property
    def scores_only(self) -> bool:
        """Whether the client wants the prompt back and no answer."""
        return False

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        raise NotImplementedError


class ForbiddingBody(Body):
    """One that may keep texts from its answers."""

    bad_words: Any = None
    """Texts that the answer has nowhere: up to 128, each of 1 to 256 characters. A text is forbidden in the tokens that
    the tokenizer makes of it, by itself and behind a blank."""

    def forbidden_words(self) -> list[str]:
        if (words := self.bad_words) is None:
            return []
        if (
            not isinstance(words, list)
            or len(words) > MAX_BAD_WORDS
            or not all(isinstance(one, str) and one.strip() and len(one) <= MAX_STOP_LENGTH for one in words)
        ):
            raise InvalidRequest(
                f"bad_words: must be a list of up to {MAX_BAD_WORDS} strings, each of 1 to {MAX_STOP_LENGTH} "
                "characters and not blank",
                param="bad_words",
            )
        sizes = [len(one.encode(errors="replace")) for one in words]
        if max(sizes, default=0) > MAX_BAD_WORD_BYTES or sum(sizes) > MAX_BAD_WORDS_BYTES:
            raise InvalidRequest(
                f"bad_words: must be at most {MAX_BAD_WORDS_BYTES} bytes together, and {MAX_BAD_WORD_BYTES} each; send "
                "fewer or shorter ones",
                param="bad_words",
            )
        return words


class ChoicesBody(ForbiddingBody):
    """What chat and plain completions have in common."""

    stream_options: StreamOptions | None = None
    """Only with `stream: true`; ignored otherwise."""
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES), BeforeValidator(whole)] = None
    """How many choices, each an answer of its own, for each prompt."""
    max_tokens: Annotated[int | None, Field(ge=1), same_as("max_tokens")] = None
    """The most tokens of an answer. Unset, a chat answer may fill the context, and a completion has 16."""
    stop: Any = None
    """The answer ends before the first of these strings. One string or up to 16, each of 1 to 256 characters."""
    response_format: Any = None
    """The answer is JSON: `{"type": "json_object"}`, or what a schema says: `{"type": "json_schema", "json_schema":
    {"name": …, "schema": …}}`. Or `{"type": "text"}`."""
    return_token_ids: bool | None = None
    """Return the ids of all tokens of prompt and answer."""
    return_tokens_as_token_ids: bool | None = None
    """Log probabilities show tokens as `token_id:5`, which tells apart those that read alike."""
    prompt_logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_TOP_LOGPROBS),
        same_as("top_logprobs"),
        BeforeValidator(lambda asked: None if asked is False else asked),
    ] = None
    """Return the log probability of each token of the prompt, with this number of alternatives. Not in a stream."""

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs: only a whole answer has them; set stream to false", param="prompt_logprobs"
            )

    @property
    def scores_of_prompts(self) -> int | None:
        return self.prompt_logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        return self.prompt_logprobs

    @property
    def scores_for(self) -> Sequence[str]:
        return () if self.prompt_logprobs is None else ("prompt_logprobs",)

    @property
    def usage_wanted(self) -> StreamOptions:
        """`stream_options`, as far as they act."""
        return (self.stream_options if self.stream else None) or _NO_USAGE

    @cached_property
    def grammar_asked(self) -> tuple[str, Grammar] | None:
        return grammar_of({"response_format": self.response_format} | (self.model_extra or {}))

    def stops(self) -> list[str]:
        return checked_stops("stop", [self.stop] if isinstance(self.stop, str) else self.stop)

    @property
    def tokens_as_ids(self) -> bool:
        return bool(self.return_tokens_as_token_ids)

    @property
    def token_ids_wanted(self) -> bool:
        return bool(self.return_token_ids)

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def output_limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens


class ChatBody(ChoicesBody):
    prompt_field = "messages"
    may_reason = True

    messages: Messages
    """The conversation. `content` is a string, or a list of parts of type `text`."""
    max_completion_tokens: Annotated[int | None, Field(ge=1), same_as("max_tokens")] = None
    """The newer name of `max_tokens`; of both, this one counts."""
    logprobs: Annotated[bool | None, same_as("logprobs")] = None
    """Return the log probability of each token."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS), same_as("top_logprobs")] = None
    """How many alternatives are given for each token. Needs `logprobs: true`."""
    add_generation_prompt: bool | None = None
    """Let the template begin the assistant's message. Unset: true, unless `continue_final_message` is set."""
    continue_final_message: bool | None = None
    """Go on with the last message, which must be the assistant's."""
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_LENGTH)] | None = None
    """A template in jinja2 in place of the model's own, of up to 64 KiB. Only where the pool has
    `spec.chat.requestTemplates`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""
    documents: list[dict[str, Any]] | None = None
    """For models whose chat template reads them: what to answer from."""
    tools: Any = None
    """Functions that the model may call, up to 128. Its chat template has to know tools."""
    tool_choice: Any = None
    """`auto`: the model decides. `none`: it gets no tools. `required`: it has to call one. `{"type": "function", …}`:
    it has to call this one. `{"type": "allowed_tools", …}`: it may call, or with the mode `required` has to call, one
    of these."""
    parallel_tool_calls: bool | None = None
    """False: the answer ends with its first call."""
    functions: Any = None
    """Not supported; only an empty list. Use `tools`."""
    function_call: Any = None
    """Not supported. Use `tool_choice`."""
    modalities: Any = None
    """Only `["text"]`."""
    reasoning_effort: str | None = None
    """`none`, `minimal`, `low`, `medium`, `high` or `xhigh`, for models that are declared to reason: their chat
    template gets it, and whether to reason at all."""
    include_reasoning: bool | None = None
    """False: the answer comes without its reasoning. Unset: true."""
    separate_reasoning: bool | None = None
    """False: tags and reasoning stay in `content`, as the model writes them, and no tools may be sent. Unset: true."""
    stream_reasoning: bool | None = None
    """False: a stream has the reasoning as a whole, when it has ended. Unset: true."""

    refused_here: ClassVar[Mapping[str, str]] = {
        "functions": "it is not supported; use tools",
        "function_call": "it is not supported; use tool_choice",
        "modalities": "only ['text'] is supported",
    }

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.functions:
            raise self._refused("functions")
        if self.function_call not in (None, "none", "auto"):
            raise self._refused("function_call")
        if self.modalities is not None and self.modalities != ["text"]:
            raise self._refused("modalities")
        if self.reasoning_effort not in (None, *EFFORTS):
            raise InvalidRequest(f"reasoning_effort: must be one of {', '.join(EFFORTS)}", param="reasoning_effort")
        if self.logprobs and not self.shows_reasoning:
            raise InvalidRequest(
                "include_reasoning: with logprobs the tokens of the reasoning come too; leave one of both out",
                param="include_reasoning",
            )
        if not self.separates_reasoning:
            if not self.shows_reasoning:
                raise InvalidRequest(
                    "separate_reasoning: what stays in content cannot be left out; set it or include_reasoning to true",
                    param="separate_reasoning",
                )
            if self.tools_offered is not None:
                raise InvalidRequest(
                    "separate_reasoning: calls of tools are read behind the reasoning; leave it out, or send no tools",
                    param="separate_reasoning",
                )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true; set one to false",
                param="continue_final_message",
            )
        if self.continue_final_message and self.messages[-1].get("role") != "assistant":
            raise InvalidRequest(
                "continue_final_message: the final message must have the role assistant", param="continue_final_message"
            )

    @cached_property
    def tools_offered(self) -> OfferedTools | None:
        return offered_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False

    @property
    def separates_reasoning(self) -> bool:
        return self.separate_reasoning is not False

    @property
    def streams_reasoning(self) -> bool:
        return self.stream_reasoning is not False

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    @property
    def continued(self) -> str:
        if not self.continue_final_message:
            return ""
        content = self.messages[-1].get("content")
        return content if isinstance(content, str) else ""

    def plain_messages(self, *, parts: bool = False) -> list[dict[str, Any]]:
        """The messages with all content as one string each, unless the template reads `parts`."""
        earlier = EarlierArguments()
        return [_plain(message, f"messages[{i}]", earlier, parts=parts) for i, message in enumerate(self.messages)]

    @property
    def turns(self) -> int:
        return len(self.messages)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def alternatives_field(self) -> str:
        return "top_logprobs" if self.top_logprobs else "logprobs"

    @property
    def output_limit(self) -> tuple[str, int | None]:
        # If both names are given, the newer one wins.
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().output_limit


class CompletionBody(ChoicesBody):
    prompt_field = "prompt"
    usual_tokens = 16
    """OpenAI's default, which clients know and rely on."""

    prompt: Any
    """A string, a list of up to 128 strings, a list of token ids, or up to 128 such lists."""
    max_tokens: Annotated[int | None, Field(ge=0), same_as("max_tokens", 0)] = None
    """The most tokens of an answer. Unset: 16. 0 only with `echo`: the prompt alone comes back."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS), same_as("top_logprobs")] = None
    """Return the log probability of each token, with this number of alternatives."""
    echo: bool | None = None
    """Put the prompt before the answer, with `logprobs` those of its tokens, too. The first token has none."""

    refused_here: ClassVar[Mapping[str, str]] = {
        "suffix": "text after the answer is not supported; send only prompt",
        "best_of": "it is not supported; use n",
    }

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        extra = self.model_extra or {}
        if extra.get("suffix"):
            raise self._refused("suffix")
        if extra.get("best_of") not in (None, self.choices):
            raise self._refused("best_of")
        if self.max_tokens == 0:
            if not self.echo:
                raise InvalidRequest(
                    "max_tokens must be an integer from 1, not 0. Or set echo to true.", param="max_tokens"
                )
            check_min_tokens(self.options.get("min_tokens", 0), 0)

    @field_validator("prompt")
    @classmethod
    def _compact(cls, prompt: Any) -> Any:
        """Token ids as arrays: the body is kept until the request ends."""
        if not isinstance(prompt, list) or not prompt:
            return prompt
        if (tokens := _tokens(prompt)) is not None:
            return tokens
        return [(_tokens(one) or one) if isinstance(one, list) else one for one in prompt]

    def prompts(self) -> list[str | Tokens]:
        prompt = self.prompt
        if isinstance(prompt, str | array):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if len(prompt) > MAX_PROMPTS:
                raise InvalidRequest(f"prompt: must have at most {MAX_PROMPTS} prompts", param="prompt")
            if len(prompt) * self.choices > MAX_ANSWERS:
                raise InvalidRequest(f"n: all prompts together have at most {MAX_ANSWERS} choices", param="n")
            if all(isinstance(entry, str) for entry in prompt):
                return prompt
            if all(isinstance(entry, array) for entry in prompt):
                return prompt
        raise InvalidRequest(
            "prompt: must be a string, a list of strings, a list of token ids or a list of lists of token ids, "
            "and not empty",
            param="prompt",
        )

    @property
    def prompt_comes_back(self) -> bool:
        return bool(self.echo)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        asked = [self.logprobs if self.echo else None, self.prompt_logprobs]
        return max((one for one in asked if one is not None), default=None)

    @property
    def scores_for(self) -> Sequence[str]:
        return (*(("echo",) if self.echo and self.logprobs is not None else ()), *super().scores_for)

    @property
    def scores_only(self) -> bool:
        return self.max_tokens == 0


class TokenizeBody(DescribedModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME_LENGTH)] | None = None
    """May be left out where only one base model is served."""
    prompt: str | None = None
    """The text to count. Either this or `messages`."""
    messages: Messages | None = None
    """The conversation to count, after the model's chat template."""
    add_special_tokens: bool | None = None
    """As in a request for an answer."""
    add_generation_prompt: bool | None = None
    """As in `/v1/chat/completions`."""
    continue_final_message: bool | None = None
    """As in `/v1/chat/completions`."""
    chat_template: str | None = None
    """As in `/v1/chat/completions`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As in `/v1/chat/completions`."""
    return_token_strs: bool | None = None
    """Return each token's text too."""

    def chat(self) -> ChatBody:
        """The body as a chat request, so that what a chat request would refuse is refused here, too."""
        kept = ("messages", "add_generation_prompt", "continue_final_message", "add_special_tokens")
        said = {name: getattr(self, name) for name in (*kept, "chat_template", "chat_template_kwargs")}
        try:
            chat = ChatBody.model_validate({"model": self.model or "-"} | (self.model_extra or {}) | said)
        except ValidationError as error:
            raise _first_complaint(error) from None
        chat.refuse_unsupported()
        return chat


class DetokenizeBody(DescribedModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME_LENGTH)] | None = None
    """May be left out where only one base model is served."""
    tokens: TokenIds
    """Token ids of the model's vocabulary."""


def checked_stops(field: str, stops: Any) -> list[str]:
    """Raises InvalidRequest if they are no stop strings."""
    if stops is None:
        return []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequest(f"{field}: must be a string or a list of up to {MAX_STOPS} strings", param=field)
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"{field}: a stop string must have 1 to {MAX_STOP_LENGTH} characters, not {len(stop)}", param=field
            )
    return stops


AnyBody = TypeVar("AnyBody", bound=BaseModel)
AskingBody = TypeVar("AskingBody", bound=Body)
"""Of a request for an answer."""


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """The body as an object. Raises InvalidRequest for the first thing that is wrong with it."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_complaint(error) from None


def _first_complaint(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body isn't valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    field = _path(first["loc"])
    if not field:
        return InvalidRequest("The body must be a JSON object.")
    if first["type"] == "missing":
        return InvalidRequest(f"{field}: this field is required", param=field)
    return InvalidRequest(f"{field}: {first['msg'][0].lower()}{first['msg'][1:]}", param=field)


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _tokens(values: list[Any]) -> "array[int] | None":
    """None if they are something else."""
    if set(map(type, values)) != {int}:
        return None
    try:
        return array("I", values)
    except OverflowError:
        return None


def _unsupported(field: str, why: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{field}: {why}", param=field)


def _plain(message: Mapping[str, Any], where: str, earlier: EarlierArguments, *, parts: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role: must be a string such as 'user'", param=f"{where}.role")
    plain = dict(message)
    read_calls(plain, where, earlier)
    read_reasoning(plain, where)
    content = message.get("content")
    if content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content: this field is required", param=f"{where}.content")
    if isinstance(content, list):
        texts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        if parts:
            plain["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            plain["content"] = "\n".join(texts)
    elif content is None or isinstance(content, str):
        plain["content"] = content or ""
    else:
        raise InvalidRequest(f"{where}.content: must be a string or a list of text parts", param=f"{where}.content")
    return plain


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("text", "input_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise _unsupported(where, f"only text parts are supported, not {shown(str(kind))!r}")


# ------------------------------------------------------------------------------------------------ to the runner's words


def samplings(
    body: Body, text: ModelTokenizer, limits: Sequence[int], grammar: Grammar | None, bad_words: Sequence[Tokens]
) -> list[runner_pb2.Sampling]:
    """One for each prompt; they differ in the length of the answer alone."""
    first = sampling(body, text, max_tokens=min(limits), grammar=grammar, bad_words=bad_words)
    made = []
    for limit in limits:
        one = runner_pb2.Sampling()
        one.CopyFrom(first)
        one.max_tokens = max(1, limit)
        made.append(one)
    return made


def with_prompt_logprobs(sampling: runner_pb2.Sampling, body: Body) -> runner_pb2.Sampling:
    """For the first choice of a prompt: all choices have the same one."""
    if (wanted := body.prompt_logprobs_wanted) is None:
        return sampling
    scoring = runner_pb2.Sampling(prompt_logprobs=wanted)
    scoring.MergeFrom(sampling)
    return scoring


def sampling(
    body: Body,
    text: ModelTokenizer,
    *,
    max_tokens: int,
    grammar: Grammar | None = None,
    bad_words: Sequence[Tokens] = (),
) -> runner_pb2.Sampling:
    alternatives = body.top_logprobs_wanted
    made = Sampling(
        max_tokens=max(1, max_tokens),  # an engine computes one at least; nobody gets it if only the prompt is wanted
        logprobs=alternatives is not None,
        top_logprobs=alternatives or 0,
        bad_words=tuple(map(tuple, bad_words)),
        **(USUAL | text.defaults | body.options),
    )
    made.check_fit(text.vocabulary)  # each option was checked when body or file was read, and is again in the engine
    if body.scores_only:
        return runner_pb2.Sampling(max_tokens=1, ignore_eos=True)
    message = made.to_proto()
    if grammar is not None:
        grammar.write(message)
    return message


_TIERS: dict[str, "common_pb2.RequestClass.ValueType"] = {
    "priority": common_pb2.REQUEST_CLASS_INTERACTIVE,
    "flex": common_pb2.REQUEST_CLASS_BATCH,
    "batch": common_pb2.REQUEST_CLASS_BATCH,
}
TIERS = ("auto", "default", "scale", *_TIERS)


def request_class(
    body: Body, of_adapter: "common_pb2.RequestClass.ValueType", of_tenant: "common_pb2.RequestClass.ValueType"
) -> "common_pb2.RequestClass.ValueType":
    """The class of a request: what the client asks for, never above what the adapter and the pool grant.

    `priority` follows vLLM: lower goes first, 0 is as usual. Without either, the adapter's own class.
    """
    usual = of_adapter or common_pb2.REQUEST_CLASS_STANDARD
    if body.priority:
        wanted = common_pb2.REQUEST_CLASS_INTERACTIVE if body.priority < 0 else common_pb2.REQUEST_CLASS_BATCH
    else:
        tier = body.service_tier or "auto"
        if tier not in TIERS:
            raise InvalidRequest(f"service_tier: must be one of {', '.join(TIERS)}", param="service_tier")
        wanted = _TIERS.get(tier, usual)
    return max(wanted, of_adapter, of_tenant)  # a higher number is less urgent; 0 is no bound
