"""What benchmarks of the engine begin with: the environment, the sizes, a model with adapters."""

import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engine_cases.bench import Bench
from benchmarks.random_llama import SCRATCH, LlamaShape, random_adapter, random_llama
from motet_kernels.cpp import CannotBuild, build
from motet_runner.settings import KERNEL_CACHE
from motet_runner.thread_environment import THREAD_ENVIRONMENT


def start_as_the_product_does(module: str) -> None:
    """OpenMP reads how its threads wait when torch is imported, so this process begins once more."""
    if any(os.environ.get(name) != value for name, value in THREAD_ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | THREAD_ENVIRONMENT)


def add_sizes(parser: ArgumentParser) -> None:
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


@contextmanager
def prepared(given: Namespace) -> Iterator[Bench]:
    """`given.kernels` are those to measure. Without a compiler, only torch's remain."""
    shape = shape_of(given)
    with tempfile.TemporaryDirectory() as folder:
        folders = [
            random_adapter(shape, Path(folder) / str(number), rank=given.rank, seed=number)
            for number in range(given.adapters)
        ]
        yield Bench(given, random_llama(shape, SCRATCH), folders, _kernels_of(given))


def dora_adapters(bench: Bench, folder: Path) -> list[Path]:
    """As many as the others are"""
    given, shape = bench.given, shape_of(bench.given)
    return [
        random_adapter(shape, folder / f"dora-{number}", rank=given.rank, seed=number, dora=True)
        for number in range(given.adapters)
    ]


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


def _kernels_of(given: Namespace) -> list[str]:
    try:
        print(f"compiled for {build(given.cache).instructions}")
    except CannotBuild as error:
        print(f"no compiled kernels: {error}")
        return [how for how in given.kernels if how == "torch"]
    return list(given.kernels)
