"""What clients get, as schemas. They only describe: answers are written by hand, and a test compares the two."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Error(Shape):
    message: str
    """What is wrong and what to do, for people. It may change."""
    type: str
    """The family of the error, as OpenAI's clients know it."""
    param: str | None
    """The field of the request that is wrong, such as `messages[0].content`."""
    code: str
    """Which error it is, for programs. Codes are stable."""


class Load(Shape):
    server_load: int = Field(ge=0)


class ErrorBody(Shape):
    """Every error has this shape. A stream that has begun sends it as its last event before `[DONE]`."""

    error: Error


class CompletionTokensDetails(Shape):
    reasoning_tokens: int = Field(ge=0)
    """Of the reasoning, with its tags. They are part of `completion_tokens`."""


class PromptTokensDetails(Shape):
    cached_tokens: int = Field(ge=0)
    """Those that the runner had computed before, and kept. They are part of `prompt_tokens`."""


class Usage(Shape):
    prompt_tokens: int = Field(ge=0)
    """Of all prompts of the request together."""
    completion_tokens: int = Field(ge=0)
    """Of all choices together."""
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails | None = None
    """Left out if it is not known of each prompt: runners of earlier versions do not say it."""
    completion_tokens_details: CompletionTokensDetails | None = None
    """Only of chats with a model that is declared to reason."""


class TokenAlternative(Shape):
    token: str
    logprob: float
    """At least -9999, which stands for minus infinity."""
    bytes: list[int]
    """Of the token in UTF-8. A character may need the bytes of several tokens."""


class TokenLogprob(TokenAlternative):
    top_logprobs: list[TokenAlternative]
    """The most likely tokens at this place, as many as `top_logprobs` asks for."""


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str
    """As the model wrote them. All are JSON objects if `finish_reason` is `tool_calls`; otherwise those of the last
    call may be cut, and any may be no JSON."""


class ToolCall(Shape):
    id: str
    """For the message that has its result."""
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    """Null if there are only reasoning and calls."""
    refusal: None
    reasoning_content: str = ""
    """What the model wrote between the tags of its reasoning. Only if there is some."""
    reasoning: str = ""
    """The same."""
    tool_calls: list[ToolCall] = []
    """Only if there are some."""


class ChatChoice(Shape):
    index: int
    """0 to `n` - 1."""
    message: ChatMessage
    logprobs: ChatLogprobs | None
    """Null unless the request asks for `logprobs`."""
    finish_reason: ChatFinishReason
    """`stop`: the model ended it, or a stop string did. `length`: it has as many tokens as it may. `tool_calls`: as
    `stop`, and it has calls of tools, all of them whole: their arguments are JSON objects."""
    stop_reason: int | str | None
    """The stop string or the token of `stop_token_ids` that ended it; null if neither did."""
    token_ids: list[int] = []
    """Only with `return_token_ids`: of all tokens, also of the one that ended it."""


class PromptLogprob(Shape):
    logprob: float
    """At least -9999, which stands for minus infinity."""
    rank: int | None
    """1 for the most likely token. Null: the runner is of a version that does not say it."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By the tokens' ids: each token of the prompt itself, then its alternatives. Null for the first token: nothing is
before it."""


class ChatCompletion(Shape):
    id: str
    """`chatcmpl-` and the id in the header `x-motet-request`."""
    object: Literal["chat.completion"]
    created: int
    """Seconds since 1970."""
    model: str
    """As the request names it."""
    choices: list[ChatChoice]
    system_fingerprint: str
    """Changes with the weights that answer: those of the base model, and of the adapter's revision."""
    prompt_token_ids: list[int] = []
    """Only with `return_token_ids`."""
    prompt_logprobs: PromptLogprobs = []
    """Only with `prompt_logprobs`."""
    service_tier: Literal["priority", "default", "flex"] | None = None
    """Only if the request has `service_tier`: that of the class it got."""
    usage: Usage


class FunctionDelta(Shape):
    name: str = ""
    """In the first event of a call only."""
    arguments: str
    """What to add to the arguments."""


class ToolCallDelta(Shape):
    index: int
    """Which call of the choice it belongs to."""
    id: str = ""
    """In the first event of a call only, as `type`."""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Shape):
    role: Literal["assistant"] = "assistant"
    """In the first event of a choice only."""
    content: str = ""
    """What to add to the text."""
    reasoning_content: str = ""
    """What to add to the reasoning."""
    reasoning: str = ""
    """The same."""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    """Null until the last event of the choice."""
    stop_reason: int | str | None = None
    """Only in the last event of the choice."""
    token_ids: list[int] = []
    """Only with `return_token_ids`: of all tokens, also of the one that ended it."""


