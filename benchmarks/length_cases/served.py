"""How long an estimate takes. The predictor is a process, and the calls are those of a gateway.

It has learned answers of 1,000 adapters, and weights were fitted to them, which serve; two other versions estimate each
answer in shadow. Before each call it learns one more answer
per prompt: so it cannot answer from a cache. The baseline is a health check: the same process and Unix socket, but no
work. In the end it also writes to its database while a refit runs beside it.
"""

import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness import Result, alternate, percentile
from motet.api.v1 import predictor_pb2, predictor_pb2_grpc
from motet.store import migrate, open_store
from motet.transport.over_grpc import is_healthy, open_channel
from motet_predictor.__main__ import WEIGHTS_FILE
from motet_predictor.fitted_bytes import MAX_FITTED_BYTES, take_file
from motet_predictor.kept_versions import KeptVersions
from motet_predictor.length_model import LengthModel
from motet_predictor.prompt_model import PromptModel
from motet_predictor.refits import COMMAND, ONE_THREAD

ADAPTERS, TENANTS, LEARNED = 1000, 20, 10_000
FEATURES, DIFFERENT = 200, 50_000
BUDGETS = {1: 2.0, 32: 0.2}
"""Milliseconds per prompt, by the number of prompts in a call."""
P99_MS, ASKED, PAUSE = 5.0, 1500, 0.01
SPACE = 7


_NUMBERS = itertools.count()
"""Of requests"""


class Prompts:
    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._numbers = np.random.default_rng(seed)

    def features(self) -> list[int]:
        return [int(one) for one in np.unique((self._numbers.random(FEATURES) ** 3 * DIFFERENT).astype(np.uint32))]

    def adapters(self, count: int) -> list[int]:
        return [self._chance.randrange(ADAPTERS) for _ in range(count)]

    def outcome(self, adapter: int) -> predictor_pb2.Outcome:
        tenant, name = names(adapter)
        # Each adapter has its own typical length, from 10 to about 2,000 tokens.
        tokens = int(self._chance.lognormvariate(2.3 + 5 * adapter / ADAPTERS, 0.7)) + 1
        return predictor_pb2.Outcome(
            request=f"r{next(_NUMBERS)}",
            tenant=tenant,
            adapter=name,
            output_tokens=tokens,
            features=self.features(),
            feature_space=SPACE,
        )

    def outcomes(self, adapters: list[int]) -> predictor_pb2.ObserveRequest:
        return predictor_pb2.ObserveRequest(outcomes=[self.outcome(adapter) for adapter in adapters])

    def prompts(self, adapters: list[int]) -> predictor_pb2.PredictRequest:
        found = predictor_pb2.PredictRequest()
        for adapter in adapters:
            tenant, name = names(adapter)
            found.prompts.add(
                tenant=tenant,
                adapter=name,
                prompt_tokens=100,
                max_tokens=2048,
                features=self.features(),
                feature_space=SPACE,
            )
        return found


def names(adapter: int) -> tuple[str, str]:
    tenant = f"tenant-{adapter % TENANTS}"
    return tenant, f"{tenant}/adapter-{adapter}"


async def teach(stub: "predictor_pb2_grpc.PredictorAsyncStub", request: predictor_pb2.ObserveRequest) -> None:
    """All outcomes. Of a long call the predictor learns a part, and says how many."""
    while request.outcomes:
        answer = await stub.Observe(request, timeout=30)
        del request.outcomes[: answer.accepted]


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
    made, figures = Prompts(batch), []
    for _ in range(calls):
        adapters = made.adapters(batch)
        await teach(stub, made.outcomes(adapters))
        request = made.prompts(adapters)
        started = time.perf_counter()
        answer = await stub.Predict(request, timeout=10)
        figures.append((time.perf_counter() - started) * 1000 / batch)
        assert answer.model_version.startswith("prompts"), "it has no weights"
    return percentile(figures, 0.5)


