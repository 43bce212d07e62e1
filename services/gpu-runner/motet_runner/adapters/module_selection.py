"""Which modules the config of an adapter selects. PEFT loads no tensors for other modules, so Motet must not,
either."""

from collections.abc import Collection
from dataclasses import dataclass

from motet_runner.adapters.module_patterns import Matcher

ANY_LAYER = r".*?\.[^.]*\.(?P<layer>\d+)\."
"""The layer is the first number in the path, as in PEFT, not the number of an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSelection:
    targets: str | frozenset[str]
    """A regular expression for the whole path, or a list of path ends."""
    excluded: str | frozenset[str] = frozenset()
    """Like `targets`."""
    layers: frozenset[int] = frozenset()
    """The selected layers; empty: all. A module that `targets` names with its whole path is selected in any layer."""
    layer_patterns: tuple[str, ...] = ()
    """What comes before the number of a layer in a path. Empty: anything."""

    def unselected_by(self, module: str, matcher: Matcher) -> str | None:
        """The field that leaves the module out; None if it is selected."""
        if self.excluded and _named(self.excluded, module, matcher):
            return "exclude_modules"
        if isinstance(self.targets, str) and self.targets.lower() == "all-linear":
            return None
        if not _named(self.targets, module, matcher):
            return "target_modules"
        if self.layers and module not in self.targets and self._layer_of(module, matcher) not in self.layers:
            return "layers_to_transform"
        return None

    def _layer_of(self, module: str, matcher: Matcher) -> int | None:
        wanted = [rf"(?:^|.*?\.){one}\.(?P<layer>\d+)\." for one in self.layer_patterns] or [ANY_LAYER]
        found = next((match for one in wanted if (match := matcher.at_start(one, module))), None)
        return int(found["layer"]) if found is not None and found["layer"] else None


def _named(names: str | Collection[str], module: str, matcher: Matcher) -> bool:
    if isinstance(names, str):
        return matcher.is_whole(names, module)
    parts = module.split(".")
    return any(".".join(parts[start:]) in names for start in range(len(parts)))
