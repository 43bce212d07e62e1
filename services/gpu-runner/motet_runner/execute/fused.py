"""The forward pass of Llama-shaped families in the compiled kernels, in one call (PU-21, OR-05, OR-17).

It computes what the family's modules in transformers compute. They stay the reference: a model is served so only when
both give the same logits (see `execute.compiled`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from motet_kernels import LoraBackend
from motet_kernels.cpp import CppBackend, Library
from motet_kernels.cpp.decoder import CompiledDecoder, DecoderWeights, LayerWeights
from motet_kernels.cpp.linear import PackedWeights
from motet_runner.execute.flat_batch import FlatBatch
from motet_runner.execute.packed_linears import HEAD, Packed

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

FIRST_POSITIONS = 4096
"""The table of rotations begins with so many positions, and doubles when a sequence gets longer."""

_GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)


class FusedForward:
    def __init__(self, library: Library, weights: DecoderWeights, rotary: nn.Module) -> None:
        self._decoder = CompiledDecoder(library, weights)
        self._rotary = rotary
        self._half_head = weights.head_dim // 2
        self._rotation = torch.empty(0, dtype=torch.float32)

    def use_lora(self, backend: LoraBackend[Any]) -> None:
        assert isinstance(backend, CppBackend), "the compiled kernels are chosen together"
        self._decoder.use_lora(backend)

    def __call__(self, batch: FlatBatch) -> torch.Tensor:
        """Logits [kept rows, vocabulary]"""
        assert batch.paged is not None
        if batch.longest > len(self._rotation):
            self._rotation = self._rotations(max(FIRST_POSITIONS, 2 * len(self._rotation), batch.longest))
        if batch.greedy and not batch.scored:
            batch.chosen = np.empty(len(batch.sampled), dtype=np.int64)
        logits = self._decoder(
            batch.input_ids,
            batch.positions,
            batch.keep,
            rotation=self._rotation,
            attention=batch.paged.batch,
            lora=batch.lora,
            chosen=batch.chosen,
        )
        batch.calls += self._decoder.layers
        return logits

    def _rotations(self, positions: int) -> torch.Tensor:
        """[positions, 2, half a head] cosines and sines, as the model's own module gives them"""
        both = self._rotary(torch.zeros(1, dtype=torch.float32), torch.arange(positions).unsqueeze(0))
        halves = torch.stack([table[0, :, : self._half_head].float() for table in both], dim=1)
        return self._decoder.in_order_of_pairs(halves)


def fused_forward(model: Any, packed: dict[str, Packed], library: Library) -> FusedForward | None:
    """None if the model is of no known family, or does something that its family usually does not."""
    config = model.config
    if type(model).__name__ not in FAMILIES or config.hidden_act != "silu" or HEAD not in packed:
        return None
    inner = model.model
    head_dim = inner.layers[0].self_attn.head_dim
    if 2 * len(inner.rotary_emb.inv_freq) != head_dim:  # a part of each head is not rotated
        return None
    layers = [_layer(layer, f"model.layers.{number}", packed) for number, layer in enumerate(inner.layers)]
    complete = [layer for layer in layers if layer is not None]
    if len(complete) < len(layers):
        return None
    embedding = inner.embed_tokens.weight
    weights = DecoderWeights(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        epsilon=config.rms_norm_eps,
        embedding=embedding if embedding.numel() else packed[HEAD].weights,
        layers=complete,
        final_norm=inner.norm.weight,
        head=packed[HEAD].weights,
        head_bias=model.lm_head.bias,
    )
    return FusedForward(library, weights, inner.rotary_emb)


def _layer(layer: Any, path: str, packed: dict[str, Packed]) -> LayerWeights | None:
    groups = [[f"{path}.{owner}.{name}" for name in names] for owner, names in _GROUPS]
    together = [_together(group, packed) for group in groups]
    qkv, o, gate_up, down = together
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    attend, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=[attend.q_proj.bias, attend.k_proj.bias, attend.v_proj.bias],
        q_norm=attend.q_norm.weight if hasattr(attend, "q_norm") else None,
        k_norm=attend.k_norm.weight if hasattr(attend, "k_norm") else None,
        o=o,
        o_bias=attend.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=[mlp.gate_proj.bias, mlp.up_proj.bias],
        down=down,
        down_bias=mlp.down_proj.bias,
        scale=attend.scaling,
        window=attend.motet_window,
        linears=[linear for group in groups for linear in group],
    )


def _together(paths: Sequence[str], packed: dict[str, Packed]) -> PackedWeights | None:
    """The weights of these linears, if they alone were packed together, in this order."""
    first = packed.get(paths[0])
    if first is None or [packed.get(path) for path in paths] != [Packed(first.weights, i) for i in range(len(paths))]:
        return None
    return first.weights if len(first.weights.outputs) == len(paths) else None
