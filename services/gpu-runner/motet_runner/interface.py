"""The values that a runner's service and its engine exchange between two processes: plain, without torch.

The service uses an engine only through `Engine`. That protocol is narrow, so that another engine can implement it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from motet import sampling
from motet.domain import BASE, Digest, ParkMethod, RequestId
from motet.errors import MotetError
from motet.grammars.grammar import Grammar
from motet.promises import USUAL_PROMISE_QUANTILE, PromiseRule
from motet.runner_info import BatchCap, Capacity, KernelState
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.row_mask import RowMask

Sampling = sampling.Sampling
"""A request's sampling options, see `motet.sampling`."""


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
class NewSequence:
    """One choice of one request, as submitted under one placement."""

    request: RequestId
    epoch: int
    choice: int = 0
    prompt: tuple[int, ...]
    delivered: tuple[int, ...] = ()
    """Output tokens that the client already has. The sequence continues after them."""
    scored: int = 0
    """The place in the prompt before which the client already has the log probabilities."""
    adapter: Digest = BASE
    promise: int
    """In pages"""
    promise_number: int = 1
    """Of its promise: in a second life under the same placement, numbers go on where those of the first have ended."""
    quantiles: tuple[int, int, int, int] | None = None
    """The estimate of the whole answer's length: q50, q80, q90 and q95. None: there is no estimate."""
    sampling: Sampling
    seed: int = 0
    seed_is_drawn: bool = False
    """The client has set none, and is told none: an engine with random numbers of its own may use these."""
    priority: int = 1
    """The class as a number: smaller is more urgent."""
    tenant: str = ""
    weight: int = 1
    """By which its tenant shares the engine with others"""
    engines_lost: int = 0
    """How many engines died while they had this request. If any engine did, the request is a suspect."""
    parent: RequestId | None = None
    """The first choice of the same call, if this is a later choice (`n` > 1). Both have the same prompt, adapter and
    tenant, so they can share the prompt's pages. The parent may be unknown to the engine, or have ended."""
    prefix_salt: bytes = b""
    """The salt of the pages' digests (`motet.prefix_hints.prefix_salt`): base model, adapter and tenant. Two sequences
    may share pages only under the same salt. Empty: the sequence shares no pages."""
    grammar: Grammar | None = None
    """That its answer follows."""
    mask: RowMask | None = None
    """Of its grammar and its lists of tokens, once it is there."""

    @property
    def bound(self) -> bool:
        """Not every token may come next."""
        return self.grammar is not None or bool(self.sampling.allowed_token_ids or self.sampling.bad_words)


@dataclass(frozen=True, slots=True)
class Logprobs:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    """Of a token of a prompt: 1 for the most likely one. 0: nobody has counted."""


@dataclass(slots=True)
class SequenceOutput:
    """What one iteration produced for one sequence. `index` is the position of `tokens[0]` in the output.

    With `Finish.STOP`, `tokens` ends with the stop token: it was generated, so it counts.
    """

    request: RequestId
    epoch: int
    choice: int
    index: int
    tokens: list[int]
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: Finish | None = None
    prompt_index: int = 0
    """The place in the prompt of the first token in `prompt_logprobs`"""
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    error: MotetError | None = None
    cached_tokens: int | None = None
    """With the first token from this engine: how many tokens of the prompt were in the prefix cache"""
    promise_number: int = 0
    """Of the last promise, if this is the end"""


@dataclass(frozen=True, slots=True)
class DecodedTokens:
    """One more token for each decoding sequence, as columns: the result of the usual iteration. While the same
    sequences decode, all columns except `tokens` are the same objects."""

    requests: tuple[RequestId, ...]
    epochs: tuple[int, ...]
    choices: tuple[int, ...]
    first_indices: tuple[int, ...]
    """The output positions of the tokens of the first iteration with these columns"""
    iterations: int
    """How many iterations with these columns came before this one"""
    tokens: Sequence[int]

    def outputs(self) -> list[SequenceOutput]:
        """One object per sequence"""
        columns = zip(self.requests, self.epochs, self.choices, self.first_indices, self.tokens, strict=True)
        return [
            SequenceOutput(request, epoch, choice, first + self.iterations, [token])
            for request, epoch, choice, first, token in columns
        ]


class EngineSequenceReport(NamedTuple):
    """One sequence, as the engine reports it. A tuple, because reports have many and a tuple is made quickly."""

    request: RequestId
    epoch: int
    promise: int
    """In pages. For a parked sequence: the promise that it needs to resume."""
    pages_used: int
    state: State
    prompt_tokens: int
    output_tokens: int
    adapter: Digest
    tenant: str
    priority: int
    parked_times: int
    charged_pages: int | None = None
    """The pages of the promise that the engine's ledger charges to this sequence. They are fewer than the promise while
    another sequence pays for shared pages. None: the whole promise."""
    promise_number: int = 0


