"""The logits processor of vLLM's Model Runner V2, which computes on GPUs."""

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from motet_runner.external.vllm.changed_logits import change_logits
from motet_runner.external.vllm.row_changes import ChangedRow, ChangedRows, RowChange


class Processor(LogitsProcessor):  # type: ignore[misc] # vllm is not typed here
    def __init__(self, *_: Any) -> None:
        self._changed = ChangedRows()
        self._rows: dict[int, ChangedRow] = {}
        """By slot, of requests that have not ended"""
        self._read: dict[int, RowChange] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        row = self._changed.row_of(sampling_params.extra_args)
        if row is None:
            self._rows.pop(req_idx, None)
        else:
            self._rows[req_idx] = row
        return row is not None

    def apply_staged_writes(self) -> None:
        """In each iteration, before its forward pass. Nobody says here that a request has left its slot."""
        self._rows = {slot: row for slot, row in self._rows.items() if not row.ended}
        self._read = {slot: row.read() for slot, row in self._rows.items()}

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        rows = {at: row for at, slot in enumerate(ctx.idx_mapping_np.tolist()) if (row := self._read.get(slot))}
        if rows:
            change_logits(logits, rows)
        return logits
