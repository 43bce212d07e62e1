"""The engine: our planner decides, iteration by iteration, and vLLM computes."""

import time
from dataclasses import replace

from motet.clock import Clock
from motet.errors import ParameterUnavailable
from motet.runner_info import KernelState
from motet_runner.adapters.layout import WITH_VLLM
from motet_runner.external.vllm.adapter_proofs import AdapterProofs
from motet_runner.external.vllm.driven import Driven
from motet_runner.external.vllm.options import check_served, options_of, seed_of
from motet_runner.external.vllm.reason import reason_of
from motet_runner.external.vllm.worker import Worker
from motet_runner.interface import EngineConfig, EngineInfo, EngineReport, NewSequence, StepOutput
from motet_runner.machine import hardware_name, machine_identity
from motet_runner.plan import Planner, StepPlan, preset_named
from motet_runner.planned_engine import PlannedEngine
from motet_runner.row_mask import RowMask
from motet_runner.sequence_masks import SequenceMasks
from motet_runner.step_costs import StepCosts

Shapes = dict[str, tuple[int, int]]

LATE_WAIT_SECONDS = 0.002
"""How long an engine without other work waits for a mask."""


class Engine(PlannedEngine):
    """See `motet_runner.interface.Engine` for what each call promises."""

    def __init__(
        self,
        config: EngineConfig,
        driven: Driven,
        *,
        target_modules: Shapes,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        adapter_pages: int = 1,
    ) -> None:
        """`adapter_pages`: what the plan gives to each adapter, of any rank. vLLM keeps them in memory of its own."""
        facts = driven.facts
        self._driven = driven
        self._clock = clock
        kernels = f"vllm {facts.version}"
        self._worker = Worker(
            driven,
            clock,
            frozenset(eos_token_ids),
            share_prefixes=config.prefix_cache,
            proofs=AdapterProofs(driven, config.model, kernels),
        )
        self._masks = SequenceMasks(config.model / "tokenizer.json", facts.vocabulary, eos_token_ids)
        self._newest_end: float | None = None
        """When the newest iteration ended; None: the engine has been idle since."""
        preset = preset_named(config.preset, contiguous=config.contiguous)
        self.costs = StepCosts(prefill_seconds_per_token=0.0, swap_seconds_per_page=0.0)
        self.planner = Planner(
            pages=facts.blocks,
            page_tokens=facts.block_tokens,
            preset=preset,
            places=config.max_concurrent_sequences,
            chunk_tokens=config.prefill_chunk_tokens,
            max_length=facts.max_model_length,
            vocabulary=facts.vocabulary,
            eos_token_ids=frozenset(eos_token_ids),
            protect_after_steps=config.protect_after_steps,
            prefix_cache=False,  # vLLM's own finds equal prefixes
            max_adapters=config.max_resident_adapters,
            pages_of_rank=lambda _: adapter_pages,
            max_loads=1,  # vLLM reads an adapter between two iterations
            tpot_seconds=config.tpot_seconds,
        )
        page_bytes = facts.bytes_per_token * facts.block_tokens
        self.info = EngineInfo(
            pages=facts.blocks,
            page_tokens=facts.block_tokens,
            page_bytes=page_bytes,
            max_sequences=config.max_concurrent_sequences,
            max_model_length=self.planner.max_length,
            adapter_slots=config.max_resident_adapters,
            max_lora_rank=config.max_lora_rank,
            host_bytes=0,
            architecture=facts.architecture,
            layers=facts.layers,
            vocabulary=facts.vocabulary,
            dtype=facts.dtype,
            device=facts.device,
            eos_token_ids=eos_token_ids,
            target_modules=target_modules,
            adapter_rank_bytes=adapter_pages * page_bytes // config.max_lora_rank,
            adapter_rank_tile=config.max_lora_rank,
            by_forecast=preset.admission == "forecast",
            no_scales=WITH_VLLM,
            kernels=KernelState(kernels, time.time()),
            backend="vllm",
            version=facts.version,
            proves=facts.device == "cpu" if config.prove_adapters is None else config.prove_adapters,
            hardware=hardware_name(facts.gpu),
            machine=machine_identity(facts.gpu_number),
        )

    def add(self, sequence: NewSequence) -> None:
        sequence.sampling.checked(self.info.vocabulary)  # what no engine takes needs no other runner
        check_served(sequence)
        self._check_options(sequence)
        super().add(sequence)

    def _check_options(self, sequence: NewSequence) -> None:
        """What vLLM refuses later, in an iteration, ends this process."""
        options = options_of(
            sequence.sampling,
            seed=seed_of(sequence.seed, sequence.choice, 0),
            output_tokens=0,
            eos_token_ids=frozenset(self.info.eos_token_ids),
            vocabulary=self.info.vocabulary,
        )
        try:
            self._driven.check(options)
        except Exception as error:
            named = next((name for name in options if name in str(error)), None)
            raise ParameterUnavailable(f"vLLM does not take this request: {reason_of(error)}", param=named) from error

    def mask_of(self, sequence: NewSequence) -> RowMask:
        return self._masks.mask_of(sequence)

    def step(self) -> StepOutput:
        plan = self.planner.plan()
        if plan is None:
            self._newest_end = None
            if self.planner.any_late:
                self._worker.wait_for_masks(LATE_WAIT_SECONDS)  # nobody else has something to do
        else:
            self._compute(plan)
        decoded = self.planner.take_decoded()
        return StepOutput(self.steps, *self.planner.take_outputs(), decoded, late=self.planner.any_late)

    def _compute(self, plan: StepPlan) -> None:
        result = self._worker.compute(plan)
        self.planner.collect(result)
        now, before = self._clock(), self._newest_end
        self._newest_end = now
        if plan.count and not result.model_calls:
            return  # all masks are late
        self.costs.learn(plan, result)
        if before is not None and self.planner.cap is not None:
            self.planner.cap.learn(plan, result, now - before)

    def report(self) -> EngineReport:
        return replace(
            super().report(),
            kernels=self.info.kernels,
            stopped_by_itself=self._driven.stops(),
            load_parts=self._worker.loads.parts,
        )

    def idle(self) -> float | None:
        self._newest_end = None
        return None