@dataclass(frozen=True, slots=True)
class OverflowAhead:
    """A sequence is within a page of the end of its promise (S3-10). The engine reports it once per promise."""

    entry: EngineSequenceReport
    """As of now: no report comes with this event. What the ledger charges is not in it."""

    @property
    def request(self) -> RequestId:
        return self.entry.request

    @property
    def epoch(self) -> int:
        return self.entry.epoch

    @property
    def promise(self) -> int:
        return self.entry.promise

    @property
    def number(self) -> int:
        return self.entry.promise_number


@dataclass(frozen=True, slots=True)
class ParkedNow:
    request: RequestId
    epoch: int
    wanted: int
    """The promise that the sequence needs to resume, in pages."""
    method: ParkMethod
    by_itself: bool
    number: int = 0
    """Of the promise, as of those below."""


@dataclass(frozen=True, slots=True)
class ResumedNow:
    request: RequestId
    epoch: int
    promise: int
    method: ParkMethod
    number: int = 0


@dataclass(frozen=True, slots=True)
class OrderRefused:
    """A command about a promise changed nothing. Whoever gave it need not wait for its effect."""

    request: RequestId
    epoch: int
    number: int
    """Of the promise that the command named"""


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    digest: Digest
    bytes: int
    seconds: float
    pause: float = 0.0
    """For how long iterations stood still for it, in all"""
    lacks_slab: bool = False
    """The adapter's slab is missing, or was damaged and is removed."""
    from_host: bool = False
    """Nothing was read: it was in the host's memory."""
    in_host: bool = False
    """It stays there when it leaves the device."""


@dataclass(frozen=True, slots=True)
class SlabWritten:
    number: int
    """Of the order"""
    bytes: int
    """0: it could not be written. The adapter loads from its checked bytes."""


@dataclass(frozen=True, slots=True)
class ProofEnded:
    """The answer to the order to prove an adapter. Each order gets one."""

    number: int
    """Of the order"""
    digest: Digest
    found: Proof | MotetError
    """An AdapterUnproved if the adapter's results are wrong; another error if the engine has given up"""


@dataclass(frozen=True, slots=True)
class AdapterEvicted:
    digest: Digest


@dataclass(frozen=True, slots=True)
class AdapterLeftHost:
    """The host's memory keeps it no more."""

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
    """The next iteration computes only this sequence. The service must know that before the iteration begins: if the
    engine dies in it, this sequence is the cause."""


Event = (
    OverflowAhead
    | ParkedNow
    | ResumedNow
    | OrderRefused
    | AdapterLoaded
    | ProofEnded
    | SlabWritten
    | AdapterEvicted
    | AdapterLeftHost
    | AdapterFailed
    | StateChanged
)


class EngineAdapterReport(NamedTuple):
    digest: Digest
    bytes: int
    live: int
    on_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    steps: int
    pages: int
    """The pages that KV can get now: all pages except those of adapters in use."""
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
    """Those on the device, those that load, and those that sequences use or wait for: not all that are known."""
    prefix_queried_tokens: int = 0
    """The tokens of all sequences that have started and may share pages."""
    prefix_hit_tokens: int = 0
    """How many of these tokens were in the cache."""
    prefix_pages: int = 0
    """The pages of the prefix cache. Those that no sequence uses also count as free."""
    cached_prefixes: tuple[int, ...] = ()
    """Hints (`motet.prefix_hints`) of the pages in the prefix cache, the most valuable first, at most
    `MAX_CACHED_HINTS`."""
    kernels: KernelState | None = None
    stopped_by_itself: int = 0
    """How many requests the engine has stopped that the plan has not"""
    fixed_seconds: float = 0.0
    """Of an iteration of decodes alone: this, and"""
    sequence_seconds: float = 0.0
    """this for each of them. Both 0: too few iterations were seen."""
    batch_cap: BatchCap | None = None
    """None: the pool has no SLO for the time of a token."""
    host_adapters: int = 0
    """How many adapters the host's memory keeps for their next load"""
    host_adapter_bytes: int = 0
    """Their bytes, with those of adapters on their way there"""
    load_parts: int = 0
    """How often more of an adapter had been read when the engine looked: the matrices of another linear, at least."""

    @property
    def progress(self) -> int:
        """Stands still while the engine hangs. Sequences that all wait for an adapter take no steps, and a disk that
        goes on giving parts of it does not hang."""
        return self.steps + self.load_parts


