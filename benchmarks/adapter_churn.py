"""More adapters than places, in the product's engine and in vLLM: see `benchmarks.adapters`.

Both get the same requests for adapters that are all equally likely. vLLM has as many adapters in memory as on the
device, as it has by default, and reads the others from the page cache. It is stopped while the product is measured.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.adapter_traffic import AT_ONCE, Traffic, draws
from benchmarks.driven import Driven
from benchmarks.engine_cases.bench import at_least
from benchmarks.engine_run import Ask
from benchmarks.harness import Result, alternate
from benchmarks.many_adapters import RANKS, ManyAdapters
from benchmarks.random_llama import LlamaShape
from benchmarks.vllm_setup import environment_of_vllm
from tools.peers.environment import folder, python_of
from tools.peers.vllm import VLLM

NAME, LEAST = "churn_vs_vllm", 9
EQUAL = 0.5
"""The least share of first tokens that must be equal: the likeliest two are often close, and the adapters are large."""
DRIVER = Path(__file__).with_name("vllm_driver.py")


async def measure_churn(shape: LlamaShape, model: Path, scratch: Path, given: argparse.Namespace) -> list[Result]:
    python = python_of(folder(VLLM, os.environ))
    if not python.exists():
        print(f"{NAME} is not measured: {python} does not exist. `make peer` builds an environment with vLLM.")
        return []
    adapters = ManyAdapters(shape, scratch, given.churn_adapters)
    ours = Traffic(model, adapters, given.churn_slots, given)
    setup = argparse.Namespace(python=python, vllm_threads=None, vllm_processes=False)
    # -P: a module beside that file must not take the place of one of Python's.
    with ExitStack() as stack:
        theirs = stack.enter_context(Driven("vLLM", [python, "-P", DRIVER], environment_of_vllm(setup)))
        theirs.ask(
            {
                "do": "load",
                "model": str(model),
                "adapters": [str(one) for one in adapters.folders],
                "slots": given.churn_slots,
                "rank": max(RANKS),
                "length": shape.context,
                "sequences": AT_ONCE,
                "dtype": shape.dtype,
                "eager": False,
            }
        )
        numbers = next(draws(given.churn_adapters, 0.0, given.churn_requests))
        asks, served = ours.serve(numbers)
        answer = theirs.ask(_question(asks, numbers))
        both = zip(served.tokens, answer["tokens"], strict=True)
        equal = sum(mine[0] == other[0] for mine, other in both) / len(asks)
        print(f"{NAME}: {equal:.0%} of all first tokens equal", flush=True)
        drawn = draws(given.churn_adapters, 0.0, given.churn_requests)

        async def of_theirs() -> float:
            numbers = next(drawn)
            return float(theirs.ask(_question([ours.ask(ours.digests[one]) for one in numbers], numbers))["seconds"])

        of_ours = ours.seconds(draws(given.churn_adapters, 0.0, given.churn_requests))
        pairs = await alternate(of_theirs, of_ours, pairs=given.pairs, own=theirs.processes)
    milliseconds = [1e3 * min(of) / given.churn_requests for of in (pairs.a, pairs.b)]
    print(f"{NAME}: vLLM {milliseconds[0]:.1f} ms a request, ours {milliseconds[1]:.1f}: {pairs}", flush=True)
    return [
        Result(f"{NAME}_first_tokens", equal, "", f">= {EQUAL:g}", equal >= EQUAL),
        at_least(NAME, pairs, "vLLM", LEAST),
    ]


def _question(asks: Sequence[Ask], numbers: Sequence[int]) -> dict[str, Any]:
    return {
        "do": "generate",
        "prompts": [list(one.prompt) for one in asks],
        "adapters": list(numbers),
        "output": asks[0].output,
        "margins": False,
        "temperature": 0.0,
    }
