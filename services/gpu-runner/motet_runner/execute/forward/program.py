"""A model's forward pass in the compiled kernels: one call of a program that was recorded from the modules (PU-21,
OR-05, OR-17)."""

from collections.abc import Collection
from typing import Any

import structlog
import torch
from torch import nn

from motet_kernels import LoraBackend
from motet_kernels.cpp import CppBackend, Library
from motet_kernels.cpp.peepholes import PEEPHOLES, brought_together
from motet_kernels.cpp.program import CompiledProgram
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.record.row_trace import RowTrace
from motet_runner.execute.forward.record.row_views import CannotRecord, rows_for
from motet_runner.execute.forward.record.tracing import Tracing, weights_by_address
from motet_runner.execute.forward.trial import recorded_iteration
from motet_runner.execute.pack.linear_packing import HEAD, Packed

log = structlog.get_logger(__name__)

CHOICE, PREFETCH = "choice", "prefetch"
SWITCHED_ON = frozenset((*PEEPHOLES, CHOICE, PREFETCH))
"""Optimizations of programs: these peepholes, choosing the largest logits in the program, and prefetching adapters in
linears. Tests and benchmarks can switch each one off."""


class RecordedForward:
    def __init__(self, program: CompiledProgram, *, chooses: bool = True) -> None:
        self.program = program
        self._chooses = chooses

    def use_lora(self, backend: LoraBackend[Any]) -> None:
        assert isinstance(backend, CppBackend), "the compiled kernels are chosen together"
        self.program.use_lora(backend)

    def __call__(self, batch: FlatBatch) -> torch.Tensor:
        """Logits [kept rows, vocabulary]"""
        assert batch.paged is not None
        logits = self.program(
            batch.input_ids,
            batch.positions,
            batch.keep,
            attention=batch.paged.batch,
            lora=batch.lora,
            longest=batch.longest,
            chosen=batch.choices if self._chooses else None,
        )
        if self._chooses:
            batch.chosen = batch.choices
        batch.calls += self.program.layers
        return logits


class RecordedModel:
    """Records what a model's modules compute with their own weights. Once the weights are packed, makes a forward pass
    of the record."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._tracing: Tracing | None = None
        self.fault = ""
        """Why nothing could be recorded, in one line"""
        try:
            rows = rows_for(loaded.model)
            trace = RowTrace(
                weights_by_address(loaded.model, loaded.linears),
                loaded.dtype,
                rows,
                vocabulary=loaded.vocabulary,
                positions=loaded.max_positions,
            )
            tracing = Tracing(trace)
            self._logits = tracing.run(recorded_iteration(loaded, *rows), loaded.forward)
            self._tracing = tracing
        except Exception as error:  # the modules can still serve
            self._not_recorded(error)

    def forward(
        self, packed: dict[str, Packed], library: Library, switched_on: Collection[str]
    ) -> RecordedForward | None:
        tracing = self._tracing
        if tracing is None:
            return None
        linears: dict[str, nn.Module] = self._loaded.linears | {HEAD: self._loaded.model.get_output_embeddings()}
        biases: dict[str, Any] = {path: linear.bias for path, linear in linears.items()}
        trace = tracing.trace
        values: dict[str, Any] = {"tokens": trace.tokens, "positions": trace.positions, "logits": self._logits}
        try:
            together = brought_together(
                tracing.program(packed, biases), positions=trace.positions, logits=self._logits, kinds=switched_on
            )
            program = CompiledProgram(library, together.steps, **values, prefetches=PREFETCH in switched_on)
        except Exception as error:  # as above
            self._not_recorded(error)
            return None
        architecture = self._loaded.architecture
        log.info("steps_brought_together", architecture=architecture, **together.counts)
        for kind, why in together.failed.items():
            log.warning("steps_left_apart", architecture=architecture, kind=kind, reason=_reason(why), exc_info=why)
        return RecordedForward(program, chooses=CHOICE in switched_on)

    def _not_recorded(self, error: Exception) -> None:
        architecture = self._loaded.architecture
        if isinstance(error, CannotRecord):
            self.fault = str(error)
            log.info("forward_not_recorded", architecture=architecture, reason=self.fault)
        else:
            self.fault = _reason(error).partition("\n")[0]
            log.warning("forward_not_recorded", architecture=architecture, reason=_reason(error), exc_info=error)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
