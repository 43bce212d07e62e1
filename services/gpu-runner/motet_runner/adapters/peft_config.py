"""Reads `adapter_config.json` as PEFT writes it. Each field is used, known to be harmless, or refused by its name.

The same tensors can mean different adapters (rsLoRA, patterns, PiSSA), and only the config says which. So an unknown
field is never ignored.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import regex

from motet.digest import ADAPTER_FILES
from motet.errors import AdapterIncompatible
from motet_runner.adapters.module_patterns import Matcher
from motet_runner.adapters.module_selection import ModuleSelection
from motet_runner.adapters.strict_json import parse
from motet_runner.sources.file_selection import MAX_CONFIG_BYTES

CONFIG_NAME, WEIGHTS_NAME = ADAPTER_FILES

MERGE = "merge it into the base model with PEFT's merge_and_unload(), and serve the result as a model of its own"

IGNORED = frozenset(
    {
        "auto_mapping",  # these four say where the adapter comes from
        "base_model_name_or_path",  # warned about, as task_type is
        "revision",
        "peft_version",
        "task_type",
        "inference_mode",  # these two matter only in training
        "lora_dropout",
        "fan_in_fan_out",  # how a merge transposes; it does not matter without a merge
        "megatron_config",
        "megatron_core",
        "eva_config",  # these four only configure start values of the same name, which are checked below
        "loftq_config",
        "lora_ga_config",
        "corda_config",
        "runtime_config",
        "ensure_weight_tying",
        "qalora_group_size",  # only read with use_qalora
        "velora_config",  # only about memory in training
    }
)
SUPPORTED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias",
     "use_dora", "lora_bias", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"}
)  # fmt: skip
REFUSED = {
    "modules_to_save": f"It replaces whole modules of the base model, which other tenants share: {MERGE}.",
    "layer_replication": f"It changes the layers of the base model: {MERGE}.",
    "use_qalora": f"Motet does not serve QALoRA: {MERGE}.",
    "use_bdlora": f"Motet does not serve BD-LoRA: {MERGE}.",
    "alora_invocation_tokens": "Motet does not serve activated LoRA yet. Train a plain LoRA.",
    "trainable_token_indices": f"It changes embeddings of the base model, which other tenants share: {MERGE}.",
    "target_parameters": "Motet does not serve LoRA on bare parameters (experts) yet. Train the linears of the "
    f"attention alone, by their names in target_modules, or {MERGE}.",
    "arrow_config": f"Motet does not serve Arrow routing: {MERGE}.",
    "kasa_config": f"Motet does not serve KaSA: {MERGE}.",
    "monteclora_config": f"Motet does not serve MonteCLoRA: {MERGE}.",
}
STARTS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Start values that do not change the base model. PEFT's own start values (true) and random ones (false) do not,
either. Others, such as PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA, move a part of the base model's weights into the
adapter, which is then right only on a base model without that part. Unknown values, as of later PEFT versions, are
refused."""

MIN_ALPHA, MAX_ALPHA = 2.0**-20, 2.0**20
"""No training uses an alpha beyond these limits. The scale could become 0 or infinite in the engine's numbers."""

GENERATES = ("", "CAUSAL_LM")
"""The tasks of adapters that generate text. The LoRA of another task is served with a warning: the same tensors mean
the same, but it was trained for something else."""
BIASES = (None, "none", "all", "lora_only")
"""Which biases were trained. An adapter of a model without biases has no tensors for them."""


