"""The forward pass of a Llama-shaped decoder on a GPU, in few launches (PU-21, OR-05, OR-17).

A layer has four products, which torch computes; two fused residual additions with norms; one rotation with the write of
keys and values; one SiLU · up; its attention; and at most eight launches for LoRA, or twelve if adapters scale. Nothing
waits for the device, and all numbers that change from step to step are on the device. So the pass can be captured, and
a replay uses the present contents of the tensors of both batches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import embedding

from motet_kernels.decoder_weights import DecoderWeights, LayerWeights, bias_of_columns
from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.attention_batch import GpuAttentionBatch
from motet_kernels.gpu.layer_kernels import HeadNorms, add_norm, rotate_and_write, silu_multiply
from motet_kernels.gpu.lora_backend import GpuBackend, GpuLoraBatch
from motet_kernels.torch_linear import TorchWeights


class _Layer(NamedTuple):
    """A layer's weights, and what is computed once from them"""

    weights: LayerWeights[TorchWeights]
    qkv_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    norms: HeadNorms | None


class GpuDecoder:
    def __init__(self, weights: DecoderWeights[TorchWeights]) -> None:
        self._weights = weights
        self._layers = [_layer(layer) for layer in weights.layers]
        self.layers = len(self._layers)
        self._backend: GpuBackend | None = None

    def use_lora(self, backend: GpuBackend) -> None:
        """The back end that adds LoRA to the linears. Before this call, no batch may have LoRA."""
        self._backend = backend

    def __call__(
        self,
        tokens: torch.Tensor,
        keep: torch.Tensor,
        *,
        rotation: torch.Tensor,
        attention: GpuAttention,
        pages: torch.Tensor,
        rows: GpuAttentionBatch,
        lora: GpuLoraBatch | None,
    ) -> torch.Tensor:
        """Logits [kept rows, vocabulary] of the rows `keep`.

        rotation [positions, 2, half a head] fp32    pages: those of `attention`    rows: the tokens' places
        """
        weights = self._weights
        of = weights.embedding
        hidden = embedding(tokens, of) if isinstance(of, torch.Tensor) else of.rows(tokens)
        added: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            of_layer = layer.weights
            qkv_linears, o_linears, gate_up_linears, down_linears = of_layer.linears
            x = add_norm(hidden, added, of_layer.attention_norm, weights.epsilon)
            qkv = of_layer.qkv.all_of(x, layer.qkv_bias)
            self._add(qkv, x, qkv_linears, lora)
            rotate_and_write(
                qkv,
                rows.positions,
                rotation,
                pages[:, number],
                rows.pages,
                rows.offsets,
                heads=weights.heads,
                norms=layer.norms,
                epsilon=weights.epsilon,
            )
            queries = qkv[:, : weights.heads * weights.head_dim].unflatten(1, (weights.heads, weights.head_dim))
            attended = attention.attend_written(
                queries.transpose(0, 1), number, rows, scale=of_layer.scale, window=of_layer.window
            ).flatten(1)
            o = of_layer.o.all_of(attended, of_layer.o_bias)
            self._add(o, attended, o_linears, lora)
            x = add_norm(hidden, o, of_layer.mlp_norm, weights.epsilon)
            gate_up = of_layer.gate_up.all_of(x, layer.gate_up_bias)
            self._add(gate_up, x, gate_up_linears, lora)
            active = silu_multiply(gate_up)
            added = of_layer.down.all_of(active, of_layer.down_bias)
            self._add(added, active, down_linears, lora)
        last = add_norm(hidden, added, weights.final_norm, weights.epsilon, rows=keep)
        return weights.head.all_of(last, weights.head_bias)

    def _add(self, y: torch.Tensor, x: torch.Tensor, linears: Sequence[str], lora: GpuLoraBatch | None) -> None:
        if lora is not None:
            assert self._backend is not None, "use_lora was not called"
            self._backend.add_lora_together(y, x, linears, lora)


def _layer(layer: LayerWeights[TorchWeights]) -> _Layer:
    norms = None if layer.q_norm is None or layer.k_norm is None else HeadNorms(layer.q_norm, layer.k_norm)
    return _Layer(
        weights=layer,
        qkv_bias=bias_of_columns(layer.qkv, layer.qkv_bias),
        gate_up_bias=bias_of_columns(layer.gate_up, layer.gate_up_bias),
        norms=norms,
    )
