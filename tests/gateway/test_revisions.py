"""An adapter or a base model is replaced while requests are between two steps: clients without tokens do not notice."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motet.api.v1 import scheduler_pb2
from motet.errors import BaseModelReplaced, ModelNotFound
from testbed.fake_services import BASE_DIGEST, FakeServices, assets_digest, byte_tokenizer, model_assets
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import Served, eventually, serve

NEW = "sha256:" + "e" * 64


@pytest.fixture
async def patient(cluster: FakeServices) -> AsyncIterator[Served]:
    """Its estimator takes so long: a request waits between the look-up of its name and the queue."""
    async with serve(cluster, predict_budget_seconds=5) as served:
        cluster.predictor.slow_seconds = 0.2
        yield served


def switch(cluster: FakeServices, digest: str) -> None:
    adapter = cluster.scheduler.adapters[0]
    cluster.scheduler.retired.add(adapter.digest)
    adapter.digest = digest


def post(served: Served, **more: Any) -> Any:
    body = {"model": "legal", "prompt": "The quick", "max_tokens": 4} | more
    return asyncio.create_task(served.http.post("/v1/completions", json=body))


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stream": True}], ids=["one", "choices", "stream"])
async def test_a_revision_change_during_the_estimate_is_not_visible(patient: Served, more: dict[str, Any]) -> None:
    cluster = patient.cluster
    asked = cluster.predictor.asked
    answers = [post(patient, **more) for _ in range(4)]
    await eventually(lambda: cluster.predictor.asked > asked)
    switch(cluster, NEW)
    cluster.scheduler.publish()
    for answer in await asyncio.gather(*answers):
        assert answer.status_code == 200
        assert answer.text.count('"finish_reason":"stop"') == more.get("n", 1)
    assert {submit.adapter_digest for submit in cluster.runners[0].submits} == {NEW}
    assert patient.gateway.dispatcher.live == 0


async def test_a_refusal_that_comes_before_the_catalog_waits_for_it(patient: Served) -> None:
    cluster = patient.cluster
    switch(cluster, NEW)
    answer = post(patient)
    await eventually(lambda: cluster.scheduler.enqueued)
    await eventually(lambda: patient.gateway.listeners)  # it waits for another catalog
    assert not answer.done()
    cluster.scheduler.publish()
    assert (await answer).status_code == 200
    assert [enqueue.adapter_digest for enqueue in cluster.scheduler.enqueued][1:] == [NEW]


async def test_the_scores_of_a_prompt_that_comes_back_are_counted_once(patient: Served) -> None:
    cluster, bodies = patient.cluster, patient.gateway.bodies
    cluster.predictor.slow_seconds = 0
    switch(cluster, NEW)
    answer = post(patient, prompt="The quick brown fox" * 10, echo=True, logprobs=5)
    await eventually(lambda: patient.gateway.listeners)  # it waits for another catalog
    held = bodies.held
    cluster.scheduler.holds = True
    cluster.scheduler.publish()
    await eventually(lambda: len(cluster.scheduler.enqueued) == 2)
    assert bodies.held == held > 0
    answer.cancel()


async def test_an_adapter_that_is_deleted_meanwhile_is_not_found(patient: Served) -> None:
    cluster = patient.cluster
    switch(cluster, NEW)
    answer = post(patient)
    await eventually(lambda: cluster.scheduler.enqueued)
    del cluster.scheduler.adapters[0]
    cluster.scheduler.publish()
    assert (await answer).status_code == 404


async def test_a_name_is_looked_up_a_limited_number_of_times(patient: Served) -> None:
    cluster = patient.cluster
    cluster.predictor.slow_seconds = 0
    cluster.scheduler.refuses = ModelNotFound("this revision of the adapter is no longer served").to_proto()
    answer = post(patient)
    for number in range(1, 5):
        await eventually(lambda seen=number: len(cluster.scheduler.enqueued) == seen)
        switch(cluster, "sha256:" + format(1000 + number, "064x"))
        cluster.scheduler.publish()
    assert (await answer).status_code == 404
    assert len({enqueue.request for enqueue in cluster.scheduler.enqueued}) == 4


async def test_a_request_names_the_base_model_that_it_was_tokenised_for(served: Served) -> None:
    assert (await post(served, model="tiny")).status_code == 200
    cluster = served.cluster
    assert [enqueue.base_digest for enqueue in cluster.scheduler.enqueued] == [BASE_DIGEST]
    assert [submit.base_digest for submit in cluster.runners[0].submits] == [BASE_DIGEST]
    cluster.runners[0].silent = True
    answer = post(served, model="tiny")
    await eventually(lambda: cluster.runners[0].running)
    hellos = len(cluster.scheduler.hellos)
    await cluster.scheduler.restart()
    await eventually(lambda: len(cluster.scheduler.hellos) > hellos)
    assert [live.base_digest for live in cluster.scheduler.hellos[-1].live] == [BASE_DIGEST]
    cluster.runners[0].silent = False
    cluster.runners[0].work.set()
    assert (await answer).status_code == 200


def change_base(cluster: FakeServices) -> None:
    """The group's runner gets other weights, and another tokenizer."""
    runner = cluster.runners[0]
    runner.assets = model_assets(vocabulary=260)
    runner.base_digest, runner.asset_digest = NEW, assets_digest(runner.assets)
    cluster.scheduler.publish()


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stream": True}], ids=["one", "choices", "stream"])
async def test_a_waiting_request_is_tokenised_again_for_the_base_model_that_replaces_its_own(
    served: Served, more: dict[str, Any]
) -> None:
    cluster = served.cluster
    cluster.scheduler.holds = True
    answer = post(served, model="tiny", **more)
    await eventually(lambda: cluster.scheduler.enqueued)
    change_base(cluster)
    waiting = list(cluster.scheduler.enqueued)
    await eventually(lambda: served.gateway.assets.get(cluster.runners[0].asset_digest))
    cluster.scheduler.holds = False
    for enqueue in waiting:
        cluster.scheduler.refuse_replaced(enqueue.request)
    assert (await answer).status_code == 200
    again = cluster.scheduler.enqueued[len(waiting) :]
    assert {enqueue.base_digest for enqueue in again} == {NEW}
    assert all(one.age_seconds > before.age_seconds for one, before in zip(again, waiting, strict=True))
    assert all(one.deadline_seconds < before.deadline_seconds for one, before in zip(again, waiting, strict=True))
    assert {one.whole_deadline_seconds for one in (*again, *waiting)} == {waiting[0].whole_deadline_seconds}
    assert waiting[0].whole_deadline_seconds >= waiting[0].deadline_seconds
    assert {tuple(submit.prompt_ids) for submit in cluster.runners[0].submits} == {
        tuple(byte_tokenizer(260).encode("The quick").ids)
    }
    assert byte_tokenizer(260).encode("The quick").ids != byte_tokenizer().encode("The quick").ids


