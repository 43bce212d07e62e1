"""What is counted of each answer: where its time went, and how its estimate and its promise compare with its length."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, runner_pb2
from motet.clock import FakeClock
from motet.errors import ModelNotFound
from motet.time_split import TimePart, TimeSplit
from motet_gateway.answers.metrics import MAX_TENANTS, AnswerMetrics
from motet_gateway.choice_record import ChoiceRecord
from tests.gateway.conftest import Served, eventually

ESTIMATE = common_pb2.Estimate(q50=10, q80=20, q90=30, q95=40)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"{name}_total", {"tenant": ""} | labels) or 0.0


def record(**of: int) -> ChoiceRecord:
    return ChoiceRecord(TimeSplit(TimePart.QUEUE, 0), **of)


def test_what_a_promise_had_too_much_and_too_little(registry):
    metrics = AnswerMetrics(registry, clock=FakeClock())
    for tokens in (10, 50, 90):
        metrics.count("a", record(promised_tokens=64), now=1, prompt_tokens=4, answer_tokens=tokens, estimate=None)
    metrics.count("a", record(parks=2), now=1, prompt_tokens=4, answer_tokens=0, estimate=None)
    assert value(registry, "motet_promised_tokens") == 3 * 64
    assert value(registry, "motet_promise_unused_tokens") == 51 + 11, "the last token needs no keys"
    assert value(registry, "motet_promise_exceeded_tokens") == 29
    assert value(registry, "motet_promises_exceeded") == 1
    assert value(registry, "motet_request_parks") == 2
    assert value(registry, "motet_estimates_judged") == 0


def test_coverage_counts_the_quantiles_that_were_long_enough(registry):
    metrics = AnswerMetrics(registry, clock=FakeClock())
    for tokens in (10, 11, 30, 41):
        metrics.count("a", record(), now=1, prompt_tokens=99, answer_tokens=tokens, estimate=ESTIMATE)
    assert value(registry, "motet_estimates_judged") == 4
    covered = [value(registry, "motet_estimates_covered", quantile=q) for q in ("q50", "q80", "q90", "q95")]
    assert covered == [1, 2, 3, 3]


@pytest.mark.parametrize(("names", "named"), [(0, 1), (7, 7 + 1), (1000, MAX_TENANTS + 1)])
def test_a_bounded_number_of_tenants_has_names_and_the_rest_is_one(registry, names, named):
    metrics = AnswerMetrics(registry, clock=FakeClock(), names=names)
    for number in range(2 * MAX_TENANTS):
        metrics.count(f"t{number}", record(parks=1), now=1, prompt_tokens=1, answer_tokens=1, estimate=ESTIMATE)
    found = {sample.labels["tenant"] for family in registry.collect() for sample in family.samples}
    assert len(found) == named
    counted = [one.value for one in metrics.parks.collect()[0].samples if one.name == "motet_request_parks_total"]
    assert sum(counted) == 2 * MAX_TENANTS


async def test_an_answer_is_counted_and_the_predictor_hears_where_its_time_went(served: Served) -> None:
    cluster, began = served.cluster, asyncio.get_running_loop().time()
    cluster.scheduler.holds = True
    body = {"model": "legal", "prompt": "Hi there", "max_tokens": 30}
    answer = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await eventually(lambda: cluster.scheduler.enqueued)
    await asyncio.sleep(0.2)
    cluster.scheduler.release()
    assert (await answer).status_code == 200
    whole = asyncio.get_running_loop().time() - began
    await eventually(lambda: cluster.predictor.outcomes)
    (outcome,) = cluster.predictor.outcomes
    split = outcome.split
    parts = split.queue_seconds, split.generation_seconds, split.penalty_seconds, split.overhead_seconds
    assert split.queue_seconds >= 0.2
    assert 0.2 <= sum(parts) <= whole
    assert outcome.promised_tokens > 0
    assert outcome.finish == common_pb2.FINISH_REASON_STOP
    for part, seconds in zip(TimePart, parts, strict=True):
        assert value(served.registry, "motet_request_split_seconds", part=part) == pytest.approx(seconds, abs=0.05)
    assert value(served.registry, "motet_promised_tokens") == outcome.promised_tokens
    assert value(served.registry, "motet_estimates_judged") == 1


async def test_max_tokens_in_place_of_an_estimate_is_not_judged(served: Served) -> None:
    await served.cluster.predictor.stop()
    body = {"model": "legal", "prompt": "Hi there", "max_tokens": 30}
    response = await served.http.post("/v1/completions", json=body)
    assert response.headers["x-motet-length"] == "max_tokens"
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert value(served.registry, "motet_promises") == 1, "it is counted"
    assert value(served.registry, "motet_estimates_judged") == 0


async def test_a_forced_length_is_not_judged(served: Served) -> None:
    body = {"model": "legal", "prompt": "Hi there", "max_tokens": 30, "ignore_eos": True, "stop": "there"}
    response = await served.http.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert value(served.registry, "motet_estimates_judged") == 0


async def test_the_time_in_the_queue_before_the_model_was_replaced_is_queue_time(served: Served) -> None:
    cluster = served.cluster
    cluster.scheduler.holds = True
    body = {"model": "legal", "prompt": "Hi there", "max_tokens": 30}
    answer = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await eventually(lambda: cluster.scheduler.enqueued)
    await asyncio.sleep(0.5)
    cluster.scheduler.adapters[0].digest = "sha256:" + "e" * 64
    cluster.scheduler.publish()
    cluster.scheduler.holds = False
    gone = ModelNotFound("this revision of the adapter is no longer served").to_proto()
    cluster.scheduler.say(cluster.scheduler.refusal(cluster.scheduler.enqueued[0].request, 0, gone))
    assert (await answer).status_code == 200
    assert len(cluster.scheduler.enqueued) == 2
    await eventually(lambda: cluster.predictor.outcomes)
    (outcome,) = cluster.predictor.outcomes
    assert outcome.split.queue_seconds >= 0.5


async def test_parks_that_a_runner_reports_are_counted_and_their_time_is_a_penalty(served: Served) -> None:
    (runner,) = served.cluster.runners[:1]
    runner.step_seconds = 0.05
    body = {"model": "legal", "prompt": "Hi there", "max_tokens": 8, "ignore_eos": True}
    answer = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await eventually(lambda: any(one.generation.delivered for one in served.gateway.dispatcher.choices.values()))
    (request,) = served.gateway.dispatcher.choices
    runner.progress.append(
        runner_pb2.SequenceProgress(request=request, epoch=1, state=common_pb2.SEQUENCE_STATE_PARKED)
    )
    assert (await answer).status_code == 200
    assert value(served.registry, "motet_request_parks") == 1
    assert value(served.registry, "motet_request_split_seconds", part="penalty") > 0
