"""Measures the engine against vLLM for CPUs: both have the same random model, the same adapters, and the same requests,
which begin together.

vLLM runs in its own environment (`make peer`), and each engine in a process of its own. They alternate; all that wait
are stopped with SIGSTOP. vLLM is compiled by torch, runs in one process, and binds a thread to each core: all three are
faster than its defaults. Its base is measured in a process without LoRA, everything else in another one. No engine
shares prefixes. Both choose the likeliest token. The first tokens must be equal wherever both engines say by a clear
margin that it is the likeliest one; later texts of bfloat16 models may differ.

A result is vLLM's seconds as a multiple of ours: `vllm_base`, `vllm_identical`, `vllm_skewed` and `vllm_distinct` of so
many requests; `vllm_distinct_vs_base` has our distinct adapters and vLLM's base; `vllm_prefill_*` has long prompts and
`vllm_long_*` a long context; `generic_distinct` is a Gemma, whose forward pass nobody wrote: ours is recorded from its
modules. `_torch` is our engine with the kernels of torch. `vllm_http_*` is the whole product and vLLM's HTTP server.
It does not use a GPU.

    python -m benchmarks.vllm_peer [--python PATH] [--cases base distinct] [--requests 8 32] [--kernels cpp] [--json]
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.driven import Driven
from benchmarks.harness import Measure, Pairs, Result, alternate, arguments, report, skip
from benchmarks.random_gemma import GemmaShape
from benchmarks.random_llama import SCRATCH, LlamaShape, random_adapter, random_llama
from benchmarks.traffic import TRAFFIC, among
from benchmarks.vllm_served import measure_served
from benchmarks.vllm_setup import environment_of_vllm
from motet_kernels.cpp import CannotBuild
from motet_kernels.cpp import build as build_kernels
from motet_runner.settings import KERNEL_CACHE
from motet_runner.thread_environment import THREAD_ENVIRONMENT
from tools.peer import folder, python_of

FEW = 16
CLEAR = 0.05
"""The difference of two log probabilities that rounding to bfloat16 does not turn around in this model."""
CHECKED_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured under one name, with the least ratio for up to FEW requests and for more: None is no target."""

    name: str
    ours: str
    theirs: str
    least: dict[str, tuple[float, float]]
    """By our kernels"""
    requests: int | None = None
    """None: as many as are asked for, and the name ends with their number."""
    prompt: int | None = None
    output: int | None = None
    family: str = "llama"


def _same(name: str, cpp: tuple[float, float], torch: tuple[float, float]) -> Case:
    return Case(name=f"vllm_{name}", ours=name, theirs=name, least={"cpp": cpp, "torch": torch})


def _eight(name: str, traffic: str, prompt: int, output: int, least: float) -> Case:
    sizes: dict[str, Any] = {"requests": 8, "prompt": prompt, "output": output}
    return Case(name=f"vllm_{name}_{traffic}", ours=traffic, theirs=traffic, least={"cpp": (least, least)}, **sizes)


CASES: dict[str, list[Case]] = {
    "base": [_same("base", (1.4, 0.9), (0.5, 0.45))],
    "identical": [_same("identical", (8, 7), (2.7, 3))],
    "skewed": [_same("skewed", (8, 7), (2.7, 3))],
    "distinct": [_same("distinct", (8, 7), (2.7, 3))],
    "distinct_vs_base": [
        Case(name="vllm_distinct_vs_base", ours="distinct", theirs="base", least={"cpp": (1.0, 0.65)})
    ],
    "prefill": [_eight("prefill", "base", 512, 16, 0.9), _eight("prefill", "distinct", 512, 16, 2)],
    "long": [_eight("long", "base", 2048, 64, 0.9), _eight("long", "distinct", 2048, 64, 2)],
    "generic": [
        Case(name="generic_distinct", ours="distinct", theirs="distinct", least={"cpp": (3.3, 4.5)}, family="gemma")
    ],
}
SERVED = "http"
"""The case of the whole product and vLLM's server. It needs the compiled kernels."""
SHAPES: dict[str, type[LlamaShape]] = {"llama": LlamaShape, "gemma": GemmaShape}


@dataclass(frozen=True, kw_only=True)
class Workload:
    requests: int
    prompt: int
    output: int


