"""Measures the packed linears of the compiled kernels against torch, on the linears of one Llama layer and its head.

Each alternates with `F.linear` in this process, and in bf16 also with weights that torch itself packs (by private
operators, which its compiler uses). Results are compared with fp64 first. Each call has another matrix of weights, as
in a model, so that no cache holds them all. It does not use a GPU.

    python -m benchmarks.gemm [--rows 1 8 32 512] [--threads 1] [--pairs 10] [--json]
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch

from benchmarks.harness import Measure, Result, alternate, arguments, percentile, report, skip
from motet_kernels.cpp import CannotBuild, Library, build
from motet_kernels.cpp.linear import PackedWeights
from motet_runner.settings import KERNEL_CACHE

SHAPES = {"qkv": (1024, 512), "o": (512, 512), "gate_up": (2752, 512), "down": (512, 1376), "head": (4096, 512)}
"""[outputs, inputs] of the 30 M Llama of the other benchmarks"""
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BYTES = 64 << 20
"""Of all copies of a weight together: more than the last cache of most CPUs"""
LEAST = 1.0
"""No shape may be slower than torch's own."""
ALLOWED_ERROR = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
"""Of a result, as a share of the largest: the rounding of what is written, and the order of the sums"""

Linear = Callable[[torch.Tensor], torch.Tensor]


def ours(library: Library, weight: torch.Tensor) -> Linear:
    return PackedWeights(library, [weight]).linear


def torchs(weight: torch.Tensor) -> Linear:
    return lambda x: torch.nn.functional.linear(x, weight)


def packed_by_torch(rows: int) -> Callable[[torch.Tensor], Linear]:
    def pack(weight: torch.Tensor) -> Linear:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # noqa: SLF001 - torch has no public name for it
        multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - the same
        return lambda x: multiply(x, packed, None, "none", [], "")

    return pack


def check(library: Library, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Raises ValueError if results are wrong."""
    weight, x = torch.randn(shape).to(dtype), torch.randn(13, shape[1]).to(dtype)
    expected = x.double() @ weight.double().t()
    error = float((ours(library, weight)(x).double() - expected).abs().max() / expected.abs().max())
    if error > ALLOWED_ERROR[dtype]:
        raise ValueError(f"{dtype} {shape}: the result is off by {error:.2g}")


def microseconds(make: Callable[[torch.Tensor], Linear], weights: list[torch.Tensor], x: torch.Tensor) -> Measure:
    """The median of as many calls as there are weights, each with the next one."""
    linears = [make(weight) for weight in weights]
    calls = cycle(linears)

    async def measure() -> float:
        taken = []
        for _ in linears:
            linear = next(calls)
            began = time.perf_counter()
            linear(x)
            taken.append((time.perf_counter() - began) * 1e6)
        return percentile(taken, 0.5)

    return measure


async def measure(given: argparse.Namespace, library: Library) -> list[Result]:
    results = []
    for type_name, dtype in TYPES.items():
        for shape_name, shape in SHAPES.items():
            check(library, dtype, shape)
            copies = max(8, given.bytes // (shape[0] * shape[1] * dtype.itemsize))
            weights = [torch.randn(shape).to(dtype) for _ in range(copies)]
            for rows in given.rows:
                x = torch.randn(rows, shape[1]).to(dtype)
                packed = microseconds(lambda weight: ours(library, weight), weights, x)
                baselines = {"F.linear": microseconds(torchs, weights, x)}
                if dtype is torch.bfloat16 and torch.backends.mkldnn.is_available():
                    baselines["mkldnn"] = microseconds(packed_by_torch(rows), weights, x)
                for baseline, theirs in baselines.items():
                    await theirs()
                    await packed()
                    pairs = await alternate(theirs, packed, pairs=given.pairs)
                    name = f"{type_name}_{shape_name}_{rows}_{baseline.removeprefix('F.')}"
                    rate = 2 * rows * shape[0] * shape[1] / percentile(pairs.b, 0.5) / 1e3
                    print(f"{name}: {baseline} against ours ({rate:.0f} GFLOP/s): {pairs}", flush=True)
                    holds = pairs.ratio >= LEAST if baseline == "F.linear" else None
                    target = f">= {LEAST}" if baseline == "F.linear" else ""
                    results.append(Result(name, pairs.ratio, "x", target, holds, baseline, pairs))
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512], help="rows of x")
    parser.add_argument("--bytes", type=int, default=BYTES, help="bytes of all copies of a weight")
    parser.add_argument("--cache", type=Path, default=KERNEL_CACHE.expanduser(), help="the folder of compiled kernels")
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    parser.add_argument("--pairs", type=int, default=10, help="quiet pairs to measure")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    try:
        built = build(given.cache)
    except CannotBuild as error:
        skip(str(error))
    print(f"compiled for {built.instructions}")
    with torch.inference_mode():
        results = asyncio.run(measure(given, built.library))
    report("gemm", results, as_json=given.json)


if __name__ == "__main__":
    main()
