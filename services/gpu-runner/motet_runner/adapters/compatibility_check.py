"""Checks that an adapter fits the base model. It reads names and shapes, no weights, and needs no torch.

It refuses an adapter with a tensor that belongs to no module, a shape that does not fit, an A without its B, or no
tensors at all.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from motet.domain import MAX_LORA_RANK
from motet.errors import AdapterIncompatible
from motet_runner.adapters.base_name import other_base
from motet_runner.adapters.equal_copies import without_copies
from motet_runner.adapters.layout import SCALE_ROWS, AdapterLayout, FileStamp, LoraLinear, StoredTensor
from motet_runner.adapters.peft_config import CONFIG_NAME, GENERATES, WEIGHTS_NAME, LoraConfig, read_config
from motet_runner.adapters.safetensors_header import METADATA, first_names, read_header
from motet_runner.adapters.tensor_names import MAX_NAME_CHARS, LoraPlace, Shapes, place_of, why_it_has_no_place

CHECK_VERSION = 15
"""The version of the checks. Every certificate names its version; an adapter with another version is checked again.

Raise this number when a check in this folder could now refuse an adapter that passed before, or when the kept result
(`certification.Certification`) changes its form or its meaning.
"""

MAX_LINEAR_BYTES = 2560
"""In the header, of one linear: of five tensors, with names of 400 characters"""
MAX_OTHER_BYTES = 1 << 20
"""In the header: what trainers write beside the tensors, and copies of embeddings"""

MAX_QUOTED_CHARS = 60
"""The most characters of a tenant's word that a warning quotes"""

FLOATS = ("F32", "BF16", "F16", "F64")
"""The types that are served. In integers, the small numbers of a LoRA would all be zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What the check found."""

    tensors: "dict[str, LoraTensor]"
    modules: tuple[str, ...]
    rank: int
    """The largest rank of the modules"""
    alpha: float
    method: str
    layout: AdapterLayout
    warnings: tuple[str, ...]
    """What is served and may not be meant"""


@dataclass(frozen=True, slots=True)
class LoraTensor:
    """One tensor of the adapter, and what it is of which linear."""

    place: LoraPlace
    tensor: StoredTensor


@dataclass(slots=True)
class _Lora:
    """The LoRA of one linear."""

    own_paths: tuple[str, ...]
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """By what they are."""


def check(
    folder: Path,
    shapes: Shapes,
    *,
    max_rank: int,
    no_scales: str = "",
    biased: Collection[str] = (),
    max_device_rank: int | None = None,
    base_name: str = "",
    base: Path | None = None,
) -> CheckResult:
    """Check an adapter's files. Raises AdapterIncompatible, which says why the adapter is refused. The others are
    fields of `certification.EngineLimits`; `biased` are the linears that have a bias, `base` the model's folder."""
    config = read_config(folder)
    weights = weights_of(folder)
    stamp = FileStamp.of(weights)  # before anything is read, so that any later change is noticed
    _check_length(weights, shapes)
    stored = read_header(weights)
    tensors = map_tensors(stored if base is None else without_copies(stored, weights, base), shapes)
    loras = _loras(tensors)
    ranks = _fit(loras, config, shapes, max_rank)
    rank = max(ranks.values())
    linears = tuple(
        LoraLinear(
            module,
            lora.tensors.get("A"),
            lora.tensors.get("B"),
            config.scale_of(lora.own_paths[0]),
            lora.tensors.get("magnitude"),
            lora.tensors.get("lora_bias"),
            lora.tensors.get("bias"),
        )
        for module, lora in sorted(loras.items())
    )
    scaled = next((linear for linear in linears if linear.scales), None)
    if scaled is not None and no_scales:
        raise AdapterIncompatible(
            f"{scaled.module} has DoRA, a bias on lora_B or a trained bias, which Motet does not serve {no_scales} "
            "yet. Train with use_dora=False, lora_bias=False and bias='none', or serve it in a pool with Motet's own "
            "engine.",
            reason="FormatRejected",
        )
    without = next((linear.module for linear in linears if linear.bias and linear.module not in biased), None)
    if without is not None:
        raise AdapterIncompatible(
            f"The adapter has a bias for {without}, which has no bias in this base model. Train with bias='none'. Was "
            "the adapter trained on another model?",
            reason="UnmappedTensors",
        )
    device_rank = rank if scaled is None else rank + SCALE_ROWS
    if max_device_rank is not None and max_device_rank < device_rank:
        raise AdapterIncompatible(
            f"The adapter's rank is {rank}, and it takes {device_rank} rows of device memory. This runner has memory "
            f"for {max_device_rank}. Raise the pool's engine.kvCacheMiB; where that is not set, raise "
            "engine.maxResidentAdapters. Or train a smaller rank.",
            reason="RankTooLarge",
        )
    return CheckResult(
        tensors=tensors,
        modules=tuple(sorted(loras)),
        rank=rank,
        alpha=config.alpha,
        method=config.method,
        layout=AdapterLayout.of(weights, stamp, device_rank, linears),
        warnings=_warnings(config, loras, base_name),
    )


