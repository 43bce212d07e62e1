"""Streams during failures: runners die, repeat messages or send none, schedulers restart, clients disconnect."""

import asyncio
import contextlib
import dataclasses
import json
from typing import Any

import httpx2
import openai
import pytest

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet.errors import AdapterError, AdapterFetchFailed, AdapterUnproved, NoRunner, NotFinite, PoolSaturated
from motet_gateway.answers.choice import ChoiceText
from testbed.fake_services import FakeServices, fake_services
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import Served, eventually, serve
from tests.support.metric_values import value_of

PROMPT = "The quick brown fox"


def long_request(tokens: int = 60, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True} | more


def expected(cluster: FakeServices, tokens: int) -> str:
    prompt = cluster.tokenizer.encode(PROMPT).ids
    return cluster.tokenizer.decode((prompt * tokens)[:tokens])


class ReceivedStream:
    """A stream as it was read: comments and events, in order."""

    def __init__(self) -> None:
        self.comments: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.done = False

    @property
    def text(self) -> str:
        return "".join(c["text"] for event in self.events for c in event.get("choices", []))

    @property
    def finishes(self) -> list[str]:
        return [c["finish_reason"] for e in self.events for c in e.get("choices", []) if c["finish_reason"]]

    @property
    def error(self) -> dict[str, Any] | None:
        return self.events[-1].get("error") if self.events else None

    def line(self, line: str) -> None:
        assert not self.done or not line, "nothing comes after [DONE]"
        if line.startswith(":"):
            self.comments.append(line[1:].strip())
        elif line == "data: [DONE]":
            self.done = True
        elif line:
            assert line.startswith("data: ")
            self.events.append(json.loads(line[6:]))


async def read(served: Served, body: dict[str, Any], into: ReceivedStream | None = None) -> ReceivedStream:
    result = ReceivedStream() if into is None else into
    async with served.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            result.line(line)
    return result


@pytest.fixture
async def pair():
    """Two runners. At first, the first one gets every request."""
    async with fake_services(runners=2) as cluster, serve(cluster) as served:
        yield served


async def test_a_stream_ends_with_one_finish_reason_and_done(served: Served) -> None:
    stream = await read(served, long_request())
    assert stream.text == expected(served.cluster, 60)
    assert stream.finishes == ["length"]
    assert stream.done


async def test_a_dying_runner_causes_a_pause_and_no_gap(pair: Served) -> None:
    pair.cluster.runners[0].dies_after = 20
    stream = await read(pair, long_request())
    assert stream.text == expected(pair.cluster, 60)
    assert stream.finishes == ["length"]
    (second,) = pair.cluster.runners[1].submits
    assert second.epoch == 2
    assert second.estimate.q80 > 0, "the runner is told what was estimated"
    assert len(second.choices[0].delivered_ids) == pair.cluster.scheduler.lost[0].delivered_tokens > 0


async def test_sixteen_streams_survive_their_runner(pair: Served) -> None:
    pair.cluster.runners[0].dies_after = 30
    streams = await asyncio.gather(*(read(pair, long_request(50)) for _ in range(16)))
    assert {stream.text for stream in streams} == {expected(pair.cluster, 50)}
    assert all(stream.finishes == ["length"] for stream in streams)


@pytest.mark.parametrize("fault", ["repeats_steps", "speaks_of_the_past"])
async def test_repeated_and_late_steps_are_dropped(served: Served, fault: str) -> None:
    setattr(served.cluster.runners[0], fault, True)
    stream = await read(served, long_request())
    assert stream.text == expected(served.cluster, 60)
    assert stream.finishes == ["length"]


async def test_a_gap_is_never_sent_to_the_client(served: Served) -> None:
    served.cluster.runners[0].skips_an_index_at = 10
    stream = await read(served, long_request())
    assert stream.text == expected(served.cluster, 60)
    assert len(served.cluster.scheduler.lost) == 1


