"""An adapter gets another revision while requests for it are between two steps: clients do not notice."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motet.errors import ModelNotFound
from tests.gateway.conftest import Served, eventually, serve
from tests.support.fake_services import FakeServices

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
    body = {"model": "legal", "prompt": "The quick", "max_tokens": 4, "ignore_eos": True} | more
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
        assert answer.text.count('"finish_reason":"length"') == more.get("n", 1)
    assert {submit.adapter_digest for submit in cluster.runners[0].submits} == {NEW}
    assert patient.gateway.dispatcher.live == 0


async def test_a_refusal_that_comes_before_the_catalog_waits_for_it(patient: Served) -> None:
    cluster = patient.cluster
    switch(cluster, NEW)
    answer = post(patient)
    await eventually(lambda: cluster.scheduler.enqueued)
    await asyncio.sleep(0.05)
    assert not answer.done()
    cluster.scheduler.publish()
    assert (await answer).status_code == 200
    assert [enqueue.adapter_digest for enqueue in cluster.scheduler.enqueued][1:] == [NEW]


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
