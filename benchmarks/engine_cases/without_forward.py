"""What torch's forward pass of few operators earns: what modules with packed linears reach of its tokens a second."""

from benchmarks.engine_cases.bench import Bench
from benchmarks.engine_run import owners, seconds_of
from benchmarks.harness import alternate

TRAFFIC = ("base", "distinct")


async def without_forward(bench: Bench) -> None:
    if "torch" not in bench.kernels:
        return
    given, whole, modules = bench.given, bench.run("torch"), bench.run("packed")
    for requests in given.requests:
        for traffic in TRAFFIC:
            adapters = owners(traffic, requests, bench.adapters)
            theirs, ours = (seconds_of(run, requests, adapters) for run in (whole, modules))
            await theirs()
            await ours()
            pairs = await alternate(theirs, ours, pairs=given.pairs)
            bench.add_pairs(f"torch_without_forward_{traffic}_{requests}", pairs, "torch's own forward pass")
