"""What is measured of a goal: a figure, its target, and what stands beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Pairs


@dataclass(frozen=True, slots=True)
class Beside:
    """The other side of a figure. Its ratio is how many times longer it takes than ours."""

    pairs: Pairs | None
    at_least: float | None = None
    missing: str = ""
    """Why it was not measured: then it is not beaten."""

    @property
    def holds(self) -> bool | None:
        if self.pairs is None or self.at_least is None:
            return None
        return self.pairs.ratio >= self.at_least

    def as_json(self) -> dict[str, Any]:
        if self.pairs is None:
            return {"not_measured": self.missing}
        return {
            "ratio": self.pairs.ratio,
            "spread": self.pairs.spread,
            "rounds": len(self.pairs.a),
            "target": "" if self.at_least is None else f">= {self.at_least:g}",
            "holds": self.holds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    spread: tuple[float, float] | None = None
    """The tenth and the ninetieth percentile of its samples"""
    floor: float | None = None
    """What its bytes take at the bandwidth of this machine, in microseconds"""
    twin: float | None = None
    """What a kernel takes that only reads as many bytes, in microseconds"""
    against: Mapping[str, Beside] = field(default_factory=dict)
    note: str = ""
    holds_there: bool | None = None
    """What the benchmark says from which it is"""

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"

    @property
    def holds(self) -> bool | None:
        """Whether it and what stands beside it reach their targets; None without a target, or if something with a
        target was not measured: it is not beaten."""
        verdicts = [self.holds_there, *(one.holds for one in self.against.values())]
        if self.at_most is not None:
            verdicts.append(self.value <= self.at_most)
        if self.at_least is not None:
            verdicts.append(self.value >= self.at_least)
        if False in verdicts:
            return False
        unknown = any(one.at_least is not None and one.holds is None for one in self.against.values())
        return None if unknown or True not in verdicts else True

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "target": self.target,
            "holds": self.holds,
            "spread": self.spread,
            "floor": self.floor,
            "twin": self.twin,
            "beside": {name: one.as_json() for name, one in self.against.items()},
            "note": self.note,
        }
