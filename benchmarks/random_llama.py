"""A random Llama on disk, in shards, for benchmarks of the engine: speed and memory do not depend on the weights.

It is made once for each shape, in a scratch folder, and kept there.
"""

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

SCRATCH = Path(tempfile.gettempdir()) / "motet-benchmarks"
TOKENIZER = Path(__file__).resolve().parents[1] / "cli" / "motet_cli" / "bundled" / "model" / "tokenizer.json"
"""The bundled model's"""

REPEATED = 2**24 - 3
"""No multiple of any width: rows of a matrix differ."""


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    vocabulary: int
    width: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    context: int = 2048
    dtype: str = "bfloat16"
    shard_mib: int = 512

    @property
    def name(self) -> str:
        return "llama-" + "-".join(str(value) for value in asdict(self).values())

    def config(self) -> transformers.PreTrainedConfig:
        return transformers.LlamaConfig(architectures=["LlamaForCausalLM"], tie_word_embeddings=False, **self.sizes())

    def sizes(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.width // self.heads,
            "max_position_embeddings": self.context,
            "dtype": self.dtype,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }


def random_llama(shape: LlamaShape, scratch: Path, *, repeated: bool = False) -> Path:
    """The folder of such a model. It is made if it is not there yet.

    `repeated`: some random numbers again and again, which takes a tenth of the time for a large model
    """
    folder = scratch / (shape.name + "-repeated" * repeated)
    if not folder.is_dir():
        scratch.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=scratch))
        try:
            _write(shape, unfinished, repeated=repeated)
            unfinished.rename(folder)
        except BaseException:
            shutil.rmtree(unfinished)
            raise
    return folder


def random_adapter(shape: LlamaShape, folder: Path, *, rank: int, seed: int, dora: bool = False) -> Path:
    """An adapter of such a model, on all linears of its layers, as PEFT saves it."""
    folder.mkdir(parents=True)
    width, head = shape.width, shape.width // shape.heads
    linears = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, shape.kv_heads * head),
        "self_attn.v_proj": (width, shape.kv_heads * head),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (width, shape.feed_forward),
        "mlp.up_proj": (width, shape.feed_forward),
        "mlp.down_proj": (shape.feed_forward, width),
    }
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    tensors = {}
    for layer in range(shape.layers):
        for linear, (inputs, outputs) in linears.items():
            path = f"base_model.model.model.layers.{layer}.{linear}"
            for name, size in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                tensors[f"{path}.{name}.weight"] = (torch.randn(size, generator=generator) * 0.02).to(dtype)
            if dora:  # about the lengths of the model's own rows
                lengths = (0.9 + 0.2 * torch.rand(outputs, generator=generator)) * 0.02 * inputs**0.5
                tensors[f"{path}.lora_magnitude_vector"] = lengths.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted(linear.rpartition(".")[2] for linear in linears)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": dora}))
    return folder


def with_tokenizer(model: Path, scratch: Path) -> Path:
    """A folder with this model and the bundled one's tokenizer, for masks. The model may have more tokens."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    shutil.copy(TOKENIZER, folder)
    return folder


def _repeat(some: torch.Tensor, into: torch.Tensor) -> None:
    for part in into.split(len(some)):
        part.copy_(some[: len(part)])


def _write(shape: LlamaShape, folder: Path, *, repeated: bool) -> None:
    config = shape.config()
    config.save_pretrained(folder)
    with torch.device("meta"):
        wanted = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    dtype = getattr(torch, shape.dtype)
    shards: list[list[str]] = []
    left = 0
    for name, tensor in wanted.items():
        size = tensor.numel() * dtype.itemsize
        if size > left:
            shards.append([])
            left = max(size, shape.shard_mib << 20)
        shards[-1].append(name)
        left -= size
    generator = torch.Generator().manual_seed(0)
    some = torch.empty(REPEATED, dtype=dtype).normal_(0, 0.02, generator=generator) if repeated else None
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: torch.empty(wanted[name].shape, dtype=dtype) for name in names}
        for tensor in tensors.values():
            if tensor.dim() == 1:
                tensor.fill_(1)  # a norm
            elif some is not None:
                _repeat(some, tensor.view(-1))
            else:
                tensor.normal_(0, 0.02, generator=generator)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
