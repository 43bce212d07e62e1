"""Measures the engine, as a library, against itself at an earlier commit: both have the same random models, the same
adapters, and the same requests (`benchmarks.peer_engines`).

A result is the earlier engine's seconds as a multiple of today's: `before_base` and `before_distinct` on a Llama,
`before_gemma` with distinct adapters, each with its number of requests; `before_prefill_*` has long prompts.
`before_start` is the time until a new process has loaded the model and its kernels, which are in the cache of compiled
kernels, and `before_start_memory` the most memory that it takes meanwhile. `_float32` is that type of numbers.

The commit's tree lies beside this one's only while this runs. Its first run compiles its kernels.

    python -m benchmarks.engine_before COMMIT [--cases base distinct] [--requests 1 8 32] [--dtypes bfloat16] [--json]
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.driven import Driven
from benchmarks.earlier_tree import environment_of
from benchmarks.harness import Measure, Pairs, Result, alternate, arguments, report, skip
from benchmarks.peer_engines import Case, Comparison, Engines, Workload, kernels_of, with_target
from benchmarks.peer_sizes import add_sizes, with_sizes
from motet_runner.thread_environment import THREAD_ENVIRONMENT

CASES = {
    "base": Case(name="before_base", ours="base", theirs="base"),
    "distinct": Case(name="before_distinct", ours="distinct", theirs="distinct"),
    "gemma": Case(name="before_gemma", ours="distinct", theirs="distinct", family="gemma"),
    "prefill_base": Case(name="before_prefill_base", ours="base", theirs="base", requests=8, prompt=512, output=16),
    "prefill_distinct": Case(
        name="before_prefill_distinct", ours="distinct", theirs="distinct", requests=8, prompt=512, output=16
    ),
}
START = "start"
LEAST = 0.97


class Before:
    """The engine of an earlier commit, run by that tree's own code."""

    def __init__(self, commit: str, folder: Path) -> None:
        self.name = f"engine of {commit}"
        self.environment = {**THREAD_ENVIRONMENT, **environment_of(commit, folder)}


def own_load(given: argparse.Namespace, adapters: Sequence[str]) -> dict[str, object]:
    return {
        "kernels": "cpp",
        "threads": given.threads[0],
        "cache": str(given.cache),
        "kv_mib": given.kv_mib,
        "adapters": list(adapters),
    }


async def measure_cases(given: argparse.Namespace, engines: Engines, before: Before) -> list[Result]:
    results = []
    for case in (CASES[name] for name in given.cases if name != START):
        for requests in [case.requests] if case.requests else given.requests:
            work = Workload(requests=requests, prompt=case.prompt or given.prompt, output=case.output or given.output)
            ours = engines.ours(case.family, "cpp", given.threads[0])
            command = [sys.executable, "-m", "benchmarks.own_driver"]
            load = own_load(given, engines.adapters)
            theirs = engines.start(case.family, before.name, command, before.environment, load)
            comparison = Comparison(given, case, work, theirs)
            parts = [case.name, *([] if case.requests else [str(requests)]), *_of_dtype(given.dtype)]
            found = await comparison.measure("_".join(parts), before.name, engines, [ours])
            results += [with_target(one, LEAST) if one.pairs is not None else one for one in found]
    return results


async def measure_start(given: argparse.Namespace, engines: Engines, before: Before) -> list[Result]:
    """Each start is a process of its own."""
    peaks: dict[str, list[float]] = {}

    def starting(name: str, environment: Mapping[str, str]) -> Measure:
        async def measure() -> float:
            began = time.perf_counter()
            with Driven(name, [sys.executable, "-m", "benchmarks.own_driver"], environment) as driven:
                driven.ask(engines.question_of_load("llama") | own_load(given, engines.adapters))
                seconds = time.perf_counter() - began
                peaks.setdefault(name, []).append(_peak_bytes(driven))
            return seconds

        return measure

    theirs, ours = starting(before.name, before.environment), starting("engine", THREAD_ENVIRONMENT)
    await theirs()
    await ours()
    for of_one in peaks.values():
        of_one.clear()
    pairs = await alternate(theirs, ours, pairs=given.pairs)
    memory = pairs.beside(peaks[before.name], peaks["engine"])
    name = "_".join(["before_start", *_of_dtype(given.dtype)])
    return [
        with_target(_result(of, two, before), least)
        for of, two, least in ((name, pairs, 1.0), (f"{name}_memory", memory, 0.98))
    ]


def _result(name: str, pairs: Pairs, before: Before) -> Result:
    print(f"{name}: {pairs}", flush=True)
    return Result(name, pairs.ratio, "x", baseline=before.name, pairs=pairs)


def _peak_bytes(driven: Driven) -> float:
    status = Path(f"/proc/{driven.processes[0].pid}/status").read_text()
    return float(status.partition("VmHWM:")[2].split()[0]) * 1024


def _of_dtype(dtype: str) -> list[str]:
    return [] if dtype == "bfloat16" else [dtype]


def main() -> None:
    # Otherwise the stopped processes would outlive this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = arguments(__doc__)
    parser.add_argument("commit", nargs="?", help="of this repository, whose engine is the baseline")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, START], default=[*CASES, START], help="what is measured")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    add_sizes(parser)
    given = with_sizes(parser.parse_args())
    if given.commit is None:
        skip("name the commit to compare with: python -m benchmarks.engine_before COMMIT")
    kernels_of(given, ["cpp"])
    results = []
    with tempfile.TemporaryDirectory() as folder:
        before = Before(given.commit, Path(folder))
        for dtype in given.dtypes:
            given.dtype = dtype
            with ExitStack() as stack:
                engines = Engines(given, stack)
                results += asyncio.run(measure_cases(given, engines, before))
                if START in given.cases:
                    results += asyncio.run(measure_start(given, engines, before))
    report("engine_before", results, as_json=given.json)


if __name__ == "__main__":
    main()