async def test_a_decline_is_not_seen_by_the_client(pair: Served) -> None:
    pair.cluster.runners[0].declines.append(NoRunner("full").to_proto())
    stream = await read(pair, long_request())
    assert stream.text == expected(pair.cluster, 60)
    assert [lost.epoch for lost in pair.cluster.scheduler.lost] == [1]


async def test_a_decline_of_a_past_term_does_not_affect_the_present_placement(pair: Served) -> None:
    pair.cluster.scheduler.term = 7
    first = pair.cluster.runners[0]
    first.step_seconds = 0.1
    result = ReceivedStream()
    task = asyncio.create_task(read(pair, long_request(), result))
    await eventually(lambda: result.events)
    (running,) = first.requests.values()
    late = runner_pb2.SubmitDeclined(
        request=running.submit.request, epoch=running.submit.epoch, failure=NoRunner("full").to_proto(), term=6
    )
    running.session.send(runner_pb2.GenerateDown(declined=late))
    first.step_seconds = 0.0
    await task
    assert result.text == expected(pair.cluster, 60)
    assert pair.cluster.scheduler.lost == []


async def test_a_move_cancels_on_the_old_runner_and_continues_on_the_new_one(pair: Served) -> None:
    first, second = pair.cluster.runners
    first.step_seconds = 0.1
    result = ReceivedStream()
    task = asyncio.create_task(read(pair, long_request(), result))
    await eventually(lambda: len(result.events) > 2)
    scheduler = pair.cluster.scheduler
    moved = scheduler_pb2.Moved(placement=scheduler.placed(first.submits[0].request, 2, second), reason="consolidation")
    scheduler.say(scheduler_pb2.ServeDown(moved=moved))
    await task
    assert result.text == expected(pair.cluster, 60)
    assert [cancel.epoch for cancel in first.cancels] == [1]
    assert second.submits[0].epoch == 2


async def test_a_placement_of_a_past_term_is_ignored(served: Served) -> None:
    scheduler = served.cluster.scheduler
    scheduler.term = 5
    scheduler.holds = True
    await scheduler.restart()
    task = asyncio.create_task(read(served, long_request()))
    await eventually(lambda: scheduler.enqueued)
    request = scheduler.enqueued[0].request
    old = scheduler.placed(request, 1, served.cluster.runners[0])
    old.term = 2
    scheduler.say(scheduler_pb2.ServeDown(placed=old))
    scheduler.release()
    assert (await task).finishes == ["length"]
    assert len(served.cluster.runners[0].submits) == 1


async def test_a_restarted_scheduler_is_sent_running_and_waiting_requests(served: Served) -> None:
    scheduler, runner = served.cluster.scheduler, served.cluster.runners[0]
    runner.step_seconds = 0.1
    running = ReceivedStream()
    first = asyncio.create_task(read(served, long_request(), running))
    await eventually(lambda: running.events)
    scheduler.holds = True
    second = asyncio.create_task(read(served, long_request()))
    await eventually(lambda: len(scheduler.enqueued) == 2)
    await scheduler.stop()
    seen = len(running.events)
    await eventually(lambda: len(running.events) > seen + 1)  # tokens come while it is away
    third = asyncio.create_task(read(served, long_request()))
    scheduler.holds = False
    greeted = len(scheduler.hellos)
    await scheduler.restart()
    await eventually(lambda: len(scheduler.hellos) > greeted)
    runner.step_seconds = 0.0
    await asyncio.gather(first, second, third)
    hello = scheduler.hellos[-1]
    assert [live.epoch for live in hello.live] == [1]
    assert hello.live[0].delivered_tokens > 0
    assert len({enqueue.request for enqueue in scheduler.enqueued[2:]}) == 2
    assert len(runner.submits) == 3, "nothing runs twice"


