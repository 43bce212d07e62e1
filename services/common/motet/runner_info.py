"""What runners report about themselves, as plain values. Scheduler, supervisor and simulator decide by them.

This module makes no decisions and does no I/O: it has the values, and reads them from the messages.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from math import inf
from typing import Literal, NamedTuple, Self

from motet.api.v1 import common_pb2
from motet.domain import BASE, PAGE_TOKENS, Digest, RequestId, adapter_pages, pages_for
from motet.errors import InvalidRequest, MotetError, code_and_reason_of, failure_to_proto, retry_after_of
from motet.promises import USUAL_PROMISE_QUANTILE, PromiseRule, known_quantile
from motet.terms import check_epoch

KvCacheDtype = Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
AttentionBackend = Literal["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "ROCM_ATTN", "ROCM_AITER_FA"]
"""vLLM's names"""

MAX_KERNEL_TEXT = 500

MAX_TPOT_MILLISECONDS = 60_000
"""No reader waits for a word for longer than a minute."""

MAX_STEP_SECONDS = 1e6
"""Of an iteration, or one part of it."""

MAX_LISTED = 8192
"""Requests in one message of a runner: twice as many as any pool computes at once (`maxConcurrentSequences`)."""

MAX_LISTED_AT_ONCE = 512
"""Requests in one message to a scheduler that takes several of them: it does nothing else while it handles one."""

MAX_UNIX_SECONDS = 2.0**36
"""In the year 4147: a date that all programs can write"""


class RequestClass(IntEnum):
    """A smaller number is more urgent. The numbers are those of the messages."""

    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3

    @classmethod
    def from_proto(cls, value: int) -> "RequestClass":
        """The class; STANDARD for a class of a newer peer that this version does not know."""
        return _CLASSES.get(value) or cls.STANDARD


# Each report of each runner names dozens of members. In Python 3.11, to call an enum takes ten times as long as to look
# into a dict, and to look up one of its attributes takes five times as long: so both are found once.
_CLASSES = {int(one): one for one in RequestClass}
_class_from_proto = RequestClass.from_proto


class SequenceState(StrEnum):
    LOADING = "loading"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"


_PARKED = SequenceState.PARKED

# An unknown state of a newer runner counts as WAITING: neither as running, nor as parked (which must be resumed).
_STATES = {
    common_pb2.SEQUENCE_STATE_LOADING: SequenceState.LOADING,
    common_pb2.SEQUENCE_STATE_PREFILL: SequenceState.PREFILL,
    common_pb2.SEQUENCE_STATE_DECODE: SequenceState.DECODE,
    common_pb2.SEQUENCE_STATE_PARKED: SequenceState.PARKED,
}


class Tier(IntEnum):
    """Where a runner holds an adapter. A larger number is nearer to the device."""

    NONE = 0
    DISK = 1
    HOST = 2
    DEVICE = 3

    @classmethod
    def from_proto(cls, value: int) -> "Tier":
        """The tier; NONE for a tier of a newer runner that this version does not know. At worst, the scheduler orders
        a load that is not needed."""
        return _TIERS.get(value) or cls.NONE


