"""The goals of the GPU, and the part of the benchmark in which each is measured. This module imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu_goals.bench import Bench
    from benchmarks.gpu_goals.figures import Figure

PART_MINUTES = 8
"""The longest that a part may take on a GPU"""


@dataclass(frozen=True, slots=True)
class Goal:
    name: str
    title: str
    target: str
    module: str
    """Of `benchmarks.gpu_goals`; its function of the goal's name in small letters yields the figures."""

    def figures(self, bench: "Bench") -> "Iterator[Figure]":
        found: Iterator[Figure] = getattr(import_module(f"benchmarks.gpu_goals.{self.module}"), self.name.lower())(
            bench
        )
        return found


PARTS: Sequence[Sequence[Goal]] = (
    (
        Goal("G0", "The machine: reads, copies, an empty kernel", "no target", "ground"),
        Goal("G17", "Adapters are copied to the card at its speed", ">= 80 % of a plain copy", "ground"),
    ),
    (
        Goal("G1", "Shared adapters: launches, not bytes", "<= 5 us, >= 3 x vLLM's kernels", "operator"),
        Goal("G2", "Distinct adapters and high ranks: bytes", ">= 70 to 93 % of a plain read", "operator"),
    ),
    (
        Goal("G3", "Punica's own benchmark", "<= 12.5 us shared, <= 22 us distinct", "punica"),
        Goal("G4", "Mixed ranks cost their sum", "<= 1.1 of their bytes", "operator"),
        Goal("G11", "The same bits beside other neighbours", "100 %, >= 3 x vLLM's invariant mode", "operator"),
    ),
    (
        Goal("G10", "LoRA in prompts", "<= 3 % of the base product at rank 16, <= 6 % at 64", "prefill"),
        Goal("G21", "Decodes with DoRA against those with LoRA", ">= 0.93 of the speed", "steps"),
    ),
    (Goal("G12", "Paged attention at the speed of memory", ">= 80 to 90 % of a plain read", "attention"),),
    (
        Goal("G6", "LoRA without launches of its own", "<= 1 kernel a layer", "steps"),
        Goal("G7", "What LoRA adds to a decode step", "<= 2.5 to 18 %, by traffic and model", "steps"),
        Goal("G9", "You pay for what you use", "<= 0.3 % unused, <= 1.5 % one linear", "steps"),
    ),
    (Goal("G13", "A decode step against its bytes", ">= 87 to 94 % of the floor", "steps"),),
    (
        Goal("G14", "Many adapters against what people use today", ">= 30 x PEFT, >= 0.85 of the base", "served"),
        Goal("G8", "The throughput that LoRA leaves", ">= 0.94 (7B), >= 0.90 (8B)", "served"),
    ),
    (Goal("G16", "The host never shows", "idle <= 1 % (8B), metadata <= 10 us", "served"),),
    (Goal("G5", "8-bit adapters", "<= 0.65 of the floor of 16 bits, >= 99.5 % same tokens", "int8"),),
    (Goal("G20", "vLLM behind a runner of ours", "suites pass, >= 0.85 masked, >= 1 x its own server", "vllm_behind"),),
)
"""In the order in which they are measured: what decides most comes first."""

GOALS = {goal.name: goal for part in PARTS for goal in part}
