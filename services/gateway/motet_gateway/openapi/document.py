"""The API in OpenAPI's form: every path, what it takes and what it answers. Pure."""

from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, RootModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from motet.errors import (
    AdapterError,
    AdapterFetchFailed,
    AdapterIncompatible,
    AdapterUnproved,
    BaseModelReplaced,
    ContextLengthExceeded,
    DeadlineExceeded,
    Declined,
    EngineRestarted,
    InsufficientScope,
    Internal,
    InvalidRequest,
    ModelNotFound,
    MotetError,
    NoRunner,
    NotAuthenticated,
    NotFinite,
    NotFound,
    Overloaded,
    ParameterUnavailable,
    PoolSaturated,
    RateLimited,
    RequestKillsEngines,
    RequestTooLarge,
    StoreUnavailable,
    StructuredOutputUnavailable,
    UnsupportedMediaType,
    UnsupportedParameter,
)
from motet.keys import KeyScope
from motet_gateway.answers.lorax.body import GenerateBody, StreamedBody, WholeBody
from motet_gateway.answers.messages.body import CountedMessages, MessagesBody
from motet_gateway.answers.messages.errors import PATH as MESSAGES_PATH
from motet_gateway.answers.messages.errors import is_messages
from motet_gateway.answers.responses.api import PATH as RESPONSES_PATH
from motet_gateway.answers.responses.body import ResponsesBody
from motet_gateway.errors import ChangesNotAllowed, HeadersTooLarge, HostNotAllowed, RequestTimeout
from motet_gateway.lora_bodies import LOAD_PATH, UNLOAD_PATH, LoadLoraBody, UnloadLoraBody
from motet_gateway.openapi import fields, shapes
from motet_gateway.parameters import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Json = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"
IN_PATHS = {"model": "Its name.", "request_id": "One of its ids."}

EVERYWHERE = (HostNotAllowed, HeadersTooLarge, RequestTimeout, Internal)
"""Of every path: the connection, the Host header on a loopback address, and defects."""
OF_KEYS = (NotAuthenticated, InsufficientScope, StoreUnavailable)
OF_BODIES = (InvalidRequest, UnsupportedParameter, UnsupportedMediaType, RequestTooLarge, Overloaded)
OF_MODELS = (ModelNotFound, NoRunner, AdapterError, AdapterIncompatible, AdapterUnproved, AdapterFetchFailed)
OF_ANSWERS = (
    ContextLengthExceeded,
    RateLimited,
    PoolSaturated,
    DeadlineExceeded,
    Declined,
    EngineRestarted,
    BaseModelReplaced,
    NotFinite,
    RequestKillsEngines,
    ParameterUnavailable,
    StructuredOutputUnavailable,
)

OF_QUOTAS = {
    f"x-ratelimit-{what}-{of}": f"{meaning} Only if {of} are limited."
    for of in ("requests", "tokens")
    for what, meaning in (
        ("limit", f"The {of} that may be used in a minute."),
        ("remaining", f"The {of} that may be used at once."),
        ("reset", "How long until ten seconds of the limit may be used at once, such as `6s`."),
    )
}
REQUEST_ID = {"x-request-id": "The id of this HTTP request: the client's own, or a new one. The gateway's log has it."}
IGNORED = {"x-motet-ignored": "Fields of the body that have no effect: nobody here knows them, or not for this path."}
OF_AN_ANSWER = (
    REQUEST_ID
    | {
        "x-motet-request": "The id of the generation; it is part of `id` in the body.",
        **IGNORED,
        "x-motet-length": "Who estimated the length of the answer: `model:<version>`, `tenant` or `max_tokens`.",
        "server-timing": "Milliseconds of each phase that is over: `prepare`, `queue`, `prefill`.",
    }
    | OF_QUOTAS
)
OF_A_STREAM = OF_AN_ANSWER | {"cache-control": "`no-cache`", "x-accel-buffering": "`no`"}
OF_AN_ERROR = REQUEST_ID | {
    "x-should-retry": "`true` where sending it again makes sense, else `false`.",
    "retry-after": "Seconds to wait, at most 60. Only with `x-should-retry: true`.",
    "retry-after-ms": "The same in milliseconds.",
}
OF_ONE_ERROR = {
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": "`Bearer`"},
    HTTPStatus.METHOD_NOT_ALLOWED: {"allow": "The method to use."},
    HTTPStatus.TOO_MANY_REQUESTS: OF_QUOTAS,
}