_TIERS = {int(one): one for one in Tier}
_tier_from_proto = Tier.from_proto


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a value. `code` is a key of `motet.errors.TABLE`."""

    code: str
    message: str
    retry_after: float = 0.0
    reason: str = ""

    @classmethod
    def of(cls, error: MotetError) -> Self:
        return cls(error.code, error.message, error.retry_after, error.reason)

    @classmethod
    def from_proto(cls, failure: common_pb2.Failure) -> Self:
        code, reason = code_and_reason_of(failure)
        return cls(code, failure.message, retry_after_of(failure), reason)

    def to_proto(self) -> common_pb2.Failure:
        return failure_to_proto(self.code, self.message, self.retry_after, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerIdentity:
    """One start of one runner process. `instance` stays the same after a restart, `incarnation` does not."""

    instance: str
    incarnation: str = ""
    pool: str = ""
    group: str = ""
    revision: str = ""
    pod_name: str = ""
    pod_uid: str = ""

    @classmethod
    def from_proto(cls, it: common_pb2.RunnerIdentity) -> Self:
        return cls(
            instance=it.instance,
            incarnation=it.incarnation,
            pool=it.pool,
            group=it.group,
            revision=it.revision,
            pod_name=it.pod_name,
            pod_uid=it.pod_uid,
        )

    def to_proto(self) -> common_pb2.RunnerIdentity:
        return common_pb2.RunnerIdentity(
            instance=self.instance,
            incarnation=self.incarnation,
            pool=self.pool,
            group=self.group,
            revision=self.revision,
            pod_name=self.pod_name,
            pod_uid=self.pod_uid,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a runner can hold."""

    pages: int
    page_tokens: int = PAGE_TOKENS
    page_bytes: int = 0
    max_sequences: int = 64
    max_model_length: int = 2048
    adapter_slots: int = 16
    max_lora_rank: int = 64
    host_bytes: int = 0
    promise_rule: PromiseRule = PromiseRule.EXPECTED
    """What its preset promises a request."""
    promise_quantile: int = USUAL_PROMISE_QUANTILE
    """The quantile of the estimate that a promise covers, in percent."""
    by_forecast: bool = False
    """It admits by a forecast of the largest need. Its requests are charged what they have of that, and no promise
    keeps pages from others."""
    adapter_rank_bytes: int = 0
    """How many bytes of its pages an adapter takes for each row of its rank. 0: adapters take none of its pages."""
    adapter_rank_tile: int = 1
    """An adapter's rank counts as the next multiple of this."""

    def pages_for(self, tokens: int) -> int:
        return pages_for(tokens, self.page_tokens)

    def kv_pages(self, reported: int) -> int:
        """How many pages KV can have now, by a runner's report. An earlier version reports 0: it has them all."""
        return min(reported or self.pages, self.pages)

    def adapter_pages(self, rank: int) -> int:
        """How many pages an adapter of this rank takes from KV while sequences use it."""
        return adapter_pages(
            rank, rank_bytes=self.adapter_rank_bytes, tile=self.adapter_rank_tile, page_bytes=self.page_bytes
        )

    @classmethod
    def from_proto(cls, it: common_pb2.Capacity) -> Self:
        return cls(
            pages=it.pages,
            page_tokens=it.page_tokens or PAGE_TOKENS,
            page_bytes=it.page_bytes,
            max_sequences=it.max_sequences,
            max_model_length=it.max_model_length,
            adapter_slots=it.adapter_slots,
            max_lora_rank=it.max_lora_rank,
            host_bytes=it.host_bytes,
            promise_rule=PromiseRule.from_proto(it.promise_rule),
            promise_quantile=known_quantile(it.promise_quantile),
            by_forecast=it.by_forecast,
            adapter_rank_bytes=it.adapter_rank_bytes,
            adapter_rank_tile=it.adapter_rank_tile or 1,
        )

    def to_proto(self) -> common_pb2.Capacity:
        return common_pb2.Capacity(
            pages=self.pages,
            page_tokens=self.page_tokens,
            page_bytes=self.page_bytes,
            max_sequences=self.max_sequences,
            max_model_length=self.max_model_length,
            adapter_slots=self.adapter_slots,
            max_lora_rank=self.max_lora_rank,
            host_bytes=self.host_bytes,
            promise_rule=self.promise_rule,
            promise_quantile=self.promise_quantile,
            by_forecast=self.by_forecast,
            adapter_rank_bytes=self.adapter_rank_bytes,
            adapter_rank_tile=self.adapter_rank_tile,
        )


