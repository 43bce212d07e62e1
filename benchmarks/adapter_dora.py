"""Adapters with DoRA against those without, and against PEFT's: see `benchmarks.adapters`."""

import argparse
from pathlib import Path

from benchmarks.engine_cases.against_transformers import peft_dora
from benchmarks.engine_cases.ours import dora
from benchmarks.engine_cases.setup import add_sizes, prepared
from benchmarks.harness import Result
from benchmarks.random_llama import LlamaShape


async def measure_dora(_: LlamaShape, __: Path, ___: Path, given: argparse.Namespace) -> list[Result]:
    parser = argparse.ArgumentParser()
    add_sizes(parser)
    sizes = parser.parse_args([])
    for name in ("layers", "width", "vocabulary", "dtype", "prompt", "pairs"):
        setattr(sizes, name, getattr(given, name))
    sizes.kernels, sizes.requests, sizes.adapters = ["fused"], given.dora_requests, max(given.dora_requests)
    with prepared(sizes) as bench:
        await dora(bench)
        sizes.requests, sizes.output = [min(given.dora_requests)], given.dora_output
        await peft_dora(bench)
    return bench.results
