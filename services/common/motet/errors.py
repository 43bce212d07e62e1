"""All errors of Motet, and how each is reported to gRPC peers, to HTTP clients and on the command line.

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
│   ├── NoRunner
│   ├── StoreUnavailable
│   ├── AdapterLoading
│   └── DeadlineExceeded
├── AdapterError              the adapter is wrong; its owner must act
│   ├── AdapterIncompatible
│   ├── AdapterUnproved
│   └── AdapterFetchFailed
├── StoreRefused              the database will never accept the value
├── Declined                  a runner does not take the request now: the scheduler places it again
│   ├── ParameterUnavailable         this runner never will; a client gets it if no runner can
│   └── StructuredOutputUnavailable  as well
├── EngineRestarted           no runner continued the stream in time, or the gateway stops
├── BaseModelReplaced         no runner has the base model of the request any more
├── Cancelled
├── NotFinite                 the results for this request are infinite or not numbers; one other runner tries it
├── RequestKillsEngines       engines died or hung while they computed this request and no other
├── Internal
└── SetupError                start-up and command line: exit status 2
    ├── AlreadyDeclared
    ├── ManifestError
    ├── ModelFolderError
    │   └── ModelFileDamaged
    └── StateDirectoryError

Raise the most specific class, with a message. `TABLE` has each error by its code: its gRPC and HTTP status and its
OpenAI `type`.
"""

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Self

import grpc

from motet.api.v1 import common_pb2

_REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,127}")
"""What a condition's reason may be (motet.resources.status)."""


@dataclass(frozen=True, slots=True)
class ErrorMapping:
    """How one kind of error is reported to gRPC peers and HTTP clients."""

    code: str
    http: int
    type: str
    grpc: grpc.StatusCode
    retry_after: float = 0.0
    """Seconds after which a client may send the request again. 0: sending it again does not help, even if one error has
    its own `retry_after`. For example, clients need not wait for a fetch that the runner repeats by itself."""


class MotetError(Exception):
    """An error of the table. `message` says in one or two sentences what is wrong and what to do. It is for the person
    who can correct it. API clients read `for_clients`."""

    mapping = ErrorMapping("internal_error", 500, "server_error", grpc.StatusCode.INTERNAL)

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason
        """For an adapter's error: the reason of the condition in its status, such as RankTooLarge. Of a decline:
        TOO_FEW_PAGES, or empty. Empty: see the code."""
        self.retry_after = self.mapping.retry_after if retry_after is None else retry_after
        self.headers: Mapping[str, str] = {}
        """That an HTTP client gets with it."""

    @property
    def code(self) -> str:
        return self.mapping.code

    @property
    def for_clients(self) -> str:
        return self.message

    def again(self) -> Self:
        """A new one of the same meaning. An error that is kept and raised several times would keep the frames of every
        time."""
        return copy(self)

    def to_proto(self) -> common_pb2.Failure:
        return failure_to_proto(self.code, self.message, self.retry_after, self.reason)