def weights_of(folder: Path) -> Path:
    """The file with the weights. Raises AdapterIncompatible if it does not exist."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickles = [name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).exists()]
        if pickles:
            raise AdapterIncompatible(
                f"{pickles[0]} is a pickle, and Motet never opens pickles. Save the adapter as {WEIGHTS_NAME} with "
                "PEFT's save_pretrained(safe_serialization=True)."
            )
        raise AdapterIncompatible(
            f"{folder} has no {WEIGHTS_NAME}. Save the adapter there with PEFT's save_pretrained()."
        )
    return path


def _check_length(weights: Path, shapes: Shapes) -> None:
    """A header that is longer than any for this base model is not parsed: that takes long, beside requests."""
    most = MAX_LINEAR_BYTES * len(shapes) + MAX_OTHER_BYTES
    names = first_names(weights, most)
    if names is None:
        return
    why = f"The header of {WEIGHTS_NAME} is too long: one for the {len(shapes)} linears of this base model has at most "
    why += f"{most} bytes."
    strange = next((name for name in names if name != METADATA and place_of(name, shapes) is None), None)
    if strange is None:
        raise AdapterIncompatible(f"{why} Save the adapter again, without other data in it.", reason="TooLarge")
    raise AdapterIncompatible(
        f"{why} {strange[:MAX_NAME_CHARS]} belongs to none of them. {why_it_has_no_place(strange, shapes)}",
        reason="UnmappedTensors",
    )


def map_tensors(tensors: dict[str, StoredTensor], shapes: Shapes) -> dict[str, LoraTensor]:
    """Tensor name → its place in the base model. Raises AdapterIncompatible for tensors that belong to no linear; the
    message says what to do with the first one."""
    mapped: dict[str, LoraTensor] = {}
    unmapped: list[str] = []
    for name, tensor in tensors.items():
        place = place_of(name, shapes)
        if place is None:
            unmapped.append(name)
        else:
            mapped[name] = LoraTensor(place, tensor)
    if unmapped:
        some = ", ".join(name[:MAX_NAME_CHARS] for name in unmapped[:3])
        raise AdapterIncompatible(
            f"{len(unmapped)} of {len(tensors)} tensors belong to no linear of this base model, for example {some}. "
            f"{why_it_has_no_place(unmapped[0], shapes)}",
            reason="UnmappedTensors",
        )
    unsupported = next((name for name in mapped if tensors[name].dtype not in FLOATS), None)
    if unsupported is not None:
        raise AdapterIncompatible(
            f"{unsupported} has the type {tensors[unsupported].dtype}, which Motet does not serve. Save the adapter "
            f"with one of the types {', '.join(FLOATS)}."
        )
    if not mapped:
        raise AdapterIncompatible(
            f"{WEIGHTS_NAME} has no LoRA tensors. Save the adapter again after training.", reason="NoEffect"
        )
    return mapped


def _warnings(config: LoraConfig, loras: dict[str, _Lora], base_name: str) -> tuple[str, ...]:
    found = []
    if (other := other_base(config.trained_on, base_name)) is not None:
        found.append(other)
    if config.task not in GENERATES:
        found.append(f"task_type is {config.task[:MAX_QUOTED_CHARS]}, so it was not trained to generate text")
    if not isinstance(targets := config.modules.targets, str):
        parts = [path.split(".") for lora in loras.values() for path in lora.own_paths]
        with_tensors = {".".join(path[start:]) for path in parts for start in range(len(path))}
        if idle := sorted(targets - with_tensors):
            some = ", ".join(name[:MAX_QUOTED_CHARS] for name in idle[:3])
            found.append(f"{len(idle)} of target_modules have no tensors, for example {some}")
    for module, lora in loras.items():
        if module not in lora.own_paths:
            found.append(f"trained as {lora.own_paths[-1]} of another kind of model, it serves as {module}")
            break
    return tuple(found)


def _loras(mapped: dict[str, LoraTensor]) -> dict[str, _Lora]:
    """By module. Raises AdapterIncompatible if a module has two tensors A or two tensors B."""
    loras: dict[str, _Lora] = {}
    for one in mapped.values():
        module, half, own_paths = one.place
        lora = loras.setdefault(module, _Lora(own_paths))
        if half in lora.tensors or own_paths != lora.own_paths:
            raise AdapterIncompatible(
                f"{module} has two {_NAME_OF[half]} tensors, or halves under different names. Remove one of them.",
                reason="ShapeMismatch",
            )
        lora.tensors[half] = one.tensor
    return loras


_NAME_OF = {
    "A": "lora_A",
    "B": "lora_B",
    "magnitude": "lora_magnitude_vector",
    "lora_bias": "lora_B.bias",
    "bias": "bias",
}


def _fit_vectors(module: str, found: dict[str, StoredTensor], config: LoraConfig, outputs: int) -> None:
    """Raises AdapterIncompatible if a magnitude or a bias is missing, does not fit the linear, or is there although the
    config says that there is none."""
    fields = {"magnitude": ("use_dora", config.dora), "lora_bias": ("lora_bias", config.lora_bias)}
    with_lora = "A" in found or "B" in found
    for kind, (name, said) in (fields | {"bias": ("bias", config.biases)}).items():
        if said and with_lora and kind in fields and kind not in found:
            raise AdapterIncompatible(
                f"{module} has no {_NAME_OF[kind]} tensor, but {name} in {CONFIG_NAME} is true. Save the adapter "
                "again, with the config of its training.",
                reason="UnmappedTensors",
            )
        if kind not in found:
            continue
        if not said:
            raise AdapterIncompatible(
                f"{module} has a {_NAME_OF[kind]} tensor, but {name} in {CONFIG_NAME} says that there is none. Save "
                "the adapter again, with the config of its training.",
                reason="UnmappedTensors",
            )
        if found[kind].shape != (outputs,):
            raise AdapterIncompatible(
                f"{_NAME_OF[kind]} of {module} has the shape {found[kind].shape}. With this base model, it must be "
                f"{(outputs,)}. Was the adapter trained on another model?",
                reason="ShapeMismatch",
            )


def _settings(module: str, lora: _Lora, config: LoraConfig) -> tuple[int, float, str | None]:
    """Rank, scale, and the field that leaves the linear out. Raises AdapterIncompatible if they depend on how PEFT
    called the linear."""
    found = {(config.rank_of(path), config.scale_of(path), config.unselected_by(path)) for path in lora.own_paths}
    if len(found) > 1:
        raise AdapterIncompatible(
            f"{module} is {' or '.join(lora.own_paths)} for the patterns in {CONFIG_NAME}, which say different things "
            "of these. Write patterns that match the ends of names, as q_proj does, or save the adapter from a model "
            "that is not compiled.",
            reason="UnmappedTensors",
        )
    return found.pop()


def _fit(loras: dict[str, _Lora], config: LoraConfig, shapes: Shapes, max_rank: int) -> dict[str, int]:
    """The rank of every module. Raises AdapterIncompatible if A or B is missing, does not fit the linear, or has
    another rank than the config; if the config leaves the module out; and if the pool does not serve the rank."""
    ranks = {}
    for module, lora in loras.items():
        found = lora.tensors
        inputs, outputs = shapes[module]
        _fit_vectors(module, found, config, outputs)
        if found.keys() == {"bias"}:
            continue
        for half in ("A", "B"):
            if half not in found:
                raise AdapterIncompatible(
                    f"{module} has no lora_{half} tensor. Save the adapter again.", reason="UnmappedTensors"
                )
        rank, _, unselected_by = _settings(module, lora, config)
        if found["A"].shape != (rank, inputs) or found["B"].shape != (outputs, rank):
            raise AdapterIncompatible(
                f"The tensors of {module} have the wrong shapes: lora_A is {found['A'].shape} and lora_B is "
                f"{found['B'].shape}. With rank {rank} from {CONFIG_NAME} and this base model, they must be "
                f"{(rank, inputs)} and {(outputs, rank)}. Was the adapter trained on another model?",
                reason="ShapeMismatch",
            )
        if unselected_by is not None:
            raise AdapterIncompatible(
                f"{module} has tensors, but {unselected_by} in {CONFIG_NAME} leaves it out, so PEFT does not load "
                f"them. Change {unselected_by}, or remove the tensors.",
                reason="UnmappedTensors",
            )
        ranks[module] = rank
    if not ranks:
        raise AdapterIncompatible(
            f"{WEIGHTS_NAME} has no LoRA tensors. Save the adapter again after training.", reason="NoEffect"
        )
    largest = max(ranks.values())
    served = min(max_rank, MAX_LORA_RANK)
    if largest > served:
        raise AdapterIncompatible(
            f"The adapter's rank is {largest}, but this pool serves ranks up to {served}. Train a smaller rank, or "
            f"raise the pool's engine.maxLoraRank (at most {MAX_LORA_RANK}).",
            reason="RankTooLarge",
        )
    return ranks