class Engines:
    """The processes, each started when it is first needed, and the files that they all read."""

    def __init__(self, given: argparse.Namespace, stack: ExitStack) -> None:
        self._given = given
        self._stack = stack
        self._running: dict[tuple[str, ...], Driven] = {}
        self._files = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    @property
    def running(self) -> list[Driven]:
        return list(self._running.values())

    @cached_property
    def adapters(self) -> list[str]:
        shape = shape_of("llama", self._given)
        numbers = range(self._given.adapters)
        return [str(random_adapter(shape, self._files / str(i), rank=self._given.rank, seed=i)) for i in numbers]

    def ours(self, family: str, kernels: str, threads: int | None) -> Driven:
        given = self._given
        command = [sys.executable, "-m", "benchmarks.own_driver"]
        name = f"engine with kernels {kernels}, {threads or 'its own number of'} threads"
        driven = self._start((family, name), name, command, **THREAD_ENVIRONMENT)
        if driven is not None:
            own = {"kernels": kernels, "threads": threads, "cache": str(given.cache), "kv_mib": given.kv_mib}
            self._load(driven, family, self.adapters, **own)
        return self._running[family, name]

    def theirs(self, family: str, *, lora: bool) -> Driven:
        given = self._given
        # -P: a module beside that file must not take the place of one of Python's.
        command = [given.python, "-P", Path(__file__).with_name("vllm_driver.py")]
        name = f"vLLM {'with' if lora else 'without'} LoRA"
        driven = self._start((family, name), name, command, **environment_of_vllm(given))
        if driven is not None:
            self._load(driven, family, self.adapters if lora else [], eager=given.vllm_eager)
        return self._running[family, name]

    def _start(self, key: tuple[str, ...], name: str, command: Sequence[str | Path], **variables: str) -> Driven | None:
        """None if it already runs."""
        if key in self._running:
            return None
        print(f"starting {name} ({key[0]})", flush=True)
        driven = self._stack.enter_context(Driven(name, command, variables))
        self._running[key] = driven
        return driven

    def _load(self, driven: Driven, family: str, adapters: list[str], **more: object) -> None:
        given = self._given
        question = {
            "do": "load",
            "model": str(random_llama(shape_of(family, given), SCRATCH)),
            "adapters": adapters,
            "rank": given.rank,
            "length": given.context,
            "sequences": max(FEW, *given.requests),
            "dtype": given.dtype,
        }
        print(f"  {driven.name}: {driven.ask(question | more)}", flush=True)


def shape_of(family: str, given: argparse.Namespace) -> LlamaShape:
    heads = max(1, given.width // 64)
    return SHAPES[family](
        vocabulary=given.vocabulary,
        width=given.width,
        feed_forward=given.width * 43 // 16,
        layers=given.layers,
        heads=heads,
        kv_heads=max(1, heads // 2),
        context=given.context,
        dtype=given.dtype,
    )


class Comparison:
    """The same requests to both engines. Each round has prompts of its own."""

    def __init__(self, given: argparse.Namespace, case: Case, work: Workload, theirs: Driven) -> None:
        self._given, self._case, self._work = given, case, work
        self._theirs = theirs

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
        }

    def of_ours(self, ours: Driven) -> Measure:
        return self._measure(ours, self._case.ours, count(1))

    def of_theirs(self) -> Measure:
        return self._measure(self._theirs, self._case.theirs, count(1))

    def _measure(self, driven: Driven, traffic: str, seeds: Iterator[int]) -> Measure:
        async def measure() -> float:
            return float(driven.ask(self.question(next(seeds), traffic))["seconds"])

        return measure

    def check(self, ours: Driven) -> tuple[str, int, int]:
        """What was equal, and how many clear first tokens were, of how many."""
        question = self.question(0, self._case.ours, checked=True)
        return agreement(ours.ask(question), self._theirs.ask(question))


def agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, int, int]:
    both = list(zip(ours["tokens"], theirs["tokens"], strict=True))
    margins = zip(ours["margins"], theirs["margins"], strict=True)
    clear = [pair[0][0] == pair[1][0] for pair, margin in zip(both, margins, strict=True) if min(margin) >= CLEAR]
    equal = [common_prefix(mine, other) for mine, other in both]
    share = sum(equal) / sum(len(mine) for mine, _ in both)
    first = sum(length > 0 for length in equal)
    text = (
        f"{first} of {len(both)} first tokens equal, {sum(clear)} of {len(clear)} clear ones, {share:.0%} of all tokens"
    )
    return text, sum(clear), len(clear)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


