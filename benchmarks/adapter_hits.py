"""How often a request finds its adapter among those that are kept, over an eviction that knows the future: see
`benchmarks.adapters`. Nothing here reads a clock."""

from benchmarks.harness import Result
from testbed.adapter_uses import best_hits, hits_on_device, hits_on_disk, uses_of

KEPT = {"hits": hits_on_device, "disk_hits": hits_on_disk}
LEAST = {"15": (1.5, 0.965), "10": (1.0, 0.78)}
"""The exponent of Zipf's law, and the least share"""


def measure_hits() -> list[Result]:
    results = []
    for suffix, (exponent, least) in LEAST.items():
        uses = uses_of(exponent)
        best = best_hits(uses)
        for name, hits in KEPT.items():
            share = hits(uses) / best
            result = Result(f"{name}_{suffix}", share, "of the best", f">= {least:g}", share >= least, counted=True)
            results.append(result)
    return results
