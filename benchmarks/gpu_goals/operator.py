"""add_lora alone: G1, G2, G4 and G11.

A model whose layers all have one linear stands for cold weights: each call is another layer's, so the calls of a graph
go round through weights that no cache holds, as those of a decode step do. All of them share one batch.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from benchmarks.gpu_goals.bench import Bench, cells
from benchmarks.gpu_goals.clock import Times, Way
from benchmarks.gpu_goals.figures import Beside, Figure
from benchmarks.gpu_goals.twins import bandwidth, reads
from benchmarks.harness import Do
from benchmarks.lora_baselines import Baseline, Case, Product, gather, grouped, loop
from benchmarks.traffic import TRAFFIC, distinct
from motet_kernels import LinearGroup, PlacedAdapter, RunLayout, Segment
from motet_kernels.gpu.lora_backend import GpuBackend
from motet_kernels.int8_layout import LARGEST, SCALE_BYTES, Int8Layout, int8_layout

BASELINES: dict[str, Baseline] = {"loop": loop, "gather": gather, "grouped": grouped}
SAME = 0.02
"""How far a baseline may differ from the reference, as a share of it: it rounds in other places."""


class Operator:
    def __init__(
        self, bench: Bench, inputs: int, outputs: int, case: Case, *, pad_to: int = 0, int8: bool = False
    ) -> None:
        """`pad_to`: all adapters get room for this rank. `int8`: they are of integers."""
        self.bench, self.inputs, self.outputs, self.case = bench, inputs, outputs, case
        dtype = bench.dtype
        ranks = [max(rank, pad_to) for rank in case.ranks]
        tiles = [-(-rank // GpuBackend.tile) * GpuBackend.tile for rank in ranks]
        of_one_rank = inputs + outputs + SCALE_BYTES if int8 else (inputs + outputs) * dtype.itemsize
        self.weight_bytes = sum(tiles) * of_one_rank
        self.sets = bench.sets(self.weight_bytes)
        groups = [LinearGroup(inputs, {str(number): outputs}) for number in range(self.sets)]
        make_layout = int8_layout if int8 else RunLayout
        self._layouts = [make_layout(rank, groups, dtype) for rank in tiles]
        of_all = sum(layout.bytes for layout in self._layouts)
        self._memory = bench.random(of_all // dtype.itemsize, scale=inputs**-0.5).view(torch.uint8)
        self.backend = GpuBackend(groups, self._memory, dtype, int8=int8)
        linears = frozenset(map(str, range(self.sets)))
        self.adapters, offset = list[PlacedAdapter](), 0
        for owner, layout in enumerate(self._layouts):
            self.adapters.append(PlacedAdapter(str(owner), offset, layout.rank, linears))
            if isinstance(layout, Int8Layout):
                self._draw_integers(layout, self._memory[offset : offset + layout.bytes])
            offset += layout.bytes
        self.x = bench.random(len(case.owners), inputs)
        self.y = torch.zeros(len(case.owners), outputs, dtype=dtype, device=bench.device)
        self.batch = self.backend.fixed_batch(len(case.owners))
        self.backend.fill(self.batch, self.segments)

    def _draw_integers(self, layout: Int8Layout, run: torch.Tensor) -> None:
        run.random_(0, 256, generator=self.bench.generator)
        for linear in layout.offsets:
            layout.scales(run, linear).fill_(1 / (LARGEST**2 * self.inputs))

    @property
    def segments(self) -> list[Segment]:
        return [Segment(*span, self.adapters[owner]) for owner, span in enumerate(self.case.spans)]

    @property
    def bytes(self) -> int:
        """Weights once, x read, y read and written: the floor"""
        rows = len(self.case.owners)
        return self.weight_bytes + rows * (self.inputs + 2 * self.outputs) * self.bench.dtype.itemsize

    @cached_property
    def product(self) -> Product:
        sets = [[self.matrices(owner, number) for owner in range(len(self.adapters))] for number in range(self.sets)]
        return Product(self.case, self.x, self.y, sets)

    def matrices(self, owner: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        layout, offset = self._layouts[owner], self.adapters[owner].offset
        run = self._memory[offset : offset + layout.bytes]
        return (layout.stored if isinstance(layout, Int8Layout) else layout.matrices)(run, str(number))

    def ours(self) -> Do:
        following = itertools.cycle(map(str, range(self.sets)))
        return lambda: self.backend.add_lora(self.y, self.x, next(following), self.batch)

    def expected(self) -> torch.Tensor:
        """What the first call adds to zeros, in fp64"""
        added = torch.zeros(self.y.shape, dtype=torch.float64, device=self.y.device)
        for owner, (first, last) in enumerate(self.case.spans):
            a, b = self.matrices(owner, 0)
            added[first:last] = self.x[first:last].double() @ a.double().t() @ b.double()
        return added

    def check(self, ways: Mapping[str, Do], failed: dict[str, str]) -> dict[str, Do]:
        """Those that compute the right thing. Ours must: its error is at most that of a linear of this width, doubled
        because y is rounded, too."""
        expected, right = self.expected(), {}
        for name, do in ways.items():
            self.y.zero_()
            try:
                do()
            except Exception as error:
                if name == "ours":
                    raise
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            error_of = float((self.y.double() - expected).norm() / expected.norm())
            allowed = 2 * self.linear_error() + 1e-6 if name == "ours" else SAME
            if not error_of <= allowed:
                if name == "ours":
                    raise AssertionError(f"add_lora differs from fp64 by {error_of:g}, more than {allowed:g}")
                failed[name] = f"its result differs from fp64 by {error_of:g}"
                continue
            right[name] = do
        return right

    def linear_error(self) -> float:
        """The rounding of a plain linear of this size"""
        weight = self.bench.random(self.outputs, self.inputs, scale=self.inputs**-0.5)
        right = self.x.double() @ weight.double().t()
        return float(((self.x @ weight.t()).double() - right).norm() / right.norm())

    def timed(self, baselines: Sequence[str], *, seconds: float = 1.0) -> Times:
        failed: dict[str, str] = {}
        ways: dict[str, Do] = {"ours": self.ours()}
        for name in baselines:
            try:
                ways[name] = self.baseline(name)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        right = self.check(ways, failed)
        measured = {name: Way(do, self.sets) for name, do in right.items()}
        times = self.bench.clock.compare(measured | {"twin": reads(self.bench, self.bytes)}, seconds=seconds)
        times.failed |= failed
        return times

    def baseline(self, name: str) -> Do:
        if name.startswith("vllm"):
            from benchmarks.gpu_goals.vllm_kernels import VllmKernels

            if self.bench.vllm is None:
                raise LookupError("--vllm-kernels names no folder")
            return VllmKernels(self.bench.vllm, invariant=name == "vllm_invariant").way(self.product)
        return BASELINES[name](self.product)


def beside(times: Times, goals: Mapping[str, float | None]) -> dict[str, Beside]:
    """Each baseline's time against ours"""
    return {
        name: Beside(times.pairs(name, "ours"), at_least)
        if name in times.samples
        else Beside(None, at_least, times.failed[name])
        for name, at_least in goals.items()
    }