class InvocationsBody(RootModel[ChatBody | CompletionBody | GenerateBody]):
    """Of the API whose prompt's field it has: `messages`, `prompt` or `inputs`."""


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    id: str
    tag: str
    summary: str
    description: str
    answer: type[BaseModel] | str = ""
    """The shape of a JSON answer, or the media type of another; empty: a status without a body."""
    chunk: type[BaseModel] | None = None
    """The shape of the events of a stream."""
    body: type[BaseModel] | None = None
    scope: KeyScope | None = None
    """What its key must allow. None: any key."""
    keyless: bool = False
    errors: tuple[type[MotetError], ...] = ()
    unhealthy: str = ""
    """When it answers 503 without a body."""
    of_lorax: bool = False
    """Its errors have LoRAX's form."""


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "chat",
        "answers",
        "Answer a conversation",
        "With `stream: true` the answer comes as server-sent events: `data:` and one chunk each, and `data: [DONE]` "
        "at the end. Lines that begin with `:` are comments; they say what a stream waits for. The status of a stream "
        "is held until there are tokens, at most two seconds. A later error is the last event before `[DONE]`.",
        shapes.ChatCompletion,
        shapes.ChatCompletionChunk,
        ChatBody,
        KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS, *OF_ANSWERS),
    ),
    Operation(
        "post",
        "/v1/completions",
        "completion",
        "answers",
        "Continue a text",
        "Streams as `/v1/chat/completions` does. Several prompts are answered side by side.",
        shapes.Completion,
        shapes.CompletionChunk,
        CompletionBody,
        KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS, *OF_ANSWERS),
    ),
    Operation(
        "post",
        RESPONSES_PATH,
        "response",
        "answers",
        "Answer a conversation, as OpenAI's Responses API",
        "Nothing is stored: each request has the whole conversation. With `stream: true` the answer comes as "
        "server-sent events. The last one is `response.completed`, `response.incomplete` or `error`; there is no "
        "`[DONE]`.",
        shapes.Response,
        shapes.ResponseEvent,
        ResponsesBody,
        KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS, *OF_ANSWERS),
    ),
    Operation(
        "post",
        MESSAGES_PATH,
        "message",
        "answers",
        "Answer a conversation, as Anthropic's Messages API",
        "With `stream: true` the answer comes as server-sent events. The last one is `message_stop` or `error`. Errors "
        "have Anthropic's form.",
        shapes.Message,
        shapes.MessageEvent,
        MessagesBody,
        KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS, *OF_ANSWERS),
    ),
    Operation(
        "post",
        f"{MESSAGES_PATH}/count_tokens",
        "countTokens",
        "tokens",
        "Count the tokens of a conversation, as Anthropic's Messages API",
        "What `/v1/messages` would refuse of a conversation is refused here.",
        shapes.MessagesTokenCount,
        body=CountedMessages,
        scope=KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS),
    ),
    Operation(
        "post",
        "/generate",
        "generate",
        "answers",
        "Continue a text, as LoRAX's API",
        "Errors have LoRAX's form.",
        shapes.Generated,
        body=WholeBody,
        scope=KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS, *OF_ANSWERS),
        of_lorax=True,
    ),
    Operation(
        "post",
        "/generate_stream",
        "generateStream",
        "answers",
        "Continue a text as a stream, as LoRAX's API",
        "An event for each token. The last one has the whole text, or is an error; there is no `[DONE]`.",
        chunk=shapes.GeneratedEvent,
        body=StreamedBody,
        scope=KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS, *OF_ANSWERS),
        of_lorax=True,
    ),
    Operation(
        "post",
        "/",
        "generateEither",
        "answers",
        "Continue a text, as LoRAX's clients without a path",
        "With `stream: true` as `/generate_stream`, otherwise as `/generate`, with the answer in a list.",
        shapes.GeneratedList,
        shapes.GeneratedEvent,
        GenerateBody,
        KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS, *OF_ANSWERS),
        of_lorax=True,
    ),
    Operation(
        "post",
        "/invocations",
        "invocations",
        "answers",
        "Answer any of these bodies, as SageMaker's clients send them",
        "A body with `messages` is one of `/v1/chat/completions`, one with `prompt` of `/v1/completions`, and one with "
        "`inputs` of `/`. Answers and errors are theirs.",
        shapes.Invoked,
        shapes.InvokedEvent,
        InvocationsBody,
        KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS, *OF_ANSWERS),
        of_lorax=True,
    ),
    Operation(
        "get",
        "/v1/models",
        "models",
        "models",
        "List the models that you may ask",
        "Base models and adapters, under the names that this caller uses.",
        shapes.ModelList,
        scope=KeyScope.USER,
        errors=(Overloaded,),
    ),
    Operation(
        "get",
        "/v1/models/{model}",
        "model",
        "models",
        "Show one model",
        "`model` may hold a slash, as in `acme/pirate`.",
        shapes.Model,
        scope=KeyScope.USER,
        errors=(InvalidRequest, ModelNotFound, Overloaded),
    ),
    Operation(
        "post",
        "/tokenize",
        "tokenize",
        "tokens",
        "Count the tokens of a prompt or a conversation",
        "Send `prompt` or `messages`. What `/v1/chat/completions` would refuse of a conversation is refused here.",
        shapes.TokenCount,
        body=TokenizeBody,
        scope=KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS),
    ),
    Operation(
        "post",
        "/detokenize",
        "detokenize",
        "tokens",
        "Turn tokens into text",
        "Special tokens are part of the text.",
        shapes.Text,
        body=DetokenizeBody,
        scope=KeyScope.USER,
        errors=(*OF_BODIES, *OF_MODELS),
    ),
    Operation(
        "post",
        LOAD_PATH,
        "loadAdapter",
        "adapters",
        "Load an adapter, as vLLM's API",
        "Only on the local stack, and only if MOTET_GATEWAY_ADAPTER_FOLDERS allows it: it does what `motet adapter "
        "push` does, waits until the adapter is served or refused, and answers a line of text. A cluster answers with "
        "the manifest to apply. It goes on if the client leaves.",
        "text/plain",
        body=LoadLoraBody,
        scope=KeyScope.ADMIN,
        errors=(*OF_BODIES, NotFound, ChangesNotAllowed, EngineRestarted),
    ),
    Operation(
        "post",
        UNLOAD_PATH,
        "unloadAdapter",
        "adapters",
        "Unload an adapter, as vLLM's API",
        "Only on the local stack, as `/v1/load_lora_adapter`: it does what `motet adapter rm` does, so it removes what "
        "was loaded there or with `motet adapter push`. Answers under way are finished.",
        "text/plain",
        body=UnloadLoraBody,
        scope=KeyScope.ADMIN,
        errors=(*OF_BODIES, NotFound, ChangesNotAllowed, EngineRestarted),
    ),
    Operation(
        "get",
        "/motet/requests/{request_id}",
        "request",
        "requests",
        "Explain what happened to a request",
        "Of your tenant's own requests: those that wait or run, and the last that ended. `request_id` is the id of the "
        "completion, or that of the header `x-motet-request` or `x-request-id`; the last one only at the gateway that "
        "answered. `motet why` prints this.",
        shapes.ExplainedRequest,
        scope=KeyScope.USER,
        errors=(NotFound, Overloaded),
    ),
    Operation(
        "get",
        "/load",
        "load",
        "requests",
        "Count the requests under way",
        "Of your tenant, at this gateway. Under the name and in the form of vLLM.",
        shapes.Load,
        scope=KeyScope.USER,
        errors=(Overloaded,),
    ),
    Operation(
        "get",
        "/health",
        "health",
        "probes",
        "Can a request be answered?",
        "At least one pool has a runner. `HEAD` works too.",
        keyless=True,
        unhealthy="No pool has a runner.",
    ),
    Operation(
        "get",
        "/ping",
        "ping",
        "probes",
        "The same as /health",
        "Under the name that SageMaker's probes use. `HEAD` works too.",
        keyless=True,
        unhealthy="No pool has a runner.",
    ),
    Operation(
        "get",
        "/version",
        "version",
        "probes",
        "Show the version",
        "Answers as soon as the gateway listens. `HEAD` works too.",
        shapes.Version,
    ),
    Operation(
        "get",
        "/metrics",
        "metrics",
        "probes",
        "Read metrics in Prometheus' text format",
        "Under `motet up` those of every process; elsewhere the gateway's own, and only with a key. `HEAD` works too.",
        "text/plain",
        scope=KeyScope.MONITOR,
        errors=(NotFound,),
    ),
    Operation(
        "get",
        "/openapi.json",
        "openapi",
        "probes",
        "This description",
        "In OpenAPI's form, for generators of clients.",
        "application/json",
    ),
)


