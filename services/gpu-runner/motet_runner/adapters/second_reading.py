"""Reads an adapter a second time, straight from PEFT's rules, and compares that with the layout.

An engine loads what the layout says, and its proof expects what the layout says: a wrong reading of the config would
pass. So nothing serves on the word of one reader. This one shares no code with the other (`peft_config`, `layout`,
`module_patterns`, `module_selection`, `tensor_names`), and runs after it, where that has refused what is hostile, in
the process that checks.

It knows less, and the readings may differ in this:

- Copies of embeddings and of the output layer: only the first one compares them with the base model's.
- What torch.compile, FSDP and models of images put into names is left out of them. The first one refuses an adapter
  whose patterns depend on it.
- A bias of a linear counts if it is there, as for PEFT. The first one refuses it where `bias` says that there is none.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import regex

from motet.digest import ADAPTER_FILES
from motet.errors import AdapterIncompatible

CONFIG_NAME, WEIGHTS_NAME = ADAPTER_FILES

MAX_SECONDS = 5.0
"""CPU time for all patterns together: a hundred times what a pattern for each linear of a large model takes"""

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
ROOTS = frozenset({"base_model", "model", "module", "language_model"})
"""With these a path may begin: they say where a decoder is, and not which linear of it is meant."""

KINDS = {
    "A.weight": "a",
    "B.weight": "b",
    "magnitude_vector": "magnitude",
    "magnitude_vector.weight": "magnitude",
    "B.bias": "lora_bias",
}
"""What comes after `.lora_`, without the adapter's name"""

