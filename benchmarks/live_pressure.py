"""Compares `paged-chunk` with paging on demand where memory is short: a model on a CPU computes the iterations.

The two ways, their plan and the requests are those of `benchmarks.memory_pressure`, which gives each iteration a
virtual time. Here a random Llama of 12 M parameters computes each of them, on one thread, with compiled kernels. The
lengths of answers are those of ShareGPT-like requests: what the model samples is replaced. The time is this process's
CPU time, so that others on the machine matter little. It has the plan's own time. Each way has a new engine.

    python -m benchmarks.live_pressure [--requests 400] [--pairs 2] [--scratch FOLDER] [--json]
"""

import argparse
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import Result, arguments, report
from benchmarks.memory_pressure import USUAL_TOKENS, WAYS, Outcome, run
from benchmarks.random_llama import SCRATCH, LlamaShape, random_llama
from benchmarks.virtual_plan import Step, VirtualWorker, Workload, workloads
from motet.domain import PAGE_TOKENS
from motet_runner.engine import Engine
from motet_runner.execute.worker.local_worker import LocalWorker
from motet_runner.interface import EngineConfig
from motet_runner.plan import StepPlan, StepResult
from motet_runner.settings import KERNEL_CACHE

SHAPE = LlamaShape(
    vocabulary=512, width=512, feed_forward=1408, layers=4, heads=8, kv_heads=2, dtype="float32", shard_mib=64
)
KV_MIB = 64
"""Of `USUAL_TOKENS` by a model of this shape"""
COMPARED = ("forecast", "on demand")
LEAST = 1.1


class ForcedWorker(VirtualWorker):
    """A model computes the rows, but the virtual worker says which tokens they get."""

    def __init__(self, worker: LocalWorker) -> None:
        super().__init__()
        self._worker = worker

    def run(self, plan: StepPlan) -> StepResult:
        self._worker.launch(plan)
        computed = self._worker.collect()
        forced = super().run(plan)
        assert len(computed.sampled) == len(forced.sampled), f"{computed} instead of {forced}"
        return forced


class StopWatch:
    """Of CPU time, from one step to the next."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def milliseconds(self, _: Step) -> float:
        before, self._last = self._last, time.process_time()
        return 1000 * (self._last - before)


def run_live(way: str, workload: Workload, model: Path) -> Outcome:
    cache = KERNEL_CACHE.expanduser()
    engine = Engine(
        EngineConfig(model=model, device="cpu", kernels="cpp", kernel_cache=cache, kv_cache_mib=KV_MIB, threads=1)
    )
    worker = engine.diagnostics.worker
    assert isinstance(worker, LocalWorker)
    pages = USUAL_TOKENS // PAGE_TOKENS
    assert engine.info.pages == pages, f"{engine.info.pages} pages instead of {pages}"
    runner = WAYS[way](workload, pages)
    runner.worker = ForcedWorker(worker)
    found = run(runner, StopWatch().milliseconds)
    print(
        f"  {way:<10} {found.tokens_per_second:6.0f} tokens/s, recomputed {found.recomputed:5.1%}, "
        f"ever parked {found.parked:5.1%}",
        flush=True,
    )
    return found


def measure(given: argparse.Namespace) -> list[Result]:
    model = random_llama(SHAPE, given.scratch)
    (workload,) = (one for one in workloads(given.requests, None) if one.name == "sharegpt")
    print(f"{workload.name}: {len(workload.requests)} requests, {USUAL_TOKENS} tokens of keys and values")
    found = [[run_live(way, workload, model) for way in COMPARED] for _ in range(given.pairs)]
    gain = median(forecast.tokens_per_second / on_demand.tokens_per_second for forecast, on_demand in found)
    return [Result("live_vs_paged", gain, "x", f">= {LEAST:g} x", gain >= LEAST)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=400, help="requests of each way")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each way, alternately")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where the model is kept")
    given = parser.parse_args()
    report("live_pressure", measure(given), as_json=given.json)


if __name__ == "__main__":
    main()
