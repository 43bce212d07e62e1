"""Measures the engine, as a library, against vLLM for CPUs: both have the same random model, the same adapters, and the
same requests (`benchmarks.peer_engines`).

vLLM runs in its own environment (`make peer`). It is compiled by torch, runs in one process, and binds a thread to each
core: all three are faster than its defaults. Its base is measured in a process without LoRA, everything else in another
one. No engine shares prefixes.

A result is vLLM's seconds as a multiple of ours: `vllm_base`, `vllm_identical`, `vllm_skewed` and `vllm_distinct`, each
with its number of requests; `vllm_distinct_vs_base` has our distinct adapters and vLLM's base; `vllm_prefill_*` has
long prompts and `vllm_long_*` a long context; `generic_distinct` is a Gemma, whose forward pass nobody wrote: ours is
recorded from its modules. `_torch` is our engine with the kernels of torch, `_1b` the model of that size, which has no
targets. `vllm_http_*` is the whole product and vLLM's HTTP server. It does not use a GPU.

    python -m benchmarks.vllm_peer [--python PATH] [--cases base distinct] [--model 30m] [--requests 8 32]
        [--kernels cpp] [--json]
"""

import argparse
import asyncio
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.driven import Driven
from benchmarks.harness import Result, arguments, report, skip
from benchmarks.peer_engines import FEW, Case, Comparison, Engines, Workload, kernels_of, shape_of, with_target
from benchmarks.peer_sizes import SMALL, add_sizes, with_sizes
from benchmarks.random_llama import SCRATCH, random_llama
from benchmarks.vllm_served import measure_served
from benchmarks.vllm_setup import environment_of_vllm
from tools.peers.environment import folder, python_of
from tools.peers.vllm import VLLM


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


def vllm(given: argparse.Namespace, engines: Engines, family: str, *, lora: bool) -> Driven:
    # -P: a module beside that file must not take the place of one of Python's.
    command = [given.python, "-P", Path(__file__).with_name("vllm_driver.py")]
    load = {"adapters": engines.adapters if lora else [], "eager": given.vllm_eager}
    return engines.start(family, name_of(lora=lora), command, environment_of_vllm(given), load)


def name_of(*, lora: bool) -> str:
    return f"vLLM {'with' if lora else 'without'} LoRA"


async def measure_case(given: argparse.Namespace, engines: Engines, case: Case, kernels: str) -> list[Result]:
    results = []
    for requests in [case.requests] if case.requests else given.requests:
        work = Workload(requests=requests, prompt=case.prompt or given.prompt, output=case.output or given.output)
        parts = [case.name, *([] if given.model == SMALL else [given.model])]
        parts += [*([] if case.requests else [str(requests)]), *([] if kernels == "cpp" else [kernels])]
        candidates = [engines.ours(case.family, kernels, threads) for threads in given.threads]
        theirs = vllm(given, engines, case.family, lora=case.theirs != "base")
        comparison, baseline = Comparison(given, case, work, theirs), f"vLLM, {case.theirs}"
        found = await comparison.measure("_".join(parts), baseline, engines, candidates)
        least = case.least[kernels][requests > FEW]
        has_target = given.model == SMALL
        results += [with_target(one, least) if one.pairs is not None and has_target else one for one in found]
    return results


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
    default = python_of(folder(VLLM, os.environ))
    parser.add_argument("--python", type=Path, default=default, help="the Python of an environment with vLLM")
    parser.add_argument(
        "--cases", nargs="+", choices=[*CASES, SERVED], default=[*CASES, SERVED], help="what is measured"
    )
    parser.add_argument("--kernels", nargs="+", choices=["cpp", "torch"], default=["cpp", "torch"], help="our kernels")
    add_sizes(parser)
    parser.add_argument("--vllm-threads", type=int, help="vLLM's threads (default: one per core)")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile, which is slower")
    parser.add_argument(
        "--vllm-processes", action="store_true", help="vLLM's engine in a process of its own, as in its server"
    )
    given = with_sizes(parser.parse_args())
    if not given.python.exists():
        skip(f"{given.python} does not exist. `make peer` builds an environment with vLLM; --python names another one.")
    given.kernels = kernels_of(given, given.kernels)
    results = []
    with ExitStack() as stack:
        engines = Engines(given, stack)
        results += asyncio.run(measure_engines(given, engines))
        if SERVED in given.cases and "cpp" in given.kernels:
            results += measure_served(given, random_llama(shape_of("llama", given), SCRATCH), engines.adapters)
    report("vllm_peer", results, as_json=given.json)


if __name__ == "__main__":
    main()
