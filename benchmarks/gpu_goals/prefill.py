"""LoRA beside the base product of a prompt (G10)."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu_goals.bench import Bench, cells
from benchmarks.gpu_goals.clock import Way
from benchmarks.gpu_goals.figures import Beside, Figure
from benchmarks.gpu_goals.operator import Operator
from benchmarks.harness import Do, Pairs
from benchmarks.lora_baselines import Case

BASELINES = ("loop", "grouped", "vllm")
SEGMENTS = (1, 8)


def g10(bench: Bench) -> Iterator[Figure]:
    sizes = bench.sizes
    for outputs, tokens, segments, rank in cells(
        (sizes.width, sizes.wide), sizes.prompt_tokens, SEGMENTS, (sizes.rank, sizes.high_rank)
    ):
        owners = [token * segments // tokens for token in range(tokens)]
        # Prompts read no weights that a cache could keep: two sets are enough.
        small = replace(bench, sizes=replace(sizes, cold_bytes=1))
        operator = Operator(small, sizes.width, outputs, Case(owners, [rank] * segments))
        weight = bench.random(outputs, sizes.width, scale=sizes.width**-0.5)
        failed: dict[str, str] = {}
        ways: dict[str, Do] = {"ours": operator.ours()}
        for name in BASELINES:
            try:
                ways[name] = operator.baseline(name)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        right = operator.check(ways, failed)

        def after_base(add: Do, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Do:
            def step() -> None:
                torch.mm(x, weight.t(), out=y)
                add()

            return step

        given = operator.y, operator.x, weight
        measured = {name: Way(after_base(do, *given), operator.sets) for name, do in right.items()}
        times = bench.clock.compare(
            {"base": Way(after_base(lambda: None, *given), operator.sets)} | measured, seconds=0.7
        )
        times.failed |= failed
        ours = [max(one - base, 1e-6) for one, base in zip(times.samples["ours"], times.samples["base"], strict=True)]
        against = {}
        for name in BASELINES:
            if name in times.samples:
                theirs = [one - base for one, base in zip(times.samples[name], times.samples["base"], strict=True)]
                against[name] = Beside(Pairs(theirs, ours), 4.0)
            else:
                against[name] = Beside(None, 4.0, times.failed[name])
        added = times.pairs("ours", "base").ratio - 1
        yield Figure(
            name=f"prompt_overhead_{tokens}_in_{segments}_rank_{rank}_to_{outputs}",
            value=100 * added,
            unit="%",
            at_most=3.0 if rank == sizes.rank else 6.0,
            against=against,
            note=f"of {times.median('base'):.4g} us; ratios are those of what is added to the base",
        )
        bench.freed()
