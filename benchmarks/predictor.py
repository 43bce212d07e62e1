"""Time to estimate a prompt's answer: the predictor as a process, asked over its Unix socket as a gateway asks it.

The budget is 2 ms for a prompt alone and 0.2 ms a prompt in a batch of 32 (docs: services/predictor/README.md). It has
learned 50,000 answers of 1,000 adapters, and before each call it learns one more answer per prompt, so that nothing it
could have kept from the call before is up to date.

    python -m benchmarks.predictor [--calls 300] [--json]
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from motet.api.v1 import predictor_pb2, predictor_pb2_grpc
from motet.rpc import is_healthy, open_channel
from motet.store import migrate

ADAPTERS, TENANTS, LEARNED = 1000, 20, 50_000
BUDGETS = {1: 2.0, 32: 0.2}
"""Milliseconds a prompt, by prompts in a call."""


def names(adapter: int) -> tuple[str, str]:
    tenant = f"tenant-{adapter % TENANTS}"
    return tenant, f"{tenant}/adapter-{adapter}"


def outcome(chance: random.Random, adapter: int) -> predictor_pb2.Outcome:
    tenant, name = names(adapter)
    # Each adapter has a typical length of its own, from 10 to some 2,000 tokens.
    tokens = int(chance.lognormvariate(2.3 + 5 * adapter / ADAPTERS, 0.7)) + 1
    return predictor_pb2.Outcome(request="r", tenant=tenant, adapter=name, output_tokens=tokens)


def prompt(adapter: int) -> predictor_pb2.Prompt:
    tenant, name = names(adapter)
    return predictor_pb2.Prompt(tenant=tenant, adapter=name, prompt_tokens=100, max_tokens=2048)


async def measure(address: str, batch: int, calls: int) -> list[float]:
    """Milliseconds a prompt, one figure per call."""
    chance = random.Random(batch)
    figures = []
    async with open_channel(address) as channel:
        stub: predictor_pb2_grpc.PredictorAsyncStub = predictor_pb2_grpc.PredictorStub(channel)
        for _ in range(calls):
            adapters = [chance.randrange(ADAPTERS) for _ in range(batch)]
            news = predictor_pb2.ObserveRequest(outcomes=[outcome(chance, adapter) for adapter in adapters])
            await stub.Observe(news, timeout=10)
            request = predictor_pb2.PredictRequest(prompts=[prompt(adapter) for adapter in adapters])
            started = time.perf_counter()
            await stub.Predict(request, timeout=10)
            figures.append((time.perf_counter() - started) * 1000 / batch)
    return figures


async def run(calls: int) -> dict[int, list[float]]:
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
                while not await is_healthy(address):  # noqa: ASYNC110 - it says so to nobody
                    await asyncio.sleep(0.05)
            chance = random.Random(1)
            async with open_channel(address) as channel:
                stub: predictor_pb2_grpc.PredictorAsyncStub = predictor_pb2_grpc.PredictorStub(channel)
                for _ in range(LEARNED // 1000):
                    learned = [outcome(chance, chance.randrange(ADAPTERS)) for _ in range(1000)]
                    await stub.Observe(predictor_pb2.ObserveRequest(outcomes=learned), timeout=30)
            await measure(address, 1, 20)
            return {batch: await measure(address, batch, calls) for batch in BUDGETS}
        finally:
            child.terminate()
            await child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    results = []
    for batch, figures in asyncio.run(run(arguments.calls)).items():
        median, p95 = statistics.median(figures), statistics.quantiles(figures, n=20)[-1]
        budget = BUDGETS[batch]
        print(f"{batch:3} prompts a call: {median:.3f} ms a prompt (p95 {p95:.3f}), budget {budget} ms")
        results.append(
            {
                "name": f"predict_batch_{batch}",
                "value": round(median, 4),
                "unit": "ms/prompt",
                "target": budget,
                "holds": median <= budget,
            }
        )
    if arguments.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        print(json.dumps({"benchmark": "predictor", "machine": machine, "results": results}))


if __name__ == "__main__":
    main()