@dataclass(slots=True)
class StepOutput:
    number: int
    others: list[SequenceOutput]
    """All outputs but `decoded`"""
    events: list[Event]
    decoded: DecodedTokens | None = None
    late: bool = False
    """A sequence waits for its mask. The next call of `step` computes others meanwhile, or waits by itself."""

    @property
    def sequences(self) -> list[SequenceOutput]:
        """One object per sequence that has an output. Time-critical code reads the columns instead."""
        return self.others if self.decoded is None else [*self.decoded.outputs(), *self.others]


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
    layers: int
    vocabulary: int
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    target_modules: dict[str, tuple[int, int]]
    """Every linear layer that an adapter may change: its module path in the base model -> (in, out)."""
    adapter_rank_bytes: int = 0
    """The bytes of pages that an adapter takes per row of its rank. 0: adapters have their own memory."""
    adapter_rank_tile: int = 1
    """An adapter's rank counts as the next multiple of this."""
    kernels: KernelState | None = None
    """The first kernels"""
    backend: str = "motet"
    version: str = ""
    """Of the backend. Empty: Motet's own"""
    by_forecast: bool = False
    """True if the engine admits sequences by a forecast. Its charges are then parts of the forecast."""
    no_scales: str = ""
    """Where Motet can't scale and shift a linear's own result yet, as DoRA and trained biases need; empty if it can"""
    biased_modules: tuple[str, ...] = ()
    """Those of `target_modules` that have a bias: only these can get a trained one."""
    max_device_rank: int | None = None
    """The largest rank on the device for which it has pages, beside one for a request. None: it has them for every rank
    that the pool serves."""
    proves: bool = False
    """True if the engine proves adapters: `Engine.load_adapter`"""
    hardware: str = ""
    """The model of the device that computes"""
    machine: str = ""
    """The same: what no other machine or device has"""
    run_layout: str = ""
    """What the bytes of an adapter on the device depend on, besides the adapter and the base. Empty: it loads no
    slabs."""

    def slab_bytes(self, rank: int) -> int:
        """What a slab of this rank has at most. Beside the run there is a short head."""
        tiles = -(-rank // self.adapter_rank_tile)
        run = tiles * self.adapter_rank_tile * self.adapter_rank_bytes
        return run + run // 64 + 4096

    def capacity(self, promise_rule: PromiseRule, promise_quantile: int = USUAL_PROMISE_QUANTILE) -> Capacity:
        """As the runner tells scheduler and supervisor."""
        return Capacity(
            pages=self.pages,
            page_tokens=self.page_tokens,
            page_bytes=self.page_bytes,
            max_sequences=self.max_sequences,
            max_model_length=self.max_model_length,
            adapter_slots=self.adapter_slots,
            max_lora_rank=self.max_lora_rank,
            host_bytes=self.host_bytes,
            promise_rule=promise_rule,
            promise_quantile=promise_quantile,
            by_forecast=self.by_forecast,
            adapter_rank_bytes=self.adapter_rank_bytes,
            adapter_rank_tile=self.adapter_rank_tile,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: Path
    preset: str = "paged-chunk"
    contiguous: bool = False
    """True if the pages of each sequence are one run, for its whole promise."""
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    """What computes adapters and attention: auto, torch, cpp, triton on a GPU, or exact for exact mode."""
    adapter_dtype: str = "auto"
    """The type of adapters in device memory: auto for the model's, or int8 with the kernels triton."""
    prove_adapters: bool | None = False
    """True if the engine proves adapters, as far as it can: see `EngineInfo.proves`. None: on a CPU"""
    kernel_cache: Path | None = None
    """The folder of compiled kernels. None: nothing is compiled, so that `auto` is torch."""
    compiler: str = ""
    """The C++ compiler, as a name or a path. Empty: the first usual one on the PATH."""
    max_lora_rank: int = 64
    max_resident_adapters: int = 16
    max_model_length: int | None = None
    max_concurrent_sequences: int = 64
    memory_utilization_percent: int = 90
    kv_cache_mib: int | None = None
    host_kv_mib: int | None = None
    host_adapters_mib: int = 0
    """Host memory for adapters, from which they load again without the disk"""
    prefill_chunk_tokens: int = 512
    decode_slowdown: float | None = None
    """The longest time of an iteration with decodes and prompt tokens, as a multiple of the time of the decodes alone.
    None: no limit, for callers that only want all answers soon."""
    tpot_seconds: float | None = None
    """The longest mean time of a token. As many sequences run at once as keep it, at least one. None: no limit."""
    threads: int | None = None
    step_trace: Path | None = None
    kv_cache_dtype: str = "auto"
    """This and the next four are vLLM's alone."""
    enforce_eager: bool = False
    attention_backend: str | None = None
    """None: vLLM's choice"""
    tensor_parallel: int = 1
    """How many devices share each layer"""
    stages: int = 1
    """How many groups of devices share the layers"""
    prefix_cache: bool = True
    """True if sequences with a `prefix_salt` share the pages of equal tokens."""
    plan_ahead: int | None = None
    """How many iterations are planned and launched before the oldest one is collected. None: 1 if the device is
    asynchronous, and 0 otherwise."""
    protect_after_steps: int = 0
    """The iterations that a sequence at the end of its promise waits for an answer. Then the engine decides alone. 0:
    the engine decides at once."""


LoadProgress = Callable[[int, int], None]
"""Gets the bytes of weights that are read, and all bytes, about once a second, on a thread of the load."""


class Engine(Protocol):
    """Calls are synchronous and come from one thread. An engine opens no sockets. Commands take effect before the next
    iteration. The cases in `tests/contract/test_engines.py` show what an engine must do.

    A command about a request that the engine does not have, or whose epoch or promise has changed, does nothing and
    returns False.
    """

    info: EngineInfo

    def add(self, sequence: NewSequence) -> None:
        """Accept a sequence. Raises Declined if the promise does not fit now beside the adapters in use, and
        InvalidRequest if the promise and the sequence's adapter can never fit together.

        A sequence waits for an adapter that the engine does not know yet.
        """

    def cancel(self, request: RequestId, epoch: int | None = None) -> int:
        """Returns the number of its last promise; 0 if the engine does not have it."""

    def extend(self, request: RequestId, epoch: int, promise: int, extended: int, *, number: int = 0) -> bool:
        """`promise` and `number` are those for which this was decided. If the sequence has another promise now, nothing
        happens. Without a number, the pages alone are compared."""

    def park(
        self, request: RequestId, epoch: int, promise: int, wanted: int, method: ParkMethod, *, number: int = 0
    ) -> bool: ...

    def resume(self, request: RequestId, epoch: int, promise: int, *, number: int = 0) -> bool:
        """`promise`: the pages that it gets. `number`: of the promise that it asked for when it was parked."""

    def set_supervised(self, supervised: bool) -> None:
        """Without a supervisor the engine extends, parks and resumes by itself."""

    def set_overcommit(self, factor: float) -> None:
        """Allow promises whose sum is `factor` × the pages. Raises InvalidRequest if no pool may choose it."""

    def mask_of(self, sequence: NewSequence) -> RowMask:
        """Of a sequence that is bound. To compile a grammar may take a while, so this is the one call that another
        thread makes. Raises InvalidRequest if the grammar cannot be served, StructuredOutputUnavailable if none can."""

    def load_adapter(
        self,
        digest: Digest,
        layout: AdapterLayout,
        *,
        pinned: bool = False,
        proof: ProofOrder | None = None,
    ) -> None:
        """Register where an adapter's checked bytes are, and load the adapter once the device has pages for it.
        Idempotent. `motet_runner.adapters.certification` makes the layout. `pinned`: it leaves the device last.

        `proof`: the kernels that serve are to prove the adapter, which loads for that even if nobody waits for it. A
        ProofEnded answers each order. An order with the same number as the last one is that order, told again; one
        with another number takes its place. A new adapter serves only once it is proved, unless it
        `serves_meanwhile`. With an AdapterUnproved, all its sequences end with that error, and later ones are refused,
        until there is another order.
        """

    def drop_adapter(self, digest: Digest) -> None:
        """Forget an adapter once no live sequence uses it."""

    def write_slab(self, number: int, layout: AdapterLayout) -> None:
        """Write an adapter's slab beside its checked bytes. `slabs_written` says when that has ended."""

    def slabs_written(self) -> list[SlabWritten]:
        """Since the last call. Until all are told, `idle` asks to be called again."""

    def has_work(self) -> bool: ...

    def step(self) -> StepOutput:
        """One iteration: plan, run the model, sample. The error of one sequence is in its output, and is not raised."""

    def idle(self) -> float | None:
        """Use a moment without work, at most some milliseconds, for preparations that speed up later iterations.

        → the seconds after which the engine wants the next call; None: not before it has had work again.
        """

    def report(self) -> EngineReport: ...

    def free_share(self) -> float:
        """The free share of the pages that KV can get now, 0 to 1. Far cheaper than a report."""
