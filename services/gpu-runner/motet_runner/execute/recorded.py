"""The forward pass of a family that has none of its own in the compiled kernels: a program that was recorded from its
modules, in one call (PU-21, OR-05, OR-17)."""

from typing import Any

import structlog
import torch
from torch import nn

from motet_kernels import LoraBackend
from motet_kernels.cpp import CppBackend, Library
from motet_kernels.cpp.peepholes import PEEPHOLES, brought_together
from motet_kernels.cpp.program import CompiledProgram
from motet_runner.execute.flat_batch import FlatBatch
from motet_runner.execute.model import LoadedModel
from motet_runner.execute.packed_linears import HEAD, Packed
from motet_runner.execute.recording import Recording, linears_by_address
from motet_runner.execute.row_views import KEPT, ROWS, CannotRecord
from motet_runner.execute.trial import recorded_iteration

log = structlog.get_logger(__name__)

CHOICE, PREFETCH = "choice", "prefetch"
SWITCHED_ON = frozenset((*PEEPHOLES, CHOICE, PREFETCH))
"""Which steps are brought together; and whether a program also chooses the largest logits, and prefetches what adapters
read while their linears multiply"""


class RecordedForward:
    def __init__(self, program: CompiledProgram, *, chooses: bool = True) -> None:
        self._program = program
        self._chooses = chooses

    def use_lora(self, backend: LoraBackend[Any]) -> None:
        assert isinstance(backend, CppBackend), "the compiled kernels are chosen together"
        self._program.use_lora(backend)

    def __call__(self, batch: FlatBatch) -> torch.Tensor:
        """Logits [kept rows, vocabulary]"""
        assert batch.paged is not None
        logits = self._program(
            batch.input_ids,
            batch.positions,
            batch.keep,
            attention=batch.paged.batch,
            lora=batch.lora,
            chosen=batch.choices if self._chooses else None,
        )
        if self._chooses:
            batch.chosen = batch.choices
        batch.calls += self._program.layers
        return logits


class RecordedModel:
    """What a model's modules compute. It is recorded before their weights are packed, and used after that."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._recording: Recording | None = None
        try:
            linears, head = linears_by_address(loaded.model, loaded.linears)
            recording = Recording(
                linears, head, loaded.dtype, vocabulary=loaded.vocabulary, positions=loaded.max_positions
            )
            self._logits = recording.run(recorded_iteration(loaded, ROWS, KEPT), loaded.forward)
            self._recording = recording
        except Exception as error:  # the modules serve, whatever they do
            self._not_recorded(error)

    def forward(self, packed: dict[str, Packed], library: Library) -> RecordedForward | None:
        recording = self._recording
        if recording is None:
            return None
        linears: dict[str, nn.Module] = self._loaded.linears | {HEAD: self._loaded.model.get_output_embeddings()}
        biases: dict[str, Any] = {path: linear.bias for path, linear in linears.items()}
        values: dict[str, Any] = {"tokens": recording.tokens, "positions": recording.positions, "logits": self._logits}
        try:
            steps, counts = brought_together(recording.program(packed, biases), self._logits, SWITCHED_ON)
            program = CompiledProgram(library, steps, **values, prefetches=PREFETCH in SWITCHED_ON)
            log.info("steps_brought_together", architecture=self._loaded.architecture, **counts)
            return RecordedForward(program, chooses=CHOICE in SWITCHED_ON)
        except Exception as error:  # as above
            self._not_recorded(error)
            return None

    def _not_recorded(self, error: Exception) -> None:
        architecture = self._loaded.architecture
        if isinstance(error, CannotRecord):
            log.info("forward_not_recorded", architecture=architecture, reason=str(error))
        else:
            reason = f"{type(error).__name__}: {error}"
            log.warning("forward_not_recorded", architecture=architecture, reason=reason, exc_info=error)
