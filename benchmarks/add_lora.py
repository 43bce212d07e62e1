"""Measures add_lora against a loop over adapters and against the linear of the base model.

The loop, which is the simplest code for this, multiplies the rows of one adapter after the other. The linear is what
every row costs without an adapter. Each of the two alternates with add_lora in this process, on one thread. It does not
use a GPU.

    python -m benchmarks.add_lora [--width 1024] [--rank 16] [--calls 20] [--pairs 10] [--json]
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness import Measure, Result, alternate, arguments, percentile, report
from motet_kernels import LinearGroup, PlacedAdapter, RunLayout, Segment, TorchBackend

TRAFFIC: dict[str, Callable[[int], list[int]]] = {
    "distinct": lambda rows: list(range(rows)),
    "zipf": lambda rows: [int(rows / (1 + row)) % rows for row in range(rows)],
    "identical": lambda rows: [0] * rows,
}
ROWS = (1, 8, 32)


@dataclass(frozen=True)
class Variants:
    """The same product in three ways: add_lora and its two baselines."""

    ours: Callable[[], object]
    loop: Callable[[], object]
    linear: Callable[[], object]


def variants(traffic: str, rows: int, width: int, rank: int) -> Variants:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(width, width, generator=generator)
    x, y = torch.randn(rows, width, generator=generator), torch.zeros(rows, width)
    owners = sorted(TRAFFIC[traffic](rows))
    groups = [LinearGroup(width, {"linear": width})]
    layout = RunLayout(-(-rank // TorchBackend.tile) * TorchBackend.tile, groups, torch.float32)
    runs = torch.zeros(len(set(owners)), layout.bytes, dtype=torch.uint8)
    backend = TorchBackend(groups, runs.view(-1), torch.float32, copy_bytes=runs.numel())
    matrices, placed = {}, {}
    for number, owner in enumerate(dict.fromkeys(owners)):
        a, b = torch.randn(rank, width, generator=generator), torch.randn(width, rank, generator=generator)
        layout.write(runs[number], "linear", a, b, 1.0)
        matrices[owner] = a.t().contiguous(), b.t().contiguous()
        placed[owner] = PlacedAdapter(str(owner), number * layout.bytes, layout.rank, frozenset({"linear"}))
    batch = backend.make_batch([Segment(row, row + 1, placed[owner]) for row, owner in enumerate(owners)])
    spans = [(owners.index(owner), owners.index(owner) + owners.count(owner), owner) for owner in matrices]

    def loop() -> None:
        for first, last, owner in spans:
            a, b = matrices[owner]
            y[first:last].addmm_(x[first:last] @ a, b)

    return Variants(lambda: backend.add_lora(y, x, "linear", batch), loop, lambda: torch.nn.functional.linear(x, base))


def microseconds(do: Callable[[], object], calls: int) -> Measure:
    """The median time of `calls` calls."""

    async def measure() -> float:
        taken = []
        for _ in range(calls):
            began = time.perf_counter()
            do()
            taken.append((time.perf_counter() - began) * 1e6)
        return percentile(taken, 0.5)

    return measure


async def measure(given: argparse.Namespace) -> list[Result]:
    results = []
    for traffic in TRAFFIC:
        for rows in ROWS:
            by = variants(traffic, rows, given.width, given.rank)
            ours = microseconds(by.ours, given.calls)
            for warm in (by.ours, by.loop, by.linear):
                await microseconds(warm, 5)()
            loop = await alternate(microseconds(by.loop, given.calls), ours, pairs=given.pairs)
            linear = await alternate(ours, microseconds(by.linear, given.calls), pairs=given.pairs)
            name = f"{traffic}_{rows}_rows"
            print(f"{name}: a loop over adapters against add_lora: {loop}")
            print(f"{name}: add_lora against the base's linear: {linear}")
            results += [
                Result(f"{name}_us", percentile(linear.a, 0.5), "us"),
                Result(f"{name}_loop", loop.ratio, "x", baseline="a loop over adapters", pairs=loop),
                Result(f"{name}_linear", linear.ratio, "x", baseline="the base's linear", pairs=linear),
            ]
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=1024, help="inputs and outputs of the linear")
    parser.add_argument("--rank", type=int, default=16, help="rank of every adapter")
    parser.add_argument("--calls", type=int, default=20, help="calls per figure")
    parser.add_argument("--pairs", type=int, default=10, help="quiet pairs to measure")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        results = asyncio.run(measure(given))
    report("add_lora", results, as_json=given.json)


if __name__ == "__main__":
    main()
