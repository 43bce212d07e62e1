"""Measures how long an estimate takes. The predictor is a process, and the calls are those of a gateway.

The targets are 2 ms for a single prompt and 0.2 ms per prompt for 32 prompts (see services/predictor/README.md). The
predictor has learned 50,000 answers of 1,000 adapters. Before each call it learns one more answer per prompt: so it
cannot answer from a cache. The baseline is a health check: the same process and Unix socket, but no work.

    python -m benchmarks.predictor [--calls 50] [--pairs 8] [--json]
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness import Result, alternate, arguments, percentile, report
from motet.api.v1 import predictor_pb2, predictor_pb2_grpc
from motet.store import migrate
from motet.transport.over_grpc import is_healthy, open_channel

ADAPTERS, TENANTS, LEARNED = 1000, 20, 50_000
BUDGETS = {1: 2.0, 32: 0.2}
"""Milliseconds per prompt, by the number of prompts in a call."""


def names(adapter: int) -> tuple[str, str]:
    tenant = f"tenant-{adapter % TENANTS}"
    return tenant, f"{tenant}/adapter-{adapter}"


def outcome(chance: random.Random, adapter: int) -> predictor_pb2.Outcome:
    tenant, name = names(adapter)
    # Each adapter has its own typical length, from 10 to about 2,000 tokens.
    tokens = int(chance.lognormvariate(2.3 + 5 * adapter / ADAPTERS, 0.7)) + 1
    return predictor_pb2.Outcome(request="r", tenant=tenant, adapter=name, output_tokens=tokens)


def prompt(adapter: int) -> predictor_pb2.Prompt:
    tenant, name = names(adapter)
    return predictor_pb2.Prompt(tenant=tenant, adapter=name, prompt_tokens=100, max_tokens=2048)


async def ms_a_check(stub: "health_pb2_grpc.HealthAsyncStub", calls: int) -> float:
    """The median time of `calls` health checks."""
    figures = []
    for _ in range(calls):
        started = time.perf_counter()
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        figures.append((time.perf_counter() - started) * 1000)
    return percentile(figures, 0.5)


async def ms_a_prompt(stub: "predictor_pb2_grpc.PredictorAsyncStub", batch: int, calls: int) -> float:
    """The median time of `calls` calls with `batch` prompts each."""
    chance = random.Random(batch)
    figures = []
    for _ in range(calls):
        adapters = [chance.randrange(ADAPTERS) for _ in range(batch)]
        news = predictor_pb2.ObserveRequest(outcomes=[outcome(chance, adapter) for adapter in adapters])
        await stub.Observe(news, timeout=10)
        request = predictor_pb2.PredictRequest(prompts=[prompt(adapter) for adapter in adapters])
        started = time.perf_counter()
        await stub.Predict(request, timeout=10)
        figures.append((time.perf_counter() - started) * 1000 / batch)
    return percentile(figures, 0.5)


@asynccontextmanager
async def predictor() -> AsyncIterator[tuple[psutil.Process, grpc.aio.Channel]]:
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        address = f"unix:{folder}/p.sock"
        await migrate(f"sqlite+aiosqlite:///{folder}/motet.db")
        environment = os.environ | {"MOTET_DATA_DIR": folder, "MOTET_PREDICTOR_ADDRESS": address}
        with (Path(folder) / "predictor.log").open("w") as log:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "motet_predictor", env=environment, stderr=log
            )
        try:
            async with asyncio.timeout(30):
                while not await is_healthy(address):  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.05)
            async with open_channel(address) as channel:
                yield psutil.Process(child.pid), channel
        finally:
            child.terminate()
            await child.wait()


async def measure(calls: int, pairs: int) -> list[Result]:
    async with predictor() as (process, channel):
        stub, health = predictor_pb2_grpc.PredictorStub(channel), health_pb2_grpc.HealthStub(channel)
        chance = random.Random(1)
        for _ in range(LEARNED // 1000):
            learned = [outcome(chance, chance.randrange(ADAPTERS)) for _ in range(1000)]
            await stub.Observe(predictor_pb2.ObserveRequest(outcomes=learned), timeout=30)
        await ms_a_prompt(stub, 1, 20)
        results = []
        for batch, budget in BUDGETS.items():
            both = await alternate(
                partial(ms_a_prompt, stub, batch, calls), partial(ms_a_check, health, calls), pairs=pairs, own=[process]
            )
            print(f"a prompt, {batch} in a call, against a health check: {both}")
            figure, target = percentile(both.a, 0.5), f"<= {budget} ms a prompt"
            results.append(
                Result(f"predict_batch_{batch}", figure, "ms", target, figure <= budget, "a health check", both)
            )
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=int, default=50, help="calls per figure")
    parser.add_argument("--pairs", type=int, default=8, help="quiet pairs to measure")
    given = parser.parse_args()
    report("predictor", asyncio.run(measure(given.calls, given.pairs)), as_json=given.json)


if __name__ == "__main__":
    main()