Number = TypeVar("Number", int, float)
Accept = Callable[[str, str], str]
"""Gets a field and a pattern → the pattern, if it is a regular expression that can be matched in little memory"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    r: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    lora_bias: bool = False
    biases: bool = False
    """True if biases of the base model were trained"""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules: ModuleSelection
    task: str = ""
    trained_on: str = ""
    """The base model's name or folder where it was trained; empty: it does not say"""
    matcher: Matcher = field(compare=False, repr=False)

    @property
    def method(self) -> str:
        return ("dora, rslora" if self.rslora else "dora") if self.dora else "rslora" if self.rslora else "lora"

    def rank_of(self, module: str) -> int:
        return self.matcher.first(self.rank_pattern, module, self.r)

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / √r for rank-stabilised LoRA, with the rank and alpha of this module (PU-08)."""
        alpha, rank = self.matcher.first(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def unselected_by(self, module: str) -> str | None:
        """The field that leaves the module out; None if the adapter may have tensors for it."""
        return self.modules.unselected_by(module, self.matcher)


def read_config(folder: Path) -> LoraConfig:
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise AdapterIncompatible(f"{folder} has no {CONFIG_NAME}. The source must name the folder that PEFT saved.")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterIncompatible(
            f"{CONFIG_NAME} has more than {MAX_CONFIG_BYTES} bytes. Save the adapter again.", reason="TooLarge"
        )
    raw = parse(path.read_bytes(), CONFIG_NAME)
    if not isinstance(raw, dict):
        raise AdapterIncompatible(f"{CONFIG_NAME} must contain a JSON object. Save the adapter again.")
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> LoraConfig:
    """The config. Raises AdapterIncompatible, which names the field that cannot be served and says what to do."""
    if "lora_parameters" in raw and "peft_type" not in raw:
        raise AdapterIncompatible(
            f"{CONFIG_NAME} has the form of MLX. Fuse the adapter with mlx_lm.fuse and serve the result as a model of "
            "its own, or train with PEFT.",
            param="lora_parameters",
        )
    if raw.get("peft_type") != "LORA":
        raise _refused("peft_type", raw.get("peft_type"), "Motet serves only LORA adapters.")
    for name, value in raw.items():
        if name in REFUSED and value not in (None, False, [], {}):
            raise _refused(name, value, REFUSED[name])
        if name not in SUPPORTED | IGNORED | REFUSED.keys() and value is not None:
            raise _refused(name, value, "Motet does not know this field. Remove it if the adapter does not need it.")
    if raw.get("bias") not in BIASES:
        raise _refused("bias", raw["bias"], "PEFT knows none, all and lora_only.")
    for name in ("use_dora", "lora_bias"):
        if not isinstance(raw.get(name), bool | None):
            raise _refused(name, raw[name], "It must be true or false.")
    start = raw.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or (isinstance(start, str) and start.lower() in STARTS)):
        raise _refused(
            "init_lora_weights",
            start,
            "With these start values the adapter may be right only on a changed base model. Save it as a plain LoRA "
            "with save_pretrained(..., path_initial_model_for_weight_conversion=...), or merge it into the model that "
            "it was trained on with merge_and_unload().",
        )
    task = raw.get("task_type", "")
    if task is None:
        task = ""
    if not isinstance(task, str):
        raise _refused("task_type", task, "It must be a name, such as CAUSAL_LM.")
    matcher = Matcher(CONFIG_NAME)

    def accept(name: str, pattern: str) -> str:
        try:
            return matcher.accept(pattern)
        except (ValueError, RecursionError, regex.error) as error:
            raise _refused(
                name,
                pattern,
                f"As a regular expression it is not accepted: {str(error)[:200]}. Name the modules instead.",
            ) from error

    try:
        config = LoraConfig(
            r=_positive("r", raw.get("r")),
            alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
            rslora=bool(raw.get("use_rslora")),
            dora=bool(raw.get("use_dora")),
            lora_bias=bool(raw.get("lora_bias")),
            biases=raw.get("bias") in {"all", "lora_only"},
            rank_pattern=_pattern(raw, "rank_pattern", _positive, accept),
            alpha_pattern=_pattern(raw, "alpha_pattern", _alpha, accept),
            modules=_selection(raw, accept),
            task=task,
            trained_on=trained_on if isinstance(trained_on := raw.get("base_model_name_or_path"), str) else "",
            matcher=matcher,
        )
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, regex.error) as error:
        raise AdapterIncompatible(
            f"{CONFIG_NAME} does not have the form that PEFT writes: {str(error)[:200]}. Save the adapter again."
        ) from error
    return config


def _pattern(
    raw: Mapping[str, Any], name: str, value_of: Callable[[str, Any], Number], accept: Accept
) -> dict[str, Number]:
    found = raw.get(name) or {}
    if not isinstance(found, dict):
        raise _refused(name, found, "It must be an object of names and numbers.")
    return {accept(name, key): value_of(name, value) for key, value in found.items()}


def _selection(raw: Mapping[str, Any], accept: Accept) -> ModuleSelection:
    targets = _names(raw, "target_modules", accept)
    if targets is None:
        raise _refused(
            "target_modules", None, "PEFT would choose modules by the kind of model. Name those that have tensors."
        )
    layers = raw.get("layers_to_transform")
    if layers is not None:
        numbers = layers if isinstance(layers, list) else [layers]
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise _refused("layers_to_transform", layers, "It must be the number of a layer, or a list of numbers.")
        layers = frozenset(numbers)
    patterns = _names(raw, "layers_pattern", accept)
    for name, value in (("layers_to_transform", layers), ("layers_pattern", patterns)):
        if value is not None and isinstance(targets, str):
            raise _refused(name, raw[name], "PEFT allows it only where target_modules is a list of names.")
    if patterns and layers is None:
        raise _refused("layers_pattern", raw["layers_pattern"], "PEFT allows it only with layers_to_transform.")
    return ModuleSelection(
        targets=targets,
        excluded=_names(raw, "exclude_modules", accept) or frozenset(),
        layers=layers or frozenset(),
        layer_patterns=tuple(accept("layers_pattern", one) for one in _listed(raw.get("layers_pattern"))),
    )


def _names(raw: Mapping[str, Any], name: str, accept: Accept) -> str | frozenset[str] | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        return accept(name, value)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return frozenset(value)
    raise _refused(name, value, "It must be a list of names or one regular expression.")


def _listed(value: str | list[str] | None) -> list[str]:
    """The patterns in the config's order: the first pattern that matches gives the layer's number."""
    return [value] if isinstance(value, str) and value else list(value or ())


def _alpha(name: str, value: Any) -> float:
    """A negative alpha is valid: it subtracts what the adapter has learnt."""
    if value == 0 or value is None:
        raise _refused(name, value, "With alpha 0 the adapter does nothing. Set the alpha of the training.")
    if not isinstance(value, int | float) or not MIN_ALPHA <= abs(value) <= MAX_ALPHA:  # also NaN
        raise _refused(name, value, f"It must be a number from {MIN_ALPHA:g} to {MAX_ALPHA:g}, or the negative of one.")
    return float(value)


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refused(name, value, "It must be a whole number of at least 1.")
    return value


def _refused(name: str, value: Any, hint: str) -> AdapterIncompatible:
    name = name[:80]
    return AdapterIncompatible(
        f"{CONFIG_NAME}: {name} is {json.dumps(value, default=str)[:80]}. {hint}", param=name, reason="UnknownField"
    )
