"""Measures the engine, as a library, against llama.cpp: both have the same random Llama without adapters, and the same
requests (`benchmarks.peer_engines`).

llama.cpp runs in its own environment (`make peer`), where it was compiled for this processor, with a thread for each
core. It computes all sequences together, in bfloat16 (`llama_cpp_bf16`), and with the same weights in its own 8 bits
(`llama_cpp_q8_0`); ours is bfloat16 in both. A result is its seconds as a multiple of ours, and has no target. It does
not use a GPU.

    python -m benchmarks.llama_cpp_peer [--python PATH] [--formats bf16 q8_0] [--model 1b] [--requests 1 8 32] [--json]
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Result, arguments, report, skip
from benchmarks.peer_engines import CLEAR, Case, Comparison, Engines, Workload, kernels_of
from benchmarks.peer_sizes import add_sizes, with_sizes
from benchmarks.random_llama import SCRATCH
from tools.peers.environment import folder, python_of
from tools.peers.llama_cpp import LLAMA_CPP

FORMATS = {"bf16": CLEAR, "q8_0": 4 * CLEAR}
"""With the margin from which first tokens must be equal: 8 bits round more."""
PAGE = 256
"""llama.cpp's memory for a sequence is a multiple of it."""


async def measure(given: argparse.Namespace, engines: Engines) -> list[Result]:
    results = []
    for form, clear in FORMATS.items():
        if form not in given.formats:
            continue
        case = Case(name=f"llama_cpp_{form}", ours="base", theirs="base", clear=clear)
        name = f"llama.cpp, {form}"
        load = {
            "format": form,
            "files": str(SCRATCH / "gguf"),
            "threads": given.their_threads,
            "length": -(-(given.prompt + given.output) // PAGE) * PAGE,
            "sequences": max(given.requests),
            "unified": given.unified,
        }
        theirs = engines.start("llama", name, [given.python, "-m", "benchmarks.llama_cpp_driver"], {}, load)
        said = engines.answers[name]
        baseline = f"{name}, version {said.get('version')}, {said.get('threads')} threads, {said.get('system')}"
        candidates = [engines.ours("llama", given.kernels, threads, adapters=False) for threads in given.threads]
        for requests in given.requests:
            work = Workload(requests=requests, prompt=given.prompt, output=given.output)
            comparison = Comparison(given, case, work, theirs)
            results += await comparison.measure(f"{case.name}_{requests}", baseline, engines, candidates)
    return results


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    default = python_of(folder(LLAMA_CPP, os.environ))
    parser.add_argument("--python", type=Path, default=default, help="the Python of an environment with llama.cpp")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of its weights")
    parser.add_argument("--kernels", choices=["cpp", "torch"], default="cpp", help="ours")
    add_sizes(parser, model="1b")
    parser.set_defaults(requests=[1, 8, 32], prompt=16, output=16)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--their-threads", type=int, default=cores, help="of llama.cpp (default: one per core)")
    parser.add_argument("--unified", action="store_true", help="one memory for llama.cpp's sequences, which is slower")
    return with_sizes(parser.parse_args(given))


def main() -> None:
    # Otherwise the stopped processes would outlive this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    given = parsed()
    if not given.python.exists():
        skip(
            f"{given.python} does not exist. `make peer PEERS=llama.cpp` builds an environment with llama.cpp; "
            "--python names another one."
        )
    kernels_of(given, [given.kernels])
    with ExitStack() as stack:
        results = asyncio.run(measure(given, Engines(given, stack)))
    report("llama_cpp_peer", results, as_json=given.json)


if __name__ == "__main__":
    main()
