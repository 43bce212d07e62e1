"""Punica's own benchmark (G3): the host's clock around a call and a synchronisation, after much was written."""

from collections.abc import Iterator

import torch

from benchmarks.gpu_goals.bench import Bench, cells
from benchmarks.gpu_goals.figures import Figure
from benchmarks.gpu_goals.operator import Operator, beside
from benchmarks.gpu_goals.twins import bandwidth
from benchmarks.lora_baselines import Case
from benchmarks.traffic import TRAFFIC

FLUSHED_BYTES = 256 << 20
ROUNDS = 200


def g3(bench: Bench) -> Iterator[Figure]:
    sizes = bench.sizes
    flushed = torch.empty(bench.sizes.cold_bytes or FLUSHED_BYTES, dtype=torch.uint8, device=bench.device)
    for rows, traffic in cells(sizes.rows, ("identical", "uniform", "skewed", "distinct")):
        owners = TRAFFIC[traffic](rows)
        operator = Operator(bench, sizes.width, sizes.wide, Case(owners, [sizes.rank] * (max(owners) + 1)))
        failed: dict[str, str] = {}
        ways = {"ours": operator.ours()} | {name: operator.baseline(name) for name in ("loop", "gather")}
        right = operator.check(ways, failed)
        graphs = {name: bench.clock.graph(do) for name, do in right.items()}
        times = bench.clock.host(graphs, before=flushed.zero_, rounds=ROUNDS)
        times.failed |= failed
        yield Figure(
            name=f"punica_{traffic}_{rows}",
            value=times.median("ours"),
            unit="us",
            at_most=22.0 if traffic == "distinct" else 12.5,
            spread=times.spread("ours"),
            floor=operator.bytes / bandwidth(bench),
            against=beside(times, {"loop": None, "gather": None}),
            note="with launch and synchronisation, as Punica counts",
        )
        bench.freed()