class ChatCompletionChunk(Shape):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    """Empty in the event that has the usage of the whole answer."""
    system_fingerprint: str
    prompt_token_ids: list[int] = []
    """Only with `return_token_ids`."""
    service_tier: Literal["priority", "default", "flex"] | None = None
    """Only if the request has `service_tier`: that of the class it got."""
    usage: Usage | None = None
    """Only with `stream_options`; null until there is one."""


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt that comes back, as in `top_logprobs`: nothing is before it."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins in the text, in characters."""


class CompletionChoice(Shape):
    index: int
    """Choices of the first prompt come first: with two prompts and `n: 2`, 2 and 3 are of the second."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or the token of `stop_token_ids` that ended it; null if neither did."""
    token_ids: list[int] = []
    """Only with `return_token_ids`: of all tokens, also of the one that ended it."""
    prompt_token_ids: list[int] = []
    """Only with `return_token_ids`."""
    prompt_logprobs: PromptLogprobs = []
    """Only with `prompt_logprobs`."""


class Completion(Shape):
    id: str
    """`cmpl-` and the id in the header `x-motet-request`."""
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    service_tier: Literal["priority", "default", "flex"] | None = None
    """Only if the request has `service_tier`: that of the class it got."""
    usage: Usage


class CompletionChunkChoice(Shape):
    index: int
    text: str
    """What to add to the text."""
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    """Only in the last event of the choice."""
    token_ids: list[int] = []
    """Only with `return_token_ids`: of all tokens, also of the one that ended it."""
    prompt_token_ids: list[int] = []
    """Only with `return_token_ids`."""


class CompletionChunk(Shape):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    system_fingerprint: str
    service_tier: Literal["priority", "default", "flex"] | None = None
    """Only if the request has `service_tier`: that of the class it got."""
    usage: Usage | None = None
    """Only with `stream_options`; null until there is one."""


MessageStopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesError(Shape):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "api_error",
        "overloaded_error",
    ]
    """The family of the error, as Anthropic's clients know it."""
    message: str
    code: str
    """Which error it is, for programs. Anthropic's own errors do not have it, as `param`."""
    param: str | None
    """The field of the request that is wrong."""


class MessagesErrorBody(Shape):
    """Every error of `/v1/messages` has this shape. It is also the last event of a stream that has begun and fails."""

    type: Literal["error"]
    error: MessagesError
    request_id: str
    """As in the header `request-id`."""


class MessageUsage(Shape):
    input_tokens: int = Field(ge=0)
    """Without those of `cache_read_input_tokens`."""
    cache_creation_input_tokens: int
    """Always 0: no part of a prompt is kept on request."""
    cache_read_input_tokens: int
    """Tokens of the prompt that its runner had computed before, and kept. 0, too, if the runner does not say it, as
    those of earlier versions."""
    output_tokens: int = Field(ge=0)


class MessageBlock(Shape):
    type: Literal["thinking", "text", "tool_use"]
    thinking: str = ""
    """Of a `thinking`: what the model wrote between the tags of its reasoning."""
    signature: str = ""
    """Of a `thinking`. It says nothing."""
    text: str = ""
    """Of a `text`."""
    id: str = ""
    """Of a `tool_use`: for the block that has its result."""
    name: str = ""
    """Of a `tool_use`."""
    input: dict[str, Any] = {}
    """Of a `tool_use`: its arguments. What is missing of one that was cut is missing here; what is no JSON object is
    empty."""


class Message(Shape):
    id: str
    """`msg_` and the id in the header `x-motet-request`."""
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    """As the request names it."""
    content: list[MessageBlock]
    stop_reason: MessageStopReason | None
    """Null in `message_start`."""
    stop_sequence: str | None
    """The string of `stop_sequences` that has ended the answer."""
    usage: MessageUsage


class MessageDelta(Shape):
    type: Literal["thinking_delta", "signature_delta", "text_delta", "input_json_delta"] = "text_delta"
    thinking: str = ""
    signature: str = ""
    text: str = ""
    partial_json: str = ""
    stop_reason: MessageStopReason | None = None
    """In `message_delta`, as the next."""
    stop_sequence: str | None = None


