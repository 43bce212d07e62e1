"""The forward pass that is recorded from the modules, against the one that was written by hand: on a Llama, which has
both. `program_vs_handwritten_*` is what the recorded one reaches of the other's tokens a second.

It also prints how many seconds each kind of stage takes in both.
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.engine_cases.bench import Bench
from benchmarks.engine_run import Run, owners, seconds_of
from benchmarks.harness import alternate
from motet.domain import Digest
from motet_kernels.cpp import decoder, program
from motet_runner.execute import recorded
from motet_runner.execute.fused import CompiledForward

LEAST = 0.97
TRAFFIC = ("base", "distinct")


async def program_and_handwritten(bench: Bench) -> None:
    if "fused" not in bench.kernels:
        return
    given, handwritten = bench.given, bench.run("fused")
    with patch.object(recorded, "SWITCHED_ON", recorded.SWITCHED_ON - {*given.without}):
        ours = bench.run("program")
    for requests in given.requests:
        for traffic in TRAFFIC:
            adapters = owners(traffic, requests, bench.adapters)
            theirs, of_program = (seconds_of(run, requests, adapters) for run in (handwritten, ours))
            await theirs()
            await of_program()
            pairs = await alternate(theirs, of_program, pairs=given.pairs)
            bench.add_pairs(f"program_vs_handwritten_{traffic}_{requests}", pairs, "written by hand", LEAST)
            for name, run in (("written by hand", handwritten), ("recorded", ours)):
                of_stages = _seconds_of_stages(run, requests, adapters)
                print(f"  {name}: " + ", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in of_stages.items()))


def _seconds_of_stages(run: Run, requests: int, adapters: Sequence[Digest]) -> dict[str, float]:
    fused: Any = run.engine._loaded.fused
    one, kinds = (
        (fused._decoder, decoder.KINDS) if isinstance(fused, CompiledForward) else (fused._program, program.KINDS)
    )
    one.seconds = np.zeros(len(kinds))
    try:
        run.seconds(requests, adapters)
        return dict(zip(kinds, one.seconds.tolist(), strict=True))
    finally:
        one.seconds = None
