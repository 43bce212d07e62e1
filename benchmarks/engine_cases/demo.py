"""The bundled model: steps a second, against torch's kernels without a fused forward. Both have `motet up`'s data type.

It is so small that a step is all overhead.
"""

from argparse import Namespace
from pathlib import Path

import motet_cli
from benchmarks.engine_cases.bench import Bench
from benchmarks.engine_run import Run, make_run, owners
from benchmarks.harness import Measure, alternate, percentile
from motet.domain import Digest
from motet_runner.adapters.certification import certify

BUNDLED = Path(motet_cli.__file__).parent / "bundled"
STREAMS = 16
GAINED = 4.0


async def demo(bench: Bench) -> None:
    if "fused" not in bench.kernels:
        return
    given = Namespace(**(vars(bench.given) | {"dtype": "float32", "vocabulary": 1024, "prompt": 16}))
    ours, theirs = (make_run(BUNDLED / "model", given, how) for how in ("fused", "modules"))
    adapters = []
    for folder in sorted((BUNDLED / "adapters").iterdir()):
        adapters.append(Digest(f"sha256:{folder.name}"))
        for run in (ours, theirs):
            run.engine.load_adapter(adapters[-1], certify(folder, run.engine.info).layout)
    for name, kind, least in (("demo_steps", "base", GAINED), ("demo_steps_adapters", "distinct", None)):
        of_requests = owners(kind, STREAMS, adapters)
        a, b = _seconds_of_a_step(theirs, of_requests), _seconds_of_a_step(ours, of_requests)
        await a()
        await b()
        pairs = await alternate(a, b, pairs=given.pairs)
        bench.add_pairs(name, pairs, "torch's kernels and the modules", least)
        bench.add(f"{name}_a_second", 1 / percentile(pairs.b, 0.5), "steps/s")


def _seconds_of_a_step(run: Run, adapters: list[Digest]) -> Measure:
    async def measure() -> float:
        run.seconds(STREAMS, adapters)
        return sum(run.of_decodes) / len(run.of_decodes)

    return measure
