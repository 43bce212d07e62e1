"""What all cases share: a random model with adapters, and the engines that serve it."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine_run import Run, make_run
from benchmarks.harness import Pairs, Result
from motet.domain import Digest

FEW = 16
"""Up to this number of requests, the first of two targets counts."""

Leasts = tuple[float, float]
"""The least of a ratio with up to FEW requests, and with more"""

SUFFIXES = {"fused": "", "torch": "_torch"}
"""What the names of results end in, by kernels"""


@dataclass
class Bench:
    given: argparse.Namespace
    model: Path
    folders: list[Path]
    """Of the adapters"""
    kernels: list[str]
    """Those that this machine has, of those that are to be measured"""
    results: list[Result] = field(default_factory=list)
    _runs: dict[str, Run] = field(default_factory=dict)

    @property
    def adapters(self) -> list[Digest]:
        return [Digest(f"sha256:{number}") for number in range(len(self.folders))]

    def run(self, how: str) -> Run:
        """The engine with these kernels, made once; it knows all adapters."""
        if how not in self._runs:
            self._runs[how] = self.new_run(how)
        return self._runs[how]

    def new_run(self, how: str, **settings: Any) -> Run:
        run = make_run(self.model, self.given, how, **settings)
        for digest, folder in zip(self.adapters, self.folders, strict=True):
            run.know(digest, folder)
        return run

    def add_pairs(self, name: str, pairs: Pairs, baseline: str, least: float | None = None) -> None:
        print(f"{name}: {baseline} against ours: {pairs}", flush=True)
        self.results.append(at_least(name, pairs, baseline, least))

    def add(self, name: str, value: float, unit: str) -> None:
        self.results.append(Result(name, value, unit))


def at_least(name: str, pairs: Pairs, baseline: str, least: float | None = None) -> Result:
    target, holds = ("", None) if least is None else (f">= {least:g}", pairs.ratio >= least)
    return Result(name, pairs.ratio, "x", target, holds, baseline, pairs)


def at_most(name: str, pairs: Pairs, baseline: str, most: float) -> Result:
    return Result(name, pairs.ratio, "x", f"<= {most:g}", pairs.ratio <= most, baseline, pairs)


def least_of(leasts: Leasts, requests: int) -> float:
    return leasts[requests > FEW]
