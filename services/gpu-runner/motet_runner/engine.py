"""The engine: iteration after iteration over all sequences of all adapters (OR-01).

The plan decides, the store holds, the model computes, the sampler chooses; this loop only introduces them to each
other. Synchronous, one thread, no sockets, no files but weights and the step trace.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from motet.clock import Clock
from motet.domain import PAGE_TOKENS, Digest, ParkMethod, RequestId
from motet.errors import MotetError, NotFinite, SetupError
from motet_kernels import RANKS, rank_class_of
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.slots import SlotChanges, SlotStore
from motet_runner.execute.checkpoint import ignore_progress
from motet_runner.execute.lora import LoraLinears, bytes_of
from motet_runner.execute.model import load, probe_sequence
from motet_runner.execute.rows import Assembler, Rows
from motet_runner.execute.sampler import sample
from motet_runner.interface import (
    AdapterEvicted,
    AdapterFailed,
    AdapterLoaded,
    EngineAdapterReport,
    EngineConfig,
    EngineInfo,
    EngineReport,
    Event,
    Finish,
    LoadProgress,
    Logprobs,
    NewSequence,
    OverflowAhead,
    ParkedNow,
    ResumedNow,
    SequenceOutput,
    State,
    StepOutput,
)
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import (
    Book,
    Iteration,
    Sequence,
    Work,
    preset_named,
)

MIB = 1024 * 1024
CPU_KV_MIB = 512
_NOT_FINITE = (
    "The model's results for this request are infinite or not numbers. If the request uses an adapter, try the base "
    "model, and tell the adapter's owner."
)
HOST_SHARE_ON_CPU = 16
"""On a CPU the host tier is the same memory: a sixteenth of the KV unless it is set."""


RANK_RESERVED = 16
"""Memory for adapters is set aside at the start, for `max_resident_adapters` of this rank, which is the usual one."""


LogitsTap = Callable[[list[RequestId], torch.Tensor], None]
"""Gets the requests that are sampled now, and their logits before any penalty: [requests, vocabulary]."""


class Engine:
    """See `motet_runner.interface.Engine` for what each call promises."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock = time.perf_counter,
        on_logits: LogitsTap | None = None,
        on_load_progress: LoadProgress = ignore_progress,
    ) -> None:
        """`on_logits` is called in each iteration that samples."""
        self._config = config
        self._on_logits = on_logits
        self._clock = clock
        preset = preset_named(config.preset)
        if config.device != "cuda":
            torch.set_num_threads(config.threads or 1)
        self._loaded = load(config.model, config.dtype, config.device, on_load_progress)
        loaded = self._loaded
        page_bytes = loaded.shape.bytes_per_page()
        adapter_rows = _adapter_rows(config)
        pages = self._pages(page_bytes, bytes_of(loaded.linears, adapter_rows, loaded.dtype))
        host_pages = int(self._host_bytes(pages * page_bytes) // page_bytes)
        max_length = self._max_length(pages)
        with torch.inference_mode():
            self._store = PagedStore(pages, loaded.shape, loaded.dtype, loaded.device)
            self._tiers = PageTiers(self._store, host_pages)
        self._assembler = Assembler(self._store, loaded.device)
        self._linears = LoraLinears(loaded.linears, adapter_rows, loaded.dtype, loaded.device)
        self._slots = SlotStore(
            self._linears,
            slots=config.max_resident_adapters,
            live=lambda digest: self._book.live_on(digest),  # noqa: PLW0108 the book comes next, and asks these slots
            users=lambda digest: self._book.users_of(digest),  # noqa: PLW0108
            clock=clock,
        )
        self._book = Book(
            pages=pages,
            preset=preset,
            places=config.max_concurrent_sequences,
            chunk_tokens=config.prefill_chunk_tokens,
            max_length=max_length,
            vocabulary=loaded.vocabulary,
            eos_token_ids=frozenset(loaded.eos_token_ids),
            host_pages=host_pages,
            protect_after_steps=config.protect_after_steps,
            on_device=self._slots.on_device,
            cheaper=self._cheaper,
        )
        self._eos = frozenset(loaded.eos_token_ids)
        self._steps = 0
        self._step_seconds = 0.0
        self._prefill_seconds_per_token, self._swap_seconds_per_page = self._measure()
        self._trace = _Trace(config.step_trace)
        self.info = EngineInfo(
            pages=pages,
            page_tokens=PAGE_TOKENS,
            page_bytes=page_bytes,
            max_sequences=config.max_concurrent_sequences,
            max_model_length=max_length,
            adapter_slots=config.max_resident_adapters,
            max_lora_rank=config.max_lora_rank,
            host_bytes=host_pages * page_bytes,
            architecture=loaded.architecture,
            vocabulary=loaded.vocabulary,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=str(loaded.device),
            eos_token_ids=loaded.eos_token_ids,
            target_modules=self._linears.shapes,
        )

    # -- commands ----------------------------------------------------------------------------------------------------

    def add(self, sequence: NewSequence) -> None:
        added = self._book.add(sequence)
        if added.state is State.LOADING:
            self._slots.request_load(added.adapter)

    def cancel(self, request: RequestId, epoch: int | None = None) -> bool:
        return self._book.cancel(request, epoch) is not None

    def extend(self, request: RequestId, epoch: int, promise: int, extended: int) -> bool:
        return self._book.extend(request, epoch, promise, extended)

    def park(self, request: RequestId, epoch: int, promise: int, wanted: int, method: ParkMethod) -> bool:
        return self._book.park(request, epoch, promise, wanted, method)

    def resume(self, request: RequestId, epoch: int, promise: int) -> bool:
        resumed = self._book.resume(request, epoch, promise)
        self._want_adapters()
        return resumed

    def set_supervised(self, supervised: bool) -> None:
        self._book.supervised = supervised

    def set_overcommit(self, factor: float) -> None:
        self._book.set_overcommit(factor)

    def load_adapter(self, digest: Digest, layout: AdapterLayout) -> None:
        self._slots.register(digest, layout)

    def drop_adapter(self, digest: Digest) -> None:
        self._slots.drop(digest)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return self._book.has_work() or self._slots.busy or bool(self._book.copies or self._book.events)

    def step(self) -> StepOutput:
        began = self._clock()
        outputs: list[SequenceOutput] = []
        events: list[Event] = []
        self._load_adapters(outputs, events)
        iteration, given_up = self._book.next_iteration()
        outputs += [_failed(sequence, error) for sequence, error in given_up]
        self._want_adapters()
        rows = None
        with torch.inference_mode():
            self._copy_pages()
            launched = self._clock()
            if iteration:
                rows = self._assembler.assemble(iteration, self._slots.slot_of)
                logits = self._loaded.forward(rows)
                sequences = [work.sequence for work in rows.sampled]
                if self._on_logits is not None:
                    self._on_logits([sequence.request for sequence in sequences], logits)
                sampled = sample(logits, sequences, self._eos) if sequences else []
                for work in iteration.work:
                    self._book.computed(work)
                for sequence, token in zip(sequences, sampled, strict=True):
                    index = sequence.output_tokens
                    if token is None:
                        self._book.failed(sequence)
                        outputs.append(_failed(sequence, NotFinite(_NOT_FINITE)))
                        continue
                    finish = self._book.sampled(sequence, token.token)
                    outputs.append(_output(sequence, index, token.token, token.logprobs, finish))
        events += self._book.events
        self._book.events.clear()
        if iteration:
            self._steps += 1
            self._learn(iteration, self._clock() - launched)
        self._trace.write(self._steps, self._clock() - began, iteration, rows, events, self._book)
        return StepOutput(self._steps, outputs, events)

    def report(self) -> EngineReport:
        book = self._book
        return EngineReport(
            steps=self._steps,
            pages_free=book.pages.free,
            pages_promised=book.ledger.promised,
            running=book.count(State.PREFILL, State.DECODE),
            waiting=book.count(State.WAITING, State.LOADING),
            parked=book.count(State.PARKED),
            pending_prefill_tokens=sum(s.to_compute for s in book if not s.decodes),
            host_bytes_free=book.host.free * self.info.page_bytes,
            step_seconds=self._step_seconds,
            prefill_seconds_per_token=self._prefill_seconds_per_token,
            swap_seconds_per_page=self._swap_seconds_per_page,
            sequences=[sequence.entry() for sequence in book],
            adapters=[
                EngineAdapterReport(digest, known.layout.size, book.live_on(digest), on_device=known.slot is not None)
                for digest, known in self._slots
            ],
        )

    def check(self) -> None:
        """Recount everything; raises AssertionError with the numbers."""
        self._book.check()

    # -- adapters ----------------------------------------------------------------------------------------------------

    def _load_adapters(self, outputs: list[SequenceOutput], events: list[Event]) -> None:
        nobody_waits = not self._book.count(State.WAITING, State.PREFILL, State.DECODE)
        progress: SlotChanges = self._slots.advance(hurry=nobody_waits)
        for digest, size, seconds in progress.loaded:
            events.append(AdapterLoaded(digest, size, seconds))
            self._book.adapter_arrived(digest)
        events += [AdapterEvicted(digest) for digest in progress.evicted]
        for digest, error in progress.failed:
            events.append(AdapterFailed(digest, error))
            outputs += [_failed(sequence, error) for sequence in self._book.fail_waiting_for(digest)]

    def _want_adapters(self) -> None:
        for sequence in self._book:
            if sequence.state is State.LOADING:
                self._slots.request_load(sequence.adapter)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _copy_pages(self) -> None:
        """Make the copies that the plan asks for before the next model call, in their order."""
        copies, self._book.copies = self._book.copies, []
        for copy in copies:
            began = self._clock()
            self._tiers.carry_out(copy)
            seconds = (self._clock() - began) / len(copy.pages)
            self._swap_seconds_per_page += 0.2 * (seconds - self._swap_seconds_per_page)

    def _cheaper(self, sequence: Sequence) -> ParkMethod:
        """Two copies of its pages, or computing its tokens again."""
        swap = 2 * len(sequence.pages) * self._swap_seconds_per_page
        recompute = sequence.computed * self._prefill_seconds_per_token
        return ParkMethod.SWAP if swap < recompute else ParkMethod.RECOMPUTE

    def _pages(self, page_bytes: int, adapter_bytes: int) -> int:
        mib = self._config.kv_cache_mib
        if mib is not None:
            budget = mib * MIB
        elif self._loaded.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._loaded.device)
            budget = free - total * (100 - self._config.memory_utilization_percent) // 100 - adapter_bytes
        else:
            budget = CPU_KV_MIB * MIB
        pages = int(budget // page_bytes)
        if pages < 1:
            raise SetupError(
                f"engine.kvCacheMiB leaves {max(0, budget) / MIB:.2f} MiB for keys and values and one page of this "
                f"model takes {page_bytes / MIB:.2f} MiB; give it more, or lower engine.maxResidentAdapters: adapters "
                f"take {adapter_bytes / MIB:.2f} MiB."
            )
        return pages

    def _host_bytes(self, kv_bytes: int) -> int:
        if self._config.host_kv_mib is not None:
            return self._config.host_kv_mib * MIB
        return kv_bytes // HOST_SHARE_ON_CPU if self._loaded.device.type == "cpu" else kv_bytes

    def _max_length(self, pages: int) -> int:
        wanted, possible = self._config.max_model_length, self._loaded.max_positions
        if wanted is not None and wanted > possible:
            raise SetupError(f"engine.maxModelLength is {wanted} and the model's context holds {possible}; lower it.")
        return min(wanted or possible, pages * PAGE_TOKENS)

    # -- costs -------------------------------------------------------------------------------------------------------

    def _measure(self) -> tuple[float, float]:
        """First figures of what a prefilled token and a copied page cost; both follow what is seen later."""
        loaded, store = self._loaded, self._store
        with torch.inference_mode():
            began = self._clock()
            store.copy_in([0], store.copy_out([0]))
            page = self._clock() - began
            tokens = min(128, self._book.max_length)
            pages = list(range(-(-tokens // PAGE_TOKENS)))
            rows = _warm_up_rows(self._assembler, tokens, pages)
            began = self._clock()
            loaded.forward(rows)
            token = (self._clock() - began) / tokens
        return token, page

    def _learn(self, iteration: Iteration, seconds: float) -> None:
        """`seconds`: from the rows to the sampled tokens. Loads and copies of pages are other costs."""
        if not iteration.prefills:
            self._step_seconds += 0.1 * (seconds - self._step_seconds) if self._step_seconds else seconds
        elif iteration.prefill_tokens >= PAGE_TOKENS:
            beside = self._step_seconds if iteration.decodes else 0.0
            per_token = max(0.0, seconds - beside) / iteration.prefill_tokens
            self._prefill_seconds_per_token += 0.1 * (per_token - self._prefill_seconds_per_token)


def _adapter_rows(config: EngineConfig) -> int:
    """Rows of rank for all adapters together. One of any rank that is served fits, if nobody else is there."""
    largest = RANKS[rank_class_of(min(config.max_lora_rank, RANKS[-1]))]
    return max(config.max_resident_adapters * RANK_RESERVED, largest)


def _warm_up_rows(assembler: Assembler, tokens: int, pages: list[int]) -> Rows:
    work = Work(probe_sequence([0] * tokens, pages), 0, tokens, samples=True)
    return assembler.assemble(Iteration([], [work]), lambda _: (0, 0))


def _output(
    sequence: Sequence, index: int, token: int, logprobs: Logprobs | None, finish: Finish | None
) -> SequenceOutput:
    new = sequence.new
    return SequenceOutput(
        new.request, new.epoch, new.choice, index, [token], [logprobs] if logprobs is not None else [], finish
    )


def _failed(sequence: Sequence, error: MotetError) -> SequenceOutput:
    new = sequence.new
    return SequenceOutput(
        new.request, new.epoch, new.choice, sequence.output_tokens, [], finish=Finish.FAILED, error=error
    )


class _Trace:
    """One JSON line an iteration; promises, parks and resumes on the line of the iteration they came with."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._promises: dict[RequestId, int] = {}

    def write(  # noqa: PLR0917
        self, step: int, seconds: float, iteration: Iteration, rows: Rows | None, events: list[Event], book: Book
    ) -> None:
        if self._path is None:
            return
        promises = {s.request: s.promise for s in book if s.state is not State.PARKED}
        changed = {request: pages for request, pages in promises.items() if self._promises.get(request) != pages}
        self._promises = {request: self._promises.get(request, 0) for request in (s.request for s in book)} | promises
        line: dict[str, Any] = {
            "step": step,
            "ms": round(seconds * 1000, 3),
            "prefill": iteration.prefill_tokens,
            "decode": len(iteration.decodes),
            "adapters": len(rows.adapters) if rows else 0,
            "pages": book.pages.capacity - book.pages.free,
            "calls": 1 if rows else 0,
            "attention": rows.calls if rows else 0,
            "padding": rows.input_ids.numel() - len(iteration.decodes) - iteration.prefill_tokens if rows else 0,
        }
        if changed:
            line["promises"] = changed
        for name, kind in (("overflows", OverflowAhead), ("parks", ParkedNow), ("resumes", ResumedNow)):
            happened = [event for event in events if isinstance(event, kind)]
            if happened:
                line[name] = [_told(event) for event in happened]
        if rows or line.keys() & {"promises", "overflows", "parks", "resumes"}:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _told(event: OverflowAhead | ParkedNow | ResumedNow) -> dict[str, Any]:
    match event:
        case OverflowAhead(request, _, promise):
            return {"request": request, "promise": promise}
        case ParkedNow(request, _, wanted, method, by_itself):
            return {"request": request, "wanted": wanted, "method": method, "by_itself": by_itself}
        case ResumedNow(request, _, promise, method):
            return {"request": request, "promise": promise, "method": method}
