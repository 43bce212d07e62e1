"""The forward pass that is recorded from the modules, with all that it gains from and without some of it (`--without`,
else all). `program_gained_*` is what it reaches of the plain one's tokens a second.

It also prints how many seconds each kind of stage takes in both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.engine_cases.bench import Bench
from benchmarks.engine_run import Run, owners, seconds_of
from benchmarks.harness import alternate
from motet.domain import Digest
from motet_kernels.cpp.program import KINDS
from motet_runner.execute.forward.program import SWITCHED_ON

TRAFFIC = ("base", "distinct")


async def gained_by_program(bench: Bench) -> None:
    if "fused" not in bench.kernels:
        return
    given, ours = bench.given, bench.run("fused")
    plain = bench.new_run("fused", switched_on=SWITCHED_ON - {*(given.without or SWITCHED_ON)})
    for requests in given.requests:
        for traffic in TRAFFIC:
            adapters = owners(traffic, requests, bench.adapters)
            without, with_all = (seconds_of(run, requests, adapters) for run in (plain, ours))
            await without()
            await with_all()
            pairs = await alternate(without, with_all, pairs=given.pairs)
            bench.add_pairs(f"program_gained_{traffic}_{requests}", pairs, "without")
            for name, run in (("without", plain), ("with all", ours)):
                of_stages = _seconds_of_stages(run, requests, adapters)
                print(f"  {name}: " + ", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in of_stages.items()))


def _seconds_of_stages(run: Run, requests: int, adapters: Sequence[Digest]) -> dict[str, float]:
    program: Any = run.engine.diagnostics.loaded.fused.program  # type: ignore[union-attr]
    program.seconds = np.zeros(len(KINDS))
    try:
        run.seconds(requests, adapters)
        return dict(zip(KINDS, program.seconds.tolist(), strict=True))
    finally:
        program.seconds = None
