"""Measures add_lora, compiled and in plain torch, against what people write by hand.

- A loop over adapters multiplies the rows of one adapter after the other.
- Gather and bmm collects the matrices of each row's adapter, and multiplies all rows at once.
- grouped_mm is torch's own product of groups of rows.
- PEFT's layer gets the names of the rows' adapters. Its base linear is not measured.
- A plain read only reads the bytes of all matrices once: nothing can be faster.

Each alternates with add_lora in this process, after a check that both give the same. As in a model, whose other layers
come in between, no call finds its adapters in a cache: all sides go round through sets of adapters that together are
larger than the caches. It does not use a GPU. Without a compiler it measures the back end in torch alone.

    python -m benchmarks.lora_op [--width 4096] [--rank 16] [--dtype bfloat16] [--threads 1] [--json]
"""

import argparse
import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Do, Pairs, Result, alternate, arguments, microseconds, percentile, report
from benchmarks.lora_baselines import Baseline, Case, Product, gather, grouped, loop, peft_layer
from benchmarks.traffic import TRAFFIC, distinct
from motet_kernels import LinearGroup, LoraBackend, PlacedAdapter, RunLayout, Segment, TorchBackend
from motet_kernels.cpp import CannotBuild, CppBackend, Library, build
from motet_kernels.huge_pages import prefer_huge_pages
from motet_runner.settings import KERNEL_CACHE

LINEAR = "linear"
ROWS = (8, 32)
MIXED_RANKS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Sides:
    """The same product in several ways; each call takes the next set of adapters."""

    compiled: Do | None
    torch: Do
    baselines: dict[str, Do]
    """By the names that results have"""
    read: Do | None
    bytes: int
    """Of the matrices that one call needs"""


BASELINES: dict[str, Baseline] = {"loop": loop, "gather": gather, "grouped": grouped, "peft": peft_layer}
NAMES = {"loop": "a loop over adapters", "gather": "gather and bmm", "grouped": "grouped_mm", "peft": "PEFT's layer"}
SAME = 0.02
"""How far two ways may differ, as a share of the largest value: they round in other places."""