@cache
def document(*, metrics: bool) -> Json:
    """`metrics`: this gateway shows them to clients."""
    shown = [one for one in OPERATIONS if metrics or one.path != "/metrics"]
    _, components = models_json_schema(_models(), ref_template=REFERENCE)
    fields.complete(components["$defs"])
    paths: dict[str, Json] = {}
    for operation in shown:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Motet", "version": version("motet")},
        "paths": paths,
        "components": {
            "schemas": components["$defs"],
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key of Motet. A gateway that asks for none ignores it.",
                },
                "header": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same key, as Anthropic's clients send it.",
                },
            },
        },
    }


def errors_of(operation: Operation) -> dict[int, list[type[MotetError]]]:
    """By HTTP status."""
    found: dict[int, list[type[MotetError]]] = {}
    of_keys = () if operation.keyless else OF_KEYS if operation.scope else (NotAuthenticated, StoreUnavailable)
    for error in sorted({*EVERYWHERE, *of_keys, *operation.errors}, key=lambda error: error.mapping.code):
        found.setdefault(error.mapping.http, []).append(error)
    return found


def _models() -> list[tuple[type[BaseModel], JsonSchemaMode]]:
    modes: dict[type[BaseModel], JsonSchemaMode] = {
        shapes.ErrorBody: "serialization",
        shapes.MessagesErrorBody: "serialization",
        shapes.LoraxErrorBody: "serialization",
    }
    for operation in OPERATIONS:
        if operation.body:
            modes[operation.body] = "validation"
        for answer in (operation.answer, operation.chunk):
            if isinstance(answer, type):
                modes[answer] = "serialization"
    return sorted(modes.items(), key=lambda pair: pair[0].__name__)


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def _operation(operation: Operation) -> Json:
    made: Json = {
        "tags": [operation.tag],
        "operationId": operation.id,
        "summary": operation.summary,
        "description": operation.description,
        "security": [] if operation.keyless else [{"key": []}, {"header": []}],
        "parameters": _parameters(operation),
        "responses": {"200": _answer(operation)},
    }
    if operation.scope:
        made["x-motet-scope"] = operation.scope.value
    if operation.body:
        content = {"application/json": {"schema": _ref(operation.body)}}
        made["requestBody"] = {"required": True, "content": content}
    if operation.unhealthy:
        made["responses"]["503"] = {"description": operation.unhealthy, "headers": _headers(REQUEST_ID)}
    error_body = _ref(shapes.MessagesErrorBody if is_messages(operation.path) else shapes.ErrorBody)
    if operation.of_lorax:
        error_body = {"anyOf": [_ref(shapes.LoraxErrorBody), error_body]}
    for status, errors in sorted(errors_of(operation).items()):
        codes = ", ".join(f"`{error.mapping.code}`" for error in errors)
        made["responses"][str(status)] = {
            "description": codes,
            "headers": _headers(OF_AN_ERROR | OF_ONE_ERROR.get(HTTPStatus(status), {})),
            "content": {"application/json": {"schema": error_body}},
        }
    return made


