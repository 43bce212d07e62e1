"""/motet/requests: what happened to a request, by all its ids, for its own tenant only, and over restarts."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import FakeClock
from motet.errors import RateLimited
from motet_gateway import explanations
from motet_gateway.answers.timings import RequestTimings
from motet_gateway.choice_record import ChoiceRecord
from motet_gateway.histories import MAX_CHOICES, ChoiceHistory, Histories, choices_of
from motet_gateway.identity.caller import ANONYMOUS, Caller
from testbed.fake_services import fake_services
from tests.gateway.conftest import Served, eventually, serve
from tests.gateway.identity.memory_keys import MemoryKeySource, bearer

BODY: dict[str, Any] = {"model": "tiny", "prompt": "Hello there", "max_tokens": 4}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with fake_services() as cluster, serve(cluster, histories=3) as one:
        yield one


async def explained(served: Served, name: str, **headers: str) -> dict[str, Any]:
    answer = await served.http.get(f"/motet/requests/{name}", headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(lines: list[dict[str, Any]], by: str = "gateway") -> list[str]:
    return [line["event"] for line in lines if line["by"] == by]


async def test_a_request_is_found_by_each_of_its_ids(served: Served) -> None:
    answer = await served.http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    id_ = answer.headers["x-motet-request"]
    await eventually(lambda: served.gateway.histories.find(id_, ANONYMOUS)[0].status)
    first = await explained(served, id_)
    assert (first["id"], first["http_id"], first["status"], first["model"]) == (id_, "mine", "200", "tiny")
    for name in ("mine", answer.json()["id"], f"{id_}.0"):
        assert (await explained(served, name))["id"] == id_
    for name in ("theirs", "0" * 24, f"{id_}.7", f"cmpl-{'0' * 24}", "x" * 3000):
        missing = await served.http.get(f"/motet/requests/{name}")
        assert missing.status_code == 404, name
    assert "There is no request theirs of yours" in (await served.http.get("/motet/requests/theirs")).text


async def test_it_says_what_was_predicted_and_where_the_time_went(served: Served) -> None:
    answer = await served.http.post("/v1/completions", json=BODY)
    await eventually(lambda: served.cluster.scheduler.finished)
    found = await explained(served, answer.json()["id"])
    (choice,) = found["choices"]
    assert (choice["tokens"], choice["max_tokens"]) == (4, 4)
    assert choice["predicted"]["q50"] <= 4
    assert events(found["timeline"]) == ["received", "prepared", "first token", "answered"]
    assert events(choice["timeline"]) == ["sent", "placed", "finished"]
    times = [line["seconds"] for line in choice["timeline"]]
    assert times == sorted(times)
    rounded = 0.0001 * (len(choice["split"]) + 1)
    assert times[-1] <= sum(choice["split"].values()) + rounded, "it is split from when it was received"
    assert sum(choice["split"].values()) <= found["seconds"] + rounded, "until its end"
    assert not [line for line in choice["timeline"] if line["lasted"] < 0]


async def test_a_choice_that_is_not_kept_after_the_end_is_not_said_to_be_missing(served: Served) -> None:
    prompts = BODY | {"prompt": ["Hello"] * (MAX_CHOICES + 4)}
    answer = await served.http.post("/v1/completions", json=prompts)
    id_ = answer.headers["x-motet-request"]
    await eventually(lambda: served.gateway.histories.find(id_, ANONYMOUS)[0].status)
    later = await served.http.get(f"/motet/requests/{id_}.{MAX_CHOICES + 2}")
    assert later.status_code == 404
    assert "has ended. Only its first 16 choices are still known." in later.text


async def test_a_refusal_is_its_last_words(served: Served) -> None:
    served.cluster.scheduler.refuses = RateLimited("Tenant default is over its requestsPerMinute 2.").to_proto()
    answer = await served.http.post("/v1/completions", json=BODY, headers={"x-request-id": "no"})
    assert answer.status_code == 429
    found = await explained(served, "no")
    assert found["status"] == "429"
    last = found["choices"][0]["timeline"][-1]
    assert (last["event"], last["detail"]) == (
        "failed",
        "rate_limit_exceeded: Tenant default is over its requestsPerMinute 2.",
    )
    await served.http.post("/v1/completions", json=BODY | {"model": "nobody"}, headers={"x-request-id": "404"})
    found = await explained(served, "404")
    assert found["choices"] == []
    assert found["timeline"][-2]["detail"].startswith("model_not_found: The model 'nobody' does not exist")


async def test_a_request_that_the_gateway_ends_says_what_ended_it() -> None:
    async with fake_services() as cluster, serve(cluster, deadline_seconds=0.3, hold_seconds=0.2) as served:
        cluster.scheduler.holds = True
        answer = await served.http.post("/v1/completions", json=BODY, headers={"x-request-id": "late"})
        assert answer.status_code == 504
        found = await explained(served, "late")
    assert found["timeline"][-2]["event"] == "failed"
    assert found["timeline"][-2]["detail"].startswith("deadline_exceeded: The request made no progress for 0.3 s")
    last = found["choices"][0]["timeline"][-1]
    assert (last["event"], last["detail"]) == ("cancelled", "deadline_exceeded")


async def test_a_choice_whose_sibling_failed_does_not_say_that_the_client_left(served: Served) -> None:
    served.cluster.scheduler.holds = True
    both = BODY | {"n": 2}
    asked = asyncio.create_task(served.http.post("/v1/completions", json=both, headers={"x-request-id": "two"}))
    await eventually(lambda: len(served.cluster.scheduler.enqueued) == 2)
    first = served.cluster.scheduler.enqueued[0].request
    served.cluster.scheduler.say(
        served.cluster.scheduler.refusal(first, 0, RateLimited("It is over its limit.").to_proto())
    )
    assert (await asked).status_code == 429
    refused, sibling = [choice["timeline"][-1] for choice in (await explained(served, "two"))["choices"]]
    assert (refused["event"], sibling["event"]) == ("failed", "cancelled")
    assert sibling["detail"] == "rate_limit_exceeded"


async def test_the_schedulers_half_is_put_on_the_gateways_clock(served: Served) -> None:
    served.cluster.scheduler.holds = True
    asked = asyncio.create_task(served.http.post("/v1/completions", json=BODY, headers={"x-request-id": "waits"}))
    await eventually(lambda: served.cluster.scheduler.enqueued)
    request = served.cluster.scheduler.enqueued[0].request
    served.cluster.scheduler.stories[request] = scheduler_pb2.ExplainResponse(
        request=request,
        tenant="default",
        entries=[
            scheduler_pb2.TimelineEntry(seconds=0.0, event="queued", detail="class standard"),
            scheduler_pb2.TimelineEntry(seconds=0.25, event="waits", detail="every batch is full"),
        ],
        now_seconds=1000.0,  # it was there before the gateway sent it: its clock is not ours
        position=3,
        runners=[scheduler_pb2.RunnerObstacle(instance="r0", why="it is reserved for another tenant")],
    )
    found = await explained(served, "waits")
    assert found["status"] is None
    (choice,) = found["choices"]
    assert (choice["position"], choice["tokens"]) == (3, None)
    assert choice["runners"] == [{"runner": "r0", "why": "it is reserved for another tenant"}]
    assert events(choice["timeline"], "scheduler") == ["queued", "waits"]
    assert min(line["seconds"] for line in choice["timeline"]) >= 0
    assert served.cluster.scheduler.explained[-1].tenant == "default"
    served.cluster.scheduler.release()
    await asked


async def test_it_outlives_a_scheduler_and_says_when_none_answers(served: Served) -> None:
    served.cluster.scheduler.holds = True
    asked = asyncio.create_task(served.http.post("/v1/completions", json=BODY, headers={"x-request-id": "long"}))
    await eventually(lambda: served.cluster.scheduler.enqueued)
    await served.cluster.scheduler.stop()
    await eventually(lambda: not served.gateway.dispatcher.scheduler.connected)
    found = await explained(served, "long")
    assert found["scheduler"]
    assert events(found["choices"][0]["timeline"]) == ["sent", "waits"]
    assert found["choices"][0]["timeline"][-1]["detail"] == "the scheduler does not answer"
    served.cluster.scheduler.holds = False
    await served.cluster.scheduler.restart()
    await asked
    found = await explained(served, "long")
    assert events(found["choices"][0]["timeline"]) == ["sent", "waits", "placed", "finished"]
    assert "does not know the request" in found["scheduler"]


async def test_questions_behind_others_that_hang_get_the_gateways_half_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "SECONDS", 0.2)
    await served.http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    served.cluster.scheduler.explains.clear()
    loop = asyncio.get_running_loop()
    others = [asyncio.create_task(served.http.get(f"/motet/requests/{one:024x}")) for one in range(24)]
    await eventually(lambda: len(served.cluster.scheduler.explained) == explanations.MAX_AT_ONCE)
    began = loop.time()
    found = await explained(served, "mine")
    took = loop.time() - began
    served.cluster.scheduler.explains.set()
    await asyncio.gather(*others)
    assert events(found["timeline"])[0] == "received"
    assert "within 0.2 s" in found["scheduler"]
    assert took < 0.9, "24 questions, 4 at once, would take 1.2 s"


async def test_a_request_of_another_gateway_has_the_schedulers_half(served: Served) -> None:
    request = "ab" * 12
    served.cluster.scheduler.stories[request] = scheduler_pb2.ExplainResponse(
        request=request,
        tenant="default",
        entries=[
            scheduler_pb2.TimelineEntry(event="queued"),
            scheduler_pb2.TimelineEntry(seconds=2.0, event="finished"),
        ],
        now_seconds=9.0,
        ended=True,
    )
    found = await explained(served, f"chatcmpl-{request}")
    assert (found["gateway"] or "").startswith("this gateway has not served it")
    assert (found["seconds"], found["ended"]) == (pytest.approx(2.0), True)
    assert events(found["choices"][0]["timeline"], "scheduler") == ["queued", "finished"]


async def test_a_tenant_gets_only_its_own() -> None:
    kept = MemoryKeySource()
    acme, zeta = kept.make("acme"), kept.make("zeta")
    async with fake_services() as cluster, serve(cluster, keys=kept, auth="keys") as served:
        mine = {"x-request-id": "same", **bearer(acme)}
        answer = await served.http.post("/v1/completions", json=BODY, headers=mine)
        id_ = answer.headers["x-motet-request"]
        cluster.scheduler.stories[id_] = scheduler_pb2.ExplainResponse(request=id_, tenant="acme")
        assert (await explained(served, id_, **bearer(acme)))["tenant"] == "acme"
        said = []
        for name in (id_, "same", "0" * 24):
            refused = await served.http.get(f"/motet/requests/{name}", headers=bearer(zeta))
            assert refused.status_code == 404
            said.append(refused.json()["error"]["message"].replace(name, ""))
        assert len(set(said)) == 1, "theirs is as unknown as one that never was"
        await served.http.post("/v1/completions", json=BODY, headers={"x-request-id": "same", **bearer(zeta)})
        assert (await explained(served, "same", **bearer(acme)))["id"] == id_
        assert (await served.http.get(f"/motet/requests/{id_}")).status_code == 401


async def test_only_the_last_ended_ones_are_kept(served: Served) -> None:
    for number in range(8):
        await served.http.post("/v1/completions", json=BODY, headers={"x-request-id": f"r{number}"})
    histories = served.gateway.histories
    await eventually(lambda: len(histories) == 3)
    assert [name for number in range(8) if histories.find(name := f"r{number}", ANONYMOUS)] == ["r5", "r6", "r7"]


def test_nobody_pushes_out_the_requests_of_others_and_no_account_is_kept() -> None:
    clock = FakeClock()
    histories = Histories(3, clock)
    for number in range(9):
        tenant = "zeta" if number else "acme"
        history = histories.begin(f"{number:024x}", str(number), Caller(tenant), "nobody", RequestTimings(clock))
        record = ChoiceRecord(history.timings.split.copy())
        record.placed(scheduler_pb2.Placed(accounts=[scheduler_pb2.AccountLevel()]), "", clock())
        history.choices.append(ChoiceHistory(history.id, 3, 4, common_pb2.Estimate(), record))
        histories.end(history, "404")
        assert not record.accounts
    assert histories.find("0", Caller("acme"))
    assert [number for number in range(9) if histories.find(str(number), Caller("zeta"))] == [7, 8]


def test_the_next_tenant_of_a_name_does_not_find_requests_of_the_one_before() -> None:
    clock = FakeClock()
    histories = Histories(3, clock)
    before, next_ = Caller("acme", "k1", tenant_uid="uid-1"), Caller("acme", "k2", tenant_uid="uid-2")
    history = histories.begin("a" * 24, "1", before, "tiny", RequestTimings(clock))
    histories.end(history, "200")
    for name in ("1", "a" * 24):
        assert histories.find(name, before)
        assert histories.find(name, Caller("acme", "unbound"))
        assert histories.find(name, next_) is None


def test_an_ended_request_keeps_its_first_choices_and_no_id_of_a_later_one() -> None:
    clock = FakeClock()
    histories = Histories(1, clock)
    for number in range(2):
        history = histories.begin(f"{number:024x}", "again", Caller("acme"), "tiny", RequestTimings(clock))
        for choice in range(2 * MAX_CHOICES):
            request = f"{number:024x}.{choice}" if choice else f"{number:024x}"
            record = ChoiceRecord(history.timings.split.copy())
            history.choices.append(ChoiceHistory(request, 3, 4, common_pb2.Estimate(), record))
        assert [one.number for one in choices_of(history, MAX_CHOICES + 1)] == [MAX_CHOICES + 1]
        histories.end(history, "200")
        assert [one.number for one in history.choices] == list(range(MAX_CHOICES))
        found = histories.find("again", Caller("acme"))
        assert found is not None
        assert found[0] is history
    assert len(histories) == 1
    assert histories.find(f"{0:024x}", Caller("acme")) is None


async def test_what_a_scheduler_of_an_earlier_version_says_of_anybody_is_not_passed_on(served: Served) -> None:
    request = "cd" * 12
    entries = [scheduler_pb2.TimelineEntry(event="queued", detail="of umbrella")]
    served.cluster.scheduler.stories[request] = scheduler_pb2.ExplainResponse(request=request, entries=entries)
    served.cluster.scheduler.tells_all = True
    assert (await served.http.get(f"/motet/requests/{request}")).status_code == 404
