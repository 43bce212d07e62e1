"""Peers that send what no honest peer sends: each message fails alone, no number in it counts, others are served."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2, scheduler_pb2_grpc, supervisor_pb2
from motet.clock import FakeClock
from motet.errors import InvalidRequest
from motet.leadership import LocalLeadership
from motet.rpc import EndStream, Link
from motet.rpc.message_failures import TOLD_ONCE, handle
from motet.runner_info import RunnerIdentity
from motet.transport.over_grpc import open_channel
from motet_scheduler import conversion
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy import events
from motet_scheduler.policy.values import SchedulerConfig
from motet_scheduler.service import SchedulerService
from motet_supervisor.metrics import Metrics as SupervisorMetrics
from motet_supervisor.policy.values import SupervisorConfig
from motet_supervisor.service import SupervisorService
from tests.common.waiting import PATIENCE_S
from tests.scheduler.builders import GROUP, PIRATE, SchedulerDriver, adapter, entry
from tests.scheduler.test_failing_messages import all_streams, streamed_types
from tests.support.hostile_messages import hostile, hostile_bytes, receive, serve
from tests.support.in_process_system import in_process_system
from tests.support.surroundings import REAL, with_clock

HIGHEST_TERM = 2**32

HELLOS: dict[type, Any] = {
    scheduler_pb2.ServeUp: scheduler_pb2.ServeUp(hello={"gateway": "evil"}),
    scheduler_pb2.AttachUp: scheduler_pb2.AttachUp(hello={"identity": {"instance": "evil"}}),
    supervisor_pb2.WatchUp: supervisor_pb2.WatchUp(hello={"identity": {"instance": "evil"}}),
    supervisor_pb2.AdviseUp: supervisor_pb2.AdviseUp(hello={"term": 1}),
    runner_pb2.GenerateUp: runner_pb2.GenerateUp(hello={"gateway": "evil"}),
}


@pytest.mark.parametrize("kind", sorted(streamed_types(), key=lambda kind: kind.__name__), ids=lambda m: m.__name__)
async def test_no_message_of_a_peer_harms_another(folder, kind):
    async with all_streams(folder) as streams:
        receiver = streams.receivers[kind]
        with capture_logs() as logs:
            for message in hostile(kind):
                if isinstance(receiver, Link):
                    receive(receiver, message)
                elif (hello := HELLOS.get(kind)) is None:
                    await serve(receiver, message, peer=streams.next_number())
                else:
                    await serve(receiver, *([] if message.HasField("hello") else [hello]), message)
            if kind.__name__ in {stream for stream, _ in TOLD_ONCE}:  # some messages were false but possible
                await streams.open_again(kind)
        assert [line for line in logs if line["event"] in ("message_failed", "decision_failed")] == []
        assert max(streams.terms()) < HIGHEST_TERM


SERVERS = {
    (scheduler_pb2, "Scheduler"): ("Serve", "Attach", "Sync"),
    (supervisor_pb2, "Supervisor"): ("Watch", "Advise"),
    (runner_pb2, "Runner"): ("Generate",),
}


async def test_bytes_that_are_no_message_end_their_own_stream(folder):
    async with all_streams(folder) as streams:
        for (module, service), methods in SERVERS.items():
            for method in methods:
                described = module.DESCRIPTOR.services_by_name[service].methods_by_name[method]
                async with open_channel(streams.addresses[service]) as channel:
                    for wrong in hostile_bytes(GetMessageClass(described.input_type)):
                        call = channel.stream_stream(f"/motet.api.v1.{service}/{method}")()
                        async with asyncio.timeout(PATIENCE_S):
                            with suppress(grpc.aio.AioRpcError):
                                await call.write(wrong)
                                await call.done_writing()
                                async for _ in call:
                                    pass
        await streams.open_again(scheduler_pb2.SyncUp)  # some were an empty catalog


async def test_a_leader_does_not_yield_to_an_impossible_term(folder):
    async with in_process_system(folder) as system, open_channel(system.control.scheduler_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="not possible"):
            await scheduler_pb2_grpc.SchedulerStub(channel).Succeed(
                scheduler_pb2.SucceedRequest(term=2**64 - 1), timeout=PATIENCE_S
            )
        assert system.control.scheduler_service.term < HIGHEST_TERM


RUNNING = {"request": "a", "epoch": 1, "promise": {"pages": 2}, "gateway": "g0", "prompt_tokens": 16, "max_tokens": 64}
PARKED = RUNNING | {"state": common_pb2.SEQUENCE_STATE_PARKED}
IDENTITY = RunnerIdentity(instance="r0", incarnation="1", pool="default/demo", group=GROUP)
CAPACITY = {"pages": 100, "page_tokens": 16, "max_sequences": 64, "max_model_length": 2048, "adapter_slots": 16}
HELLO = {"identity": IDENTITY.to_proto(), "capacity": CAPACITY, "base": {"digest": "sha256:base"}}
HELLO_OF_WATCHED = {"identity": IDENTITY.to_proto(), "capacity": CAPACITY}
ASKED = {"request": "a", "epoch": 1, "group": GROUP, "tenant": "t", "prompt_tokens": 16, "max_tokens": 64}
HELD_BY_R0 = {"instance": "r0", "request": "a", "epoch": 1, "promise": {"pages": 2, "tokens": 32}}

TO_SCHEDULER = [
    scheduler_pb2.ServeUp(enqueue=ASKED),
    scheduler_pb2.ServeUp(hello={"gateway": "g0", "live": [ASKED | {"instance": "r0", "incarnation": "1"}]}),
    scheduler_pb2.ServeUp(lost={"request": "a", "epoch": 1}),
    scheduler_pb2.ServeUp(finished={"request": "a", "epoch": 1}),
    scheduler_pb2.ServeUp(held={"groups": [{"group": GROUP, "requests": 1}]}),
    scheduler_pb2.AttachUp(hello=HELLO | {"live": [RUNNING]}),
    scheduler_pb2.AttachUp(hello=HELLO | {"live": [PARKED]}),
    scheduler_pb2.AttachUp(hello=HELLO | {"live": [PARKED], "capacity": CAPACITY | {"page_tokens": 2**31}}),
    scheduler_pb2.AttachUp(report={"pages": 100, "live": [RUNNING]}),
    scheduler_pb2.AttachUp(report={"pages": 100, "live": [PARKED]}),
    scheduler_pb2.AttachUp(declined={"request": "a", "epoch": 1}),
    scheduler_pb2.AttachUp(report={"pages": 100, "live": [RUNNING], "live_follows": True}),
    scheduler_pb2.AttachUp(listed={"requests": [RUNNING]}),
    scheduler_pb2.AttachUp(
        adapter={
            "ref": {"namespace": "default", "name": "pirate", "generation": 1},
            "digest": PIRATE,
            "stage": common_pb2.ADAPTER_STAGE_CERTIFIED,
            "answers": common_pb2.ADAPTER_STAGE_CERTIFIED,
            "certificate": {"digest": PIRATE, "rank": 8},
        }
    ),
    supervisor_pb2.AdviseDown(promise=HELD_BY_R0),
    supervisor_pb2.AdviseDown(parked=HELD_BY_R0),
    supervisor_pb2.AdviseDown(resumed=HELD_BY_R0),
    supervisor_pb2.AdviseDown(overcommit={"pool": "default/demo", "factor": 1.5}),
]


def service_of(leadership, driver, folder):
    return SchedulerService(
        SchedulerConfig(),
        leadership=leadership,
        metrics=Metrics(CollectorRegistry()),
        supervisor_address=f"unix:{folder}/supervisor.sock",
        catalog_file=None,
        surroundings=with_clock(driver.clock),
    )


def possible(like):
    """This message, and as often as it has fields one with a false number."""
    kind, member = type(like), like.WhichOneof("message")
    yield like
    yield from (one for one in hostile(kind, like=like) if one.WhichOneof("message") == member)


@pytest.mark.parametrize("like", TO_SCHEDULER, ids=lambda like: f"{type(like).__name__}-{like.WhichOneof('message')}")
async def test_no_number_of_a_peer_fails_a_decision_or_a_message_that_follows(folder, like):
    """The numbers of one peer are copied into what others are told, perhaps much later."""
    with LocalLeadership(folder / "term", REAL) as leadership, capture_logs() as logs:
        for message in possible(like):
            driver = SchedulerDriver()
            service = service_of(leadership, driver, folder)
            driver.scheduler, driver.send = service.scheduler, service.handle
            driver.send(events.SupervisorConnected())
            driver.send(events.OperatorConnected())
            driver.gateway()
            driver.state(adapter())
            driver.attach()
            driver.enqueue("a")
            for said in (message, like):
                with suppress(EndStream):
                    handle(said, partial(hear, service), lambda *_: None)
                driver.report("r0", entry("a", 2))
                driver.report("r0", entry("a", 2, parked=True))
                driver.attach("r1")
                driver.lose("a")
                driver.enqueue("b", digest=PIRATE, adapter="default/pirate")
                driver.send(events.OperatorConnected())
                for _ in range(3):
                    driver.wait(3.0)
                    driver.report("r0")
                    driver.report("r1")
            assert not {"decision_failed", "message_failed"} & {line["event"] for line in logs}, message
            logs.clear()


@pytest.mark.parametrize("said", ["hello", "report", "ended", "listed"])
def test_no_message_of_a_runner_lists_more_requests_than_it_can_have(said):
    """One of 64 MiB would keep the scheduler busy for seconds."""
    field = {"ended": "sequences", "listed": "requests"}.get(said, "live")
    up = scheduler_pb2.AttachUp(**{said: {field: [{"request": "a", "epoch": 1}] * 8193}})
    with pytest.raises(InvalidRequest, match=f"`{field}`; it can have at most 8192"):
        conversion.runner_attached(up.hello) if said == "hello" else conversion.attach_event(IDENTITY, up)


class Said:
    """A stream of these messages."""

    def __init__(self, *messages):
        self._messages = messages
        self.ended = ""

    async def accept(self):
        pass

    async def send_all(self, _take):
        await asyncio.Event().wait()

    async def receive_all(self, receive):
        for message in self._messages:
            receive(message)

    async def end(self, _code, details):
        self.ended = details


async def test_all_parts_of_a_list_have_no_more_requests_than_a_runner_can_have(folder):
    part = [{"request": str(number), "epoch": 1} for number in range(5000)]
    hello = {"identity": IDENTITY.to_proto(), "capacity": {"pages": 9}, "live": part, "live_follows": True}
    with LocalLeadership(folder / "term", REAL) as leadership:
        stream = Said(scheduler_pb2.AttachUp(hello=hello), scheduler_pb2.AttachUp(listed={"requests": part}))
        await service_of(leadership, SchedulerDriver(), folder).runners.serve(stream)
    assert stream.ended == "a runner lists 10000 requests in `requests`; it can have at most 8192"


def hear(service, up):
    match up:
        case scheduler_pb2.ServeUp() if up.HasField("hello"):
            service.handle(conversion.gateway_connected(up.hello))
        case scheduler_pb2.ServeUp():
            service.handle(conversion.serve_event("g0", up))
        case scheduler_pb2.AttachUp() if up.HasField("hello"):
            service.handle(conversion.runner_attached(up.hello))
        case scheduler_pb2.AttachUp():
            service.handle(conversion.attach_event(IDENTITY, up))
        case _:
            service.supervisor.receive(up)


async def test_a_gateway_that_does_not_come_to_an_end_with_what_runs_has_no_stream(folder, monkeypatch):
    """Until then its requests have no end, and each of its parts may claim more."""
    with LocalLeadership(folder / "term", REAL) as leadership:
        driver = SchedulerDriver()
        service = SchedulerService(
            SchedulerConfig(),
            leadership=leadership,
            metrics=Metrics(CollectorRegistry()),
            supervisor_address=f"unix:{folder}/supervisor.sock",
            catalog_file=None,
            surroundings=with_clock(driver.clock),
        )
        heard = []

        def handle_slowly(event):
            driver.clock.advance(1.0)
            heard.append(event)

        monkeypatch.setattr(service, "handle", handle_slowly)
        running = ASKED | {"instance": "r0", "incarnation": "1"}
        part = scheduler_pb2.ServeUp(live={"requests": [running], "more": True})
        await serve(
            service.gateways, scheduler_pb2.ServeUp(hello={"gateway": "g0", "live_follows": True}), *[part] * 30
        )
        assert len(heard) in (11, 12, 13), "its hello, ten parts, and its end"


TO_SUPERVISOR = [
    supervisor_pb2.WatchUp(hello=HELLO_OF_WATCHED | {"live": [RUNNING]}),
    supervisor_pb2.WatchUp(hello=HELLO_OF_WATCHED | {"live": [PARKED]}),
    supervisor_pb2.WatchUp(memory={"pages": 100, "live": [RUNNING]}),
    supervisor_pb2.WatchUp(memory={"pages": 100, "live": [PARKED]}),
    supervisor_pb2.WatchUp(overflow={"request": RUNNING}),
    supervisor_pb2.WatchUp(parked={"request": "a", "epoch": 1, "promise": {"pages": 2}}),
    supervisor_pb2.WatchUp(resumed={"request": "a", "epoch": 1, "promise": {"pages": 2}}),
]


@pytest.mark.parametrize("like", TO_SUPERVISOR, ids=lambda like: f"{type(like).__name__}-{like.WhichOneof('message')}")
async def test_no_number_of_a_runner_fails_a_message_of_the_supervisor(like):
    for message in possible(like):
        now = FakeClock(100.0)
        service = SupervisorService(SupervisorConfig(), metrics=SupervisorMetrics(CollectorRegistry()), clock=now)
        with capture_logs() as logs:
            for said in (message, like):
                hello = [] if said.HasField("hello") else [TO_SUPERVISOR[0]]
                await serve(service.runners, *hello, said)
                await serve(service.schedulers, supervisor_pb2.AdviseUp(hello={"term": 1}))
                for _ in range(3):
                    now.advance(3.0)
                    service.tick()
        assert "message_failed" not in {line["event"] for line in logs}, message
