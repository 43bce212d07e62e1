"""Estimates: from the predictor within a time limit, or else from the gateway; no request waits for longer."""

import asyncio
import gc
from typing import Any

from motet_gateway.estimator import LocalLengths
from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, eventually, serve


async def length_header(served: Served, model: str = "legal", **more) -> str:
    body = {"model": model, "prompt": "Hi", "max_tokens": 50} | more
    return (await served.http.post("/v1/completions", json=body)).headers["x-motet-length"]


async def test_the_source_follows_the_predictor_away_and_back(served: Served) -> None:
    assert await length_header(served) == "model:v1"
    await served.cluster.predictor.stop()
    assert await length_header(served) == "max_tokens"
    for _ in range(5):
        await length_header(served)
    assert await length_header(served) == "tenant"
    assert await length_header(served, model="acme/sql") == "max_tokens"
    await served.cluster.predictor.start()
    await eventually(lambda: served.gateway.estimator.up)
    assert await length_header(served) == "model:v1"


async def test_a_slow_predictor_costs_its_budget_once(cluster: FakeServices) -> None:
    async with serve(cluster, predict_budget_seconds=0.2) as served:
        cluster.predictor.slow_seconds = 3600
        await asyncio.gather(*(length_header(served) for _ in range(10)))
        asked = cluster.predictor.asked
        for _ in range(10):
            await length_header(served)
        assert cluster.predictor.asked == asked, "what is away is not waited for again"
        assert not served.gateway.estimator.up
        cluster.predictor.slow_seconds = 0
        await eventually(lambda: served.gateway.estimator.up)


async def test_requests_behind_a_failing_call_are_answered_without_another_call(cluster: FakeServices) -> None:
    crashed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: crashed.append(context))
    async with serve(cluster, predict_budget_seconds=0.3) as served:
        cluster.predictor.slow_seconds = 3600
        first = asyncio.create_task(length_header(served))
        await eventually(lambda: cluster.predictor.asked)
        second = asyncio.create_task(length_header(served))
        assert [await first, await second] == ["max_tokens", "max_tokens"]
        assert cluster.predictor.asked == 1
    gc.collect()  # asyncio logs an exception that was not retrieved
    assert crashed == []


async def test_requests_that_arrive_together_share_calls(served: Served) -> None:
    served.cluster.predictor.slow_seconds = 0.1
    await asyncio.gather(*(length_header(served) for _ in range(30)))
    assert served.cluster.predictor.asked < 20


async def test_the_estimate_reaches_the_scheduler_and_never_exceeds_the_limit(served: Served) -> None:
    await length_header(served, max_tokens=25)
    estimate = served.cluster.scheduler.enqueued[-1].estimate
    assert (estimate.q50, estimate.q80, estimate.q90, estimate.q95) == (10, 20, 25, 25)
    assert estimate.source == "model:v1"


async def test_true_lengths_are_reported_with_the_estimate(served: Served) -> None:
    await length_header(served)
    await length_header(served, max_tokens=1)
    outcomes = served.cluster.predictor.outcomes
    await eventually(lambda: len(outcomes) == 2)
    assert [outcome.censored for outcome in outcomes] == [False, True]
    assert outcomes[0].adapter == "default/legal"
    assert outcomes[0].output_tokens == outcomes[0].prompt_tokens + 1
    assert outcomes[0].estimate.q95 == 40


async def test_lengths_forced_by_ignore_eos_are_not_learned(served: Served) -> None:
    await length_header(served, ignore_eos=True)
    await length_header(served)
    await eventually(lambda: served.cluster.predictor.outcomes)
    assert len(served.cluster.predictor.outcomes) == 1


async def test_outcomes_wait_for_a_predictor_that_is_away(served: Served) -> None:
    await served.cluster.predictor.stop()
    await length_header(served)
    await served.cluster.predictor.start()
    await eventually(lambda: served.cluster.predictor.outcomes)
    assert len(served.cluster.predictor.outcomes) == 1


def test_our_own_statistics_count_after_five_answers() -> None:
    lengths = LocalLengths()
    for _ in range(4):
        lengths.observe("t", "a", 12, censored=False)
    assert lengths.estimate("t", "a", 100).source == "max_tokens"
    lengths.observe("t", "a", 12, censored=False)
    estimate = lengths.estimate("t", "a", 100)
    assert estimate.source == "tenant"
    assert estimate.q50 <= estimate.q80 <= estimate.q90 <= estimate.q95 < 100
    assert lengths.estimate("t", "a", 5).q95 == 5
