"""Checks that an adapter fits the base model. It reads names and shapes, no weights, and needs no torch.

It refuses an adapter with a tensor that belongs to no module, a shape that does not fit, an A without its B, or no
tensors at all.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from motet.domain import MAX_LORA_RANK
from motet.errors import AdapterIncompatible
from motet_runner.adapters.layout import AdapterLayout, FileStamp, LoraLinear, StoredTensor
from motet_runner.adapters.peft_config import CONFIG_NAME, WEIGHTS_NAME, LoraConfig, read_config
from motet_runner.adapters.safetensors_header import read_header

CHECK_VERSION = 4
"""The version of the checks. Every certificate names its version; an adapter with another version is checked again.

Raise this number when a check in this folder could now refuse an adapter that passed before, or when the kept result
(`certification.Certification`) changes its form or its meaning.
"""

Shapes = dict[str, tuple[int, int]]
"""Module path in the base model → (in, out): `EngineInfo.target_modules`."""

PREFIXES = ("base_model.model.", "base_model.", "")
"""Prefixes that PEFT and similar tools put before the base model's own module path"""

FLOATS = ("F32", "BF16", "F16", "F64")
"""The types that are served. In integers, the small numbers of a LoRA would all be zeros."""

TENSOR_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")

MAX_NAME_CHARS = 200
"""The most characters of a tenant's name that are compared, or quoted in a message"""


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


@dataclass(frozen=True, slots=True)
class LoraTensor:
    """One tensor, as matrix A or B of one linear's LoRA."""

    module: str
    half: Literal["A", "B"]
    tensor: StoredTensor


def check(folder: Path, shapes: Shapes, *, max_rank: int) -> CheckResult:
    """Check an adapter's files. Raises AdapterIncompatible, which says why the adapter is refused."""
    config = read_config(folder)
    weights = weights_of(folder)
    stamp = FileStamp.of(weights)  # before anything is read, so that any later change is noticed
    tensors = map_tensors(read_header(weights), shapes)
    halves = _halves(tensors)
    ranks = _fit(halves, config, shapes, max_rank)
    rank = max(ranks.values())
    linears = tuple(
        LoraLinear(module, found["A"], found["B"], config.scale_of(module)) for module, found in sorted(halves.items())
    )
    return CheckResult(
        tensors=tensors,
        modules=tuple(sorted(ranks)),
        rank=rank,
        alpha=config.alpha,
        method=config.method,
        layout=AdapterLayout.of(weights, stamp, rank, linears),
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


def map_tensors(tensors: dict[str, StoredTensor], shapes: Shapes) -> dict[str, LoraTensor]:
    """Tensor name → its place in the base model. Raises AdapterIncompatible for tensors that belong to no module; the
    message names the nearest module."""
    mapped: dict[str, LoraTensor] = {}
    unmapped: list[str] = []
    for name, tensor in tensors.items():
        match = TENSOR_NAME.fullmatch(name)
        module = _module(match["module"], shapes) if match else None
        if match is None or module is None:
            unmapped.append(name)
        else:
            mapped[name] = LoraTensor(module, "A" if match["half"] == "A" else "B", tensor)
    if unmapped:
        nearest = _nearest(unmapped[0], shapes)
        some = ", ".join(name[:MAX_NAME_CHARS] for name in unmapped[:3])
        hint = f" The nearest module of this base model is {nearest}." if nearest else ""
        raise AdapterIncompatible(
            f"{len(unmapped)} of {len(tensors)} tensors belong to no module of this base model, for example "
            f"{some}.{hint} Was the adapter trained on another model?",
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


def _module(path: str, shapes: Shapes) -> str | None:
    for prefix in PREFIXES:
        if path.startswith(prefix) and path.removeprefix(prefix) in shapes:
            return path.removeprefix(prefix)
    return None


def _nearest(name: str, shapes: Shapes) -> str | None:
    close = difflib.get_close_matches(re.sub(r"\.lora_.*", "", name[:MAX_NAME_CHARS]), shapes, n=1, cutoff=0.3)
    return close[0] if close else None


def _halves(mapped: dict[str, LoraTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Module → its tensors A and B. Raises AdapterIncompatible if a module has two tensors A or two tensors B."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    for half in mapped.values():
        of_module = halves.setdefault(half.module, {})
        if half.half in of_module:
            raise AdapterIncompatible(
                f"{half.module} has two lora_{half.half} tensors. Remove one of them.", reason="ShapeMismatch"
            )
        of_module[half.half] = half.tensor
    return halves


def _fit(
    halves: dict[str, dict[str, StoredTensor]], config: LoraConfig, shapes: Shapes, max_rank: int
) -> dict[str, int]:
    """The rank of every module. Raises AdapterIncompatible if A or B is missing, does not fit the linear, or has
    another rank than the config; if the config leaves the module out; and if the pool does not serve the rank."""
    ranks = {}
    for module, found in halves.items():
        if found.keys() != {"A", "B"}:
            missing = "B" if "A" in found else "A"
            raise AdapterIncompatible(
                f"{module} has no lora_{missing} tensor. Save the adapter again.", reason="UnmappedTensors"
            )
        inputs, outputs = shapes[module]
        rank = config.rank_of(module)
        if found["A"].shape != (rank, inputs) or found["B"].shape != (outputs, rank):
            raise AdapterIncompatible(
                f"The tensors of {module} have the wrong shapes: lora_A is {found['A'].shape} and lora_B is "
                f"{found['B'].shape}. With rank {rank} from {CONFIG_NAME} and this base model, they must be "
                f"{(rank, inputs)} and {(outputs, rank)}. Was the adapter trained on another model?",
                reason="ShapeMismatch",
            )
        if (field := config.unselected_by(module)) is not None:
            raise AdapterIncompatible(
                f"{module} has tensors, but {field} in {CONFIG_NAME} leaves it out, so PEFT does not load them. "
                f"Change {field}, or remove the tensors.",
                reason="UnmappedTensors",
            )
        ranks[module] = rank
    largest = max(ranks.values())
    served = min(max_rank, MAX_LORA_RANK)
    if largest > served:
        raise AdapterIncompatible(
            f"The adapter's rank is {largest}, but this pool serves ranks up to {served}. Train a smaller rank, or "
            f"raise the pool's engine.maxLoraRank (at most {MAX_LORA_RANK}).",
            reason="RankTooLarge",
        )
    return ranks