def _figure(name: str, operator: Operator, times: Times, goals: Mapping[str, float | None]) -> Figure:
    return Figure(
        name=name,
        value=times.median("ours"),
        unit="us",
        spread=times.spread("ours"),
        floor=operator.bytes / bandwidth(operator.bench),
        twin=times.median("twin"),
        against=beside(times, goals),
    )


def g1(bench: Bench) -> Iterator[Figure]:
    sizes = bench.sizes
    for outputs, rows, traffic in cells(
        (sizes.width, sizes.wide), sizes.rows, ("identical", "uniform", "skewed", "zipf")
    ):
        owners = TRAFFIC[traffic](rows)
        active = max(owners) + 1
        operator = Operator(bench, sizes.width, outputs, Case(owners, [sizes.rank] * active))
        goals = {
            "vllm": 3.0,
            "loop": 10.0 if active >= 8 else 1.3 if active == 1 else None,
            "gather": 6.0 if rows == max(sizes.rows) else 2.0 if rows == 1 else None,
            "grouped": None,
        }
        figure = _figure(f"shared_{traffic}_{rows}_to_{outputs}", operator, operator.timed(list(goals)), goals)
        yield replace(figure, at_most=5.0)
        bench.freed()


def g2(bench: Bench) -> Iterator[Figure]:
    sizes = bench.sizes
    rows = max(sizes.rows)
    for number, rank, share, vllm in (
        (rows, sizes.rank, 0.70, 2.0),
        (rows, sizes.high_rank, 0.87, 1.5),
        (sizes.many_rows, sizes.high_rank, 0.93, 1.5),
        (rows, sizes.highest_rank, 0.90, 1.5),
    ):
        operator = Operator(bench, sizes.width, sizes.wide, Case(distinct(number), [rank] * number))
        goals = {"vllm": vllm, "gather": 3.0, "grouped": None, "loop": 10.0}
        times = operator.timed(list(goals))
        yield Figure(
            name=f"distinct_share_of_read_{number}_rank_{rank}",
            value=times.pairs("twin", "ours").ratio,
            unit="of a read",
            at_least=share,
            spread=times.pairs("twin", "ours").spread,
            floor=operator.bytes / bandwidth(bench),
            twin=times.median("twin"),
            against=beside(times, goals),
            note=f"{times.median('ours'):.4g} us",
        )
        bench.freed()