def _parameters(operation: Operation) -> list[Json]:
    """In the path and in headers. OpenAPI says content-type and authorization elsewhere."""
    own_id: Json = {
        "name": "x-request-id",
        "in": "header",
        "description": "An id of your own for this HTTP request. One that does not fit the pattern is ignored.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    }
    trace: Json = {
        "name": "traceparent",
        "in": "header",
        "description": "Your trace, as W3C's trace context writes it. Log lines about the request name it. What does "
        "not fit that form is ignored.",
        "schema": {"type": "string"},
    }
    name, meaning = next(
        ((name, meaning) for name, meaning in IN_PATHS.items() if f"{{{name}}}" in operation.path), ("", "")
    )
    if not name:
        return [own_id, trace]
    schema: Json = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "description": meaning, "schema": schema}, own_id, trace]


def _answer(operation: Operation) -> Json:
    if not operation.answer and operation.chunk is None:
        return {"description": "Yes", "headers": _headers(REQUEST_ID)}
    content: Json = {}
    if isinstance(operation.answer, type):
        content["application/json"] = {"schema": _ref(operation.answer)}
    elif operation.answer:
        content[operation.answer] = {}
    if operation.chunk is None:
        headers = OF_AN_ANSWER if operation.of_lorax else REQUEST_ID
        if operation.body is CountedMessages:
            headers = headers | IGNORED
        return {"description": "Done", "headers": _headers(headers), "content": content}
    content["text/event-stream"] = {"schema": _ref(operation.chunk)}
    either = "One JSON object, or server-sent events with `stream: true`" if operation.answer else "Server-sent events"
    return {"description": either, "headers": _headers(OF_A_STREAM), "content": content}


def _headers(headers: dict[str, str]) -> Json:
    return {name: {"description": meaning, "schema": {"type": "string"}} for name, meaning in headers.items()}
