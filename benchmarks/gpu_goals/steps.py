"""Whole decode steps, each captured as one graph: with and without LoRA (G6, G7, G9), and without it against others
(G13); and of DoRA against LoRA (G21)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu_goals.bench import Bench
from benchmarks.gpu_goals.clock import Times, Way
from benchmarks.gpu_goals.figures import Beside, Figure
from benchmarks.gpu_goals.hf_decode import MODES, HfDecode
from benchmarks.gpu_goals.lora_in_model import OTHERS, Lora
from benchmarks.gpu_goals.models import (
    LLAMA_7B,
    LLAMA_8B,
    TINY_SHAPE,
    Adapters,
    DecodeStep,
    Model,
    Shape,
    counted_kernels,
)
from benchmarks.gpu_goals.twins import bandwidth
from benchmarks.harness import Do, Pairs
from benchmarks.traffic import TRAFFIC, identical, zipf
from motet_kernels.gpu.lora_backend import GpuLoraBatch

MOST_ADDED = {  # in percent, with 32 rows
    "7b": {"identical": 2.5, "zipf": 4.5, "distinct": 12.0},
    "8b": {"identical": 3.5, "zipf": 6.5, "distinct": 18.0},
}
SAME_LOGITS = 0.05
"""How far another way of LoRA may be from ours in a whole model, as a share of the logits"""
SAME_SCALED = 0.01
"""How far one linear with scales may be from fp64, as a share of it. Scales that are left out move it twice as far."""


def _shapes(bench: Bench) -> Sequence[Shape]:
    return (TINY_SHAPE,) if bench.rehearsal else (LLAMA_7B, LLAMA_8B)


def _step_of(step: DecodeStep, lora: Lora | None, batch: GpuLoraBatch | None) -> Callable[[], torch.Tensor]:
    def do() -> torch.Tensor:
        if lora is not None:
            given: Any = lora
            step.model.decoder.use_lora(given)
        return step.greedy(batch)

    return do


def _logits(step: DecodeStep, lora: Lora, batch: GpuLoraBatch) -> torch.Tensor:
    given: Any = lora
    step.model.decoder.use_lora(given)
    return step.logits(batch)


def _added(times: Times, way: str, base: str = "base") -> list[float]:
    """What LoRA adds in each round; never quite nothing, because others are divided by it"""
    both = zip(times.samples[way], times.samples[base], strict=True)
    return [max(with_lora - without, 1e-3) for with_lora, without in both]


def g6(bench: Bench) -> Iterator[Figure]:
    shape = _shapes(bench)[0]
    rows = bench.sizes.sequences
    model = Model(bench, shape)
    step, owners = DecodeStep(model, rows, bench.sizes.contexts[0]), zipf(rows)
    adapters = Adapters(model, max(owners) + 1, bench.sizes.rank)
    batch = adapters.batch(owners)

    def kernels(do: Do) -> int:
        do()
        with counted_kernels(bench) as names:
            do()
        return len(names)

    base = kernels(_step_of(step, None, None))
    if not base:
        raise LookupError("no kernel of the step was counted")
    ours = (kernels(_step_of(step, adapters.backend, batch)) - base) / shape.layers
    against, note = {}, f"{base} kernels without LoRA"
    if not bench.rehearsal:  # others are not launched through our counter
        for name, other in OTHERS.items():
            try:
                theirs = (kernels(_step_of(step, other(model, adapters, owners), batch)) - base) / shape.layers
            except Exception as error:
                against[name] = Beside(None, None, f"{type(error).__name__}: {error}".splitlines()[0])
                continue
            against[name] = Beside(Pairs([theirs], [ours]))
    yield Figure(name="lora_kernels_per_layer", value=ours, unit="", at_most=1.0, against=against, note=note)
    bench.freed()


def g7(bench: Bench) -> Iterator[Figure]:
    context = bench.sizes.contexts[0]
    for shape in _shapes(bench):
        model = Model(bench, shape)
        for rows in (bench.sizes.sequences, 2 * bench.sizes.sequences):
            step = DecodeStep(model, rows, context)
            for traffic in ("identical", "zipf", "distinct"):
                owners = TRAFFIC[traffic](rows)
                adapters = Adapters(model, max(owners) + 1, bench.sizes.rank)
                batch = adapters.batch(owners)
                times = _with_others(step, adapters, batch, owners)
                ours = _added(times, "ours")
                goals = {"vllm": 3.0, "loop": 3.0 if traffic == "identical" else 10.0, "gather": None, "grouped": None}
                bytes_added = (max(owners) + 1) * adapters.layout.bytes
                yield Figure(
                    name=f"step_overhead_{shape.name}_{traffic}_{rows}",
                    value=100 * (times.pairs("ours", "base").ratio - 1),
                    unit="%",
                    at_most=MOST_ADDED.get(shape.name, {}).get(traffic) if rows == bench.sizes.sequences else None,
                    floor=bytes_added / bandwidth(bench),
                    against={
                        name: Beside(Pairs(_added(times, name), ours), at_least)
                        if name in times.samples
                        else Beside(None, at_least, times.failed[name])
                        for name, at_least in goals.items()
                    },
                    note=f"of {times.median('base'):.5g} us; the floor is that of the adapters' bytes",
                )
                del adapters, batch
                bench.freed()
            del step
            bench.freed()
        del model
        bench.freed()


def _with_others(step: DecodeStep, adapters: Adapters, batch: GpuLoraBatch, owners: Sequence[int]) -> Times:
    expected = _logits(step, adapters.backend, batch).double()
    ways = {"base": Way(_step_of(step, None, None)), "ours": Way(_step_of(step, adapters.backend, batch))}
    failed: dict[str, str] = {}
    for name, other in OTHERS.items():
        try:
            lora = other(step.model, adapters, owners)
            difference = float((_logits(step, lora, batch).double() - expected).norm() / expected.norm())
            if not difference <= SAME_LOGITS:
                raise ArithmeticError(f"its logits differ from ours by {difference:g}")
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        ways[name] = Way(_step_of(step, lora, batch))
    times = step.model.bench.clock.compare(ways, seconds=3.0)
    times.failed |= failed
    return times


def g9(bench: Bench) -> Iterator[Figure]:
    context, rows = bench.sizes.contexts[0], 2 * bench.sizes.sequences
    for shape in _shapes(bench):
        model = Model(bench, shape)
        step, of_half = DecodeStep(model, rows, context), DecodeStep(model, rows // 2, context)
        adapters = Adapters(model, 1, bench.sizes.rank)
        backend = adapters.backend
        only_o = frozenset(linear for linear in model.linears if linear.endswith(".o"))
        half: list[int | None] = [0, None] * (rows // 2)
        batches = {
            "unused": adapters.batch([None] * rows),
            "only_o": adapters.batch(identical(rows), only_o),
            "half": adapters.batch(half),
        }
        alone = _step_of(of_half, backend, adapters.batch(identical(rows // 2)))
        ways: Mapping[str, Do] = {
            "base": _step_of(step, None, None),
            **{name: _step_of(step, backend, batch) for name, batch in batches.items()},
            "base_of_half": _step_of(of_half, None, None),
            "half_alone": alone,
        }
        times = bench.clock.compare({name: Way(do) for name, do in ways.items()}, seconds=3.0)
        for name, most in (("unused", 0.3), ("only_o", 1.5)):
            yield Figure(
                name=f"step_overhead_{shape.name}_{name}_{rows}",
                value=100 * (times.pairs(name, "base").ratio - 1),
                unit="%",
                at_most=most,
                note=f"of {times.median('base'):.5g} us",
            )
        beside = Pairs(_added(times, "half"), _added(times, "half_alone", "base_of_half"))
        yield Figure(
            name=f"half_without_adapter_{shape.name}_{rows}",
            value=beside.ratio,
            unit="x",
            at_most=1.0,
            spread=beside.spread,
            note="what LoRA adds, against the rows with an adapter alone",
        )
        without = [row for row, owner in enumerate(half) if owner is None]
        same = torch.equal(step.logits(None)[without], _logits(step, backend, batches["half"])[without])
        yield Figure(
            name=f"base_rows_same_bits_{shape.name}", value=float(same), unit="", at_least=1.0, note="1: bit-identical"
        )
        del model, step, of_half, adapters, backend, batches, ways, alone
        bench.freed()


def g13(bench: Bench) -> Iterator[Figure]:
    sizes = bench.sizes
    few, many = sizes.sequences, 4 * sizes.sequences
    cases = ((TINY_SHAPE, few, 0.0),) if bench.rehearsal else (
        (LLAMA_8B, 1, 0.94), (LLAMA_8B, few, 0.91), (LLAMA_8B, many, 0.87), (LLAMA_7B, few, 0.906),
    )  # fmt: skip
    for shape, rows, share in cases:
        model = Model(bench, shape)
        step = DecodeStep(model, rows, sizes.contexts[0])
        times = bench.clock.compare({"ours": Way(_step_of(step, None, None))}, seconds=2.0)
        ours = times.median("ours")
        floor = step.floor_bytes / bandwidth(bench)
        del model, step
        bench.freed()
        against = {}
        if rows == few:
            hf = HfDecode(bench, shape, rows, sizes.contexts[0])
            for mode, at_least in MODES.items():
                try:
                    theirs = hf.microseconds(mode)
                except Exception as error:
                    against[mode] = Beside(None, at_least, f"{type(error).__name__}: {error}".splitlines()[0])
                    continue
                against[mode] = Beside(Pairs(theirs, [ours] * len(theirs)), at_least)
            del hf
            bench.freed()
        yield Figure(
            name=f"step_share_of_floor_{shape.name}_{rows}",
            value=floor / ours,
            unit="of the floor",
            at_least=share or None,
            floor=floor,
            against=against,
            note=f"{ours:.5g} us, {rows / ours * 1e6:.5g} tokens/s" if not bench.rehearsal else "",
        )


def g21(bench: Bench) -> Iterator[Figure]:
    """Distinct adapters on all linears. Those of DoRA have two rows more of each B to read, and a launch more for each
    group of linears."""
    rows = bench.sizes.sequences
    owners = TRAFFIC["distinct"](rows)
    for shape in _shapes(bench):
        model = Model(bench, shape)
        step = DecodeStep(model, rows, bench.sizes.contexts[0])
        both = {name: Adapters(model, rows, bench.sizes.rank, scale=name == "dora") for name in ("lora", "dora")}
        _check_scales(bench, both["dora"])
        ways = {name: Way(_step_of(step, one.backend, one.batch(owners))) for name, one in both.items()}
        times = bench.clock.compare(ways, seconds=3.0)
        speed = times.pairs("lora", "dora")
        yield Figure(
            name=f"dora_vs_lora_{shape.name}_{rows}",
            value=speed.ratio,
            unit="x",
            at_least=0.93,
            spread=speed.spread,
            note=f"of {times.median('lora'):.5g} us",
        )
        del model, step, both, ways
        bench.freed()


def _check_scales(bench: Bench, adapters: Adapters) -> None:
    """The first linear of the first adapter, against fp64"""
    layout, (linear, *_) = adapters.layout, adapters.layout.offsets
    run = adapters.memory[: layout.bytes]
    (a, b), (d, e) = layout.matrices(run, linear), layout.scaling(run, linear)
    x, y = bench.random(1, a.shape[1]), bench.random(1, b.shape[1])
    products = adapters.placed(0).product_rank
    added = x.double() @ a[:products].double().t() @ b[:products].double()
    expected = y.double() * (1 + d.double()) + e.double() + added
    adapters.backend.add_lora(y, x, linear, adapters.batch([0]))
    if not (error := float((y.double() - expected).norm() / expected.norm())) <= SAME_SCALED:
        raise ArithmeticError(f"add_lora with scales differs from fp64 by {error:g}")
