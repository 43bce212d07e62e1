"""The logits processor of vLLM's first model runner, which computes on CPUs."""

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from motet_runner.external.vllm.changed_logits import change_logits
from motet_runner.external.vllm.row_changes import ChangedRow, ChangedRows, RowChange


class Processor(LogitsProcessor):  # type: ignore[misc] # vllm is not typed here
    def __init__(self, *_: Any) -> None:
        self._changed = ChangedRows()
        self._rows: dict[int, ChangedRow] = {}
        """By place in the batch"""
        self._read: dict[int, RowChange] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """In each iteration, before its forward pass"""
        process_dict_updates(self._rows, batch_update, self._row_of)
        self._read = {at: row.read() for at, row in self._rows.items()}

    def _row_of(self, params: SamplingParams, *_: Any) -> ChangedRow | None:
        """This runner divides by the repetition penalty after all processors."""
        return self._changed.row_of(params.extra_args, params.repetition_penalty)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._read:
            change_logits(logits, self._read)
        return logits