async def measure_case(given: argparse.Namespace, engines: Engines, case: Case, kernels: str) -> list[Result]:
    results = []
    for requests in [case.requests] if case.requests else given.requests:
        work = Workload(requests=requests, prompt=case.prompt or given.prompt, output=case.output or given.output)
        end = "" if case.requests else f"_{requests}"
        name = f"{case.name}{end}{'' if kernels == 'cpp' else '_torch'}"
        candidates = [engines.ours(case.family, kernels, threads) for threads in given.threads]
        theirs = engines.theirs(case.family, lora=case.theirs != "base")
        comparison = Comparison(given, case, work, theirs)
        ours = comparison.fastest(candidates)
        same_model = case.ours == case.theirs
        if same_model:
            said, equal, clear = comparison.check(ours)
            print(f"{name}: {said}", flush=True)
            # Without a clear one, nothing has been compared.
            results.append(Result(f"{name}_first_tokens", equal, "", f"= {max(1, clear)}", 0 < equal == clear))
        seconds_of_theirs, seconds_of_ours = comparison.of_theirs(), comparison.of_ours(ours)
        await seconds_of_theirs()
        await seconds_of_ours()
        own = [process for driven in engines.running for process in driven.processes]
        pairs = await alternate(seconds_of_theirs, seconds_of_ours, pairs=given.pairs, own=own)
        print(f"{name}: {pairs}", flush=True)
        results += figures(name, case, work, pairs, case.least.get(kernels))
    return results


def figures(name: str, case: Case, work: Workload, pairs: Pairs, least: tuple[float, float] | None) -> list[Result]:
    tokens = work.requests * work.output
    bound = None if least is None else least[work.requests > FEW]
    return [
        Result(
            name,
            pairs.ratio,
            "x",
            "" if bound is None else f">= {bound:g}",
            None if bound is None else pairs.ratio >= bound,
            f"vLLM, {case.theirs}",
            pairs,
        ),
        Result(f"{name}_ours", tokens / middle(pairs.b), "tok/s"),
        Result(f"{name}_theirs", tokens / middle(pairs.a), "tok/s"),
    ]


def middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


async def measure_engines(given: argparse.Namespace, engines: Engines) -> list[Result]:
    results = []
    for kernels in given.kernels:
        for case in (case for name in given.cases for case in CASES.get(name, [])):
            if kernels in case.least:
                results += await measure_case(given, engines, case, kernels)
    return results


def main() -> None:
    # Otherwise the stopped processes would outlive this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = arguments(__doc__)
    default = python_of(folder(os.environ))
    parser.add_argument("--python", type=Path, default=default, help="the Python of an environment with vLLM")
    parser.add_argument(
        "--cases", nargs="+", choices=[*CASES, SERVED], default=[*CASES, SERVED], help="what is measured"
    )
    parser.add_argument("--kernels", nargs="+", choices=["cpp", "torch"], default=["cpp", "torch"], help="our kernels")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32], help="requests that begin together")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--context", type=int, default=2304, help="the most tokens of a sequence")
    parser.add_argument("--adapters", type=int, default=16, help="adapters of the requests that have one")
    parser.add_argument("--rank", type=int, default=16, help="rank of every adapter")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kv-mib", type=int, default=256, help="our memory for keys and values, and for adapters")
    parser.add_argument(
        "--cache", type=Path, default=KERNEL_CACHE.expanduser(), help="the folder of our compiled kernels"
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[None],
        help="our threads; the fastest of several is compared (default: what the engine chooses)",
    )
    parser.add_argument("--vllm-threads", type=int, help="vLLM's threads (default: one per core)")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile, which is slower")
    parser.add_argument(
        "--vllm-processes", action="store_true", help="vLLM's engine in a process of its own, as in its server"
    )
    parser.add_argument("--pairs", type=int, default=5, help="quiet pairs to measure")
    given = parser.parse_args()
    if not given.python.exists():
        skip(f"{given.python} does not exist. `make peer` builds an environment with vLLM; --python names another one.")
    if "cpp" in given.kernels:
        try:
            build_kernels(given.cache)
        except CannotBuild as error:
            given.kernels.remove("cpp")
            if not given.kernels:
                skip(str(error))
            print(f"no compiled kernels: {error}")
    results = []
    with ExitStack() as stack:
        engines = Engines(given, stack)
        results += asyncio.run(measure_engines(given, engines))
        if SERVED in given.cases and "cpp" in given.kernels:
            results += measure_served(given, random_llama(shape_of("llama", given), SCRATCH), engines.adapters)
    report("vllm_peer", results, as_json=given.json)


if __name__ == "__main__":
    main()
