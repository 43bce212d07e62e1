"""Everything that can go wrong, once, and how each face of the system says it.

MotetError
├── InvalidRequest            the caller must change the request
│   ├── ContextLengthExceeded
│   ├── UnsupportedParameter
│   ├── UnsupportedMediaType
│   └── RequestTooLarge
├── NotAuthenticated
├── InsufficientScope
├── ModelNotFound             also for a model of another tenant: its name is not revealed
├── NotFound
├── RateLimited
├── Overloaded                come back later
│   ├── PoolSaturated
│   ├── AdapterLoading
│   ├── NoRunner
│   ├── StoreUnavailable
│   └── DeadlineExceeded
├── AdapterError              the adapter is at fault; its owner must act
│   ├── AdapterIncompatible
│   └── AdapterFetchFailed
├── StoreRefused              a value that no database takes, however often it is told
├── Declined                  a runner's "not here, not now": the scheduler places the request again
├── EngineRestarted           a stream that could not be continued
├── Cancelled
├── NotFinite                 the model's numbers for this request; at most one other runner tries it
├── RequestKillsEngines       engines died or hung while they computed this request and no other
├── Internal
└── SetupError                start-up and command line: exit status 2
    ├── ManifestError
    ├── ModelFolderError
    └── StateDirectoryError

Raise the leaf; carry the sentence. `TABLE` maps each to its gRPC status, HTTP status, OpenAI `type` and `code`.
"""

from dataclasses import dataclass

import grpc

from motet.api.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class ErrorMapping:
    """How one kind of error is said to gRPC peers, HTTP clients and people."""

    code: str
    http: int
    type: str
    grpc: grpc.StatusCode
    retry_after: float = 0.0
    """Seconds after which it makes sense for a client to send the request again; 0 means that it does not, whatever one
    error says: a fetch that the runner repeats by itself is no reason for clients to wait for it."""


class MotetError(Exception):
    """An error with a place in the table. `message` says what is wrong and what to do, in one or two sentences, to
    those who can do it; what API clients read is `for_clients`."""

    mapping = ErrorMapping("internal_error", 500, "server_error", grpc.StatusCode.INTERNAL)

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason
        """Of an adapter's error: the reason in its status' condition, such as RankTooLarge. Empty: the code says it."""
        self.retry_after = self.mapping.retry_after if retry_after is None else retry_after

    @property
    def code(self) -> str:
        return self.mapping.code

    @property
    def for_clients(self) -> str:
        return self.message

    def to_proto(self) -> common_pb2.Failure:
        return common_pb2.Failure(
            code=self.code, message=self.message, retry_after_seconds=self.retry_after, reason=self.reason
        )