class InvalidRequest(MotetError):
    """A field of the request has a wrong value. The message names the field and says which values are allowed."""

    mapping = ErrorMapping("invalid_value", 400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class ContextLengthExceeded(InvalidRequest):
    """Prompt and `max_tokens` together do not fit into the context. Shorten the prompt, or lower `max_tokens`."""

    mapping = ErrorMapping("context_length_exceeded", 400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class UnsupportedParameter(InvalidRequest):
    """Motet knows the parameter but does not support it, so the answer would not be as requested. Leave it out."""

    mapping = ErrorMapping("unsupported_parameter", 400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class UnsupportedMediaType(InvalidRequest):
    """The body is not JSON. Send `content-type: application/json`."""

    mapping = ErrorMapping("unsupported_media_type", 415, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class RequestTooLarge(InvalidRequest):
    """The body is larger than the gateway reads: send a smaller one, or raise MOTET_GATEWAY_MAX_BODY_BYTES. Or a prompt
    has more than 512 KiB of text that can only be tokenised at once: send less, or token ids."""

    mapping = ErrorMapping("request_too_large", 413, "invalid_request_error", grpc.StatusCode.RESOURCE_EXHAUSTED)


class NotAuthenticated(MotetError):
    """The API key is missing, wrong, expired or revoked. A stream also ends with this error when its key is revoked or
    expires. Send `authorization: Bearer <key>`."""

    mapping = ErrorMapping("invalid_api_key", 401, "authentication_error", grpc.StatusCode.UNAUTHENTICATED)


class InsufficientScope(MotetError):
    """The API key is valid but does not allow this. Use a key with the scope that the message names."""

    mapping = ErrorMapping("insufficient_scope", 403, "permission_error", grpc.StatusCode.PERMISSION_DENIED)


class ModelNotFound(MotetError):
    """This tenant has no model of this name. The message has similar names; `GET /v1/models` lists all."""

    mapping = ErrorMapping("model_not_found", 404, "not_found_error", grpc.StatusCode.NOT_FOUND)


class NotFound(MotetError):
    """No such path or object."""

    mapping = ErrorMapping("not_found", 404, "not_found_error", grpc.StatusCode.NOT_FOUND)


class RateLimited(MotetError):
    """A tenant, an adapter or an API key is over its `requestsPerMinute` or `tokensPerMinute`; the message says which.
    Try again after the time in `retry-after`. A prompt with more tokens than a minute allows is refused for good, and
    so are answers of one call (`n`) that together may have more."""

    mapping = ErrorMapping("rate_limit_exceeded", 429, "rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)


class Overloaded(MotetError):
    """The system cannot take the request now. Try again after the time in `retry-after`."""

    mapping = ErrorMapping("overloaded", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 1.0)


class PoolSaturated(Overloaded):
    """No runner has free pages for the request, and the queue is full. Try again later. If it lasts, add runners."""

    mapping = ErrorMapping("pool_saturated", 503, "overloaded_error", grpc.StatusCode.RESOURCE_EXHAUSTED, 2.0)


class NoRunner(Overloaded):
    """No runner of the model's pool is ready. `kubectl describe spool`, or `motet status` on your own machine, says
    why."""

    mapping = ErrorMapping("no_runner", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 2.0)


class StoreUnavailable(Overloaded):
    """The database is locked, full or cannot be reached. Everything that needs no database still works. The message
    says what to correct."""

    mapping = ErrorMapping("store_unavailable", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 5.0)


class StoreRefused(MotetError):
    """The database will never accept this value, so trying again does not help. Motet skips the row with this
    value and logs it."""

    mapping = ErrorMapping("store_refused", 500, "server_error", grpc.StatusCode.INVALID_ARGUMENT)


class AdapterLoading(Overloaded):
    """The adapter was on no runner's device, and was not loaded within `admission.coldWaitSeconds` of its pool. It goes
    on loading. Try again after the time in `retry-after`, which follows from its size and the rate at which its files
    come."""

    mapping = ErrorMapping("adapter_loading", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 5.0)


class DeadlineExceeded(Overloaded):
    """The request got no new token for `MOTET_GATEWAY_DEADLINE_SECONDS`. Send it again later."""

    mapping = ErrorMapping("deadline_exceeded", 504, "overloaded_error", grpc.StatusCode.DEADLINE_EXCEEDED, 2.0)


class AdapterError(MotetError):
    """The adapter cannot be served as it is, and its owner must act. `kubectl describe lora`, or `motet status` on your
    own machine, shows the adapter's conditions."""

    mapping = ErrorMapping("adapter_error", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)
    public_message = "The adapter cannot be served as it is"

    @property
    def for_clients(self) -> str:
        """A text without details. The full message may name files, Secrets and commands. It is only for the adapter's
        owner, in the adapter's status."""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.public_message}{why}. Its owner finds the details in the adapter's status."


class AdapterIncompatible(AdapterError):
    """A field or a tensor of the adapter does not fit the base model, or is not supported. The adapter's status names
    it."""

    mapping = ErrorMapping("adapter_incompatible", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)
    public_message = "The adapter does not fit its base model, or uses a feature that Motet does not support"


class AdapterUnproved(AdapterError):
    """The adapter fits its base model, but what a runner's engine computes with it is wrong, or the adapter moves no
    logit, or makes logits that are not numbers. The runner does not serve it, and an earlier version goes on serving.
    The adapter's status says what was found."""

    mapping = ErrorMapping("adapter_unproved", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)
    public_message = "The adapter was not proved: its results are wrong or no numbers, or it changes nothing"


REFERENCE_MISMATCH = "ReferenceMismatch"
"""The reason of an AdapterIncompatible whose recorded answers differ from what a runner computes. Others are asked."""
PROOF_FAILED = "ProofFailed"
"""The reason of an AdapterUnproved whose results are wrong. Its runner may be the cause, so another one is asked."""


class AdapterFetchFailed(AdapterError):
    """The adapter's files are missing, cannot be read, or have another digest. The adapter's status names the file."""

    mapping = ErrorMapping("adapter_fetch_failed", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)
    public_message = "The adapter's files could not be fetched"


TOO_FEW_PAGES = "TooFewPages"
"""The reason of a decline that more free pages would have prevented. The scheduler tries such a request with more."""


class Declined(MotetError):
    """A runner did not take the request. The scheduler places it again, so clients hardly ever see this."""

    mapping = ErrorMapping("declined", 503, "overloaded_error", grpc.StatusCode.ABORTED, 0.1)


class ParameterUnavailable(Declined):
    """No runner of the model can compute what a parameter asks for: their engine is of another make. The message names
    the parameter. Leave it out, or tell the pool's owner."""

    mapping = ErrorMapping("parameter_unavailable", 400, "invalid_request_error", grpc.StatusCode.FAILED_PRECONDITION)


class StructuredOutputUnavailable(Declined):
    """No runner of the pool can serve structured output: its engine is on a GPU or of another make, lacks the package
    `llguidance`, or cannot use the model's tokenizer for it; the message says which. Send the request without
    `response_format` and its like, or tell the pool's owner."""

    mapping = ErrorMapping(
        "structured_output_unavailable", 400, "invalid_request_error", grpc.StatusCode.FAILED_PRECONDITION
    )


NEVER_HERE: tuple[type[Declined], ...] = (ParameterUnavailable, StructuredOutputUnavailable)
"""A runner that declines with one of them can never take the request, and others may."""


class EngineRestarted(MotetError):
    """The runner died, and no other runner could continue the stream before its deadline. Or the gateway stopped before
    the answer was complete. Send the request again."""

    mapping = ErrorMapping("engine_restarted", 503, "server_error", grpc.StatusCode.UNAVAILABLE, 1.0)


class BaseModelReplaced(MotetError):
    """The pool has another base model now, and no runner could continue the stream with the old one. Send the request
    again: the new base model answers it."""

    mapping = ErrorMapping("base_model_replaced", 503, "server_error", grpc.StatusCode.UNAVAILABLE, 1.0)


class Cancelled(MotetError):
    """The client disconnected, or cancelled the request."""

    mapping = ErrorMapping("cancelled", 499, "cancelled", grpc.StatusCode.CANCELLED)


class NotFinite(MotetError):
    """On two runners, the model's results for this request were infinite or not numbers. The usual cause is the weights
    of the adapter: try the base model, and tell the adapter's owner. Sending the request again does not help."""

    mapping = ErrorMapping("not_finite", 500, "server_error", grpc.StatusCode.INTERNAL)


class RequestKillsEngines(MotetError):
    """Engines died or hung while they computed only this request, so Motet does not try it again. Other requests are
    not affected. Change the prompt, the parameters or the model, and please report it with the request id."""

    mapping = ErrorMapping("request_kills_engines", 500, "server_error", grpc.StatusCode.INTERNAL)


class Internal(MotetError):
    """A defect of Motet. The log has the details under the request id; please report it."""


SETUP_FAILED = 2
"""Exit status of a process that a person has to correct. The process manager waits longer before it tries again."""


class SetupError(MotetError):
    """A process cannot start with its settings. The message names the setting or the command-line option."""

    mapping = ErrorMapping("setup_error", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class AlreadyDeclared(SetupError):
    """A manifest declares this name, and a new one was asked for."""

    mapping = ErrorMapping("already_declared", 500, "server_error", grpc.StatusCode.ALREADY_EXISTS)


class ManifestError(SetupError):
    """A manifest is wrong. The message has file, line, column and the nearest valid name."""

    mapping = ErrorMapping("manifest_invalid", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class ModelFolderError(SetupError):
    """The base model's folder is missing or incomplete, or Motet cannot serve this kind of model. The message says
    which."""

    mapping = ErrorMapping("model_folder_invalid", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class ModelFileDamaged(ModelFolderError):
    """A file of the base model is there, but is not what was saved. The message names it. Copy it there again."""

    mapping = ErrorMapping("model_file_damaged", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class StateDirectoryError(SetupError):
    """The state directory is in use, full, or cannot be written, or nothing runs with it. The message names it and says
    what to do."""

    mapping = ErrorMapping("state_directory_unusable", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


def _classes_by_code(root: type[MotetError]) -> dict[str, type[MotetError]]:
    found = {root.mapping.code: root}
    for child in root.__subclasses__():
        found |= _classes_by_code(child)
    return found


TABLE: dict[str, type[MotetError]] = _classes_by_code(MotetError) | {Internal.mapping.code: Internal}
"""Every error of this module by its code. The codes are unique."""


_SENT_AS = {(ParameterUnavailable.mapping.code, ""): (UnsupportedParameter.mapping.code, "ParameterUnavailable")}
"""By code and reason: with which ones it is sent. An earlier version does not know the code, and would try the request
again and again; with the other code it refuses the request."""
_READ_AS = {sent: said for said, sent in _SENT_AS.items()}


def failure_to_proto(code: str, message: str, retry_after: float, reason: str) -> common_pb2.Failure:
    code, reason = _SENT_AS.get((code, reason), (code, reason))
    return common_pb2.Failure(code=code, message=message, retry_after_seconds=retry_after, reason=reason)


def reason_of(failure: common_pb2.Failure) -> str:
    """The reason that a peer reported; empty, as if it had said none, if no condition may have it."""
    return failure.reason if _REASON.fullmatch(failure.reason) else ""


def code_and_reason_of(failure: common_pb2.Failure) -> tuple[str, str]:
    said = failure.code, reason_of(failure)
    return _READ_AS.get(said, said)


def retry_after_of(failure: common_pb2.Failure) -> float:
    """Any number may come. 0: the peer has not said."""
    seconds = failure.retry_after_seconds
    return seconds if 0 <= seconds < float("inf") else 0.0


def from_proto(failure: common_pb2.Failure) -> MotetError:
    """The error that a peer reported. A code that this version does not know becomes Internal with the peer's text."""
    code, reason = code_and_reason_of(failure)
    kind = TABLE.get(code, Internal)
    return kind(failure.message, retry_after=retry_after_of(failure), reason=reason)
