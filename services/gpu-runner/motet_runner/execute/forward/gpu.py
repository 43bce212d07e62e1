"""The forward pass of Llama-shaped families on a GPU's kernels (PU-21, OR-05, OR-17)."""

from typing import Any

import torch
from torch import nn

from motet_kernels import LoraBackend
from motet_kernels.decoder_weights import DecoderWeights
from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.decoder import GpuDecoder
from motet_kernels.gpu.lora_backend import GpuBackend
from motet_kernels.positions import more_positions
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.forward.rotation_table import rotations


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
        """A call can be captured: all that it reads is on the device. A capture must have the longest `batch.longest`
        of all batches, because a longer batch makes a new table of rotations."""
        assert batch.paged is not None
        attention, rows = batch.paged
        assert isinstance(attention, GpuAttention), "the kernels of a GPU are chosen together"
        if batch.longest > len(self._rotation):
            positions = more_positions(len(self._rotation), batch.longest)
            self._rotation = rotations(self._rotary, positions, self._half_head)
        batch.calls += self._decoder.layers
        return self._decoder(
            batch.input_ids[0],
            batch.keep,
            rotation=self._rotation,
            attention=attention,
            pages=batch.store.data,
            rows=rows,
            lora=batch.lora,
        )
