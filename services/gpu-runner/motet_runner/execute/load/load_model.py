"""Loads a base model: its configuration, its files and its modules. Then `ModelCheck` runs the model."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.conv import _ConvNd

from motet.domain import KVShape
from motet.errors import ModelFolderError, MotetError
from motet_runner.execute.forward import attention
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.load.checkpoint_headers import Checkpoint, other_shape
from motet_runner.execute.load.checkpoint_reader import CheckpointReader, ignore_progress
from motet_runner.execute.load.device import device_named
from motet_runner.execute.load.dtype import dtype_named
from motet_runner.execute.load.length_rope import compute_per_sequence, length_rope
from motet_runner.execute.load.model_check import ModelCheck
from motet_runner.execute.load.text_model import checkpoint_of, text_config
from motet_runner.interface import LoadProgress
from motet_runner.memory.gpu_memory import GpuMemory
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.supported_models import eos_token_ids, read_supported_config

_KEEPS_A_STATE = re.compile(
    r"Mamba|SSM|Rwkv|LSTM|Recurrent|RgLru|DeltaNet|(Linear|Lightning)Attention|ShortConv|Retention"
)
"""Parts of the class names of modules that keep a state"""

ChooseDtype = Callable[[Checkpoint], torch.dtype]


def always_float32(_: Checkpoint) -> torch.dtype:
    return torch.float32


def load(
    folder: Path,
    dtype: str,
    device: str,
    on_progress: LoadProgress = ignore_progress,
    *,
    utilization_percent: int = 100,
    choose_dtype: ChooseDtype = always_float32,
) -> LoadedModel:
    """`utilization_percent`: the share of a GPU's memory that this process may take. `choose_dtype`: chooses the type
    for `auto` on a CPU."""
    raw = read_config(folder)
    torch_device = device_named(device)
    # On a CPU, `auto` depends on the files, which are read later.
    named = None if (dtype, torch_device.type) == ("auto", "cpu") else dtype_named(dtype, torch_device, raw)
    checkpoint = checkpoint_of(folder, raw)
    torch_dtype = named or choose_dtype(checkpoint)
    if torch_device.type == "cuda":
        needed = checkpoint.bytes_as(torch_dtype)
        GpuMemory.of(torch_device).check_weights(needed, utilization_percent, str(torch_dtype).removeprefix("torch."))
    model = _with_weights(checkpoint, torch_dtype, torch_device, on_progress)
    model = model.to(torch_device).eval().requires_grad_(False)  # also moves buffers that are not in the files
    name = type(model).__name__
    try:
        return _probed(model, folder, torch_dtype, torch_device)
    except MotetError:
        raise
    except Exception as error:  # a model may do anything that our attention does not support
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise ModelFolderError(f"not yet: {name} does not run with our attention ({reason}).") from error


def read_config(folder: Path, *, with_vllm: bool = False) -> dict[str, Any]:
    """The model's config.json, once transformers can make such a model. Raises ModelFolderError if Motet does not serve
    it."""
    attention.register()
    raw = read_supported_config(folder, with_vllm=with_vllm)
    if raw.get("model_type") == "gptj":
        from motet_runner.execute.load import gptj

        gptj.register()
    quiet()
    _refuse_unknown(folder, raw)
    return raw


def without_weights(folder: Path) -> Any:
    """The model's modules, on the device `meta`: those for text. Raises what transformers raises."""
    config = text_config(folder)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    _refuse_states(empty)
    return empty


def _probed(model: Any, folder: Path, torch_dtype: torch.dtype, torch_device: torch.device) -> LoadedModel:
    config = model.config.get_text_config()
    try:
        shape = KVShape.from_config(config.to_dict() | _gpt_names(config), torch_dtype.itemsize)
    except (KeyError, TypeError) as error:
        raise ModelFolderError(f"not yet: {type(model).__name__} has no attention heads in its config.") from error
    rope, longer = length_rope(config) or (None, 1.0)
    rotations = compute_per_sequence(model, rope) if rope is not None else []
    loaded = LoadedModel(
        model=model,
        config=config,
        shape=shape,
        architecture=type(model).__name__,
        vocabulary=config.vocab_size,
        max_positions=int(longer * (getattr(config, "max_position_embeddings", None) or 2048)),
        eos_token_ids=eos_token_ids(folder, getattr(config, "eos_token_id", None)),
        dtype=torch_dtype,
        device=torch_device,
        rope=rope,
    )
    ModelCheck(loaded).run()
    if rope is not None and not any(one.calls for one in rotations):
        raise ModelFolderError(
            f"not yet: {type(model).__name__} has a rope whose frequencies depend on the longest request of a batch, "
            "and does not compute this rope in the usual module."
        )
    return loaded


def _refuse_unknown(folder: Path, raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        own = " The folder has code of its own, which Motet does not run." if raw.get("auto_map") else ""
        raise ModelFolderError(
            f"{folder}: config.json has model_type {kind!r}, which transformers {transformers.__version__} does not "
            f"know.{own} Use a model of a family that this transformers knows."
        )


def _with_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, on_progress: LoadProgress) -> Any:
    folder = checkpoint.folder
    try:
        empty = without_weights(folder)
        checkpoint.check_shapes(empty)
        with CheckpointReader(checkpoint, device, on_progress) as reader:
            model, found = type(empty).from_pretrained(
                None,
                config=empty.config,
                state_dict=reader.state_dict(),
                dtype=dtype,
                attn_implementation=attention.NAME,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            raise ModelFolderError(
                f"not yet: {type(empty).__name__} takes its attention from a table of its own, not through "
                "transformers' attention interface."
            ) from error
        if "conversion of the weights" in str(error):  # the error refers to a report that we do not print
            raise ModelFolderError(
                f"{folder}: {type(empty).__name__} stacks some weights, such as a layer's experts, and one such weight "
                "is missing or has another shape. Copy all files of the model there again."
            ) from error
        raise ModelFolderError(f"{folder}: the model could not be loaded: {_first_line(error)}") from error
    for name, shape, wanted in sorted(found["mismatched_keys"]):
        raise other_shape(folder, "a file", name, tuple(shape), tuple(wanted))
    if missing := sorted(found["missing_keys"]):
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFolderError(
            f"{folder}: the files have no weights for {missing[0]}{others}, which config.json asks for. Copy all files "
            "of the model there again."
        )
    return model


def _refuse_states(model: nn.Module) -> None:
    """Some models have a module with a state beside the attention of each layer, and their config does not name it."""
    for path, module in model.named_modules():
        if path and (isinstance(module, _ConvNd) or _KEEPS_A_STATE.search(type(module).__name__)):
            raise ModelFolderError(
                f"{type(model).__name__} keeps a state besides keys and values ({path} is {type(module).__name__}), "
                "which Motet does not serve yet."
            )


def quiet() -> None:
    """Keeps the library's progress bars and advice out of this process's log."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _gpt_names(config: Any) -> dict[str, Any]:
    """Configs map old names to new ones only as attributes, not in their dictionary."""
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim")
    return {name: value for name in names if (value := getattr(config, name, None)) is not None}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
