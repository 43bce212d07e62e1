"""Estimates: from the predictor within a time limit, or else from the gateway; no request waits for longer."""

import asyncio
import gc
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, predictor_pb2, scheduler_pb2
from motet.clock import monotonic
from motet.length_statistics import LengthStatistics
from motet.transport import UnaryMethod
from motet.transport.methods import PREDICT
from motet.transport.over_grpc import GrpcNetwork
from motet_gateway import estimator
from motet_gateway.estimator import KEPT_OUTCOMES, MIN_ANSWERS, PROMPTS_AT_ONCE, LocalLengths
from motet_gateway.identity.caller import ANONYMOUS
from motet_gateway.metrics import Metrics
from testbed.fake_services import FakeServices, fake_services
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


async def test_a_mistake_of_our_own_is_not_taken_for_a_predictor_that_is_away(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An estimate of the wrong kind once went unnoticed, because whatever was raised was suppressed."""

    def mistaken(_: object) -> None:
        raise TypeError("a model of the wrong class")

    assert await length_header(served) == "model:v1"
    monkeypatch.setattr(estimator, "_check", mistaken)
    with pytest.raises(TypeError, match="wrong class"):
        await served.gateway.estimator.estimate([predictor_pb2.Prompt(max_tokens=50)])
    assert not served.gateway.estimator.up, "later requests do not wait for it"


async def test_requests_that_arrive_together_share_calls(served: Served) -> None:
    served.cluster.predictor.slow_seconds = 0.1
    await asyncio.gather(*(length_header(served) for _ in range(30)))
    assert served.cluster.predictor.asked < 20


async def test_many_that_arrive_together_share_calls_of_bounded_size(cluster: FakeServices) -> None:
    async with serve(cluster, predict_budget_seconds=10) as served:
        prompts = [predictor_pb2.Prompt(request=f"{n}", tenant="acme", max_tokens=50) for n in range(500)]
        estimator, requests = served.gateway.estimator, [[prompt] for prompt in prompts[:300]] + [prompts[300:]]
        found = await asyncio.gather(*map(estimator.estimate, requests))
    assert [len(some) for some in found] == [1] * 300 + [200]
    assert all(estimate.source == "model:v1" for some in found for estimate in some)
    assert max(cluster.predictor.calls) == PROMPTS_AT_ONCE
    assert sum(cluster.predictor.calls) == 500


async def test_a_request_with_many_prompts_takes_the_predictor_from_nobody(cluster: FakeServices) -> None:
    async with serve(cluster, predict_budget_seconds=0.5) as served:
        estimator, cluster.predictor.slow_seconds_a_prompt = served.gateway.estimator, 0.00625
        prompt = predictor_pb2.Prompt(tenant="acme", max_tokens=50)
        many, one = await asyncio.gather(estimator.estimate([prompt] * 128), estimator.estimate([prompt]))
        sources = [estimate.source for estimate in many]
        assert len(sources) == 128
        assert (sources[0], sources[-1], one[0].source) == ("model:v1", "max_tokens", "model:v1")
        assert sources == sorted(sources, reverse=True), "what the predictor has not answered in time comes last"
        await eventually(lambda: cluster.predictor.answered == cluster.predictor.asked)
        assert estimator.up


async def test_who_waits_in_vain_behind_others_does_not_make_the_predictor_count_as_away(cluster: FakeServices) -> None:
    async with serve(cluster, predict_budget_seconds=1.0) as served:
        cluster.predictor.slow_seconds = 0.6
        prompts = [predictor_pb2.Prompt(tenant="acme", max_tokens=50)] * PROMPTS_AT_ONCE
        found = await asyncio.gather(*(served.gateway.estimator.estimate(prompts) for _ in range(2)))
        assert [some[0].source for some in found] == ["model:v1", "max_tokens"]
        await eventually(lambda: cluster.predictor.answered == 2)
        assert served.gateway.estimator.up


@pytest.mark.parametrize(
    "answer",
    [
        common_pb2.Estimate(q50=0, q80=20, q90=30, q95=40),
        common_pb2.Estimate(q50=10, q80=20, q90=19, q95=40),
        common_pb2.Estimate(q50=10, q80=20, q90=30, q95=40, rank=nan),
        common_pb2.Estimate(q50=10, q80=20, q90=30, q95=40, rank=inf),
    ],
    ids=["zero", "falling", "not a number", "infinite"],
)
async def test_an_estimate_that_no_lengths_have_is_not_used(served: Served, answer: common_pb2.Estimate) -> None:
    assert await length_header(served) == "model:v1"
    served.cluster.predictor.answer = answer
    assert await length_header(served) == "max_tokens"


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


async def test_a_namespace_that_is_made_again_does_not_begin_with_lengths_of_the_one_before(
    cluster: FakeServices,
) -> None:
    predictor, scheduler = cluster.predictor, cluster.scheduler
    scheduler.namespaces = {ANONYMOUS.tenant: "first"}
    async with serve(cluster) as served:
        for _ in range(MIN_ANSWERS):
            await length_header(served)
        await eventually(lambda: len(predictor.outcomes) == MIN_ANSWERS)
        await predictor.stop()
        assert await length_header(served) == "tenant"
        before = served.gateway.catalog.current
        scheduler.namespaces = {ANONYMOUS.tenant: "second"}
        scheduler.publish()
        await eventually(lambda: served.gateway.catalog.current is not before)
        assert await length_header(served) == "max_tokens"
    first = {f"{ANONYMOUS.tenant}@first"}
    assert {one.tenant for one in predictor.prompts} == {one.tenant for one in predictor.outcomes} == first


async def test_each_base_model_of_a_tenant_has_lengths_and_features_of_its_own() -> None:
    async with fake_services(runners=2) as cluster:
        predictor, scheduler = cluster.predictor, cluster.scheduler
        (tiny,) = scheduler.catalog().groups
        cluster.runners[1].base_digest = f"sha256:{7:064x}"
        large = scheduler_pb2.CatalogGroup()
        large.CopyFrom(tiny)
        large.group, large.served_name, large.base_digest = "p/large", "large", cluster.runners[1].base_digest
        scheduler.groups = [tiny, large]
        async with serve(cluster) as served:
            for model, runner in zip(("tiny", "large"), cluster.runners, strict=True):
                scheduler.places_at = runner
                await length_header(served, model=model)
            await eventually(lambda: len(predictor.outcomes) == 2)
        asked = [(one.tenant, one.adapter) for one in predictor.prompts]
        assert asked == [(ANONYMOUS.tenant, tiny.base_digest), (ANONYMOUS.tenant, large.base_digest)]
        assert [(one.tenant, one.adapter) for one in predictor.outcomes] == asked
        one, other = (set(prompt.features) for prompt in predictor.prompts)
        assert len(one) == len(other) > 5
        assert not one & other
        assert predictor.prompts[0].feature_space == predictor.prompts[1].feature_space


async def test_lengths_forced_by_ignore_eos_are_not_learned(served: Served) -> None:
    await length_header(served, ignore_eos=True)
    await length_header(served)
    await eventually(lambda: served.cluster.predictor.outcomes)
    assert len(served.cluster.predictor.outcomes) == 1


async def test_what_the_client_says_of_the_length_counts_more_than_what_was_learned(served: Served) -> None:
    """With ignore_eos each answer has max_tokens, and with min_tokens at least these."""
    assert await length_header(served, ignore_eos=True) == "max_tokens"
    await length_header(served, min_tokens=25)
    estimates = [request.estimate for request in served.cluster.scheduler.enqueued[-2:]]
    found = [(one.q50, one.q80, one.q90, one.q95) for one in estimates]
    assert found == [(50, 50, 50, 50), (25, 25, 30, 40)]


async def test_many_outcomes_are_sent_in_calls_that_end_in_time(cluster: FakeServices) -> None:
    """A call that takes too long would lose its outcomes, and the predictor would count as away."""
    cluster.predictor.slow_seconds_an_outcome = 0.0025
    async with serve(cluster) as served:
        estimator = served.gateway.estimator
        for number in range(400):
            estimator.observe(predictor_pb2.Outcome(request=f"{number}", tenant="acme", output_tokens=9))
        await eventually(lambda: len(cluster.predictor.outcomes) == 400)
        assert estimator.up


async def test_a_predictor_that_learns_slowly_still_estimates_and_learns_each_outcome_once(
    cluster: FakeServices,
) -> None:
    predictor = cluster.predictor
    predictor.slow_seconds_an_outcome = 0.02  # 1.3 s for a whole call
    async with serve(cluster) as served:
        estimator, was_down = served.gateway.estimator, False
        for number in range(100):
            estimator.observe(predictor_pb2.Outcome(request=f"{number}", tenant="acme", output_tokens=9))
        predictor.accepts_at_once = 20
        while len(predictor.outcomes) < 100:
            was_down |= not estimator.up
            await asyncio.sleep(0.01)
        assert not was_down
        assert await length_header(served) == "model:v1"
        assert [one.request for one in predictor.outcomes[:100]] == [f"{number}" for number in range(100)]


async def test_outcomes_of_a_call_that_took_too_long_are_sent_again(
    cluster: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predictor knows which it has learned."""
    monkeypatch.setattr("motet_gateway.estimator.OBSERVE_TIMEOUT_SECONDS", 0.2)
    cluster.predictor.slow_seconds_an_outcome = 1.0
    async with serve(cluster) as served:
        estimator = served.gateway.estimator
        for number in range(3):
            estimator.observe(predictor_pb2.Outcome(request=f"{number}", tenant="acme", output_tokens=9))
        await asyncio.sleep(1.0)
        assert estimator.up, "it may estimate"
        cluster.predictor.slow_seconds_an_outcome = 0.0
        await eventually(lambda: len(cluster.predictor.outcomes) == 3)
        assert served.registry.get_sample_value("motet_length_outcomes_lost_total") == 0


async def test_a_tenant_with_many_answers_takes_no_room_from_outcomes_of_the_others(
    served: Served,
) -> None:
    for number in range(10):
        served.gateway.estimator.observe(predictor_pb2.Outcome(tenant=f"{number}", output_tokens=9))
    for _ in range(KEPT_OUTCOMES):
        served.gateway.estimator.observe(predictor_pb2.Outcome(tenant="flood", output_tokens=1))
    assert served.registry.get_sample_value("motet_length_outcomes_lost_total") == 10
    await eventually(lambda: len(served.cluster.predictor.outcomes) == KEPT_OUTCOMES)
    assert {one.tenant for one in served.cluster.predictor.outcomes} == {"flood", *map(str, range(10))}


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


def test_an_estimate_of_our_own_goes_through_the_lengths_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the predictor is away, a request with 128 prompts takes 128 of them from everybody's event loop."""
    lengths, calls = LocalLengths(), []
    for tokens in range(1, 20):
        lengths.observe("t", "a", tokens, censored=tokens % 3 == 0)
    shares = LengthStatistics.bucket_shares
    monkeypatch.setattr(LengthStatistics, "bucket_shares", lambda *of: calls.append(of) or shares(*of))
    lengths.estimate("t", "a", 100)
    assert len(calls) == 1


async def test_an_answer_that_cannot_be_decoded_fails_no_request(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/p.sock"

    async def nonsense(request: predictor_pb2.PredictRequest) -> bytes:
        return b"\xff" if request.prompts else b""

    raw = UnaryMethod(PREDICT.path, PREDICT.up, bytes)
    async with GrpcNetwork().serving(address, {raw: nonsense}):
        metrics = Metrics(CollectorRegistry(), clock=monotonic)
        asking = estimator.Estimator(address, metrics, network=GrpcNetwork(), budget_seconds=5.0)
        running = asyncio.create_task(asking.run())
        await eventually(lambda: asking.up)
        (found,) = await asking.estimate([predictor_pb2.Prompt(tenant="t", adapter="a", max_tokens=9)])
        assert found == estimator.longest(9)
        assert not asking.up
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
