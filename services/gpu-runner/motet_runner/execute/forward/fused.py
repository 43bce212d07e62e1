"""The forward pass of Llama-shaped families without their modules, in plain torch (PU-21, OR-05, OR-17). The pass for a
GPU is in `gpu.py`. For the compiled kernels, the modules' operations are recorded (`record`, `program.py`).

This pass computes what the family's modules in transformers compute. The modules stay the reference: the pass serves a
model only if its logits pass the gate (see `execute.kernels.packed_model`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from motet_kernels import LoraBackend, TorchBackend
from motet_kernels.decoder_weights import DecoderWeights, LayerWeights, PackedLinears
from motet_kernels.positions import more_positions
from motet_kernels.torch_decoder import TorchDecoder, rotation_table
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.forward.attention import How, attend_heads
from motet_runner.execute.forward.protocol import Forward, MakeForward
from motet_runner.execute.forward.rotation_table import rotations
from motet_runner.execute.pack.linear_packing import HEAD, Packed

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

_GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)


class TorchForward:
    def __init__(self, weights: DecoderWeights[Any], rotary: nn.Module) -> None:
        self._decoder = TorchDecoder(weights)
        self._rotary = rotary
        self._dtype = weights.head.dtype
        self._half_head = weights.head_dim // 2
        self._how = [How(layer.scale, layer.window, None) for layer in weights.layers]
        self._cosines = self._sines = torch.empty(0, dtype=self._dtype)

    def use_lora(self, backend: LoraBackend[Any]) -> None:
        assert isinstance(backend, TorchBackend), "the kernels of torch are chosen together"
        self._decoder.use_lora(backend)

    def __call__(self, batch: FlatBatch) -> torch.Tensor:
        if batch.longest > len(self._cosines):
            cosines_and_sines = rotations(
                self._rotary, more_positions(len(self._cosines), batch.longest), self._half_head
            )
            self._cosines, self._sines = rotation_table(cosines_and_sines, self._dtype)
        positions = batch.positions[0]
        return self._decoder(
            batch.input_ids[0],
            batch.keep,
            rotation=(self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)),
            attend=partial(self._attend, batch),
            lora=batch.lora,
        )

    def _attend(self, batch: FlatBatch, layer: int, heads: torch.Tensor) -> torch.Tensor:
        batch.calls += 1
        return attend_heads(batch, layer, self._how[layer], heads)


def of_a_fused_family(model: Any) -> bool:
    """True if the fused forward computes what this model computes: the model is like the others of its family."""
    if type(model).__name__ not in FAMILIES or model.config.hidden_act != "silu":
        return False
    head_dim: int = model.model.layers[0].self_attn.head_dim
    return bool(2 * len(model.model.rotary_emb.inv_freq) == head_dim)  # otherwise only a part of each head is rotated


def fused_forward(model: Any, packed: dict[str, Packed], make: MakeForward) -> Forward | None:
    """None if the model is unlike the known families, or its weights are not packed as the pass needs them."""
    if not of_a_fused_family(model) or HEAD not in packed:
        return None
    config, inner = model.config, model.model
    head_dim = inner.layers[0].self_attn.head_dim
    layers = [_layer(layer, f"model.layers.{number}", packed) for number, layer in enumerate(inner.layers)]
    complete = [layer for layer in layers if layer is not None]
    if len(complete) < len(layers):
        return None
    embedding = inner.embed_tokens.weight
    weights: DecoderWeights[Any] = DecoderWeights(
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
    return make(weights, inner.rotary_emb)


def _layer(layer: Any, path: str, packed: dict[str, Packed]) -> LayerWeights[Any] | None:
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
        linears=groups,
    )


def _together(paths: Sequence[str], packed: dict[str, Packed]) -> PackedLinears | None:
    """The weights of these linears; None unless exactly these linears were packed together, in this order."""
    first = packed.get(paths[0])
    if first is None or [packed.get(path) for path in paths] != [Packed(first.weights, i) for i in range(len(paths))]:
        return None
    return first.weights if len(first.weights.outputs) == len(paths) else None