def g4(bench: Bench) -> Iterator[Figure]:
    """Ranks in equal shares, against as many rows of one rank with as many bytes, and against room for the highest."""
    sizes = bench.sizes
    tile = GpuBackend.tile
    for rows in (sizes.rows[-2], sizes.rows[-1], sizes.many_rows):
        ranks = list(itertools.islice(itertools.cycle(sizes.ranks), rows))
        true = sum(-(-rank // tile) * tile for rank in ranks)
        alike = max(tile, round(true / rows / tile) * tile)
        operators = {
            "ours": Operator(bench, sizes.width, sizes.wide, Case(distinct(rows), ranks)),
            "alike": Operator(bench, sizes.width, sizes.wide, Case(distinct(rows), [alike] * rows)),
            "padded": Operator(bench, sizes.width, sizes.wide, Case(distinct(rows), ranks), pad_to=max(ranks)),
        }
        for operator in operators.values():
            operator.check({"ours": operator.ours()}, {})
        times = bench.clock.compare({name: Way(one.ours(), one.sets) for name, one in operators.items()})
        per_byte = operators["alike"].bytes / operators["ours"].bytes
        yield Figure(
            name=f"mixed_ranks_{rows}",
            value=times.pairs("ours", "alike").ratio * per_byte,
            unit="x",
            at_most=1.10,
            floor=operators["ours"].bytes / bandwidth(bench),
            against=beside(times, {"padded": 2.3}),
            note=f"time per byte, against rank {alike} everywhere",
        )
        del operators, operator
        bench.freed()


def g11(bench: Bench) -> Iterator[Figure]:
    """A row's bits are the same whoever is beside it; and what vLLM's kernels take in their mode for that."""
    sizes = bench.sizes
    rows = max(sizes.rows)
    owners = TRAFFIC["zipf"](rows)
    ranks = list(itertools.islice(itertools.cycle(sizes.ranks), max(owners) + 1))
    operator = Operator(bench, sizes.width, sizes.wide, Case(owners, ranks))
    alone = _results(operator, list(range(rows)))
    order = torch.Generator().manual_seed(0)
    differing = 0
    for number in range(sizes.shuffles):
        beside_it = 1 + number % rows
        some = torch.randperm(rows, generator=order)[:beside_it].tolist()
        differing += not torch.equal(_results(operator, some), alone[some])
    yield Figure(
        name="same_bits_beside_others",
        value=1 - differing / sizes.shuffles,
        unit="of shuffles",
        at_least=1.0,
        note=f"{sizes.shuffles} orders and subsets of {rows} rows, ranks {min(ranks)} to {max(ranks)}",
    )
    times = operator.timed(["vllm_invariant"])
    yield _figure("invariant", operator, times, {"vllm_invariant": 3.0})
    bench.freed()


def _results(operator: Operator, rows: Sequence[int]) -> torch.Tensor:
    """Of the first linear for these rows in this order; each keeps its adapter."""
    owners = operator.case.owners
    segments = [Segment(place, place + 1, operator.adapters[owners[row]]) for place, row in enumerate(rows)]
    operator.backend.fill(operator.batch, segments)
    x = operator.x[list(rows)].contiguous()
    y = torch.zeros(len(rows), operator.outputs, dtype=operator.y.dtype, device=operator.y.device)
    operator.backend.add_lora(y, x, "0", operator.batch)
    operator.backend.fill(operator.batch, operator.segments)
    return y
