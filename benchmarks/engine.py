"""Measures the engine on a CPU: against itself, against transformers and PEFT, and beside what disturbs it.

All engines have the same random Llama (30 million parameters by default), and adapters on all its linears. Both sides
of a comparison alternate. Names end in the number of requests that begin together, and in _torch for torch's kernels;
without a compiler only those are measured. The modules in `benchmarks/engine_cases` say what each case is. It does not
use a GPU.

    python -m benchmarks.engine [--cases gained kept host …] [--kernels fused torch] [--requests 8 32] [--threads N]
        [--pairs 5] [--json]
"""

import asyncio
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.engine_cases.against_transformers import hf_base, peft_distinct, ragged
from benchmarks.engine_cases.bench import SUFFIXES, Bench
from benchmarks.engine_cases.demo import demo
from benchmarks.engine_cases.disturbed import busy, prefill
from benchmarks.engine_cases.ours import gained, host, kept
from benchmarks.harness import arguments, report
from benchmarks.random_llama import SCRATCH, LlamaShape, random_adapter, random_llama
from motet_kernels.cpp import CannotBuild, build
from motet_runner.settings import KERNEL_CACHE

WAIT_POLICY = {"OMP_WAIT_POLICY": "passive"}
"""With it the product starts its processes. OpenMP reads it when torch is imported."""

CASES: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "gained": gained,
    "kept": kept,
    "host": host,
    "hf": hf_base,
    "peft": peft_distinct,
    "ragged": ragged,
    "prefill": prefill,
    "busy": busy,
    "demo": demo,
}


async def measure(bench: Bench) -> None:
    for case in bench.given.cases:
        print(f"-- {case}", flush=True)
        await CASES[case](bench)


def shape_of(given: Namespace) -> LlamaShape:
    heads = max(1, given.width // 64)
    return LlamaShape(
        vocabulary=given.vocabulary,
        width=given.width,
        feed_forward=given.width * 43 // 16,
        layers=given.layers,
        heads=heads,
        kv_heads=max(1, heads // 2),
        dtype=given.dtype,
    )


def kernels_of(given: Namespace) -> list[str]:
    try:
        print(f"compiled for {build(given.cache).instructions}")
    except CannotBuild as error:
        print(f"no compiled kernels: {error}")
        return [how for how in given.kernels if how == "torch"]
    return list(given.kernels)


def main() -> None:
    if any(os.environ.get(name) != value for name, value in WAIT_POLICY.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.engine", *sys.argv[1:]], os.environ | WAIT_POLICY)
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--kernels", nargs="+", default=list(SUFFIXES), choices=list(SUFFIXES))
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
    parser.add_argument("--threads", type=int, default=None, help="of our engine; without it, the engine chooses")
    parser.add_argument("--pairs", type=int, default=5, help="quiet pairs to measure")
    parser.add_argument("--ragged", type=int, default=32, help="requests of the case ragged")
    parser.add_argument("--lengths", type=int, nargs=2, default=(8, 512), help="of their prompts and answers")
    parser.add_argument("--arrivals", type=float, default=16, help="of them in a second")
    parser.add_argument("--ragged-pairs", type=int, default=2, help="pairs to measure them in")
    parser.add_argument("--long-prompt", type=int, default=1536, help="tokens of the prompt of the case prefill")
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 512], help="tokens of its pieces")
    given = parser.parse_args()
    shape = shape_of(given)
    with tempfile.TemporaryDirectory() as folder:
        folders = [
            random_adapter(shape, Path(folder) / str(number), rank=given.rank, seed=number)
            for number in range(given.adapters)
        ]
        bench = Bench(given, random_llama(shape, SCRATCH), folders, kernels_of(given))
        asyncio.run(measure(bench))
    report("engine", bench.results, as_json=given.json)


if __name__ == "__main__":
    main()
