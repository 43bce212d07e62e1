"""Loading a base model and finding out, by running it, that it is one we serve right.

`set_attn_implementation` only warns for some models and their own attention runs on; some mix tokens outside attention.
So a probe looks: our attention is called exactly once a layer, with the shapes the KV pages have; a sequence has the
same logits whoever is beside it, and when it is cut in two. It also tells each attention module which layer it is.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.conv import _ConvNd

from motet.domain import KVShape
from motet.errors import ModelFolderError, MotetError, SetupError
from motet_runner.execute import attention
from motet_runner.execute.checkpoint import Checkpoint, CheckpointReader, ignore_progress, other_shape
from motet_runner.execute.flat_batch import CURRENT, FlatBatch
from motet_runner.execute.forward import Forward
from motet_runner.execute.gpu_device import check_card, cuda_is_usable, why_not
from motet_runner.execute.lora import features
from motet_runner.execute.rope import compute_per_sequence, length_rope
from motet_runner.execute.trial import Trial, text
from motet_runner.execute.wide import wide
from motet_runner.interface import LoadProgress
from motet_runner.memory.gpu_memory import GpuMemory
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.plan import LengthRope
from motet_runner.supported_models import read_supported_config

EXACT = torch.float64
"""In which the probe compares logits: rounding is then far below whatever a mixed-in token changes."""
SAME = 1e-9
"""By which share of the largest two logits may differ there, because products have other shapes"""


_KEEPS_A_STATE = re.compile(
    r"Mamba|SSM|Rwkv|LSTM|Recurrent|RgLru|DeltaNet|(Linear|Lightning)Attention|ShortConv|Retention"
)
"""In the names of classes"""

ChooseDtype = Callable[[Checkpoint], torch.dtype]


def always_float32(_: Checkpoint) -> torch.dtype:
    return torch.float32


@dataclass(slots=True)
class LoadedModel:
    model: Any
    config: Any
    shape: KVShape
    architecture: str
    vocabulary: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    linears: dict[str, torch.nn.Module]
    """Linears that see exactly the rows of the iteration, by path."""
    window: int | None
    """How many tokens a token attends to, itself included, if all layers have such a window: the widest one."""
    linear_groups: list[tuple[str, ...]]
    """The same linears, those together that are fed the same tensor, such as q, k and v of a layer."""
    dtype: torch.dtype
    device: torch.device
    keeps_all: bool = False
    """Whether the model gives the logits of all rows, whatever is asked"""
    rope: LengthRope | None = None
    """Its rope, if the frequencies depend on the length of a sequence"""
    fused: Forward | None = None
    """Computes what the model computes, in the kernels that serve"""

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """One model call over all rows of the iteration → logits [kept rows, vocabulary]"""
        batch.store.clear(batch.begun)
        if self.fused is not None:
            return self.fused(batch)
        token = CURRENT.set(batch)
        of_head = batch.keep if batch.head_rows is None else batch.head_rows
        try:
            output = self.model(
                input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False, logits_to_keep=of_head
            )
        finally:
            CURRENT.reset(token)
        logits: torch.Tensor = output.logits[0]
        # The first call of all, that of the probe, keeps fewer rows than it has.
        self.keeps_all = self.keeps_all or len(logits) != len(of_head)
        return logits[batch.keep] if self.keeps_all or batch.head_rows is not None else logits


def load(
    folder: Path,
    dtype: str,
    device: str,
    on_progress: LoadProgress = ignore_progress,
    *,
    utilization_percent: int = 100,
    choose_dtype: ChooseDtype = always_float32,
) -> LoadedModel:
    """`utilization_percent`: how much of a GPU's memory this process may take in all. `choose_dtype`: what `auto` is on
    a CPU."""
    attention.register()
    raw = read_supported_config(folder)
    if raw.get("model_type") == "gptj":
        from motet_runner.execute import gptj

        gptj.register()
    torch_device = device_named(device)
    # On a CPU, `auto` depends on the files, which are read later.
    named = None if (dtype, torch_device.type) == ("auto", "cpu") else _dtype(dtype, torch_device, raw)
    quiet()
    _refuse_unknown(folder, raw)
    checkpoint = Checkpoint(folder, raw.get("dtype") or raw.get("torch_dtype"))
    torch_dtype = named or choose_dtype(checkpoint)
    if torch_device.type == "cuda":
        needed = checkpoint.bytes_as(torch_dtype)
        GpuMemory.of(torch_device).check_weights(needed, utilization_percent, str(torch_dtype).removeprefix("torch."))
    model = _with_weights(checkpoint, torch_dtype, torch_device, on_progress)
    model = model.to(torch_device).eval().requires_grad_(False)  # moves buffers that are not in the files
    name = type(model).__name__
    try:
        return _probed(model, folder, torch_dtype, torch_device)
    except MotetError:
        raise
    except Exception as error:  # whatever a model does that ours does not fit
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise ModelFolderError(f"not yet: {name} does not run with our attention ({reason}).") from error


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
        eos_token_ids=_eos(folder, config),
        linears={},
        window=None,
        linear_groups=[],
        dtype=torch_dtype,
        device=torch_device,
        rope=rope,
    )
    _Probe(loaded).run()
    if rope is not None and not any(one.calls for one in rotations):
        raise ModelFolderError(
            f"not yet: {type(model).__name__} computes its rope, whose frequencies depend on the longest request of a "
            "batch, in a way of its own."
        )
    return loaded


def _refuse_unknown(folder: Path, raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        own = " The folder has code of its own, which Motet does not run." if raw.get("auto_map") else ""
        raise ModelFolderError(
            f"{folder}: config.json has model_type {kind!r}, which transformers {transformers.__version__} does not "
            f"know.{own} Use a model of a family that it has."
        )


def _with_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, on_progress: LoadProgress) -> Any:
    folder = checkpoint.folder
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        _refuse_states(empty)
        checkpoint.check_shapes(empty)
        with CheckpointReader(checkpoint, device, on_progress) as reader:
            model, found = type(empty).from_pretrained(
                None,
                config=empty.config,
                state_dict=reader.state_dict(),
                dtype=dtype,
                attn_implementation=attention.NAME,
                ignore_mismatched_sizes=True,  # they are refused below, by their names
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            raise ModelFolderError(
                f"not yet: {type(empty).__name__} takes its attention from a table of its own, not through "
                "transformers' attention interface."
            ) from error
        if "conversion of the weights" in str(error):  # refers to a report, which we do not print
            raise ModelFolderError(
                f"{folder}: {type(empty).__name__} stacks some weights, such as a layer's experts, and one of these is "
                "missing or has another shape. Copy all files of the model there again."
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
    """Its config may not tell: some have such a module beside the attention of each layer."""
    for path, module in model.named_modules():
        if path and (isinstance(module, _ConvNd) or _KEEPS_A_STATE.search(type(module).__name__)):
            raise ModelFolderError(
                f"{type(model).__name__} keeps a state besides keys and values ({path} is {type(module).__name__}), "
                "which Motet does not serve yet."
            )


def quiet() -> None:
    """Progress bars and advice of the library are not this process's log."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def device_named(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if cuda_is_usable() else "cpu"
    if wanted not in ("cpu", "cuda"):
        raise SetupError(
            f"engine.device {wanted!r} is unknown. Choose one of auto, cpu, cuda; CUDA_VISIBLE_DEVICES chooses one of "
            "several GPUs."
        )
    device = torch.device(wanted)
    if wanted == "cuda":
        if not cuda_is_usable():
            raise SetupError(
                f"engine.device is cuda and no CUDA device is visible ({why_not()}). Mend that, or use auto or cpu."
            )
        check_card(device)
    return device


