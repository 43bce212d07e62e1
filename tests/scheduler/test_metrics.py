"""What the scheduler's metrics count."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from motet.clock import FakeClock
from motet.leadership import LocalLeadership
from motet.runner_info import RequestClass
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy import events
from motet_scheduler.policy.values import Limits, SchedulerConfig
from motet_scheduler.service import SchedulerService
from tests.scheduler.builders import SchedulerDriver, pool
from tests.support.surroundings import REAL, with_clock

POOL = {"pool_namespace": "default", "pool": "demo"}


def test_requests_that_wait_are_counted_by_their_class() -> None:
    driver, registry = SchedulerDriver(), CollectorRegistry()
    driver.enqueue("chat", request_class=RequestClass.INTERACTIVE)
    for number in range(3):
        driver.enqueue(f"nightly{number}", request_class=RequestClass.BATCH)
    Metrics(registry).observe(driver.scheduler)
    waiting = {
        one.name.lower(): registry.get_sample_value("motet_queued_requests", {"class": one.name.lower()})
        for one in RequestClass
    }
    assert waiting == {"interactive": 1, "standard": 0, "batch": 3}


def test_requests_that_wait_for_a_quota_are_in_no_queue_and_counted_apart() -> None:
    driver, registry = SchedulerDriver(), CollectorRegistry()
    driver.attach(pages=1000)
    driver.state(pools=(pool(limits=(("*", Limits(concurrency=1)),)),))
    for number in range(4):
        driver.enqueue(f"r{number}")
    Metrics(registry).observe(driver.scheduler)
    assert registry.get_sample_value("motet_quota_waiting_requests") == 3
    assert registry.get_sample_value("motet_queued_requests", {"class": "standard"}) == 0


async def test_levels_are_taken_once_a_second_however_many_ticks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take milliseconds where there are many runners. The last ones are those of the end."""
    clock, registry = FakeClock(), CollectorRegistry()
    taken = []
    observe = Metrics.observe
    monkeypatch.setattr(Metrics, "observe", lambda self, it: (taken.append(clock()), observe(self, it)))
    with LocalLeadership(tmp_path / "term", REAL) as alone:
        service = SchedulerService(
            SchedulerConfig(),
            leadership=alone,
            metrics=Metrics(registry),
            supervisor_address=f"unix:{tmp_path}/supervisor.sock",
            catalog_file=None,
            surroundings=with_clock(clock),
        )
        began = clock()
        service.handle(events.CatalogReplaced((), (), ()))
        for _ in range(160):
            service.tick()
            clock.advance(1 / 64)
        assert len(taken) == 3

        service.handle(events.CatalogReplaced((pool(max_replicas=3),), (), ()))
        service.tick()
        assert registry.get_sample_value("motet_pool_desired_replicas", POOL) is None
        clock.now = service.next_due()
        assert clock() == pytest.approx(began + 3)
        service.tick()
        assert registry.get_sample_value("motet_pool_desired_replicas", POOL) is not None