async def test_a_client_that_leaves_frees_the_runner_and_the_promise(served: Served) -> None:
    cluster = served.cluster
    cluster.runners[0].step_seconds = 0.05
    async with served.http.stream("POST", "/v1/completions", json=long_request(400)) as answer:
        async for line in answer.aiter_lines():
            if line:
                break
    await eventually(lambda: cluster.runners[0].cancels)
    await eventually(lambda: cluster.scheduler.finished)
    assert cluster.scheduler.finished[0].reason == common_pb2.FINISH_REASON_CANCELLED
    assert served.gateway.dispatcher.live == 0
    await eventually(lambda: cluster.predictor.outcomes == [] or cluster.predictor.outcomes[0].censored)


async def leave(waiting: asyncio.Task[httpx2.Response]) -> None:
    """Its connection is closed with it."""
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_client_that_leaves_before_its_whole_answer_frees_it_too(served: Served) -> None:
    cluster = served.cluster
    cluster.runners[0].step_seconds = 0.05
    waiting = asyncio.create_task(served.http.post("/v1/completions", json=long_request(400, stream=False)))
    await eventually(lambda: cluster.runners[0].running)
    await leave(waiting)
    await eventually(lambda: cluster.runners[0].cancels)
    assert served.gateway.dispatcher.live == 0


async def test_a_client_that_leaves_the_queue_is_taken_out_of_it(served: Served) -> None:
    served.cluster.scheduler.holds = True
    waiting = asyncio.create_task(served.http.post("/v1/completions", json=long_request()))
    await eventually(lambda: served.cluster.scheduler.enqueued)
    await leave(waiting)
    await eventually(lambda: served.cluster.scheduler.cancelled)


async def test_a_failure_in_mid_stream_is_an_error_and_then_done(served: Served) -> None:
    failure = AdapterFetchFailed("the adapter's bytes are gone").to_proto()
    served.cluster.runners[0].fails_after = (10, failure)
    stream = await read(served, long_request())
    assert stream.text == expected(served.cluster, 10)
    assert stream.error == {
        "message": "The adapter's files could not be fetched. Its owner finds the details in the adapter's status.",
        "type": "adapter_error",
        "param": None,
        "code": "adapter_fetch_failed",
    }
    assert stream.finishes == []
    assert stream.done


async def test_the_client_library_raises_on_a_failure_in_mid_stream(served: Served) -> None:
    served.cluster.runners[0].fails_after = (4, AdapterFetchFailed("gone").to_proto())
    stream = await served.openai.completions.create(model="tiny", prompt=PROMPT, stream=True)
    with pytest.raises(openai.APIError, match="could not be fetched"):
        async for _ in stream:
            pass


async def test_a_failure_before_the_first_token_has_a_real_status(served: Served) -> None:
    served.cluster.scheduler.refuses = PoolSaturated("the pool is full").to_proto()
    with pytest.raises(openai.InternalServerError) as caught:
        await served.openai.completions.create(model="tiny", prompt=PROMPT, stream=True)
    assert caught.value.status_code == 503
    assert caught.value.code == "pool_saturated"
    assert caught.value.response.headers["retry-after"] == "2"
    assert caught.value.response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("fails", ["deliver", "_flush_text"])
