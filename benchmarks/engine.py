"""Measures output tokens per second of the engine on a CPU, three ways: with torch's kernels, with the compiled ones
and the modules of transformers, and with the compiled ones and the fused forward.

All have the same random Llama (30 million parameters by default) and the same requests, which begin together. They
alternate in this process, on the same threads. `keep_*` is what the fused forward keeps of its speed when rows have
adapters on all linears: the same one (identical), few of many (skewed), each another one (distinct). The share of the
host is the time of a step that is not the model's: planning, sampling, and the description of the batch. It does not
use a GPU.

    python -m benchmarks.engine [--requests 8 32] [--threads 1] [--adapters 16] [--pairs 5] [--json]
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from benchmarks.engine_run import Run, make_run, seconds_of, traffic
from benchmarks.harness import Result, alternate, arguments, percentile, report, skip
from benchmarks.random_llama import SCRATCH, LlamaShape, random_adapter, random_llama
from motet.domain import Digest
from motet_kernels.cpp import CannotBuild, build
from motet_runner.adapters.certification import certify
from motet_runner.settings import KERNEL_CACHE

GAINED = {"modules": (1.5, 1.25), "torch": (2.5, 2.0)}
"""The least that the fused forward must gain over each with up to FEW requests, and with more."""

KEPT = {"identical": (0.88, 0.90), "skewed": (0.80, 0.80), "distinct": (0.75, 0.80)}
"""The least that is kept of the base's speed with up to FEW requests, and with more. With few, the bytes of distinct
adapters alone cost a fifth."""
FEW = 16


async def measure(given: argparse.Namespace, runs: dict[str, Run], adapters: list[Digest]) -> list[Result]:
    results = []
    fused = runs["fused"]
    for requests in given.requests:
        for run in runs.values():
            run.seconds(requests)
        for name, leasts in GAINED.items():
            theirs, ours = seconds_of(runs[name], requests), seconds_of(fused, requests)
            pairs = await alternate(theirs, ours, pairs=given.pairs)
            print(f"{requests} requests: {name} against fused: {pairs}", flush=True)
            least = leasts[requests > FEW]
            target, holds = f">= {least:g}", pairs.ratio >= least
            results.append(Result(f"{name}_to_fused_{requests}", pairs.ratio, "x", target, holds, name, pairs))
            tokens = requests * given.output
            results.append(Result(f"{name}_tokens_{requests}", tokens / percentile(pairs.a, 0.5), "tok/s"))
            fused_tokens = tokens / percentile(pairs.b, 0.5)
        for name, owner in traffic(adapters).items():
            fused.seconds(requests, owner)
            pairs = await alternate(seconds_of(fused, requests), seconds_of(fused, requests, owner), pairs=given.pairs)
            print(f"{requests} requests: base against {name}: {pairs}", flush=True)
            least = KEPT[name][requests > FEW]
            target, holds = f">= {least:g}", pairs.ratio >= least
            results.append(Result(f"keep_{name}_{requests}", pairs.ratio, "x", target, holds, "base", pairs))
        with fused.watched():
            fused.seconds(requests)
        host = 1 - percentile(fused.of_model, 0.5) / percentile(fused.of_steps, 0.5)
        results += [
            Result(f"fused_tokens_{requests}", fused_tokens, "tok/s"),
            Result(f"fused_step_ms_{requests}", percentile(fused.of_steps, 0.5) * 1e3, "ms"),
            Result(f"fused_host_share_{requests}", host, ""),
        ]
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32], help="requests that begin together")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--adapters", type=int, default=16, help="adapters of the requests that have one")
    parser.add_argument("--rank", type=int, default=16, help="rank of every adapter")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kv-mib", type=int, default=256, help="memory for keys and values, and for adapters")
    parser.add_argument("--cache", type=Path, default=KERNEL_CACHE.expanduser(), help="the folder of compiled kernels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5, help="quiet pairs to measure")
    given = parser.parse_args()
    heads = max(1, given.width // 64)
    shape = LlamaShape(
        vocabulary=given.vocabulary,
        width=given.width,
        feed_forward=given.width * 43 // 16,
        layers=given.layers,
        heads=heads,
        kv_heads=max(1, heads // 2),
        dtype=given.dtype,
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(f"compiled for {build(given.cache).instructions}")
        except CannotBuild as error:
            skip(str(error))
        model = random_llama(shape, SCRATCH)
        runs = {how: make_run(model, given, how) for how in ("torch", "modules", "fused")}
        adapters = [Digest(f"sha256:{number}") for number in range(given.adapters)]
        engine = runs["fused"].engine
        for number, digest in enumerate(adapters):
            saved = random_adapter(shape, Path(folder) / str(number), rank=given.rank, seed=number)
            engine.load_adapter(digest, certify(saved, engine.info).layout)
        results = asyncio.run(measure(given, runs, adapters))
    report("engine", results, as_json=given.json)


if __name__ == "__main__":
    main()