class MessageEvent(Shape):
    """One event of a stream; its type is also its name."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: Message | None = None
    """In `message_start`."""
    index: int = 0
    """Which block it is about."""
    content_block: MessageBlock | None = None
    """In `content_block_start`."""
    delta: MessageDelta | None = None
    """In `content_block_delta` and `message_delta`."""
    usage: MessageUsage | None = None
    """In `message_delta`."""
    error: MessagesError | None = None
    request_id: str = ""
    """Beside an error."""


class MessagesTokenCount(Shape):
    input_tokens: int = Field(ge=0)


class ResponseAlternative(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ResponseTokenLogprob(ResponseAlternative):
    top_logprobs: list[ResponseAlternative]


class ResponseText(Shape):
    type: Literal["reasoning_text", "output_text"]
    text: str
    annotations: list[Any] = []
    """Always empty, and not in reasoning, as the next."""
    logprobs: list[ResponseTokenLogprob] = []
    """Only with `include`: of all tokens, those of reasoning and calls too. In a stream, the deltas and the last
    response have them."""


class ResponseItem(Shape):
    id: str
    type: Literal["reasoning", "message", "function_call", "custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    """`incomplete`: the limit of tokens has cut it, or the arguments of a call are no JSON object."""
    role: Literal["assistant"] = "assistant"
    """Of a message."""
    content: list[ResponseText] = []
    """Of a message or of reasoning: one text."""
    summary: list[Any] = []
    """Of reasoning. Always empty."""
    call_id: str = ""
    """Of a call: for the item that has its output."""
    name: str = ""
    """Of a call: its tool."""
    arguments: str = ""
    """Of a `function_call`, as the model wrote them."""
    input: str = ""
    """Of a `custom_tool_call`."""


class ResponseFailure(Shape):
    code: str
    message: str


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(Shape):
    cached_tokens: int
    """Tokens of the prompt that its runner had computed before, and kept. 0, too, if the runner does not say it, as
    those of earlier versions."""
    cache_write_tokens: int
    """Always 0."""


class OutputTokensDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int = Field(ge=0)
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(ge=0)
    output_tokens_details: OutputTokensDetails
    total_tokens: int = Field(ge=0)


class ResponseReasoning(Shape):
    effort: str | None
    summary: None


class Response(Shape):
    id: str
    """`resp_` and the id in the header `x-motet-request`."""
    object: Literal["response"]
    created_at: int
    """Seconds since 1970."""
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    """As the request names it."""
    output: list[ResponseItem]
    usage: ResponseUsage | None
    """Null before the end."""
    temperature: float
    """That was used, as `top_p`."""
    top_p: float
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: str
    store: Literal[False]
    """Nothing is stored, whatever the request says."""
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(Shape):
    """One event of a stream; its type is also its name."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int
    """0, 1, 2, …"""
    response: Response | None = None
    output_index: int = 0
    """Which item it is about."""
    item_id: str = ""
    content_index: int = 0
    """Always 0."""
    item: ResponseItem | None = None
    part: ResponseText | None = None
    delta: str = ""
    logprobs: list[ResponseTokenLogprob] = []
    text: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""
    code: str = ""
    """In `error`, as the next."""
    message: str = ""
    param: str | None = None
    error: Error | None = None
    """The same as an error of `/v1/chat/completions`. OpenAI's clients raise an exception for it."""


class Model(Shape):
    id: str
    """What a request puts into `model`."""
    object: Literal["model"]
    created: int
    """When this gateway started, in seconds since 1970."""
    owned_by: str
    """The tenant of an adapter; `motet` for a base model."""
    root: str | None
    """Where the weights come from. Null for an adapter that another tenant shares."""
    parent: str | None
    """The base model of an adapter."""
    max_model_len: int | None
    """The most tokens of prompt and answer together. Null until a runner has loaded the model."""
    permission: list[Any]
    """Always empty; OpenAI's clients expect the field."""
    tenant: str | None
    revision: int | None
    """The generation of the adapter's manifest."""
    digest: str | None
    """Of the bytes that serve."""
    state: Literal["ready", "loading", "cold", "failed", "unknown"]
    """`ready`: in memory. `cold`: its next request loads it. `loading`: a runner fetches, checks or loads it. `failed`:
    it cannot be served; requests get the reason. `unknown`: the scheduler is newer than this gateway."""
    rank: int | None
    """Of an adapter, once it is checked."""


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]
    """Sorted by name."""


