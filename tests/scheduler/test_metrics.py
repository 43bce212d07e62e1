"""What the scheduler's metrics count."""

from prometheus_client import CollectorRegistry

from motet.runner_info import RequestClass
from motet_scheduler.metrics import Metrics
from tests.scheduler.builders import SchedulerDriver


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
