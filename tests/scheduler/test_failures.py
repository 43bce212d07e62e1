"""After a failed decision the scheduler starts again, and rejects an event that fails every time."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from motet.domain import InstanceName, RequestId
from motet.errors import Internal
from motet.leadership import LocalLeadership
from motet.lease import Election
from motet.rpc import EndStream
from motet.runner_info import RunnerIdentity
from motet.settings import LeaseSettings
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.event_failures import (
    FORGIVEN_AFTER,
    MAX_RESTARTS,
    REMEMBERED,
    RESTART_WINDOW,
    EventFailures,
    shown,
    subject_of,
)
from motet_scheduler.leader_loop import lead
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy import events
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import SchedulerConfig
from motet_scheduler.service import DecisionFailed, SchedulerService
from motet_simulator.fake_engine import SlowEngines, tokens_of
from motet_simulator.leases import FakeLeaseApi
from tests.common.waiting import PATIENCE_S
from tests.scheduler.builders import adapter, pool
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system
from tests.support.surroundings import REAL


def lost(request):
    return events.RequestLost("g0", RequestId(request), 1)


def test_an_event_is_handled_again_after_its_first_failure_and_not_after_the_second():
    failures = EventFailures()
    failures.failed(lost("a"), now=0.0)
    assert not failures.rejects(lost("a"), now=1.0)
    failures.failed(lost("a"), now=1.0)
    assert failures.rejects(lost("a"), now=2.0)
    assert not failures.rejects(lost("b"), now=2.0)


def test_a_rejected_event_is_tried_again_after_a_while():
    failures = EventFailures()
    for now in (0.0, 1.0):
        failures.failed(lost("a"), now)
    assert not failures.rejects(lost("a"), now=1.0 + FORGIVEN_AFTER)
    failures.failed(lost("a"), now=70.0)
    assert failures.rejects(lost("a"), now=71.0), "the second time, one failure is enough"


@pytest.mark.parametrize("event", [events.Tick(), events.TryMore()])
def test_what_no_peer_sends_is_never_rejected(event):
    failures = EventFailures()
    for now in range(5):
        failures.failed(event, float(now))
    assert not failures.rejects(event, now=5.0)


@pytest.mark.parametrize(
    "event",
    [
        events.GatewayConnected("g0"),
        events.GatewayTold("g0", ()),
        events.ResidencyChanged(InstanceName("r0"), "1", (), {}),
    ],
)
def test_what_is_told_only_once_and_rejected_ends_the_stream(tmp_path, event):
    """Otherwise its sender believes that it was heard: it says that again only on another stream."""
    failures = EventFailures()
    with LocalLeadership(tmp_path / "term", REAL) as leadership:
        service = SchedulerService(
            SchedulerConfig(),
            leadership=leadership,
            metrics=Metrics(CollectorRegistry()),
            supervisor_address=f"unix:{tmp_path}/supervisor.sock",
            catalog_file=None,
            surroundings=REAL,
            known_failures=failures,
        )
        for _ in range(2):
            failures.failed(event, REAL.clock())
        with pytest.raises(EndStream, match="connect again in a minute"):
            service.handle(event)


def test_many_failures_in_a_short_time_are_enough():
    failures = EventFailures()
    for now in range(MAX_RESTARTS - 1):
        failures.failed(lost(f"{now}"), float(now))
        assert not failures.should_give_up(float(now))
    failures.failed(lost("x"), 7.0)
    assert failures.should_give_up(7.0)
    assert not failures.should_give_up(RESTART_WINDOW + 1.0)


def test_the_number_of_remembered_failures_is_limited():
    failures = EventFailures()
    for n in range(3 * REMEMBERED):
        failures.failed(lost(f"{n}"), now=float(n))
        failures.failed(lost(f"{n}"), now=float(n))
    assert len(failures.counts) == len(failures.rejected_until) == REMEMBERED


@pytest.mark.parametrize(
    ("event", "subject"),
    [
        (lost("a"), ("RequestLost", "a")),
        (events.GatewayDisconnected("g0"), ("GatewayDisconnected", "g0")),
        (events.RunnerDetached(InstanceName("r0"), "1"), ("RunnerDetached", "r0")),
        (events.RunnerUnhealthy(RunnerIdentity(instance="r1"), "still", True), ("RunnerUnhealthy", "r1")),
        (events.CatalogReplaced((), ()), ("CatalogReplaced", "")),
    ],
)
def test_events_are_distinguished_by_their_kind_and_subject(event, subject):
    assert subject_of(event) == subject


def test_the_log_shows_the_event_and_no_address_of_an_adapter():
    assert "'a'" in shown(lost("a"))
    assert shown(events.CatalogReplaced((pool(),), (adapter(),))) == "CatalogReplaced: 1 pools, 1 adapters"
    assert len(shown(events.RequestLost("g0", RequestId("a"), 1, "why" * 10_000))) == 2000


@pytest.fixture
def failing_on(monkeypatch):
    """The arrival of these requests fails halfway."""
    requests, handle = set(), Scheduler.handle

    def fail(self, event, now):
        if isinstance(event, events.Enqueued) and event.request in requests:
            handle(self, event, now)
            raise RuntimeError("a defect")
        return handle(self, event, now)

    monkeypatch.setattr(Scheduler, "handle", fail)
    return requests


async def test_after_a_failure_streams_continue_and_a_repeated_failure_is_refused(folder, failing_on):
    failing_on.add("poison")
    async with in_process_system(folder) as system:
        await system.runner("r0", engines := SlowEngines())
        answers = [system.gateway.start(f"{n}", prompt=(n,), max_tokens=150) for n in range(4)]
        await until(lambda: all(one.tokens for one in system.gateway.live()))
        term, first = system.gateway.term, system.control.scheduler
        with pytest.raises(Internal, match="failed repeatedly on this request"):
            await system.gateway.ask("poison", max_tokens=4)
        assert system.control.scheduler is not first, "the scheduler kept its old state"
        assert system.gateway.term == term + 2, "it started again twice, each time in a higher term"
        failures = system.control.scheduler_metrics.get_sample_value("motet_scheduler_failures_total")
        assert failures == 2
        assert len(await system.gateway.ask("new", max_tokens=4)) == 4
        engines.hurry()
        for n, answer in enumerate(answers):
            assert await answer == tokens_of((n,), 7, 150)
            assert system.gateway.asked[f"{n}"].placements == [(1, "r0")], "a running request was not touched"
        await until(lambda: not system.control.scheduler.requests)
        await system.ledgers_agree()


@asynccontextmanager
async def leading_locally(folder):
    with LocalLeadership(folder / "term", REAL) as leadership:
        yield leadership


@asynccontextmanager
async def leading_in_an_outage(_folder):
    leases = FakeLeaseApi()
    async with Election(
        leases, LeaseSettings(name="it", namespace="here"), surroundings=REAL, lost=pytest.fail
    ) as election:
        leases.away = True
        yield election


@pytest.mark.parametrize("leading", [leading_locally, leading_in_an_outage])
async def test_a_failure_that_restarts_do_not_fix_ends_the_process(folder, monkeypatch, leading):
    monkeypatch.setattr(Scheduler, "_tick", lambda *_: 1 / 0)
    monkeypatch.setattr(Scheduler, "next_due", lambda _: 0.0)
    began = []
    async with leading(folder) as leadership:

        def begin(failures):
            began.append(leadership.term)
            return SchedulerService(
                SchedulerConfig(),
                leadership=leadership,
                metrics=Metrics(CollectorRegistry()),
                supervisor_address=f"unix:{folder}/supervisor.sock",
                catalog_file=CatalogFile(folder / "catalog.json", REAL.disk),
                surroundings=REAL,
                known_failures=failures,
            )

        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(DecisionFailed):
                await lead(leadership, begin)
    assert began == list(range(1, MAX_RESTARTS + 1)), "each start has its own term, and waits for no Lease"
