"""Writes a Llama's folder as a file that llama.cpp reads, with the same weights, in llama.cpp's environment."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Bits = np.ndarray[Any, np.dtype[np.uint16]]


def write_gguf(model: Path, path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    gguf = importlib.import_module("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, bits in tensors(model):
        if bits.ndim == 1:  # norms are float32 there
            writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
            rows = bits if heads is None else with_pairs_of_neighbours(bits, config[heads])
            of_bytes = np.ascontiguousarray(rows).view(np.uint8)
            writer.add_tensor(name, of_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: Path) -> Iterator[tuple[str, Bits]]:
    """All weights, by the names that llama.cpp has for them. They must be bfloat16."""
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, about in header.items():
            if about["dtype"] != "BF16":
                raise ValueError(f"{name} is {about['dtype']}. Only a bfloat16 model can be written.")
            offset = 8 + length + about["data_offsets"][0]
            yield name_of(name), np.memmap(file, np.uint16, "r", offset, tuple(about["shape"]))


def name_of(name: str) -> str:
    path = name.removesuffix(".weight")
    if path in OF_MODEL:
        return f"{OF_MODEL[path]}.weight"
    layer, _, linear = path.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{OF_LAYER[linear]}.weight"


def with_pairs_of_neighbours(rows: Bits, heads: int) -> Bits:
    """llama.cpp rotates neighbouring numbers of a head together. In our files it is its first half with its second."""
    outputs, inputs = rows.shape
    return rows.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)
