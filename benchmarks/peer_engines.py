"""What benchmarks beside other engines share: the model and its sizes, our engine's process, and the comparison of two
engines that get the same requests, which begin together.

Each engine is a process of its own. They alternate; all that wait are stopped with SIGSTOP. All choose the likeliest
token. The first tokens must be equal wherever both engines say by a clear margin that it is the likeliest one; later
texts of bfloat16 models may differ.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.driven import Driven
from benchmarks.harness import Measure, Result, alternate, percentile, skip
from benchmarks.peer_sizes import settings_of
from benchmarks.random_gemma import GemmaShape
from benchmarks.random_llama import SCRATCH, LlamaShape, random_adapter, random_llama
from benchmarks.traffic import TRAFFIC, among
from motet_kernels.cpp import CannotBuild
from motet_kernels.cpp import build as build_kernels
from motet_runner.thread_environment import THREAD_ENVIRONMENT

FEW = 16
CLEAR = 0.05
"""The difference of two log probabilities that rounding to bfloat16 does not turn around in this model."""
CHECKED_TOKENS = 8
SHAPES: dict[str, type[LlamaShape]] = {"llama": LlamaShape, "gemma": GemmaShape}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured under one name, with the least ratio for up to FEW requests and for more."""

    name: str
    ours: str
    theirs: str
    least: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By our kernels"""
    requests: int | None = None
    """None: as many as are asked for, and the name ends with their number."""
    prompt: int | None = None
    output: int | None = None
    family: str = "llama"
    clear: float = CLEAR
    """By so much an engine must prefer a first token for it to be compared."""
    temperature: float = 0.0
    """Otherwise than with 0 no two engines draw the same tokens."""
    masked: int = 0
    """Of our requests, with a mask"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    requests: int
    prompt: int
    output: int


def kernels_of(given: argparse.Namespace, kernels: Sequence[str]) -> list[str]:
    """Those that this machine has. Ends the benchmark if there are none."""
    if "cpp" not in kernels:
        return list(kernels)
    try:
        build_kernels(given.cache)
    except CannotBuild as error:
        rest = [one for one in kernels if one != "cpp"]
        if not rest:
            skip(str(error))
        print(f"no compiled kernels: {error}")
        return rest
    return list(kernels)


