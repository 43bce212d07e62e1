"""Defects of reading an adapter, planted one at a time, as `proof_mutants` has those of loading it.

Each changes what the check's first reading finds: the layout, by which an engine loads and proves the adapter. Without
the second reading, the proof passes them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from motet_runner.adapters import compatibility_check, peft_config
from motet_runner.adapters.compatibility_check import LoraTensor
from motet_runner.adapters.layout import AdapterLayout, LoraLinear, StoredTensor
from motet_runner.adapters.module_patterns import Matcher
from motet_runner.adapters.module_selection import ModuleSelection
from motet_runner.adapters.peft_config import LoraConfig
from motet_runner.adapters.safetensors_header import read_header
from testbed.proof_mutants import Plant

Config = Mapping[str, Any]


class Misread(NamedTuple):
    plant: Plant
    adapter: str = "rich"
    """Which of the test's adapters shows it"""
    fields: Config = MappingProxyType({})
    """Of its config, changed: where they are not empty, the adapter is one that PEFT would load in another way, and the
    check refuses it as it should be"""


def config(**fields: Any) -> Plant:
    """These fields of the config are lost, or take another value."""
    return of_config(lambda read: replace(read, **fields))


def of_config(change: Callable[[LoraConfig], LoraConfig]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        parse = peft_config.parse_config
        monkeypatch.setattr(peft_config, "parse_config", lambda raw: change(parse(raw)))

    return plant


def raw(**fields: Any) -> Plant:
    """As if the file had these fields"""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        parse = peft_config.parse_config
        monkeypatch.setattr(peft_config, "parse_config", lambda raw: parse({**raw, **fields}))

    return plant


def scale(change: Callable[[LoraConfig, str, float], float]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        of = LoraConfig.scale_of
        monkeypatch.setattr(LoraConfig, "scale_of", lambda self, module: change(self, module, of(self, module)))

    return plant


def without(half: str, **fields: Any) -> Plant:
    """The tensors of one kind are left out, and the field that says that they are there is lost."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        config(**fields)(monkeypatch)
        changed_tensors(lambda found: {name: one for name, one in found.items() if one.place.half != half})(monkeypatch)

    return plant


def changed_tensors(change: Callable[[dict[str, LoraTensor]], dict[str, LoraTensor]]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        found = compatibility_check.map_tensors
        monkeypatch.setattr(compatibility_check, "map_tensors", lambda *of: change(found(*of)))

    return plant


def elsewhere(first: str, second: str) -> Plant:
    """The tensors of two linears change places."""

    def change(found: dict[str, LoraTensor]) -> dict[str, LoraTensor]:
        def other(module: str) -> str:
            return module.replace(first, second) if first in module else module.replace(second, first)

        return {
            name: replace(one, place=one.place._replace(module=other(one.place.module))) for name, one in found.items()
        }

    return changed_tensors(change)


def stored(change: Callable[[str, StoredTensor], StoredTensor]) -> Plant:
    """What the header says of each tensor"""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        read = read_header
        monkeypatch.setattr(
            compatibility_check, "read_header", lambda path: {n: change(n, one) for n, one in read(path).items()}
        )

    return plant


def linears(change: Callable[[tuple[LoraLinear, ...]], tuple[LoraLinear, ...]]) -> Plant:
    """What the layout says"""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        kept = vars(AdapterLayout)["linears"]
        monkeypatch.setattr(AdapterLayout, "linears", property(lambda self: change(kept.fget(self))))

    return plant


def each(change: Callable[[LoraLinear], LoraLinear]) -> Plant:
    return linears(lambda every: tuple(change(one) for one in every))


def _first_of_any_part(self: Matcher, pattern: Mapping[str, float], module: str, default: float) -> float:
    return next((value for key, value in pattern.items() if key.rpartition(".")[2] in module), default)


def _last(self: Matcher, pattern: Mapping[str, float], module: str, default: float) -> float:
    return FIRST(self, dict(reversed(list(pattern.items()))), module, default)


FIRST = Matcher.first


def _square(one: LoraLinear) -> StoredTensor | None:
    """B in the shape of A, if there is room for that"""
    return one.b._replace(shape=one.a.shape) if one.a and one.b and one.a.bytes == one.b.bytes else None


def _rotated(every: tuple[LoraLinear, ...]) -> tuple[LoraLinear, ...]:
    """Each linear has the name of the next one of its shape."""

    def shape(one: LoraLinear) -> object:
        return tuple(tensor and tensor.shape for tensor in (one.a, one.b, one.magnitude, one.lora_bias, one.bias))

    found = []
    for one in every:
        alike = [other.module for other in every if shape(other) == shape(one)]
        found.append(one._replace(module=alike[alike.index(one.module) - 1]))
    return tuple(found)


def _refused_less(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr(peft_config, "IGNORED", peft_config.IGNORED | {field})
    monkeypatch.setattr(
        peft_config, "REFUSED", {name: why for name, why in peft_config.REFUSED.items() if name != field}
    )


def ignores(field: str) -> Plant:
    return lambda monkeypatch: _refused_less(monkeypatch, field)


def selects_all(monkeypatch: pytest.MonkeyPatch, but: str) -> None:
    """The field `but` is not looked at."""
    by = ModuleSelection.unselected_by

    def mutant(self: ModuleSelection, module: str, matcher: Matcher) -> str | None:
        found = by(self, module, matcher)
        return None if found == but else found

    monkeypatch.setattr(ModuleSelection, "unselected_by", mutant)


def overlooks(field: str) -> Plant:
    return lambda monkeypatch: selects_all(monkeypatch, field)


def _starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_config, "STARTS", peft_config.STARTS | {"pissa"})


CONFIG: dict[str, Misread] = {
    "rsLoRA ignored": Misread(config(rslora=False)),
    "rsLoRA where there is none": Misread(config(rslora=True), "plain"),
    "rsLoRA by the rank of the config alone": Misread(scale(lambda c, m, s: s * (c.rank_of(m) / c.r) ** 0.5)),
    "alpha_pattern ignored": Misread(config(alpha_pattern={})),
    "alpha_pattern: the last key counts": Misread(
        lambda monkeypatch: monkeypatch.setattr(
            Matcher, "first", lambda self, p, m, d: (_last if isinstance(d, float) else FIRST)(self, p, m, d)
        )
    ),
    "alpha_pattern: a part of the name is enough": Misread(
        lambda monkeypatch: monkeypatch.setattr(
            Matcher,
            "first",
            lambda self, p, m, d: (_first_of_any_part if isinstance(d, float) else FIRST)(self, p, m, d),
        )
    ),
    "alpha_pattern: a factor of lora_alpha": Misread(
        of_config(lambda c: replace(c, alpha_pattern={k: v * c.alpha for k, v in c.alpha_pattern.items()}))
    ),
    "rank_pattern ignored in the scale": Misread(scale(lambda c, m, s: s * c.rank_of(m) / c.r), "ranks"),
    "lora_alpha taken for the scale": Misread(scale(lambda c, m, s: c.alpha), "plain"),
    "lora_alpha ignored": Misread(config(alpha=6.0), "plain"),
    "lora_alpha without its fraction": Misread(of_config(lambda c: replace(c, alpha=float(int(c.alpha))))),
    "lora_alpha without its sign": Misread(of_config(lambda c: replace(c, alpha=abs(c.alpha))), "negative"),
    "a scale of few bits": Misread(scale(lambda c, m, s: round(s * 16) / 16)),
    "use_dora lost": Misread(without("magnitude", dora=False), "dora"),
    "lora_bias lost": Misread(without("lora_bias", lora_bias=False)),
    "trained biases lost": Misread(without("bias", biases=False), "dora"),
    "exclude_modules ignored": Misread(overlooks("exclude_modules"), "plain", {"exclude_modules": ["q_proj"]}),
    "exclude_modules: an expression ignored": Misread(
        raw(exclude_modules=None), "plain", {"exclude_modules": r".*layers\.1\..*"}
    ),
    "layers_to_transform ignored": Misread(overlooks("layers_to_transform"), "plain", {"layers_to_transform": [0, 2]}),
    "layers_pattern ignored": Misread(
        raw(layers_pattern=None), "plain", {"layers_to_transform": [0, 1, 2], "layers_pattern": "h"}
    ),
    "target_modules ignored": Misread(overlooks("target_modules"), "plain", {"target_modules": ["k_proj", "up_proj"]}),
    "target_modules: an expression as a list": Misread(
        raw(target_modules="all-linear"), "plain", {"target_modules": r"model\.layers\.[01]\..*"}
    ),
    "modules_to_save ignored": Misread(ignores("modules_to_save"), "plain", {"modules_to_save": ["norm"]}),
    "QALoRA taken for LoRA": Misread(ignores("use_qalora"), "plain", {"use_qalora": True}),
    "activated LoRA taken for LoRA": Misread(
        ignores("alora_invocation_tokens"), "plain", {"alora_invocation_tokens": [5]}
    ),
    "layer_replication ignored": Misread(
        ignores("layer_replication"), "plain", {"layer_replication": [[0, 2], [1, 3]]}
    ),
    "PiSSA taken for LoRA": Misread(_starts, "plain", {"init_lora_weights": "pissa"}),
    "another peft_type taken for LoRA": Misread(raw(peft_type="LORA"), "plain", {"peft_type": "LOHA"}),
}
"""Of the reader of `adapter_config.json`"""

LAYOUT: dict[str, Misread] = {
    "tensors of q and o swapped": Misread(elsewhere("self_attn.q_proj", "self_attn.o_proj"), "plain"),
    "tensors of gate and up swapped": Misread(elsewhere("gate_proj", "up_proj"), "plain"),
    "tensors of two layers swapped": Misread(elsewhere("layers.0.", "layers.2."), "plain"),
    "one linear left out": Misread(linears(lambda every: every[:-1]), "plain"),
    "names rotated among linears of a shape": Misread(linears(_rotated), "plain"),
    "A for B where both are square": Misread(each(lambda one: one._replace(a=_square(one) or one.a)), "plain"),
    "A of another layer": Misread(
        linears(lambda every: tuple(one._replace(a=every[i - 7].a) for i, one in enumerate(every))), "plain"
    ),
    "each A begins a row later": Misread(
        each(lambda one: one._replace(a=one.a and one.a._replace(start=one.a.start + 4))), "plain"
    ),
    "bfloat16 as half": Misread(stored(lambda _, one: one._replace(dtype=one.dtype.replace("BF16", "F16"))), "wide"),
    "scales of an earlier version": Misread(each(lambda one: one._replace(scale=one.scale / 2)), "plain"),
    "scales with two digits": Misread(each(lambda one: one._replace(scale=round(one.scale, 1)))),
    "the scale of the first linear for all": Misread(
        linears(lambda every: tuple(one._replace(scale=every[0].scale) for one in every)), "ranks"
    ),
    "magnitude and bias swapped": Misread(
        each(lambda one: one._replace(magnitude=one.bias, bias=one.magnitude) if one.bias else one), "dora"
    ),
    "magnitudes of another layer": Misread(
        linears(lambda every: tuple(one._replace(magnitude=every[i - 3].magnitude) for i, one in enumerate(every))),
        "dora",
    ),
}
"""Of the layout, between the check and the engine"""