async def test_a_base_model_that_comes_back_is_used_again(served: Served) -> None:
    """The request was refused while another base model was there, whose tokenizer no runner has sent yet."""
    cluster, runner = served.cluster, served.cluster.runners[0]
    cluster.scheduler.holds = True
    answer = post(served, model="tiny")
    await eventually(lambda: cluster.scheduler.enqueued)
    before = runner.base_digest, runner.asset_digest
    runner.base_digest, runner.asset_digest = NEW, ""
    cluster.scheduler.publish()
    cluster.scheduler.refuse_replaced(cluster.scheduler.enqueued[0].request)
    await eventually(lambda: served.gateway.held)
    runner.base_digest, runner.asset_digest = before
    cluster.scheduler.holds = False
    cluster.scheduler.publish()
    await eventually(answer.done)
    assert answer.result().status_code == 200
    assert [enqueue.base_digest for enqueue in cluster.scheduler.enqueued] == [BASE_DIGEST] * 2


@pytest.mark.parametrize("order", ["catalog first", "refusal first", "the catalog between is gone"])
async def test_a_base_model_that_comes_back_in_one_message_with_the_refusal_is_used_again(
    served: Served, order: str
) -> None:
    """All of it is handled before the answer sees any of it. A catalog takes the place of one that still waits to be
    sent: then only the last one comes."""
    cluster, runner = served.cluster, served.cluster.runners[0]
    cluster.scheduler.holds = True
    answer = post(served, model="tiny")
    await eventually(lambda: cluster.scheduler.enqueued and all(one.flushed for one in cluster.scheduler.sessions))
    back = scheduler_pb2.ServeDown(catalog=cluster.scheduler.catalog())
    runner.base_digest = NEW
    changed = scheduler_pb2.ServeDown(catalog=cluster.scheduler.catalog())
    runner.base_digest = BASE_DIGEST
    failure = BaseModelReplaced("the base model was replaced").to_proto()
    refused = cluster.scheduler.refusal(cluster.scheduler.enqueued[0].request, 0, failure)
    cluster.scheduler.holds = False
    orders = {"catalog first": [changed, refused], "refusal first": [refused, changed]}
    cluster.scheduler.say(scheduler_pb2.ServeDown(more=[*orders.get(order, [refused]), back]))
    async with asyncio.timeout(PATIENCE_S):
        assert (await answer).status_code == 200
    assert [enqueue.base_digest for enqueue in cluster.scheduler.enqueued] == [BASE_DIGEST] * 2
    assert not served.gateway.listeners


async def test_a_stream_whose_base_model_is_gone_ends_with_an_error_that_says_so(served: Served) -> None:
    cluster = served.cluster
    cluster.runners[0].step_seconds = 0.01
    body = {"model": "tiny", "prompt": "The quick", "max_tokens": 400, "ignore_eos": True, "stream": True}
    events = []
    async with served.http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and not events:
                change_base(cluster)
                await cluster.runners[0].restart()
            events += [line] if line.startswith("data: ") else []
    assert events[-1] == "data: [DONE]"
    assert '"code":"base_model_replaced"' in events[-2]
    assert len(cluster.scheduler.enqueued) == 1, "it is not begun again: the client has tokens of the old one"