class InvalidRequest(MotetError):
    """The request says something that makes no sense. The message names the field and the value to give instead."""

    mapping = ErrorMapping("invalid_value", 400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class ContextLengthExceeded(InvalidRequest):
    """Prompt and `max_tokens` together are longer than the model can hold. Shorten the prompt or ask for less."""

    mapping = ErrorMapping("context_length_exceeded", 400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class UnsupportedParameter(InvalidRequest):
    """A parameter is known but not supported here. Leave it out; answers would not be what it asks for."""

    mapping = ErrorMapping("unsupported_parameter", 400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class UnsupportedMediaType(InvalidRequest):
    """The body is not JSON. Send `content-type: application/json`."""

    mapping = ErrorMapping("unsupported_media_type", 415, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class RequestTooLarge(InvalidRequest):
    """The body is larger than the gateway reads. Send a smaller one, or raise MOTET_GATEWAY_MAX_BODY_BYTES."""

    mapping = ErrorMapping("request_too_large", 413, "invalid_request_error", grpc.StatusCode.RESOURCE_EXHAUSTED)


class NotAuthenticated(MotetError):
    """The API key is missing, wrong, expired or revoked; also in a stream whose key was revoked or has expired since it
    began. Send `authorization: Bearer <key>`."""

    mapping = ErrorMapping("invalid_api_key", 401, "authentication_error", grpc.StatusCode.UNAUTHENTICATED)


class InsufficientScope(MotetError):
    """The API key is right, and does not allow this. Use one that was made with the scope that the message names."""

    mapping = ErrorMapping("insufficient_scope", 403, "permission_error", grpc.StatusCode.PERMISSION_DENIED)


class ModelNotFound(MotetError):
    """No model of this name for this tenant; the message has the nearest names. `GET /v1/models` lists them all."""

    mapping = ErrorMapping("model_not_found", 404, "not_found_error", grpc.StatusCode.NOT_FOUND)


class NotFound(MotetError):
    """No such path or object."""

    mapping = ErrorMapping("not_found", 404, "not_found_error", grpc.StatusCode.NOT_FOUND)


class RateLimited(MotetError):
    """The tenant has used up what it may use for now. Nothing answers this yet: quotas per tenant come later. Wait for
    the time in `retry-after`."""

    mapping = ErrorMapping("rate_limit_exceeded", 429, "rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)


class Overloaded(MotetError):
    """The system cannot take the request now. Try again after the time in `retry-after`."""

    mapping = ErrorMapping("overloaded", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 1.0)


class PoolSaturated(Overloaded):
    """No room for the promise on any runner, and the queue is full. Try again later; add runners if it lasts."""

    mapping = ErrorMapping("pool_saturated", 503, "overloaded_error", grpc.StatusCode.RESOURCE_EXHAUSTED, 2.0)


class AdapterLoading(Overloaded):
    """The adapter is being fetched or checked. Nothing answers this yet: a request waits for its adapter instead. Try
    again in a moment."""

    mapping = ErrorMapping("adapter_loading", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 2.0)


class NoRunner(Overloaded):
    """No runner of the model's pool is up. `kubectl describe spool`, or `motet status` on a machine of one's own, says
    why."""

    mapping = ErrorMapping("no_runner", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 2.0)


class StoreUnavailable(Overloaded):
    """The database is locked, full or away. Serving goes on where it can; the message says what to put right."""

    mapping = ErrorMapping("store_unavailable", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 5.0)


class StoreRefused(MotetError):
    """The database never takes this value; trying again does not help. What holds it is put aside, and logged."""

    mapping = ErrorMapping("store_refused", 500, "server_error", grpc.StatusCode.INVALID_ARGUMENT)


class DeadlineExceeded(Overloaded):
    """The request waited longer than it may. Try again later, or allow more time."""

    mapping = ErrorMapping("deadline_exceeded", 504, "overloaded_error", grpc.StatusCode.DEADLINE_EXCEEDED, 2.0)


class AdapterError(MotetError):
    """The adapter cannot be served as it is. Its owner must act; `kubectl describe lora`, or `motet status` on a
    machine of one's own, shows the adapter's conditions."""

    mapping = ErrorMapping("adapter_error", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)
    public_message = "The adapter cannot be served as it is"

    @property
    def for_clients(self) -> str:
        """The message is its owner's, and in the adapter's status: it may name files, Secrets and commands."""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.public_message}{why}. Its owner finds the details in the adapter's status."


class AdapterIncompatible(AdapterError):
    """A field or a tensor of the adapter does not fit the base model or is not supported; the adapter's status names
    it."""

    mapping = ErrorMapping("adapter_incompatible", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)
    public_message = "The adapter does not fit its base model, or asks for what is not supported"


class AdapterFetchFailed(AdapterError):
    """The adapter's files are missing, unreadable or not what the digest says. The adapter's status names the file."""

    mapping = ErrorMapping("adapter_fetch_failed", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)
    public_message = "The adapter's files could not be fetched"


class Declined(MotetError):
    """A runner would not take the request here and now. The scheduler places it again; clients hardly ever see this."""

    mapping = ErrorMapping("declined", 503, "overloaded_error", grpc.StatusCode.ABORTED, 0.1)


class EngineRestarted(MotetError):
    """The runner died and the stream could not be continued elsewhere before its deadline. Send it again."""

    mapping = ErrorMapping("engine_restarted", 503, "server_error", grpc.StatusCode.UNAVAILABLE, 1.0)


class Cancelled(MotetError):
    """The client left, or asked for the request to be cancelled."""

    mapping = ErrorMapping("cancelled", 499, "cancelled", grpc.StatusCode.CANCELLED)


class NotFinite(MotetError):
    """The model's numbers became infinite or undefined for this request, on two runners. The weights of its adapter are
    the usual cause: try the base model, and tell the adapter's owner. Sending it again brings the same."""

    mapping = ErrorMapping("not_finite", 500, "server_error", grpc.StatusCode.INTERNAL)


class RequestKillsEngines(MotetError):
    """Engines died or hung while they computed this request and no other, so it is not tried again. Other requests are
    not affected. Change the prompt, the parameters or the model, and please report it with the request id."""

    mapping = ErrorMapping("request_kills_engines", 500, "server_error", grpc.StatusCode.INTERNAL)


class Internal(MotetError):
    """A defect of Motet. The log has the details under the request id; please report it."""


class SetupError(MotetError):
    """A process cannot start as it is set up. The message names the setting or the command-line option."""

    mapping = ErrorMapping("setup_error", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class ManifestError(SetupError):
    """A manifest is wrong. The message has file, line, column and the nearest valid name."""

    mapping = ErrorMapping("manifest_invalid", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class ModelFolderError(SetupError):
    """The base model's folder is missing, incomplete or of a kind that cannot be served. The message says which."""

    mapping = ErrorMapping("model_folder_invalid", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class StateDirectoryError(SetupError):
    """The state directory is in use, full, or cannot be written. The message names it and the way out."""

    mapping = ErrorMapping("state_directory_unusable", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


def _leaf_classes(root: type[MotetError]) -> dict[str, type[MotetError]]:
    found = {root.mapping.code: root}
    for child in root.__subclasses__():
        found |= _leaf_classes(child)
    return found


TABLE: dict[str, type[MotetError]] = _leaf_classes(MotetError) | {Internal.mapping.code: Internal}
"""Every error by its code; the codes are unique."""


def from_proto(failure: common_pb2.Failure) -> MotetError:
    """The error a peer reported. A code that this version does not know becomes Internal with the peer's sentence."""
    kind = TABLE.get(failure.code, Internal)
    seconds = failure.retry_after_seconds
    return kind(failure.message, retry_after=seconds if 0 <= seconds < float("inf") else 0.0, reason=failure.reason)