async def p99_while_saving(
    stub: "predictor_pb2_grpc.PredictorAsyncStub", refit: list[str], environment: dict[str, str]
) -> float:
    """Of single prompts, while others' answers arrive and are written, and weights are fitted again."""
    made, figures = Prompts(99), []
    # Before the clock runs: to make them takes this process longer than the predictor takes for its answer.
    answers = [made.outcomes(made.adapters(10)) for _ in range(ASKED // 5)]
    requests = [made.prompts(made.adapters(1)) for _ in range(ASKED)]
    child = await asyncio.create_subprocess_exec(*refit, env=environment | ONE_THREAD)

    async def learn() -> None:
        for outcomes in itertools.cycle(answers):
            await stub.Observe(outcomes, timeout=10)
            await asyncio.sleep(5 * PAUSE)

    learning = asyncio.create_task(learn())
    try:
        for request in requests:
            started = time.perf_counter()
            await stub.Predict(request, timeout=10)
            figures.append((time.perf_counter() - started) * 1000)
            await asyncio.sleep(PAUSE)
    finally:
        learning.cancel()
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    return percentile(figures, 0.99)


async def keep_two(url: str, weights: bytes) -> None:
    """Keep what was fitted as the version that serves, and as a candidate: so each answer is estimated three times."""
    async with open_store(url) as store:
        model = PromptModel(LengthModel())
        versions = KeptVersions(store, model, time.monotonic)
        await versions.flush(0)
        for number in range(2):
            await versions.offer(weights)
            candidate = model.versions.candidate
            assert candidate is not None
            if not number:
                model.versions.serve(candidate)
        await versions.flush(3 * MAX_FITTED_BYTES)


@asynccontextmanager
async def predictor(environment: dict[str, str]) -> AsyncIterator[tuple[psutil.Process, grpc.aio.Channel]]:
    address = environment["MOTET_PREDICTOR_ADDRESS"]
    with (Path(environment["MOTET_DATA_DIR"]) / "predictor.log").open("a") as log:
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
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        await migrate(f"sqlite+aiosqlite:///{folder}/motet.db")
        environment = os.environ | {
            "MOTET_DATA_DIR": folder,
            "MOTET_PREDICTOR_ADDRESS": f"unix:{folder}/p.sock",
            "MOTET_PREDICTOR_REFIT_ANSWERS": "1000000000",
        }
        refit = [*COMMAND, f"{folder}/{WEIGHTS_FILE}", str(os.getpid())]
        made = Prompts(1)
        async with predictor(environment) as (_, channel):
            stub = predictor_pb2_grpc.PredictorStub(channel)
            for _ in range(LEARNED // 500):
                await teach(stub, made.outcomes(made.adapters(500)))
        fitting = await asyncio.create_subprocess_exec(*refit, env=environment)
        assert await fitting.wait() == 0
        await keep_two(f"sqlite+aiosqlite:///{folder}/motet.db", take_file(Path(folder) / WEIGHTS_FILE))
        async with predictor(environment) as (process, channel):
            stub, health = predictor_pb2_grpc.PredictorStub(channel), health_pb2_grpc.HealthStub(channel)
            await ms_a_prompt(stub, 1, 20)
            results = []
            for batch, budget in BUDGETS.items():
                both = await alternate(
                    partial(ms_a_prompt, stub, batch, calls),
                    partial(ms_a_check, health, calls),
                    pairs=pairs,
                    own=[process],
                )
                print(f"a prompt, {batch} in a call, against a health check: {both}")
                figure, target = percentile(both.a, 0.5), f"<= {budget} ms a prompt"
                results.append(
                    Result(f"predict_ms_{batch}", figure, "ms", target, figure <= budget, "a health check", both)
                )
            figure = await p99_while_saving(stub, refit, environment)
            return [*results, Result("predict_ms_p99_saving", figure, "ms", f"<= {P99_MS}", figure <= P99_MS)]