def shape_of(family: str, given: argparse.Namespace) -> LlamaShape:
    heads = given.heads or max(1, given.width // 64)
    return SHAPES[family](
        vocabulary=given.vocabulary,
        width=given.width,
        feed_forward=given.feed_forward or given.width * 43 // 16,
        layers=given.layers,
        heads=heads,
        kv_heads=given.kv_heads or max(1, heads // 2),
        context=given.context,
        dtype=given.dtype,
    )


class Engines:
    """The processes, each started when it is first needed, and the files that they all read."""

    def __init__(self, given: argparse.Namespace, stack: ExitStack) -> None:
        self._given = given
        self._stack = stack
        self._running: dict[tuple[str, ...], Driven] = {}
        self._files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.answers: dict[str, Any] = {}
        """What each said when it was loaded, by its name"""

    @property
    def running(self) -> list[Driven]:
        return list(self._running.values())

    @cached_property
    def adapters(self) -> list[str]:
        shape = shape_of("llama", self._given)
        numbers = range(self._given.adapters)
        return [str(random_adapter(shape, self._files / str(i), rank=self._given.rank, seed=i)) for i in numbers]

    def ours(self, family: str, kernels: str, threads: int | None, *, adapters: bool = True) -> Driven:
        given = self._given
        command = [sys.executable, "-m", "benchmarks.own_driver"]
        name = f"engine with kernels {kernels}, {threads or 'its own number of'} threads"
        own = {"kernels": kernels, "threads": threads, "cache": str(given.cache), "kv_mib": given.kv_mib}
        of_adapters = self.adapters if adapters else []
        return self.start(family, name, command, THREAD_ENVIRONMENT, {"adapters": of_adapters} | own)

    def start(
        self,
        family: str,
        name: str,
        command: Sequence[str | Path],
        variables: Mapping[str, str],
        load: Mapping[str, object],
    ) -> Driven:
        """It gets the question `load` once, with what all engines are asked."""
        if (family, name) in self._running:
            return self._running[family, name]
        print(f"starting {name} ({family})", flush=True)
        driven = self._stack.enter_context(Driven(name, command, variables))
        self._running[family, name] = driven
        self.answers[name] = driven.ask(self.question_of_load(family) | dict(load))
        print(f"  {name}: {self.answers[name]}", flush=True)
        return driven

    def question_of_load(self, family: str) -> dict[str, Any]:
        """What all engines are asked"""
        given = self._given
        return {
            "do": "load",
            "model": str(random_llama(shape_of(family, given), SCRATCH)),
            "rank": given.rank,
            "length": given.context,
            "sequences": max(FEW, *given.requests),
            "dtype": given.dtype,
        }


class Comparison:
    """The same requests to both engines. Each round has prompts of its own."""

    def __init__(self, given: argparse.Namespace, case: Case, work: Workload, theirs: Driven) -> None:
        self._given, self._case, self._work = given, case, work
        self._theirs = theirs

    async def measure(self, name: str, baseline: str, engines: Engines, candidates: Sequence[Driven]) -> list[Result]:
        """`candidates`: ours, of which the fastest is compared"""
        ours = self.fastest(candidates)
        results, same = [], None
        if self._case.ours == self._case.theirs and not self._case.temperature and not self._case.masked:
            said, equal, clear = self.check(ours)
            print(f"{name}: {said}", flush=True)
            same = 0 < equal == clear  # without a clear one, nothing has been compared
            results.append(Result(f"{name}_first_tokens", equal, "", f"= {max(1, clear)}", same))
        seconds_of_theirs, seconds_of_ours = self.of_theirs(), self.of_ours(ours)
        await seconds_of_theirs()
        await seconds_of_ours()
        own = [process for driven in engines.running for process in driven.processes]
        pairs = await alternate(seconds_of_theirs, seconds_of_ours, pairs=self._given.pairs, own=own)
        print(f"{name}: {pairs}", flush=True)
        tokens = self._work.requests * self._work.output
        return [
            *results,
            Result(name, pairs.ratio, "x", baseline=baseline, pairs=pairs, same=same, settings=self.settings()),
            Result(f"{name}_ours", tokens / percentile(pairs.b, 0.5), "tok/s"),
            Result(f"{name}_theirs", tokens / percentile(pairs.a, 0.5), "tok/s"),
        ]

    def settings(self) -> dict[str, Any]:
        """Without those that a case of this name always has"""
        own = {"prompt": self._case.prompt, "output": self._case.output}
        return {name: value for name, value in settings_of(self._given).items() if not own.get(name)}

    def fastest(self, candidates: Sequence[Driven]) -> Driven:
        """The engine of ours with the best number of threads for these requests."""
        if len(candidates) == 1:
            return candidates[0]
        seconds = {
            candidate: min(candidate.ask(self.question(seed, self._case.ours))["seconds"] for seed in (-1, -2, -3))
            for candidate in candidates
        }
        for candidate, least in seconds.items():
            print(f"  {candidate.name}: {self._work.requests * self._work.output / least:.0f} tok/s", flush=True)
        return min(seconds, key=lambda candidate: seconds[candidate])

    def question(self, seed: int, traffic: str, *, checked: bool = False) -> dict[str, Any]:
        tokens, work, given = random.Random(seed), self._work, self._given
        base = [None] * work.requests
        return {
            "do": "generate",
            "prompts": [
                [tokens.randrange(2, given.vocabulary) for _ in range(work.prompt)] for _ in range(work.requests)
            ],
            "adapters": base if traffic == "base" else among(given.adapters, TRAFFIC[traffic](work.requests)),
            "output": min(work.output, CHECKED_TOKENS) if checked else work.output,
            "margins": checked,
            "temperature": self._case.temperature,
        }

    def of_ours(self, ours: Driven) -> Measure:
        return self._measure(ours, self._case.ours, count(1), {"masked": self._case.masked})

    def of_theirs(self) -> Measure:
        return self._measure(self._theirs, self._case.theirs, count(1), {"masked": 0})

    def _measure(self, driven: Driven, traffic: str, seeds: Iterator[int], more: Mapping[str, Any]) -> Measure:
        async def measure() -> float:
            return float(driven.ask(self.question(next(seeds), traffic) | dict(more))["seconds"])

        return measure

    def check(self, ours: Driven) -> tuple[str, int, int]:
        """What was equal, and how many clear first tokens were, of how many."""
        question = self.question(0, self._case.ours, checked=True)
        return agreement(ours.ask(question), self._theirs.ask(question), self._case.clear)


def agreement(ours: dict[str, Any], theirs: dict[str, Any], clear_from: float = CLEAR) -> tuple[str, int, int]:
    both = list(zip(ours["tokens"], theirs["tokens"], strict=True))
    margins = zip(ours["margins"], theirs["margins"], strict=True)
    clear = [pair[0][0] == pair[1][0] for pair, margin in zip(both, margins, strict=True) if min(margin) >= clear_from]
    equal = [common_prefix(mine, other) for mine, other in both]
    share = sum(equal) / sum(len(mine) for mine, _ in both)
    first = sum(length > 0 for length in equal)
    text = (
        f"{first} of {len(both)} first tokens equal, {sum(clear)} of {len(clear)} clear ones, {share:.0%} of all tokens"
    )
    return text, sum(clear), len(clear)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def with_target(result: Result, least: float) -> Result:
    return replace(result, target=f">= {least:g}", holds=result.value >= least)
