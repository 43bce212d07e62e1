"""The engine: iteration after iteration over all sequences of all adapters (OR-01).

A step is planned, launched and collected. The planner decides, the worker computes and loads adapters; this loop
connects planner and worker. Calls are synchronous. No sockets.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
import torch

from motet.clock import Clock
from motet.domain import PAGE_TOKENS
from motet.errors import SetupError, StructuredOutputUnavailable
from motet_kernels.cpp import read_file
from motet_runner.adapters.layout import SCALE_ROWS, AdapterLayout
from motet_runner.adapters.slab_writer import SlabWriter
from motet_runner.diagnostics import Diagnostics
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.execute.adapters.lora_linears import LoraLinears, biased_modules
from motet_runner.execute.exact import exact_mode
from motet_runner.execute.exact.tiles import Tiles
from motet_runner.execute.forward.program import SWITCHED_ON
from motet_runner.execute.forward.protocol import Forward
from motet_runner.execute.gate.gate import Gate
from motet_runner.execute.kernels.gpu_kernels_test import fault_of
from motet_runner.execute.kernels.kernel_change import KernelChange
from motet_runner.execute.kernels.kernel_choice import KernelChoice
from motet_runner.execute.kernels.roles import Kernels
from motet_runner.execute.load.checkpoint_reader import ignore_progress
from motet_runner.execute.load.device import device_named
from motet_runner.execute.load.load_model import load
from motet_runner.execute.memory_budget.page_budget import RANK_RESERVED, copy_bytes_of, whole_pages
from motet_runner.execute.pack.linear_packing import squares_of
from motet_runner.execute.proof.adapter_proof import Prover
from motet_runner.execute.tune.dtype_choice import DtypeChoice
from motet_runner.execute.tune.thread_choice import choose_threads, threads_to_begin_with, threads_to_judge
from motet_runner.execute.worker.base_worker import LogitsTap
from motet_runner.execute.worker.device_worker import DeviceWorker, computes_by_itself
from motet_runner.execute.worker.local_worker import LocalWorker
from motet_runner.interface import (
    EngineConfig,
    EngineInfo,
    EngineReport,
    LoadProgress,
    NewSequence,
    SlabWritten,
    StepOutput,
)
from motet_runner.machine import hardware_name, machine_identity, machine_name
from motet_runner.memory.adapter_memory import adapter_memory
from motet_runner.memory.copy_stream import copy_stream_for
from motet_runner.memory.host_limit import available_host_bytes, default_host_bytes
from motet_runner.memory.out_of_memory import device_has_failed
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import HostAdapters, Planner, StepPlan, StepResult, preset_named
from motet_runner.plan.resident_adapters import MAX_BYTES_BESIDE
from motet_runner.planned_engine import PlannedEngine
from motet_runner.row_mask import RowMask
from motet_runner.sequence_masks import SequenceMasks
from motet_runner.step_costs import StepCosts
from motet_runner.step_trace import StepTrace

log = structlog.get_logger(__name__)

MIB = 1024 * 1024
HOST_SHARE_ON_CPU = 16
"""On a CPU, host tier and KV are in the same memory. By default, the host tier gets at most the KV's bytes divided by
this."""
LATE_WAIT_SECONDS = 0.002
"""How long an engine without other work waits for a mask."""
SLAB_SECONDS = 0.05
"""After this time, an engine without work asks whether a slab is written."""


class Engine(PlannedEngine):
    """See `motet_runner.interface.Engine` for what each call promises."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock = time.perf_counter,
        on_logits: LogitsTap | None = None,
        on_load_progress: LoadProgress = ignore_progress,
        switched_on: Collection[str] = SWITCHED_ON,
    ) -> None:
        """`on_logits` is called in each iteration that samples. `switched_on`: optimizations of a recorded forward
        pass; tests and benchmarks omit some."""
        exact = config.kernels == exact_mode.NAME
        if exact:
            config = exact_mode.exact_settings(config)
        self._config = config
        self._clock = clock
        preset = preset_named(config.preset, contiguous=config.contiguous)
        self._kernel_choice = choice = KernelChoice(
            config.kernels,
            device_named(config.device),
            config.kernel_cache,
            config.compiler,
            adapter_dtype=config.adapter_dtype,
            utilization_percent=config.memory_utilization_percent,
        )
        if config.device != "cuda":
            torch.set_num_threads(threads_to_begin_with(config.threads))
        self._loaded = load(
            config.model,
            config.dtype,
            config.device,
            on_load_progress,
            utilization_percent=config.memory_utilization_percent,
            choose_dtype=DtypeChoice(
                choice.serving.name,
                choice.packing,
                compiled_follow=choice.waiting,
                folder=config.kernel_cache,
            ),
        )
        loaded = self._loaded
        if exact:
            exact_mode.check_model(loaded)
        page_bytes = loaded.shape.bytes_per_page()
        gate = Gate(loaded, threads=threads_to_judge(config.threads))
        kernels = choice.begin(lambda kernels: fault_of(loaded, kernels, gate))
        linears = LoraLinears(
            loaded.linears, loaded.dtype, kernels.add_lora, loaded.linear_groups, squares_of=squares_of
        )
        self._linears = linears
        pages = whole_pages(loaded, kernels, linears, config)
        host_pages = int(self._host_bytes(pages * page_bytes) // page_bytes)
        max_length = self._max_length(pages)
        with torch.inference_mode():
            self._store = PagedStore(pages, loaded.shape, loaded.dtype, loaded.device)
        tiers = PageTiers(self._store, host_pages, clock=clock)
        self._prover = Prover(loaded, linears, self._store.bytes.view(-1), self._serving_kernels, config.model)
        loads = AdapterLoads(
            self._store.bytes,
            linears.layout,
            clock,
            linears.base,
            self._prover,
            copy_stream_for(loaded.device),
            in_host=adapter_memory(config.host_adapters_mib * MIB, pinned=loaded.device.type == "cuda"),
        )
        self._slabs = SlabWriter(linears.layout, linears.base)
        if loaded.device.type == "cpu":  # pinned memory is dear, and the next load uses it again
            loads.offer = self._slabs.offer
        in_host = 0 if loads.in_host is None else len(loads.in_host)
        self._worker: LocalWorker | DeviceWorker
        by_itself = computes_by_itself(loaded.device) and not exact
        self._ahead = int(by_itself) if config.plan_ahead is None else config.plan_ahead
        if by_itself:
            self._worker = DeviceWorker(
                loaded,
                self._store,
                tiers,
                clock=clock,
                loads=loads,
                rows=config.max_concurrent_sequences,
                longest=max_length,
            )
        else:
            self._worker = LocalWorker(
                loaded, self._store, tiers, clock=clock, loads=loads, cut=Tiles() if exact else None
            )
        self._kernel_change = KernelChange(
            choice, loaded, gate, linears, switch=self._switch, tune=self._tune, switched_on=switched_on
        )
        self._kernel_change.begin(kernels)
        prefill_seconds, copy_seconds = self._worker.measure(max_length)
        self._worker.on_logits = on_logits
        self.costs = costs = StepCosts(
            prefill_seconds_per_token=prefill_seconds,
            swap_seconds_per_page=copy_seconds,
            decode_slowdown=config.decode_slowdown,
        )
        self.planner = Planner(
            page_tokens=PAGE_TOKENS,
            pages=pages,
            preset=preset,
            places=config.max_concurrent_sequences,
            chunk_tokens=config.prefill_chunk_tokens,
            max_length=max_length,
            vocabulary=loaded.vocabulary,
            eos_token_ids=frozenset(loaded.eos_token_ids),
            host_pages=host_pages,
            protect_after_steps=config.protect_after_steps,
            window=loaded.window,
            rope=loaded.rope,
            prefix_cache=config.prefix_cache,
            max_adapters=config.max_resident_adapters,
            pages_of_rank=lambda rank: -(-linears.run_bytes(rank) // page_bytes),
            max_pages_beside=MAX_BYTES_BESIDE // page_bytes,
            host_adapters=HostAdapters(in_host, adapters=in_host // linears.run_bytes(RANK_RESERVED)),
            bytes_of_rank=linears.run_bytes,
            cheaper=costs.cheaper_park,
            beside=None if config.decode_slowdown is None else costs.prompt_tokens_beside,
            tpot_seconds=config.tpot_seconds,
        )
        self._masks = SequenceMasks(config.model / "tokenizer.json", loaded.vocabulary, loaded.eos_token_ids)
        self._launched: deque[tuple[StepPlan, float]] = deque()
        """Launched plans that are not yet collected, and when they began."""
        self._steps = 0
        self._trace = StepTrace(config.step_trace, of=self._what_is_timed)
        self._newest_end: float | None = None
        """When the newest iteration ended; None: the engine has been idle since."""
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
            layers=loaded.shape.layers,
            vocabulary=loaded.vocabulary,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=str(loaded.device),
            eos_token_ids=loaded.eos_token_ids,
            target_modules=linears.shapes,
            adapter_rank_bytes=-(-linears.run_bytes(kernels.add_lora.tile) // kernels.add_lora.tile),
            adapter_rank_tile=kernels.add_lora.tile,
            kernels=choice.state,
            by_forecast=preset.admission == "forecast",
            biased_modules=biased_modules(loaded.linears),
            max_device_rank=linears.largest_rank((pages - 1) * page_bytes, config.max_lora_rank + SCALE_ROWS),
            run_layout=f"{linears.run_layout}, kernels {exact_mode.NAME if exact else config.kernels}",
            proves=loaded.device.type == "cpu" if config.prove_adapters is None else config.prove_adapters,
            hardware=hardware_name(_gpu_name(loaded.device)),
            machine=machine_identity(_gpu_number(loaded.device)),
        )

    @property
    def diagnostics(self) -> Diagnostics:
        """For benchmarks and tests"""
        return Diagnostics(
            config=self._config,
            loaded=self._loaded,
            linears=self._linears,
            kernel_choice=self._kernel_choice,
            kernel_change=self._kernel_change,
            backend=self._backend,
            store=self._store,
            planner=self.planner,
            worker=self._worker,
        )

    # -- commands ----------------------------------------------------------------------------------------------------

    def add(self, sequence: NewSequence) -> None:
        # If each request comes right after the previous one has ended, the loop does not call idle() between them.
        self.idle()
        super().add(sequence)

    def mask_of(self, sequence: NewSequence) -> RowMask:
        if isinstance(self._worker, DeviceWorker):  # its host learns tokens after the next iteration has begun
            raise StructuredOutputUnavailable("An engine on a GPU serves no structured output yet.")
        return self._masks.mask_of(sequence)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Plan and launch iterations until one more than `plan_ahead` is launched, or nothing is left to plan. Then
        collect the oldest."""
        try:
            while len(self._launched) <= self._ahead:
                plan = self.plan()
                if plan is None:
                    break
                self.launch(plan)
            if not self._launched and self.planner.any_late:
                self._worker.wait_for_masks(LATE_WAIT_SECONDS)  # nobody else has something to do
            return self.collect()
        except RuntimeError as error:
            if device_has_failed(error):
                reason = str(error).strip().partition("\n")[0]
                log.critical("device_failed", device=self.info.device, reason=reason, result="this engine ends")
            raise

    def plan(self) -> StepPlan | None:
        """The plan of the next iteration; None if there is nothing to do now."""
        return self.planner.plan()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append((plan, self._clock()))
        self._worker.launch(plan)

    def collect(self) -> StepOutput:
        """The results of the oldest launched iteration, and all events since the last call."""
        iterates = bool(self._launched)
        if iterates:
            plan, began = self._launched.popleft()
            result = self._worker.collect()
            self._trace.note_promises(self.planner)
            self.planner.collect(result)
            self.costs.learn(plan, result)
        else:
            plan, began = StepPlan(number=self._steps), self._clock()
            result = StepResult(number=self._steps)
        self._steps = plan.number
        decoded = self.planner.take_decoded()
        outputs, events = self.planner.take_outputs()
        now, before = self._clock(), self._newest_end
        self._newest_end = now if iterates else None
        cap = self.planner.cap
        if iterates and before is not None and cap is not None:
            cap.learn(plan, result, now - before)
        self._trace.write(
            plan,
            result,
            seconds=now - began,
            cycle=now - before if before is not None else None,
            kernels=self._kernel_choice.state.serving,
            events=events,
            planner=self.planner,
        )
        return StepOutput(self._steps, outputs, events, decoded, late=self.planner.any_late)

    def idle(self) -> float | None:
        if len(self.planner.sequences) or self._launched:
            return None
        self._newest_end = None
        before = self._kernel_choice.state
        wait = self._kernel_change.advance()
        if wait == 0:
            self._prover.weights_changed()
        if self._kernel_choice.state.serving != before.serving:
            self.planner.kernels_changed()
            if self.planner.cap is not None:
                self.planner.cap.forget()
        if self._slabs.busy:
            wait = SLAB_SECONDS if wait is None else min(wait, SLAB_SECONDS)
        return wait

    def write_slab(self, number: int, layout: AdapterLayout) -> None:
        self._slabs.write(number, layout)

    def slabs_written(self) -> list[SlabWritten]:
        return self._slabs.take_ended()

    @property
    def steps(self) -> int:
        """The number of collected iterations"""
        return self._steps

    def report(self) -> EngineReport:
        loads = self._worker.loads
        parts = 0 if loads is None else loads.parts
        return replace(super().report(), kernels=self._kernel_choice.state, load_parts=parts)

    def _what_is_timed(self) -> dict[str, Any]:
        """For the step trace: machine, model, kernels, and what bounds the batches."""
        config, info = self._config, self.info
        is_cuda = self._loaded.device.type == "cuda"
        return {
            "machine": machine_name(torch.cuda.get_device_name(self._loaded.device) if is_cuda else ""),
            "model": f"{config.model.name}, {info.dtype}",
            "kernels": self._kernel_choice.state.serving,
            "engine": {
                "pages": info.pages,
                "page_bytes": info.page_bytes,
                "host_pages": info.host_bytes // max(1, info.page_bytes),
                "max_sequences": info.max_sequences,
                "max_model_length": info.max_model_length,
                "adapter_slots": info.adapter_slots,
                "adapter_rank_bytes": info.adapter_rank_bytes,
                "adapter_rank_tile": info.adapter_rank_tile,
                "preset": config.preset,
                "prefill_chunk_tokens": config.prefill_chunk_tokens,
                "decode_slowdown": config.decode_slowdown,
                "tpot_seconds": config.tpot_seconds,
                "prefix_cache": config.prefix_cache,
            },
        }

    # -- kernels -----------------------------------------------------------------------------------------------------

    def _switch(self, kernels: Kernels, fused: Forward | None) -> None:
        """Raises an error before anything is switched, if memory does not suffice."""
        attention = kernels.attention(self._store.data)
        copies = copy_bytes_of(kernels, self._linears, self._config)
        backend = self._linears.bind(kernels.add_lora, self._store.bytes.view(-1), copies)
        if fused is not None:
            fused.use_lora(backend)
        self._loaded.fused = fused
        self._backend = backend
        self._worker.use(backend, attention)
        if self._worker.loads is not None:
            self._worker.loads.read_file = None if kernels.library is None else partial(read_file, kernels.library)

    def _serving_kernels(self) -> Kernels:
        return self._kernel_choice.serving

    def _tune(self, kernels: Kernels) -> Iterator[None]:
        if kernels.has_threads and kernels.packing is not None and self._config.threads is None:
            yield from choose_threads(self._loaded, kernels.name, kernels.attention, self._config.kernel_cache)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _host_bytes(self, kv_bytes: int) -> int:
        if self._config.host_kv_mib is not None:
            return self._config.host_kv_mib * MIB
        share = HOST_SHARE_ON_CPU if self._loaded.device.type == "cpu" else 1
        return default_host_bytes(kv_bytes, share_of_kv=share, available=available_host_bytes())

    def _max_length(self, pages: int) -> int:
        wanted, possible = self._config.max_model_length, self._loaded.max_positions
        if wanted is not None and wanted > possible:
            raise SetupError(
                f"engine.maxModelLength is {wanted}, but the model's context has {possible} tokens. Lower it."
            )
        return min(wanted or possible, pages * PAGE_TOKENS)


def _gpu_name(device: torch.device) -> str:
    """Empty for a CPU"""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""


def _gpu_number(device: torch.device) -> str:
    """That no other GPU has; empty for a CPU"""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) if device.type == "cuda" else ""
