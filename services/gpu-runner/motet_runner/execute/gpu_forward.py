"""The forward pass of Llama-shaped families on a GPU's kernels (PU-21, OR-05, OR-17)."""

from typing import Any

import torch
from torch import nn

from motet_kernels import LoraBackend
from motet_kernels.decoder_weights import DecoderWeights
from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.attention_batch import GpuAttentionBatch
from motet_kernels.gpu.decoder import GpuDecoder
from motet_kernels.gpu.lora_backend import GpuBackend, GpuLoraBatch
from motet_runner.execute.flat_batch import FlatBatch
from motet_runner.execute.rotations import more_positions, rotations


class GpuForward:
    def __init__(self, weights: DecoderWeights[Any], rotary: nn.Module) -> None:
        self._decoder = GpuDecoder(weights)
        self._rotary = rotary
        self._half_head = weights.head_dim // 2
        self._rotation = torch.empty(0, dtype=torch.float32)

    def use_lora(self, backend: LoraBackend[Any]) -> None:
        assert isinstance(backend, GpuBackend), "the kernels of a GPU are chosen together"
        self._decoder.use_lora(backend)

    def __call__(self, batch: FlatBatch) -> torch.Tensor:
        assert batch.paged is not None
        self.prepare(batch.longest)
        logits = self.compute(
            batch.input_ids[0],
            batch.keep,
            attention=batch.paged.attention,
            pages=batch.store.data,
            rows=batch.paged.batch,
            lora=batch.lora,
        )
        batch.calls += self._decoder.layers
        return logits

    def prepare(self, longest: int) -> None:
        """Sequences have at most so many tokens from now on. What was captured before has the old table."""
        if longest > len(self._rotation):
            self._rotation = rotations(self._rotary, more_positions(len(self._rotation), longest), self._half_head)

    def compute(
        self,
        tokens: torch.Tensor,
        keep: torch.Tensor,
        *,
        attention: Any,
        pages: torch.Tensor,
        rows: GpuAttentionBatch,
        lora: GpuLoraBatch | None,
    ) -> torch.Tensor:
        """Logits [kept rows, vocabulary]. It can be captured: all that it reads lies on the device. Before, `prepare`
        for the longest sequence."""
        assert isinstance(attention, GpuAttention), "the kernels of a GPU are chosen together"
        return self._decoder(
            tokens, keep, rotation=self._rotation, attention=attention, pages=pages, rows=rows, lora=lora
        )
