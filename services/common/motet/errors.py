"""Everything that can go wrong, once, and how each face of the system says it.

MotetError
├── InvalidRequest            the caller must change the request
│   ├── ContextLengthExceeded
│   ├── UnsupportedParameter
│   ├── UnsupportedMediaType
│   └── RequestTooLarge
├── NotAuthenticated
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
├── Declined                  a runner's "not here, not now": the scheduler places the request again
├── EngineRestarted           a stream that could not be continued
├── Cancelled
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
class Row:
    """How one kind of error is said to gRPC peers, HTTP clients and people."""

    code: str
    http: int
    type: str
    grpc: grpc.StatusCode
    retry_after: float = 0.0
    """Seconds after which trying again makes sense; 0 means it does not. Clients ignore hints above 60."""


class MotetError(Exception):
    """An error with a place in the table. `message` says what is wrong and what to do, in one or two sentences."""

    row = Row("internal_error", 500, "server_error", grpc.StatusCode.INTERNAL)

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason
        """Of an adapter's error: the reason in its status' condition, such as RankTooLarge. Empty: the code says it."""
        self.retry_after = self.row.retry_after if retry_after is None else retry_after

    @property
    def code(self) -> str:
        return self.row.code

    def to_proto(self) -> common_pb2.Failure:
        return common_pb2.Failure(
            code=self.code, message=self.message, retry_after_seconds=self.retry_after, reason=self.reason
        )


class InvalidRequest(MotetError):
    row = Row("invalid_value", 400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class ContextLengthExceeded(InvalidRequest):
    row = Row("context_length_exceeded", 400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class UnsupportedParameter(InvalidRequest):
    row = Row("unsupported_parameter", 400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class UnsupportedMediaType(InvalidRequest):
    row = Row("unsupported_media_type", 415, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT)


class RequestTooLarge(InvalidRequest):
    row = Row("request_too_large", 413, "invalid_request_error", grpc.StatusCode.RESOURCE_EXHAUSTED)


class NotAuthenticated(MotetError):
    row = Row("invalid_api_key", 401, "authentication_error", grpc.StatusCode.UNAUTHENTICATED)


class ModelNotFound(MotetError):
    row = Row("model_not_found", 404, "not_found_error", grpc.StatusCode.NOT_FOUND)


class NotFound(MotetError):
    row = Row("not_found", 404, "not_found_error", grpc.StatusCode.NOT_FOUND)


class RateLimited(MotetError):
    row = Row("rate_limit_exceeded", 429, "rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)


class Overloaded(MotetError):
    row = Row("overloaded", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 1.0)


class PoolSaturated(Overloaded):
    row = Row("pool_saturated", 503, "overloaded_error", grpc.StatusCode.RESOURCE_EXHAUSTED, 2.0)


class AdapterLoading(Overloaded):
    row = Row("adapter_loading", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 2.0)


class NoRunner(Overloaded):
    row = Row("no_runner", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 2.0)


class StoreUnavailable(Overloaded):
    row = Row("store_unavailable", 503, "overloaded_error", grpc.StatusCode.UNAVAILABLE, 5.0)


class DeadlineExceeded(Overloaded):
    row = Row("deadline_exceeded", 504, "overloaded_error", grpc.StatusCode.DEADLINE_EXCEEDED, 2.0)


class AdapterError(MotetError):
    row = Row("adapter_error", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)


class AdapterIncompatible(AdapterError):
    row = Row("adapter_incompatible", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)


class AdapterFetchFailed(AdapterError):
    row = Row("adapter_fetch_failed", 422, "adapter_error", grpc.StatusCode.FAILED_PRECONDITION)


class Declined(MotetError):
    row = Row("declined", 503, "overloaded_error", grpc.StatusCode.ABORTED, 0.1)


class EngineRestarted(MotetError):
    row = Row("engine_restarted", 503, "server_error", grpc.StatusCode.UNAVAILABLE, 1.0)


class Cancelled(MotetError):
    row = Row("cancelled", 499, "cancelled", grpc.StatusCode.CANCELLED)


class Internal(MotetError):
    pass


class SetupError(MotetError):
    row = Row("setup_error", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class ManifestError(SetupError):
    row = Row("manifest_invalid", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class ModelFolderError(SetupError):
    row = Row("model_folder_invalid", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


class StateDirectoryError(SetupError):
    row = Row("state_directory_unusable", 500, "server_error", grpc.StatusCode.FAILED_PRECONDITION)


def _leaves(root: type[MotetError]) -> dict[str, type[MotetError]]:
    found = {root.row.code: root}
    for child in root.__subclasses__():
        found |= _leaves(child)
    return found


TABLE: dict[str, type[MotetError]] = _leaves(MotetError) | {Internal.row.code: Internal}
"""Every error by its code; the codes are unique."""


def from_proto(failure: common_pb2.Failure) -> MotetError:
    """The error a peer reported. A code that this version does not know becomes Internal with the peer's sentence."""
    kind = TABLE.get(failure.code, Internal)
    return kind(failure.message, retry_after=failure.retry_after_seconds, reason=failure.reason)
