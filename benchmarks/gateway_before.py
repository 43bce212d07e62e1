"""Measures the gateway against itself at an earlier commit: the same requests to both, and the same fake services.

A result is the CPU time of today's gateway for a request, as a multiple of the earlier one's: `gateway_vs_before` for
whole answers of 16 tokens, `gateway_vs_before_stream` for streams of 16 events, and `gateway_vs_before_long_stream` for
streams of 128 events, nearly all of whose time is that of tokens.

The commit's tree lies beside this one's only while this runs.

    python -m benchmarks.gateway_before COMMIT [--requests 800] [--pairs 8] [--json]
"""

import argparse
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.earlier_tree import environment_of
from benchmarks.gateway import (
    BODY,
    CONNECTIONS,
    CpuPerRequest,
    connections,
    ready_gateway,
    saturate,
    services_process,
)
from benchmarks.harness import Result, alternate, arguments, report, skip

LONG = 128
TURNS = 10
"""Of each side in a pair, one after the other: other processes make the same request cost a third more for a while."""
MOST = 1.03


BODIES: dict[str, dict[str, Any]] = {
    "gateway_vs_before": BODY,
    "gateway_vs_before_stream": BODY | {"stream": True},
    "gateway_vs_before_long_stream": BODY | {"stream": True, "max_tokens": LONG, "min_tokens": LONG},
}


async def gateway(
    addresses: dict[str, str], stack: AsyncExitStack, environment: dict[str, str]
) -> tuple[psutil.Process, int]:
    process, port = await stack.enter_async_context(ready_gateway(**environment, **addresses))
    return psutil.Process(process.pid), port


async def measure(commit: str, requests: int, pairs: int) -> list[Result]:
    async with AsyncExitStack() as stack:
        tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-before-")))
        environment = environment_of(commit, tree)
        cluster, addresses = await stack.enter_async_context(services_process())
        gateways = [await gateway(addresses, stack, of) for of in ({}, environment)]
        own = [*(process for process, _ in gateways), psutil.Process(cluster.pid)]
        results = []
        for name, body in BODIES.items():
            async with AsyncExitStack() as opened:  # anew: idle ones are closed
                costs = []
                for process, port in gateways:
                    to = await opened.enter_async_context(connections(port, body))
                    await saturate(to, 10 * CONNECTIONS)  # warm
                    costs.append(CpuPerRequest(process, to, requests // TURNS))
                found = await alternate(*costs, pairs=pairs, own=own, turns=TURNS)
            print(f"{name}: {found}", flush=True)
            results.append(
                Result(name, found.ratio, "x", f"<= {MOST}", found.ratio <= MOST, f"gateway of {commit}", found)
            )
        return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("commit", nargs="?", help="of this repository, whose gateway is the baseline")
    parser.add_argument("--requests", type=int, default=800, help="requests per figure")
    parser.add_argument("--pairs", type=int, default=8, help="quiet pairs to measure")
    given: argparse.Namespace = parser.parse_args()
    if given.commit is None:
        skip("name the commit to compare with: python -m benchmarks.gateway_before COMMIT")
    report("gateway_before", uvloop.run(measure(given.commit, given.requests, given.pairs)), as_json=given.json)


if __name__ == "__main__":
    main()