def _dtype(wanted: str, device: torch.device, raw: dict[str, Any]) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if wanted == "auto":
        wanted = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        if wanted == "bfloat16" and _lacks_bfloat16(device):
            wanted = "float16"
        if wanted not in known:
            raise SetupError(f"config.json has dtype {wanted!r}. Set engine.dtype to one of {', '.join(known)}.")
    if wanted not in known:
        raise SetupError(f"engine.dtype {wanted!r} is unknown. Choose one of auto, {', '.join(known)}.")
    if wanted == "bfloat16" and _lacks_bfloat16(device):
        raise SetupError(
            "engine.dtype is bfloat16, which this GPU does not compute with; use auto, float16 or float32."
        )
    return known[wanted]


def _lacks_bfloat16(device: torch.device) -> bool:
    """GPUs before NVIDIA's Ampere"""
    return device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)


def _gpt_names(config: Any) -> dict[str, Any]:
    """Configs map old names to new ones as attributes, not in their dictionary."""
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim")
    return {name: value for name in names if (value := getattr(config, name, None)) is not None}


def _eos(folder: Path, config: Any) -> tuple[int, ...]:
    """The generation config's word, else the model's: stop tokens of a chat model are often only in the former."""
    path = folder / "generation_config.json"
    eos = None
    if path.is_file():
        eos = json.loads(path.read_text()).get("eos_token_id")
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Probe:
    """Runs a handful of tokens through the model and looks on."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._name = loaded.architecture
        self._seen: list[torch.nn.Module] = []
        self._windows: list[int | None] = []
        self._fed: dict[str, list[tuple[torch.Tensor, float]]] = {}
        """Linear → its inputs and the sum of each, in the order of the first call. They are kept, so that no two have
        the same id. One that was changed between two calls has another sum."""

    def run(self) -> None:
        loaded = self._loaded
        first = self._text(21, stride=7, first=3)
        with torch.inference_mode():
            with self._watch_linears():
                batch = Trial(loaded, [first]).batch({0: len(first)}, every_token=False)
                batch.watcher = self._look
                loaded.forward(batch)
            self._check_calls()
            self._check_neighbours(first)
            with wide(loaded, EXACT) as exact:
                whole = self._check_parts(exact, first)
                self._check_attention(exact, first, whole)
        windows = [window for window in self._windows if window]
        loaded.window = max(windows) if len(windows) == loaded.shape.layers else None
        loaded.linears = {
            path: module
            for path, module in loaded.model.named_modules()
            if features(module)
            and module is not loaded.model.get_output_embeddings()
            and [fed.shape[:-1].numel() for fed, _ in self._fed.get(path, ())] == [len(first)]
        }
        groups: dict[tuple[int, float], list[str]] = {}
        for path, ((fed, total), *_) in self._fed.items():
            if path in loaded.linears:
                groups.setdefault((id(fed), total), []).append(path)
        loaded.linear_groups = [tuple(group) for group in groups.values()]

    def _text(self, count: int, *, stride: int, first: int) -> list[int]:
        return text(count, stride=stride, first=first, vocabulary=self._loaded.vocabulary)

    def _check_neighbours(self, tokens: list[int]) -> None:
        """Beside others of equal lengths, all products have equal shapes: what differs in one bit was mixed in."""
        neighbours = [[self._text(count, stride=11, first=count + mark) for count in (6, 5)] for mark in (0, 400)]

        def beside(loaded: LoadedModel, before: list[int], after: list[int]) -> torch.Tensor:
            texts = [before, tokens, after]
            return Trial(loaded, texts).logits({row: len(one) for row, one in enumerate(texts)})[1]

        one, other = (beside(self._loaded, *texts) for texts in neighbours)
        if torch.equal(one, other):
            return
        # Only how many rows an expert gets depends on the neighbours: other shapes, and other last digits.
        with wide(self._loaded, EXACT) as exact:
            one, other = (beside(exact, *texts) for texts in neighbours)
        self._check_mixture("beside another", one, other)

    def _check_parts(self, exact: LoadedModel, tokens: list[int]) -> torch.Tensor:
        """→ the logits of each token"""
        first, tail = tokens[:9], 4
        trial = Trial(exact, [tokens, tokens, first])
        begun = trial.logits({0: len(tokens), 1: len(tokens) - tail, 2: len(first) - 1})
        ended = trial.logits({1: tail, 2: 1})
        for row, way in ((1, "in two parts"), (2, "token by token")):
            parts = torch.cat((begun[row], ended[row]))
            self._check_mixture(way, begun[0][: len(parts)], parts)
        return begun[0]

    def _check_attention(self, exact: LoadedModel, tokens: list[int], expected: torch.Tensor) -> None:
        """Ours against that of transformers"""
        model = exact.model
        model.set_attn_implementation("eager")
        try:
            theirs = Trial(exact, [tokens]).logits({0: len(tokens)})[0]
        finally:
            model.set_attn_implementation(attention.NAME)
        difference = _difference(theirs, expected)
        if not difference <= SAME:
            raise ModelFolderError(
                f"not yet: {self._name} gives other logits with our attention than with its own "
                f"(by {difference:.2g} of the largest)."
            )

    def _check_mixture(self, way: str, expected: torch.Tensor, logits: torch.Tensor) -> None:
        difference = _difference(expected, logits)
        if not difference <= SAME:
            raise ModelFolderError(
                f"not yet: {self._name} gives other logits when a sequence is computed {way} (by {difference:.2g} of "
                "the largest); something besides attention mixes its tokens."
            )

    def _check_calls(self) -> None:
        layers = self._loaded.shape.layers
        if len(self._seen) != layers or len(set(map(id, self._seen))) != layers:
            raise ModelFolderError(
                f"not yet: {self._name} called our attention {len(self._seen)} times in one pass of {layers} layers; "
                "it does not go through transformers' attention interface once a layer."
            )
        window = getattr(self._loaded.config, "sliding_window", None)
        kinds = getattr(self._loaded.config, "layer_types", None) or []
        if "sliding_attention" in kinds:
            expected = [kind == "sliding_attention" for kind in kinds]
            if [bool(seen) for seen in self._windows] != expected:
                raise ModelFolderError(f"not yet: {self._name} has sliding layers whose window it does not tell us.")
        elif (
            window and not kinds and getattr(self._loaded.config, "use_sliding_window", True) and not any(self._windows)
        ):
            raise ModelFolderError(f"not yet: {self._name} has a sliding window that it does not tell us.")

    def _look(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        self._seen.append(module)
        if len(self._seen) > self._loaded.shape.layers:
            self._check_calls()
        attention.assign_layer(module, len(self._seen) - 1, options["sliding_window"])
        self._windows.append(options["sliding_window"])
        shape = self._loaded.shape
        expected = (1, shape.kv_heads, query.shape[2], shape.head_dim)
        if tuple(key.shape) != expected or tuple(value.shape) != expected:
            raise ModelFolderError(
                f"not yet: {self._name} has keys {tuple(key.shape)} and values {tuple(value.shape)} in one layer "
                f"where its config says {expected}."
            )
        if getattr(module, "is_causal", True) is False:
            raise ModelFolderError(f"not yet: {self._name} attends to later tokens.")
        known = attention.UNDERSTOOD | attention.HARMLESS
        unknown = sorted(name for name, given in options.items() if given is not None and name not in known)
        if unknown:
            raise ModelFolderError(f"not yet: {self._name} attends with {', '.join(unknown)}.")

    @contextmanager
    def _watch_linears(self) -> Iterator[None]:
        """What each linear is fed. Only those that see exactly the rows of the iteration can take LoRA row by row."""

        def watch(path: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
            return lambda _, args: self._fed.setdefault(path, []).append((args[0], float(args[0].double().sum())))

        hooks = [
            module.register_forward_pre_hook(watch(path))
            for path, module in self._loaded.model.named_modules()
            if features(module)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _difference(expected: torch.Tensor, logits: torch.Tensor) -> float:
    """The largest one, as a share of the largest number"""
    return float((logits - expected).abs().max()) / max(float(expected.abs().max()), torch.finfo(EXACT).tiny)