async def test_an_answer_that_fails_with_its_last_tokens_ends_everywhere(
    served: Served, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def defect(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(ChoiceText, fails, defect)
    async with asyncio.timeout(PATIENCE_S):
        answer = await served.http.post("/v1/completions", json=long_request(1, stream=False))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    await eventually(lambda: served.cluster.scheduler.finished)
    (finished,) = served.cluster.scheduler.finished
    delivered = fails != "deliver"
    assert finished.reason == (common_pb2.FINISH_REASON_LENGTH if delivered else common_pb2.FINISH_REASON_FAILED)
    assert served.gateway.dispatcher.live == 0


async def test_a_waiting_stream_starts_after_a_while_and_says_what_it_waits_for(cluster: FakeServices) -> None:
    cluster.scheduler.holds = True
    async with serve(cluster, hold_seconds=0.1, keep_alive_seconds=0.1) as served:
        result = ReceivedStream()
        task = asyncio.create_task(read(served, long_request(), result))
        await eventually(lambda: result.comments.count("queued position=3") >= 2)
        cluster.scheduler.release()
        await task
        assert result.finishes == ["length"]


async def test_a_waiting_stream_says_that_the_scheduler_is_away(cluster: FakeServices) -> None:
    cluster.scheduler.holds = True
    async with serve(cluster, hold_seconds=0.05, keep_alive_seconds=0.05) as served:
        result = ReceivedStream()
        task = asyncio.create_task(read(served, long_request(), result))
        await eventually(lambda: "queued position=3" in result.comments)
        await cluster.scheduler.stop()
        await eventually(lambda: "waiting for the scheduler" in result.comments)
        cluster.scheduler.holds = False
        await cluster.scheduler.start()
        await task
        assert result.finishes == ["length"]


async def test_a_stream_says_that_its_adapter_is_loading(cluster: FakeServices) -> None:
    runner = cluster.runners[0]
    runner.step_seconds = 0.05
    async with serve(cluster, hold_seconds=0.02, keep_alive_seconds=0.1) as served:
        runner.silent = True
        result = ReceivedStream()
        task = asyncio.create_task(read(served, long_request(3, model="legal"), result))
        await eventually(lambda: runner.submits)
        progress = runner_pb2.SequenceProgress(
            request=runner.submits[0].request, epoch=1, state=common_pb2.SEQUENCE_STATE_LOADING, percent=40
        )
        (running,) = runner.requests.values()
        running.session.send(runner_pb2.GenerateDown(step=runner_pb2.Step(progress=[progress])))
        await eventually(lambda: "loading adapter default/legal 40%" in result.comments)
        runner.silent = False
        runner.work.set()
        await task
        assert result.finishes == ["length"]


async def test_a_silent_runner_ends_in_a_clear_error(cluster: FakeServices) -> None:
    cluster.runners[0].silent = True
    async with serve(cluster, hold_seconds=0.1, keep_alive_seconds=0.1) as served:
        stream = ReceivedStream()
        task = asyncio.create_task(read(served, long_request(), stream))
        await eventually(lambda: stream.comments)
        served.pass_the_deadline()
        await task
        assert stream.error is not None
        assert stream.error["code"] == "deadline_exceeded"
        assert stream.done
        asked = asyncio.create_task(served.http.post("/v1/completions", json=long_request(stream=False)))
        await eventually(lambda: len(cluster.runners[0].submits) == 2)
        served.pass_the_deadline()
        assert (await asked).status_code == 504
        await eventually(lambda: len(cluster.runners[0].cancels) == 2)


async def test_requests_wait_for_the_first_runner_of_their_group() -> None:
    async with fake_services() as cluster:
        runners, cluster.scheduler.runners = cluster.scheduler.runners, []
        async with serve(cluster, ready=False, hold_seconds=0.05) as served:
            # Otherwise the comment would say that the request waits for the scheduler.
            await eventually(lambda: served.gateway.catalog.known)
            result = ReceivedStream()
            task = asyncio.create_task(read(served, long_request(), result))
            await eventually(lambda: "queued position=1 (waiting for a runner of tiny)" in result.comments)
            assert (await served.http.get("/health")).status_code == 503
            cluster.scheduler.runners = runners
            cluster.scheduler.publish()
            await task
            assert result.finishes == ["length"]
            assert (await served.http.get("/health")).status_code == 200


async def test_a_lost_move_is_replaced_by_a_later_one(pair: Served) -> None:
    scheduler, (first, second) = pair.cluster.scheduler, pair.cluster.runners
    first.step_seconds = 0.1
    result = ReceivedStream()
    task = asyncio.create_task(read(pair, long_request(), result))
    await eventually(lambda: result.events)
    request = first.submits[0].request
    await scheduler.stop()  # the gateway never receives this message of epoch 2
    scheduler.epochs[request] = 2
    await scheduler.start()
    await eventually(lambda: scheduler.hellos[1:])
    assert [live.epoch for live in scheduler.hellos[-1].live] == [1], "it says where it runs, and not what it missed"
    moved = scheduler_pb2.Moved(placement=scheduler.placed(request, 3, second), reason="drained")
    scheduler.say(scheduler_pb2.ServeDown(moved=moved))
    await task
    assert result.text == expected(pair.cluster, 60)
    assert [submit.epoch for submit in second.submits] == [3]


async def test_a_refused_move_ends_the_request_at_once_and_frees_its_runner(served: Served) -> None:
    scheduler, runner = served.cluster.scheduler, served.cluster.runners[0]
    runner.step_seconds = 0.02
    result = ReceivedStream()
    task = asyncio.create_task(read(served, long_request(400), result))
    await eventually(lambda: result.events)
    request, failure = runner.submits[0].request, NoRunner("no other runner takes it").to_proto()
    scheduler.say(scheduler.refusal(request, 0, failure))  # sent before it was placed
    before = len(result.events)
    await eventually(lambda: len(result.events) > before + 2)
    scheduler.say(scheduler.refusal(request, 2, failure))
    await task
    assert result.error is not None
    assert result.error["message"] == "no other runner takes it"
    await eventually(lambda: not runner.running)


async def test_a_placement_that_comes_once_more_is_no_news(served: Served) -> None:
    """Mutation: it is noted, and the answer's pause begins, before its epoch is looked at."""
    (runner,), scheduler = served.cluster.runners, served.cluster.scheduler
    runner.step_seconds = 0.05
    task = asyncio.create_task(read(served, long_request(20)))
    await eventually(lambda: runner.running)
    request = scheduler.enqueued[0].request
    (live,) = served.gateway.dispatcher.choices.values()
    scheduler.say(scheduler_pb2.ServeDown(placed=scheduler.placed(request, 1, runner)))
    await eventually(lambda: value_of(served.gateway.metrics.dropped.labels("stale epoch")) == 1)
    assert live.pause is None
    assert (await task).finishes == ["length"]


async def test_a_refusal_of_an_earlier_scheduler_is_ignored(served: Served) -> None:
    scheduler = served.cluster.scheduler
    scheduler.holds = True
    task = asyncio.create_task(read(served, long_request(5)))
    await eventually(lambda: scheduler.enqueued)
    await scheduler.restart()
    await eventually(lambda: served.gateway.dispatcher.term == 2)
    late = scheduler.refusal(scheduler.enqueued[0].request, 0, NoRunner("none").to_proto())
    late.refused.term = 1
    scheduler.say(late)
    scheduler.release()
    assert (await task).finishes == ["length"]


async def test_a_gateway_that_is_older_than_its_scheduler_holds_requests() -> None:
    async with fake_services() as cluster:
        await cluster.scheduler.stop()
        async with serve(cluster, ready=False) as served:
            task = asyncio.create_task(read(served, long_request()))
            assert (await served.http.get("/v1/models")).status_code == 503
            await cluster.scheduler.start()
            assert (await task).finishes == ["length"]


async def test_the_error_says_that_the_adapter_failed_its_checks(served: Served) -> None:
    failure = AdapterFetchFailed("no adapter_config.json").to_proto()
    served.cluster.add_adapter("bad", digest="", state=scheduler_pb2.ADAPTER_READINESS_FAILED, failure=failure)
    served.cluster.scheduler.publish()
    await eventually(lambda: len(served.gateway.catalog.current.adapters) == 3)
    answer = await served.http.post("/v1/completions", json=long_request(model="bad"))
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "adapter_fetch_failed"
    assert answer.headers["x-should-retry"] == "false"


async def test_a_repeated_fetch_delays_no_client_and_shows_its_error_only_to_the_owner(
    served: Served,
) -> None:
    owners = "the runners may not read Secret acme/hub-token. Grant it: kubectl -n acme create role motet-hub-token"
    failure = AdapterFetchFailed(owners, reason="CredentialsInvalid", retry_after=300.0).to_proto()
    served.cluster.add_adapter("bad", digest="", state=scheduler_pb2.ADAPTER_READINESS_FAILED, failure=failure)
    served.cluster.scheduler.publish()
    await eventually(lambda: len(served.gateway.catalog.current.adapters) == 3)
    answer = await served.http.post("/v1/completions", json=long_request(model="bad"))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (422, "false")
    assert "retry-after" not in answer.headers
    assert "CredentialsInvalid" in answer.json()["error"]["message"]
    assert not [word for word in ("Secret", "kubectl", "hub-token") if word in answer.text]
    served.cluster.runners[0].declines = [failure]
    served.cluster.scheduler.refuses_lost = failure
    declined = await served.http.post("/v1/completions", json=long_request(model="legal"))
    assert (declined.status_code, declined.headers["x-should-retry"]) == (422, "false")
    assert "kubectl" not in declined.text


@pytest.mark.parametrize("kind", [AdapterFetchFailed, AdapterUnproved])
async def test_what_one_runner_cannot_serve_another_one_may(served: Served, kind: type[AdapterError]) -> None:
    served.cluster.runners[0].declines = [kind("the source has lost it").to_proto()] * 3
    answer = await served.http.post("/v1/completions", json=long_request(model="legal"))
    assert answer.status_code == 200
    assert [one.why for one in served.cluster.scheduler.lost] == ["the source has lost it"] * 3


async def test_an_unreachable_runner_is_given_up_soon(pair: Served) -> None:
    first, second = pair.cluster.runners
    await first.stop()
    pair.cluster.scheduler.places_at = first
    task = asyncio.create_task(read(pair, long_request()))
    await eventually(lambda: pair.cluster.scheduler.enqueued)
    pair.cluster.scheduler.places_at = second
    assert (await task).finishes == ["length"]


async def test_a_stopping_gateway_ends_its_streams_with_an_error(cluster: FakeServices) -> None:
    cluster.runners[0].step_seconds = 0.02
    result = ReceivedStream()
    async with serve(cluster, drain_seconds=0.2) as served:
        task = asyncio.create_task(read(served, long_request(400), result))
        await eventually(lambda: result.events)
        await served.gateway.drain()
        await task
    assert result.error is not None
    assert result.error["code"] == "engine_restarted"
    assert result.done


async def test_assets_are_fetched_once_and_kept_on_disk(cluster: FakeServices) -> None:
    for _ in range(2):
        async with serve(cluster) as served:
            assert (await read(served, long_request())).finishes == ["length"]
    assert cluster.runners[0].asset_requests == 1


async def test_no_request_leaves_state_behind(served: Served) -> None:
    runner, gateway = served.cluster.runners[0], served.gateway
    runner.step_seconds = 0.001
    await read(served, long_request(2))

    async def leave() -> None:
        with contextlib.suppress(httpx2.TimeoutException):
            await served.http.post("/v1/completions", json=long_request(300), timeout=0.05)

    async def refused() -> None:
        await served.http.post("/v1/completions", json=long_request(model="nobody"))

    tasks = len(asyncio.all_tasks())
    async with httpx2.AsyncClient(base_url=served.url, timeout=PATIENCE_S, verify=False) as client:
        elsewhere = dataclasses.replace(served, http=client)
        await asyncio.gather(
            *(read(elsewhere, long_request(20)) for _ in range(40)),
            *(leave() for _ in range(20)),
            *(refused() for _ in range(20)),
        )
    await eventually(lambda: gateway.dispatcher.live == 0)
    await eventually(lambda: runner.running == 0)
    assert not gateway.answers
    assert not gateway.listeners
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 5)


async def test_numbers_that_are_not_finite_twice_end_the_request_with_their_own_error(served: Served) -> None:
    runner = served.cluster.runners[0]
    runner.declines = [NotFinite("The model's numbers for this request are not finite.").to_proto()] * 3
    answer = await served.http.post("/v1/completions", json=long_request(stream=False))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_finite")
    assert answer.headers["x-should-retry"] == "false"
    assert len(runner.submits) == 2