class TokenCount(Shape):
    count: int = Field(ge=0)
    max_model_len: int
    """The most tokens of prompt and answer together; 0 until a runner has loaded the model."""
    tokens: list[int]
    token_strs: list[str | None] = []
    """Only with `return_token_strs`."""


class Text(Shape):
    prompt: str


class Version(Shape):
    version: str


class TimelineEntry(Shape):
    seconds: float
    """Since the request was received."""
    lasted: float
    """Seconds until the next entry of the same author."""
    by: Literal["gateway", "scheduler"]
    event: str
    """A word, such as `waits`, `placed`, `moved` or `finished`."""
    detail: str
    """For people."""


class RequestSplit(Shape):
    """Where its time went, in seconds. The parts add up to the whole."""

    queue: float
    """It waited for a runner, for its adapter, or for a place in a batch."""
    generation: float
    """A runner computed it."""
    penalty: float
    """It was parked or had lost its runner."""
    overhead: float
    """All other time."""


class PredictedLength(Shape):
    """How many tokens its answer was expected to have: quantiles."""

    by: str
    """As in the header `x-motet-length`."""
    q50: int
    q80: int
    q90: int
    q95: int


class RefusingRunner(Shape):
    runner: str
    why: str
    """For people. Another tenant is named by these two words."""


class ExplainedChoice(Shape):
    request: str
    """Its id at the scheduler and in logs."""
    prompt_tokens: int | None
    max_tokens: int | None
    tokens: int | None
    """Of its answer. Null until its end."""
    predicted: PredictedLength | None
    split: RequestSplit | None
    timeline: list[TimelineEntry]
    left_out: int
    """Entries between the first 16 and the last 48 of an author. One entry `left out` stands for them."""
    position: int | None
    """In the queue, while it waits there."""
    runners: list[RefusingRunner]
    """While it waits for one: why it does not get each of them, of the first 20."""


class ExplainedRequest(Shape):
    """Null where nobody knows it."""

    id: str
    http_id: str | None
    """`x-request-id`."""
    trace: str | None
    """The id in `traceparent`."""
    tenant: str
    model: str | None
    status: str | None
    """Of HTTP, or of the error that ended a stream; `499`: the client has left. Null until the end."""
    ended: bool
    """Whether it neither waits nor runs any more."""
    seconds: float
    first_token_seconds: float | None
    scheduler: str | None
    """Why the scheduler's half is missing. Null: it is there."""
    gateway: str | None
    """Why the gateway's half is missing. Null: it is there."""
    timeline: list[TimelineEntry]
    """Of the whole request."""
    choices: list[ExplainedChoice]
    """One for each prompt and choice, of the first 16. Of a request of another gateway: the one with this id."""


# ------------------------------------------------------------------------------------------------------ LoRAX's own API


class AlternativeToken(Shape):
    id: int
    text: str
    logprob: float


class GeneratedToken(Shape):
    id: int
    text: str
    """Of a token that adds no text of its own: its name."""
    logprob: float
    special: bool
    """Whether it adds no text."""
    skipped: bool
    alternative_tokens: list[AlternativeToken] = []
    """Only with `return_k_alternatives`."""


class GenerationDetails(Shape):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    prompt_tokens: int = Field(ge=0)
    generated_tokens: int = Field(ge=0)
    seed: int | None
    """With it a drawn answer comes again. Null where the most likely tokens came."""


class WholeGenerationDetails(GenerationDetails):
    skipped_tokens: int
    prefill: list[GeneratedToken]
    """Always empty."""
    tokens: list[GeneratedToken]


class Generated(Shape):
    generated_text: str
    details: WholeGenerationDetails | None = None
    """Only with `details: true`."""


class GeneratedList(RootModel[list[Generated]]):
    """One."""


class GeneratedEvent(Shape):
    token: GeneratedToken
    generated_text: str | None
    """The whole text, in the last event."""
    details: GenerationDetails | None
    """In the last event."""


class LoraxErrorBody(Shape):
    """An error of LoRAX's paths. What asks for keys is before them: its errors have the shape of all others."""

    error: str
    """What is wrong and what to do, for people. It may change."""
    error_type: Literal["validation", "generation", "overloaded"]


class Invoked(RootModel[ChatCompletion | Completion | list[Generated]]):
    """As the API answers that the body is of."""


class InvokedEvent(RootModel[ChatCompletionChunk | CompletionChunk | GeneratedEvent]):
    """As the API answers that the body is of."""