def sides(case: Case, given: argparse.Namespace, library: Library | None, against: Mapping[str, Baseline]) -> Sides:
    width, dtype = given.width, getattr(torch, given.dtype)
    generator = torch.Generator().manual_seed(0)
    groups = [LinearGroup(width, {LINEAR: width})]
    layouts = [RunLayout(-(-rank // TorchBackend.tile) * TorchBackend.tile, groups, dtype) for rank in case.ranks]
    of_a_set = sum(layout.bytes for layout in layouts)
    sets = max(2, (given.rotated << 20) // of_a_set)
    some = torch.randn(of_a_set // dtype.itemsize, generator=generator).mul_(width**-0.5).to(dtype).view(torch.uint8)
    memory = prefer_huge_pages(torch.empty(sets * of_a_set, dtype=torch.uint8))  # as the engine's pages
    memory.view(sets, of_a_set).copy_(some)
    x = torch.randn(len(case.owners), width, generator=generator).to(dtype)
    y = torch.zeros(len(case.owners), width, dtype=dtype)

    placed: list[list[PlacedAdapter]] = []
    matrices: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    offset = 0
    for number in range(sets):
        placed.append([])
        matrices.append([])
        for owner, layout in enumerate(layouts):
            placed[-1].append(PlacedAdapter(f"{number}.{owner}", offset, layout.rank, frozenset({LINEAR})))
            matrices[-1].append(layout.matrices(memory[offset : offset + layout.bytes], LINEAR))
            offset += layout.bytes

    def through(backend: Callable[[], LoraBackend[Any]]) -> Do:
        prepared = []
        for of_set in placed:
            one = backend()
            segments = [Segment(*span, adapter) for span, adapter in zip(case.spans, of_set, strict=True)]
            prepared.append((one, one.make_batch(segments)))
        following = itertools.cycle(prepared)

        def add() -> None:
            one, batch = next(following)
            one.add_lora(y, x, LINEAR, batch)

        return add

    product = Product(case, x, y, matrices)
    found = Sides(
        compiled=None if library is None else through(lambda: CppBackend(groups, memory, dtype, library=library)),
        torch=through(lambda: TorchBackend(groups, memory, dtype, copy_bytes=of_a_set)),
        baselines={name: make(product) for name, make in against.items()},
        read=None if library is None else read_of(library, memory, of_a_set, sets),
        bytes=of_a_set,
    )
    check_same({"torch": found.torch, **found.baselines} | ({"cpp": found.compiled} if found.compiled else {}), y)
    return found


def check_same(ways: dict[str, Do], y: torch.Tensor) -> None:
    """Each way adds the same to `y` in its first call."""
    expected: torch.Tensor | None = None
    for name, do in ways.items():
        y.zero_()
        do()
        if expected is None:
            expected = y.clone()
        difference = float((y - expected).abs().max())
        if not difference <= SAME * float(expected.abs().max()):
            raise SystemExit(f"{name} differs from {next(iter(ways))} by {difference:g}")


def read_of(library: Library, memory: torch.Tensor, bytes_of_set: int, sets: int) -> Do:
    following = itertools.cycle([memory.data_ptr() + number * bytes_of_set for number in range(sets)])
    return lambda: library.read(next(following), bytes_of_set)


class Benchmark:
    def __init__(self, given: argparse.Namespace, library: Library | None) -> None:
        self._given = given
        self._library = library
        self.results: list[Result] = []

    async def run(self) -> None:
        for traffic in self._given.traffic:
            for rows in ROWS:
                await self._traffic(traffic, rows, TRAFFIC[traffic](rows))
        if self._library is not None and self._given.mixed_ranks:
            await self._mixed_ranks()

    def _sides(self, owners: list[int], ranks: list[int], against: Mapping[str, Baseline]) -> Sides:
        of = sides(Case(owners, ranks), self._given, self._library, against)
        if of.read is not None:
            of.read()
        return of

    async def _pairs(self, a: Do, b: Do) -> Pairs:
        given = self._given
        return await alternate(
            microseconds(a, given.calls), microseconds(b, given.calls), pairs=given.pairs, turns=given.turns
        )

    def _add(self, name: str, pairs: Pairs, baseline: str, at_least: float | None = None) -> None:
        holds = None if at_least is None else pairs.ratio >= at_least
        target = "" if at_least is None else f">= {at_least:g}"
        print(f"{name}: {baseline} against ours: {pairs}")
        self.results.append(Result(name, pairs.ratio, "x", target, holds, baseline, pairs))

    async def _traffic(self, traffic: str, rows: int, owners: list[int]) -> None:
        given = self._given
        of = self._sides(owners, [given.rank] * (max(owners) + 1), BASELINES)
        many = rows >= 32
        goals = {
            "distinct": {"loop": 5.0, "gather": 5.0},
            "uniform": {"loop": 3.0},
            "zipf": {"loop": 3.0},
            "identical": {"loop": 2.0} if many else {},
        }
        at_least = goals.get(traffic, {}) if given.targets else {}
        in_torch = await self._pairs(of.baselines["loop"], of.torch)
        goal = 2.5 if traffic == "distinct" and given.targets else None
        self._add(f"op_torch_{traffic}_vs_loop_{rows}", in_torch, NAMES["loop"], goal)
        if of.compiled is None or of.read is None:
            return
        for name, do in of.baselines.items():
            pairs = await self._pairs(do, of.compiled)
            self._add(f"op_{traffic}_vs_{name}_{rows}", pairs, NAMES[name], at_least.get(name))
        if traffic == "distinct":
            read = await self._pairs(of.read, of.compiled)
            self._add(f"op_bandwidth_share_{rows}", read, "a plain read", 0.9 if given.targets else None)
            floor, ours = percentile(read.a, 0.5), percentile(read.b, 0.5)
            print(f"  {of.bytes / 1e6:.2f} MB: {floor:.1f} us to read, {ours:.1f} us with add_lora")
            self.results.append(Result(f"op_{traffic}_{rows}", ours, "us"))

    async def _mixed_ranks(self) -> None:
        """Against as many rows of one rank that have as many bytes together."""
        rows = ROWS[-1] // len(MIXED_RANKS) * len(MIXED_RANKS)
        mixed = list(itertools.islice(itertools.cycle(MIXED_RANKS), rows))
        tile = CppBackend.tile
        alike = round(sum(mixed) / rows / tile) * tile
        ours, even = (self._sides(distinct(rows), ranks, {}) for ranks in (mixed, [alike] * rows))
        assert ours.compiled is not None
        assert even.compiled is not None
        pairs = await self._pairs(ours.compiled, even.compiled)
        cost = pairs.ratio * even.bytes / ours.bytes
        print(f"op_mixed_ranks: ranks {MIXED_RANKS} against rank {alike} on {rows} rows: {pairs}")
        holds = cost <= 1.15 if self._given.targets else None
        baseline = f"rank {alike} everywhere, per byte"
        self.results.append(
            Result("op_mixed_ranks", cost, "x", "<= 1.15" if holds is not None else "", holds, baseline, pairs)
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=4096, help="inputs and outputs of the linear")
    parser.add_argument("--rank", type=int, default=16, help="rank of every adapter, where ranks are not mixed")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    parser.add_argument("--rotated", type=int, default=256, help="MiB of adapters that the calls go round through")
    parser.add_argument(
        "--traffic", nargs="+", default=list(TRAFFIC), choices=list(TRAFFIC), help="whose rows are whose"
    )
    parser.add_argument(
        "--mixed-ranks", action=argparse.BooleanOptionalAction, default=True, help="also adapters of several ranks"
    )
    parser.add_argument("--calls", type=int, default=20, help="calls per figure")
    parser.add_argument("--turns", type=int, default=3, help="figures of each side per pair")
    parser.add_argument("--pairs", type=int, default=10, help="quiet pairs to measure")
    parser.add_argument("--cache", type=Path, default=KERNEL_CACHE.expanduser(), help="the folder of compiled kernels")
    given = parser.parse_args()
    # The targets are for these sizes.
    given.targets = (given.width, given.rank, given.dtype) == (4096, 16, "bfloat16")
    torch.set_num_threads(given.threads)
    library = None
    try:
        built = build(given.cache)
        library = built.library
        print(f"compiled kernels: {built.instructions}")
    except CannotBuild as error:
        print(f"no compiled kernels: {error}")
    benchmark = Benchmark(given, library)
    with torch.inference_mode():
        asyncio.run(benchmark.run())
    report("lora_op", benchmark.results, as_json=given.json)


if __name__ == "__main__":
    main()