@dataclass(frozen=True, slots=True)
class KernelState:
    """What computes adapters and attention on a runner, for people."""

    serving: str
    """Such as `torch` or `cpp (avx512)`"""
    since: float
    """When it began to serve, in Unix seconds"""
    note: str = ""
    """Which others come, or why they do not; a clause without a stop"""

    @classmethod
    def from_proto(cls, it: common_pb2.KernelState) -> Self:
        since = it.since_unix_seconds
        known = since if 0 <= since < MAX_UNIX_SECONDS else 0.0  # any number may come
        return cls(it.serving[:MAX_KERNEL_TEXT], known, it.note[:MAX_KERNEL_TEXT])

    def to_proto(self) -> common_pb2.KernelState:
        return common_pb2.KernelState(serving=self.serving, since_unix_seconds=self.since, note=self.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCap:
    """How many sequences a runner computes at once, so that a token takes no longer than its pool's SLO (S3-18)."""

    target_seconds: float
    sequences: int = 0
    """0: too few iterations were seen, and there is no cap yet."""
    token_seconds: float = 0.0
    """Forecast with that many."""
    alone_seconds: float = 0.0
    """Forecast with one."""
    fixed_seconds: float = 0.0
    """The learned law of an iteration's time: this, and the next ones times what it computes."""
    sequence_seconds: float = 0.0
    context_seconds: float = 0.0
    prompt_seconds: float = 0.0

    @property
    def at_target(self) -> float:
        """How many take as long as the target, by the law alone: a line through the two forecasts. The cap is lower
        until that number was seen together; it doubles whenever it is reached. 0: not known yet."""
        each = (self.token_seconds - self.alone_seconds) / (self.sequences - 1) if self.sequences > 1 else 0.0
        if each > 0:
            return max(self.sequences, 1 + (self.target_seconds - self.alone_seconds) / each)
        return inf if self.sequences > 1 else self.sequences

    @property
    def too_slow(self) -> bool:
        """Not even one sequence alone keeps the target."""
        return self.sequences == 1 and self.alone_seconds > self.target_seconds

    @classmethod
    def from_proto(cls, it: common_pb2.BatchCap) -> Self:
        return cls(
            target_seconds=known_seconds(it.target_seconds),
            sequences=it.sequences,
            token_seconds=known_seconds(it.token_seconds),
            alone_seconds=known_seconds(it.alone_seconds),
            fixed_seconds=known_seconds(it.fixed_seconds),
            sequence_seconds=known_seconds(it.sequence_seconds),
            context_seconds=known_seconds(it.context_seconds),
            prompt_seconds=known_seconds(it.prompt_seconds),
        )

    def to_proto(self) -> common_pb2.BatchCap:
        return common_pb2.BatchCap(**asdict(self))


def known_seconds(number: float) -> float:
    """Any number may come. 0: nobody knows."""
    return number if 0 <= number < MAX_STEP_SECONDS else 0.0


class RunnerRequest(NamedTuple):
    """One request that a runner has accepted, as the runner reports it: what is decided by.

    A tuple: each report of each runner makes dozens, and a frozen dataclass takes twice as long to make."""

    request: RequestId
    epoch: int
    pages: int
    """The promised pages."""
    pages_used: int = 0
    state: SequenceState = SequenceState.DECODE
    prompt_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    """Of the output. 0: the runner did not say."""
    digest: Digest = BASE
    request_class: RequestClass = RequestClass.STANDARD
    parked_times: int = 0
    gateway: str = ""
    charged_pages: int = 0
    """How many of the promised pages the runner's ledger charges to it. 0: all of them."""
    promise_number: int = 0
    """Which of its promises the runner keeps now, or asks for if it is parked. 0: the runner did not say."""

    @property
    def parked(self) -> bool:
        return self.state is _PARKED

    @property
    def shared_pages(self) -> int:
        """How many of the promised pages are not charged to it. Negative if it is charged more than its promise, as it
        may be by a forecast."""
        return self.pages - self.charged_pages if self.charged_pages else 0

    @property
    def pages_to_charge(self) -> int:
        return self.pages - self.shared_pages

    @classmethod
    def from_proto(cls, it: common_pb2.RunnerRequest) -> Self:
        return cls(
            RequestId(it.request),
            check_epoch(it.epoch, it.request),
            it.promise.pages,
            it.pages_used,
            _STATES.get(it.state) or SequenceState.WAITING,
            it.prompt_tokens,
            it.output_tokens,
            it.max_tokens,
            Digest(it.adapter_digest),
            _class_from_proto(it.request_class),
            it.parked_times,
            it.gateway,
            it.charged_pages,
            it.promise.number,
        )


def read_runner_requests(
    entries: Collection[common_pb2.RunnerRequest], field: str = "live"
) -> tuple[RunnerRequest, ...]:
    check_listed(len(entries), field)
    return tuple(map(RunnerRequest.from_proto, entries))


def check_listed(requests: int, field: str) -> None:
    """Raise InvalidRequest for more requests than any runner can have."""
    if requests > MAX_LISTED:
        raise InvalidRequest(
            f"a runner lists {requests} requests in `{field}`; it can have at most {MAX_LISTED}", param=field
        )


def read_resident_adapters(entries: Iterable[common_pb2.ResidentAdapter]) -> dict[Digest, Tier]:
    """The adapters that a runner holds, and at which tier: all that is decided by."""
    return {Digest(entry.digest): _tier_from_proto(entry.tier) for entry in entries}
