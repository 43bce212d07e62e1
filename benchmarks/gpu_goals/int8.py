"""Adapters of 8-bit integers beside those of the model's type: add_lora alone, and a whole decode step (G5)."""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_goals.bench import Bench
from benchmarks.gpu_goals.clock import Way
from benchmarks.gpu_goals.figures import Figure
from benchmarks.gpu_goals.lora_in_model import Loop
from benchmarks.gpu_goals.models import LLAMA_8B, TINY_SHAPE, Adapters, DecodeStep, Model
from benchmarks.gpu_goals.operator import Operator, beside
from benchmarks.gpu_goals.twins import bandwidth
from benchmarks.harness import Do
from benchmarks.lora_baselines import Case
from benchmarks.traffic import distinct
from motet_kernels.gpu.lora_backend import GpuBackend, GpuLoraBatch
from motet_kernels.int8_layout import Int8Layout

MOST_OF_FLOOR = 0.65
FASTER = 1.5
MOST_ERROR = 2.0
SAME_TOKENS = 0.995
STEPS = 20
"""Whose tokens are compared"""


class RoundedAdapters(Adapters):
    """Other adapters, as integers"""

    def __init__(self, model: Model, number: int, others: Adapters) -> None:
        self.layout = Int8Layout(others.rank, model.groups, torch.int8)
        self.rank = others.rank
        self.memory = torch.zeros(number * self.layout.bytes, dtype=torch.uint8, device=model.bench.device)
        self.backend = GpuBackend(model.groups, self.memory, model.bench.dtype, int8=True)
        self._all, self._products = frozenset(model.linears), 0
        runs = self.memory.view(number, -1)
        for linear in model.linears:
            a, b = others.stacked(linear)
            for owner in range(number):
                self.layout.write(runs[owner], linear, a[owner], b[owner].t(), 1.0)


def g5(bench: Bench) -> Iterator[Figure]:
    sizes = bench.sizes
    for rows in (max(sizes.rows), sizes.many_rows):
        case = Case(distinct(rows), [sizes.high_rank] * rows)
        ours = Operator(bench, sizes.width, sizes.wide, case, int8=True)
        as_rows = Operator(bench, sizes.width, sizes.wide, case)
        for operator in (ours, as_rows):
            operator.check({"ours": operator.ours()}, {})
        times = bench.clock.compare({"ours": Way(ours.ours(), ours.sets), "as_rows": Way(as_rows.ours(), as_rows.sets)})
        floor = as_rows.bytes / bandwidth(bench)
        yield Figure(
            name=f"int8_of_floor_of_16_bits_{rows}",
            value=times.median("ours") / floor,
            unit="x",
            at_most=MOST_OF_FLOOR,
            floor=ours.bytes / bandwidth(bench),
            against=beside(times, {"as_rows": FASTER}),
            note=f"{times.median('ours'):.4g} us; the floor beside it is that of the integers' bytes",
        )
        del ours, as_rows, operator
        bench.freed()
    yield from _whole_steps(bench)


def _whole_steps(bench: Bench) -> Iterator[Figure]:
    rows = bench.sizes.sequences
    model = Model(bench, TINY_SHAPE if bench.rehearsal else LLAMA_8B)
    step, owners = DecodeStep(model, rows, bench.sizes.contexts[0]), distinct(rows)
    as_rows = Adapters(model, rows, bench.sizes.high_rank)
    rounded = RoundedAdapters(model, rows, as_rows)
    usual, integers = as_rows.batch(owners), rounded.batch(owners)
    loop = Loop(model, as_rows, owners)
    same, errors, of_loop = 0, 0.0, 0.0
    for _ in range(1 if bench.rehearsal else STEPS):
        step.draw_tokens()
        right = _logits(step, as_rows.backend, usual)
        found = _logits(step, rounded.backend, integers)
        same += int((found.argmax(-1) == right.argmax(-1)).sum())
        errors += float((found - right).norm())
        of_loop += float((_logits(step, loop, usual) - right).norm())
    compared = rows * (1 if bench.rehearsal else STEPS)
    yield Figure(
        name="int8_same_tokens",
        value=same / compared,
        unit="of tokens",
        at_least=SAME_TOKENS,
        note=f"{compared} greedy tokens of a model with random weights",
    )
    yield Figure(
        name="int8_logit_error",
        value=errors / max(of_loop, 1e-12),
        unit="x",
        at_most=MOST_ERROR,
        note="against what torch's products differ by, which round the sums between the matrices",
    )
    times = bench.clock.compare(
        {
            "ours": Way(_greedy(step, rounded.backend, integers)),
            "as_rows": Way(_greedy(step, as_rows.backend, usual)),
        },
        seconds=3.0,
    )
    yield Figure(
        name=f"int8_step_{rows}",
        value=times.median("ours"),
        unit="us",
        spread=times.spread("ours"),
        floor=(step.floor_bytes + rows * rounded.layout.bytes) / bandwidth(bench),
        against=beside(times, {"as_rows": None}),
    )
    bench.freed()


def _greedy(step: DecodeStep, lora: Any, batch: GpuLoraBatch) -> Do:
    def do() -> None:
        step.model.decoder.use_lora(lora)
        step.greedy(batch)

    return do


def _logits(step: DecodeStep, lora: Any, batch: GpuLoraBatch) -> torch.Tensor:
    step.model.decoder.use_lora(lora)
    return step.logits(batch).double()
