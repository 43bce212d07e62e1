"""Loading a base model and finding out, by running it, that it is one we serve right.

`set_attn_implementation` only warns for some models and their own attention runs on; some mix tokens outside attention.
So a probe looks: our attention is called exactly once a layer, with the shapes the KV pages have; and two sequences
packed together, or one cut in two, give what each gives alone. It also tells each attention module which layer it is.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from motet.domain import BASE, KVShape, RequestId, pages_for
from motet.errors import ModelFolderError, MotetError, SetupError
from motet_runner.execute import attention
from motet_runner.execute.checkpoint import Checkpoint, CheckpointReader, ignore_progress, other_shape
from motet_runner.execute.flat_batch import CURRENT, FlatBatch, FlatBatchBuilder, SequenceAttention, Watcher
from motet_runner.execute.forward import Forward
from motet_runner.execute.gpu_device import check_card, cuda_is_usable, why_not
from motet_runner.execute.lora import features
from motet_runner.execute.rope import compute_per_sequence, length_rope
from motet_runner.execute.row_table import RowTable
from motet_runner.interface import LoadProgress, Sampling
from motet_runner.memory.gpu_memory import GpuMemory
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import LengthRope, RowJoin, RowStep, StepPlan
from motet_runner.supported_models import read_supported_config

MakeAttention = Callable[[torch.Tensor], SequenceAttention | None]
"""Attention over pages that lie as those of a PagedStore."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""How far packing may move a logit in the probe, as a share of the largest. Rounding stays far below, a token that
was mixed in goes far above."""


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


def tolerance_of(logits: torch.Tensor) -> float:
    """How far packing may move one of these logits."""
    return TOLERANCE[logits.dtype] * max(1.0, float(logits.abs().max()))


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
        first, second = _probe_tokens(loaded)
        with torch.inference_mode(), self._watch_linears():
            alone = _last_logits(loaded, [(first, 0)], watcher=self._look)[0]
        self._check_calls()
        tolerance = tolerance_of(alone)
        difference = float((self._by_transformers(first) - alone).abs().max())
        if not difference <= tolerance:
            raise ModelFolderError(
                f"not yet: {self._name} gives other logits with our attention than with its own (by {difference:.2g})."
            )
        with torch.inference_mode():
            packed = _last_logits(loaded, [(second, 0), (first, 0)])[1]
            cut = _last_logits(loaded, [(first, 17)])[0]
            decoded = _last_logits(loaded, [(first, 20)])[0]
        for way, logits in (("beside another", packed), ("in two parts", cut), ("token by token", decoded)):
            difference = float((logits - alone).abs().max())
            if not difference <= tolerance:
                raise ModelFolderError(
                    f"not yet: {self._name} gives other logits when a sequence is computed {way} "
                    f"(by {difference:.2g}); something besides attention mixes its tokens."
                )
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

    def _by_transformers(self, tokens: list[int]) -> torch.Tensor:
        """The last logits with the attention of transformers"""
        model = self._loaded.model
        model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                return _last_logits(self._loaded, [(tokens, 0)])[0]
        finally:
            model.set_attn_implementation(attention.NAME)

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


def probe_logits(loaded: LoadedModel, paged: MakeAttention | None = None) -> torch.Tensor:
    """Last logits of a few sequences: packed together, and the first one in two parts and token by token."""
    return torch.cat(list(probes(loaded, paged)))


def probes(loaded: LoadedModel, paged: MakeAttention | None = None) -> Iterator[torch.Tensor]:
    """The same, one part after the other."""
    first, second = _probe_tokens(loaded)
    ways: list[list[tuple[list[int], int]]] = [[(second, 0), (first, 0)], [(first, 17)], [(first, 20), (second, 3)]]
    for parts in ways:
        yield _last_logits(loaded, parts, paged=paged)


def _probe_tokens(loaded: LoadedModel) -> tuple[list[int], list[int]]:
    vocabulary = min(loaded.vocabulary, 997)
    return [(7 * i + 3) % vocabulary for i in range(21)], [(11 * i + 5) % vocabulary for i in range(6)]


def _last_logits(
    loaded: LoadedModel,
    parts: list[tuple[list[int], int]],
    *,
    watcher: Watcher | None = None,
    paged: MakeAttention | None = None,
) -> torch.Tensor:
    """Last logits of each sequence; one with a second number is computed up to there first, and then the rest.

    `paged`: attention over the pages where they are; None for torch's.
    """
    pages = sum(pages_for(len(tokens)) for tokens, _ in parts)
    store = PagedStore(pages, loaded.shape, loaded.dtype, loaded.device)
    table = RowTable()
    builder = FlatBatchBuilder(table, store, loaded.device)
    if paged is not None:
        builder.use(None, paged(store.data))
    free = iter(range(pages))
    before, after = [], []
    for row, (tokens, cut) in enumerate(parts):
        table.join(probe_row(row, tokens))
        of_row = tuple(next(free) for _ in range(pages_for(len(tokens))))
        table.append_pages(RowStep(row, 0, 0, samples=False, new_pages=of_row))
        if cut:
            before.append(RowStep(row, 0, cut, samples=False))
        after.append(RowStep(row, cut, len(tokens) - cut, samples=True))
    if before:
        loaded.forward(builder.build(StepPlan(number=0, prefills=tuple(before))))
    batch = builder.build(StepPlan(number=1, prefills=tuple(after)))
    batch.watcher = watcher
    return loaded.forward(batch)


def recorded_iteration(loaded: LoadedModel, rows: int, kept: int) -> FlatBatch:
    """An iteration of so many rows, of which the logits of so many are wanted."""
    tokens, _ = _probe_tokens(loaded)
    pages = kept + pages_for(len(tokens))
    store = PagedStore(pages, loaded.shape, loaded.dtype, loaded.device)
    table = RowTable()
    builder = FlatBatchBuilder(table, store, loaded.device)
    counts = [rows - kept + 1] + [1] * (kept - 1)
    steps = []
    for row, count in enumerate(counts):
        table.join(probe_row(row, tokens[:count]))
        table.append_pages(RowStep(row, 0, 0, samples=False, new_pages=(row,)))
        steps.append(RowStep(row, 0, count, samples=True))
    return builder.build(StepPlan(number=0, prefills=tuple(steps)))


def decode_probe(loaded: LoadedModel, paged: MakeAttention, rows: int) -> Callable[[], torch.Tensor]:
    """An iteration in which so many sequences get their next token, to be computed as often as wanted."""
    tokens, _ = _probe_tokens(loaded)
    pages = pages_for(len(tokens))
    store = PagedStore(rows * pages, loaded.shape, loaded.dtype, loaded.device)
    table = RowTable()
    builder = FlatBatchBuilder(table, store, loaded.device)
    builder.use(None, paged(store.data))
    for row in range(rows):
        table.join(probe_row(row, tokens))
        of_row = tuple(range(row * pages, (row + 1) * pages))
        table.append_pages(RowStep(row, 0, 0, samples=False, new_pages=of_row))
    last = len(tokens) - 1
    prefills = tuple(RowStep(row, 0, last, samples=False) for row in range(rows))
    loaded.forward(builder.build(StepPlan(number=0, prefills=prefills)))
    decodes = tuple(RowStep(row, last, 1, samples=True) for row in range(rows))
    return lambda: loaded.forward(builder.build(StepPlan(number=1, prefills=decodes)))


def probe_row(row: int, tokens: list[int]) -> RowJoin:
    """A row for tokens of no request."""
    return RowJoin(
        row=row,
        request=RequestId("probe"),
        tokens=tuple(tokens),
        prompt_tokens=len(tokens),
        adapter=BASE,
        sampling=Sampling(max_tokens=1),
        seed=0,
        choice=0,
    )
