"""What a runner's service and its engine say to each other. Plain values that travel between two processes; no torch.

The service sees an engine only through `Engine`, narrow enough that another engine could stand behind it.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from motet.domain import BASE, Digest, ParkMethod, RequestId
from motet.errors import MotetError
from motet_runner.adapters.layout import AdapterLayout


class State(StrEnum):
    LOADING = "loading"  # waits for its adapter
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    max_tokens: int
    """Of output, delivered tokens included."""
    min_tokens: int = 0
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """One choice of one request, as submitted under one placement."""

    request: RequestId
    epoch: int
    choice: int = 0
    prompt: tuple[int, ...]
    delivered: tuple[int, ...] = ()
    """Output tokens the client already has; the sequence goes on at this index."""
    adapter: Digest = BASE
    promise: int
    """Pages."""
    sampling: Sampling
    seed: int = 0
    priority: int = 1
    """Class as a number, smaller is more urgent."""
    tenant: str = ""
    engines_lost: int = 0
    """Engines that died while they had this request. From one on it is a suspect."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceOutput:
    """What one iteration brought one sequence. `index` is that of `tokens[0]` in the output.

    A stop token is among the tokens of the output that ends with `Finish.STOP`: it was generated and counts.
    """

    request: RequestId
    epoch: int
    choice: int
    index: int
    tokens: list[int]
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: Finish | None = None
    error: MotetError | None = None


@dataclass(frozen=True, slots=True)
class OverflowAhead:
    """A sequence will reach its promise within a page (S3-10); announced once per promise."""

    request: RequestId
    epoch: int
    promise: int


@dataclass(frozen=True, slots=True)
class ParkedNow:
    request: RequestId
    epoch: int
    wanted: int
    """Pages it must be promised to come back."""
    method: ParkMethod
    by_itself: bool


@dataclass(frozen=True, slots=True)
class ResumedNow:
    request: RequestId
    epoch: int
    promise: int
    method: ParkMethod


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    digest: Digest
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AdapterEvicted:
    digest: Digest


@dataclass(frozen=True, slots=True)
class AdapterFailed:
    digest: Digest
    error: MotetError


@dataclass(frozen=True, slots=True)
class StateChanged:
    request: RequestId
    epoch: int
    state: State
    percent: int = 0
    alone: bool = False
    """The iteration that begins next computes this sequence and no other. Told before that iteration begins: whose
    fault it is when the engine dies depends on it."""


Event = OverflowAhead | ParkedNow | ResumedNow | AdapterLoaded | AdapterEvicted | AdapterFailed | StateChanged


@dataclass(frozen=True, slots=True)
class EngineSequenceReport:
    """One request in the engine's book."""

    request: RequestId
    epoch: int
    promise: int
    """Pages; of a parked one those that it must be promised to come back."""
    pages_used: int
    state: State
    prompt_tokens: int
    output_tokens: int
    adapter: Digest
    tenant: str
    priority: int
    parked_times: int


@dataclass(frozen=True, slots=True)
class EngineAdapterReport:
    digest: Digest
    bytes: int
    live: int
    on_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    steps: int
    pages_free: int
    pages_promised: int
    running: int
    waiting: int
    parked: int
    pending_prefill_tokens: int
    host_bytes_free: int
    step_seconds: float
    prefill_seconds_per_token: float
    swap_seconds_per_page: float
    sequences: list[EngineSequenceReport]
    adapters: list[EngineAdapterReport]


@dataclass(slots=True)
class StepOutput:
    number: int
    sequences: list[SequenceOutput]
    events: list[Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What is known once the model has been loaded and probed."""

    pages: int
    page_tokens: int
    page_bytes: int
    max_sequences: int
    max_model_length: int
    adapter_slots: int
    max_lora_rank: int
    host_bytes: int
    architecture: str
    vocabulary: int
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    target_modules: dict[str, tuple[int, int]]
    """Every linear an adapter may change: module path in the base model -> (in, out)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: Path
    preset: str = "paged-chunk"
    dtype: str = "auto"
    device: str = "auto"
    max_lora_rank: int = 64
    max_resident_adapters: int = 16
    max_model_length: int | None = None
    max_concurrent_sequences: int = 64
    memory_utilization_percent: int = 90
    kv_cache_mib: int | None = None
    host_kv_mib: int | None = None
    prefill_chunk_tokens: int = 512
    threads: int | None = None
    step_trace: Path | None = None
    protect_after_steps: int = 0
    """Iterations a sequence at its promise waits for an answer before the engine protects itself; 0: at once."""


class Engine(Protocol):
    """Synchronous, single-threaded, free of sockets and files but for weights. Commands act at the next boundary.
    `tests/contract/test_engines.py` says in cases what is promised here.

    Commands about a request that is not there, or whose epoch or promise has changed, do nothing and return False.
    """

    info: EngineInfo

    def add(self, sequence: NewSequence) -> None:
        """Take a sequence in. Raises Declined when its promise does not fit, InvalidRequest when it never can.

        One whose adapter is not known yet waits for it.
        """

    def cancel(self, request: RequestId, epoch: int | None = None) -> bool: ...

    def extend(self, request: RequestId, epoch: int, promise: int, extended: int) -> bool: ...

    def park(self, request: RequestId, epoch: int, promise: int, wanted: int, method: ParkMethod) -> bool: ...

    def resume(self, request: RequestId, epoch: int, promise: int) -> bool: ...

    def set_supervised(self, supervised: bool) -> None:
        """Without a supervisor the engine extends, parks and resumes by itself."""

    def set_overcommit(self, factor: float) -> None:
        """Let promises add up to `factor` × the pages. When pages run out all the same, the newest is parked."""

    def load_adapter(self, digest: Digest, layout: AdapterLayout) -> None:
        """Say where an adapter's checked bytes lie and bring them to the device when there is room. Idempotent.

        `motet_runner.adapters.certification` checks a folder and makes its layout.
        """

    def drop_adapter(self, digest: Digest) -> None:
        """Forget an adapter once no live sequence uses it."""

    def has_work(self) -> bool: ...

    def step(self) -> StepOutput:
        """One iteration: compose, run the model once, sample. Never raises for the fault of one sequence."""

    def report(self) -> EngineReport: ...
