"""The forward pass of a Llama-shaped decoder in plain torch: few operators, and no modules (PU-21, OR-05).

Each call of a module or an operator has a fixed cost. Residual additions are fused into the products before them; q and
k are rotated in place. With 8 and 32 sequences, this pass computes 1.1 to 1.6 times as many tokens per second as
modules with packed linears (`python -m benchmarks.engine --cases without_forward`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, rms_norm, silu

from motet_kernels.decoder_weights import DecoderWeights, LayerWeights, bias_of_columns
from motet_kernels.torch_backend import LoraBatch, Together, TorchBackend
from motet_kernels.torch_linear import TorchWeights

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""Gets a layer's number, and rotated queries, rotated keys and values [rows, heads + 2 · kv_heads, head_dim].
→ [rows, heads, head_dim]"""

_Linears = list[tuple[slice, Together]]


class _Lora(NamedTuple):
    """How adapters are added to the linears of a layer"""

    qkv: _Linears
    o: _Linears
    gate_up: _Linears
    down: _Linears


class TorchDecoder:
    def __init__(self, weights: DecoderWeights[TorchWeights]) -> None:
        self._weights = weights
        self.layers = len(weights.layers)
        self._biases = [
            (bias_of_columns(layer.qkv, layer.qkv_bias), bias_of_columns(layer.gate_up, layer.gate_up_bias))
            for layer in weights.layers
        ]
        self._backend: TorchBackend | None = None
        self._lora: list[_Lora] = []

    def use_lora(self, backend: TorchBackend) -> None:
        """The back end that adds LoRA to the linears. Before this call, no batch may have LoRA."""
        self._backend = backend
        self._lora = [_lora(layer, backend) for layer in self._weights.layers]

    def __call__(
        self,
        tokens: torch.Tensor,
        keep: torch.Tensor,
        *,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        lora: LoraBatch | None,
    ) -> torch.Tensor:
        """Logits [kept rows, vocabulary] of the rows `keep`.

        `rotation`: cosines and sines of the tokens' positions [rows, 1, head_dim], see `rotation_table`.
        """
        weights = self._weights
        of = weights.embedding
        hidden = embedding(tokens, of) if isinstance(of, torch.Tensor) else of.rows(tokens)
        for number in range(self.layers):
            hidden = self._layer(number, hidden, rotation, attend, lora)
        last = self._normed(hidden.index_select(0, keep), weights.final_norm)
        return weights.head.all_of(last, weights.head_bias)

    def _layer(
        self,
        number: int,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        lora: LoraBatch | None,
    ) -> torch.Tensor:
        layer = self._weights.layers[number]
        qkv_bias, gate_up_bias = self._biases[number]
        x = self._normed(hidden, layer.attention_norm)
        qkv = layer.qkv.all_of(x, qkv_bias)
        if lora is not None:
            self._add(qkv, x, self._lora[number].qkv, lora)
        attended = attend(number, self._rotated(layer, qkv, rotation)).flatten(1)
        hidden = self._added_to(
            hidden, attended, layer.o, layer.o_bias, () if lora is None else self._lora[number].o, lora
        )
        x = self._normed(hidden, layer.mlp_norm)
        gate_up = layer.gate_up.all_of(x, gate_up_bias)
        if lora is not None:
            self._add(gate_up, x, self._lora[number].gate_up, lora)
        gate, up = gate_up.tensor_split(2, 1)
        active = silu(gate).mul_(up)
        return self._added_to(
            hidden, active, layer.down, layer.down_bias, () if lora is None else self._lora[number].down, lora
        )

    def _added_to(  # noqa: PLR0917
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        weights: TorchWeights,
        bias: torch.Tensor | None,
        linears: _Linears | tuple[()],
        lora: LoraBatch | None,
    ) -> torch.Tensor:
        """hidden + x · Wᵀ, with LoRA"""
        if lora is not None and lora.scales:  # it scales the product, and not the sum
            y = weights.all_of(x, bias)
            self._add(y, x, linears, lora)
            return hidden + y
        hidden = weights.added_to(hidden, x, bias)
        if lora is not None:
            self._add(hidden, x, linears, lora)
        return hidden

    def _rotated(
        self, layer: LayerWeights[TorchWeights], qkv: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Queries and keys rotated in place."""
        weights = self._weights
        heads: torch.Tensor = qkv.unflatten(1, (-1, weights.head_dim))
        with_keys = weights.heads + weights.kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            heads[:, : weights.heads] = self._normed(heads[:, : weights.heads], layer.q_norm)
            heads[:, weights.heads : with_keys] = self._normed(heads[:, weights.heads : with_keys], layer.k_norm)
        cosines, sines = rotation
        turned = heads[:, :with_keys]
        halves_swapped = turned.roll(weights.head_dim // 2, -1)
        turned.mul_(cosines).addcmul_(halves_swapped, sines)
        return heads

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = rms_norm(x, weight.shape, weight, self._weights.epsilon)
        return normed

    def _add(self, y: torch.Tensor, x: torch.Tensor, linears: _Linears | tuple[()], lora: LoraBatch) -> None:
        assert self._backend is not None, "use_lora was not called"
        self._backend.add_lora_together(y, x, linears, lora)


def rotation_table(halves: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of whole heads [positions, head_dim], from those of half a head [positions, 2, head_dim / 2].

    The sines of the first half are negated: the second half is subtracted there.
    """
    cosines, sines = halves.unbind(1)
    return torch.cat((cosines, cosines), 1).to(dtype), torch.cat((-sines, sines), 1).to(dtype)


def _lora(layer: LayerWeights[TorchWeights], backend: TorchBackend) -> _Lora:
    together = zip(layer.linears, (layer.qkv, layer.o, layer.gate_up, layer.down), strict=True)
    return _Lora(*(backend.together(names, weights.columns) for names, weights in together))