MORE_THAN_LINEARS = (
    "modules_to_save", "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens",
    "trainable_token_indices", "target_parameters", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
"""Fields with which PEFT computes something else than LoRA on linears"""

OTHER_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Start values that change the base model"""

_PLAIN = regex.compile(r"[\w.-]+")


class Tensor(NamedTuple):
    start: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Found(NamedTuple):
    """As a `LoraLinear` of the layout, but for its module"""

    a: Tensor | None
    b: Tensor | None
    scale: float
    magnitude: Tensor | None
    lora_bias: Tensor | None
    bias: Tensor | None


def check_again(folder: Path, layout: Iterable[tuple[Any, ...]]) -> None:
    """Raises AdapterIncompatible if the linears of a layout are not what this reading finds."""
    found = _Reading(json.loads((folder / CONFIG_NAME).read_bytes())).linears(_tensors(folder / WEIGHTS_NAME))
    for module, *linear in layout:
        again = found.pop(_place(module), None)
        if again is None:
            raise _differs(f"{module} has no tensors that PEFT loads, and the layout has some")
        for field, one, other in zip(Found._fields, linear, again, strict=True):
            if field == "scale" and again.a is None:  # of nothing
                continue
            close = isinstance(one, float) and isinstance(other, float) and math.isclose(one, other)
            if one != other and not close:
                raise _differs(f"{field} of {module} is {one!s:.100}, and {other!s:.100}")
    if found:
        raise _differs(f"{min(found)[:200]} has tensors that PEFT loads, and the layout has none")


class _Reading:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._patterns: dict[str, regex.Pattern[str]] = {}
        self._ends = time.thread_time() + MAX_SECONDS
        self._ranks = _keys_of(config.get("rank_pattern"))
        self._alphas = _keys_of(config.get("alpha_pattern"))
        self._targets = _ends_of(config["target_modules"])
        self._excluded = _ends_of(config.get("exclude_modules") or [])

    def linears(self, tensors: Mapping[str, Tensor]) -> dict[str, Found]:
        """By their places"""
        config = self._config
        changed = next((field for field in MORE_THAN_LINEARS if config.get(field)), None)
        if config["peft_type"] != "LORA":
            changed = "peft_type"
        if str(config.get("init_lora_weights")).lower().startswith(OTHER_BASE):
            changed = "init_lora_weights"
        if changed is not None:
            raise _differs(f"by {changed} in {CONFIG_NAME} it changes more than linears")
        of: dict[str, dict[str, Tensor]] = {}
        paths = {}
        for name, tensor in tensors.items():
            path, lora, end = name.rpartition(".lora_")
            kind = KINDS.get(end.replace(".default", "")) if lora else "bias" if name.endswith(".bias") else None
            if lora and kind is None:
                raise _differs(f"{name[:200]} is of no linear")
            if kind is not None:
                path = path or name.removesuffix(".bias").removesuffix(".base_layer")
                place = _place(path)
                of.setdefault(place, {})[kind] = tensor
                paths[place] = _of_peft(path)
        found = {place: self._linear(kinds, paths[place]) for place, kinds in of.items()}
        return {place: linear for place, linear in found.items() if linear is not None}

    def _linear(self, kinds: Mapping[str, Tensor], path: str) -> Found | None:
        """None: PEFT loads no tensors for it."""
        config, bias = self._config, kinds.get("bias")
        if kinds.keys() == {"bias"}:
            return Found(None, None, 1.0, None, None, bias)
        if not self._selects(path):
            return None
        rank = self._first(self._ranks, path, config["r"])
        a, b = kinds.get("a"), kinds.get("b")
        if a is None or b is None or not a.shape[0] == b.shape[-1] == rank:
            raise _differs(f"lora_A and lora_B of {path[:200]} do not have the rank {rank} of {CONFIG_NAME}")
        if config.get("use_dora") and "magnitude" not in kinds:
            raise _differs(f"{path[:200]} has no lora_magnitude_vector")
        return Found(
            a,
            b,
            self._first(self._alphas, path, config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank),
            kinds.get("magnitude") if config.get("use_dora") else None,
            kinds.get("lora_bias") if config.get("lora_bias") else None,
            bias,
        )

    def _first(self, keys: Sequence["_Key"], path: str, default: float) -> float:
        """PEFT's get_pattern_key"""
        for key in keys:
            if path.endswith(key.end) and self._match(rf"(.*\.)?({key.pattern})$", path):
                return key.value
        return default

    def _selects(self, path: str) -> bool:
        """PEFT's check_target_module_exists"""
        targets, layers = self._config["target_modules"], self._config.get("layers_to_transform")
        if self._excluded and self._fits(self._excluded, path):
            return False
        if isinstance(targets, str) or layers is None or layers == [] or path in targets:
            return str(targets).lower() == "all-linear" or self._fits(self._targets, path)
        if not self._fits(self._targets, path):
            return False
        before = self._config.get("layers_pattern") or []
        for pattern in [before] if isinstance(before, str) else before or [r"[^.]*"]:
            start = r".*?\." if not before else r"(?:^|.*?\.)"
            if match := self._match(rf"{start}{pattern}\.(?P<idx>\d+)\.", path):
                return match["idx"] is not None and int(match["idx"]) in (
                    [layers] if isinstance(layers, int) else layers
                )
        return False

    def _fits(self, names: str | tuple[str, ...], path: str) -> bool:
        return f".{path}".endswith(names) if isinstance(names, tuple) else bool(self._match(rf"(?:{names})\Z", path))

    def _match(self, pattern: str, path: str) -> "regex.Match[str] | None":
        left = self._ends - time.thread_time()
        try:
            if left > 0:
                if pattern not in self._patterns:
                    self._patterns[pattern] = regex.compile(pattern)
                return self._patterns[pattern].match(path, timeout=left)
        except TimeoutError:
            pass
        raise AdapterIncompatible(
            f"The regular expressions in {CONFIG_NAME} take too long together. Name the modules instead.",
            reason="FormatRejected",
        )


class _Key(NamedTuple):
    pattern: str
    end: str
    """Of all paths that fit: what comes after the last dot, if no other character of the pattern is special"""
    value: float


def _keys_of(pattern: Mapping[str, float] | None) -> list[_Key]:
    return [
        _Key(key, key.rpartition(".")[2] if _PLAIN.fullmatch(key) else "", value)
        for key, value in (pattern or {}).items()
    ]


def _ends_of(names: str | Sequence[str]) -> str | tuple[str, ...]:
    return names if isinstance(names, str) else tuple(f".{name}" for name in names)


def _tensors(weights: Path) -> dict[str, Tensor]:
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    tensors = {}
    for name in header.keys() - {"__metadata__"}:
        begin, end = header[name]["data_offsets"]
        tensors[name] = Tensor(8 + length + begin, tuple(header[name]["shape"]), header[name]["dtype"], end - begin)
    return tensors


def _place(path: str) -> str:
    """The path, without what may be before it or in it"""
    parts = [part for part in path.split(".") if part not in WRAPPERS]
    while parts and parts[0] in ROOTS:
        parts.pop(0)
    return ".".join(parts)


def _of_peft(path: str) -> str:
    """As PEFT called the linear, to which its patterns apply"""
    parts = [part for part in path.split(".") if part not in WRAPPERS]
    while parts[0] == "module":  # of DistributedDataParallel
        parts.pop(0)
    if parts[0] == "base_model":
        parts = parts[2:] if parts[1:2] == ["model"] else parts[1:]
    return ".".join(parts)


def _differs(where: str) -> AdapterIncompatible:
    return AdapterIncompatible(
        f"Two readings of the adapter differ: {where}. Please report this with {CONFIG_NAME}: Motet is at fault. Until "
        "then, merge the adapter into its base model with PEFT's merge_and_unload(), and serve the result as a model.",
        reason="ReadingsDiffer",
    )
