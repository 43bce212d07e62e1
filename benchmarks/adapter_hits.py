"""How often a request finds its adapter among those that are kept, over an eviction that knows the future: see
`benchmarks.adapters`. Nothing here reads a clock."""

from benchmarks.harness import Result
from testbed.adapter_uses import best_hits, hits, uses_of

LEAST = {"hits_15": (1.5, 0.965), "hits_10": (1.0, 0.78)}
"""The exponent of Zipf's law, and the least share"""


def measure_hits() -> list[Result]:
    results = []
    for name, (exponent, least) in LEAST.items():
        uses = uses_of(exponent)
        share = hits(uses) / best_hits(uses)
        results.append(Result(name, share, "of the best", f">= {least:g}", share >= least, counted=True))
    return results
