"""What the scheduler says of one request: what it waited for and how long, and who may read what."""

import pytest

from motet.domain import InstanceName, RequestId, Tenant
from motet.errors import NotFound
from motet.runner_info import RequestClass
from motet_scheduler.explanation import explanation
from motet_scheduler.policy import events
from motet_scheduler.policy.values import Limits
from tests.scheduler.builders import SchedulerDriver, entry, pool, ready, reserved


def explained(driver: SchedulerDriver, request: str, tenant: str = ""):
    return explanation(driver.scheduler, RequestId(request), Tenant(tenant), driver.clock())


def story(driver: SchedulerDriver, request: str) -> list[tuple[float, str, str]]:
    return [(entry.seconds, entry.event, entry.detail) for entry in explained(driver, request).entries]


def refusing(driver: SchedulerDriver, request: str, tenant: str = "") -> dict[str, str]:
    return {runner.instance: runner.why for runner in explained(driver, request, tenant).runners}


def test_each_kind_of_wait_is_told_once_with_its_time_however_often_its_numbers_change():
    driver = ready()
    driver.attach(pages=20, max_sequences=2)
    driver.enqueue("first", prompt=200, max_tokens=64)  # 17 pages
    driver.enqueue("a", prompt=100, max_tokens=64)  # 11 pages
    driver.wait(1.0)
    driver.report("r0", entry("first", 18))
    driver.wait(1.0)
    driver.enqueue("small", prompt=1, max_tokens=1, request_class=RequestClass.INTERACTIVE)
    driver.wait(1.0)
    driver.finish("first")
    assert story(driver, "a") == [
        (0.0, "queued", "class standard"),
        (0.0, "waits", "it needs 11 pages and 3 are free"),
        (3.0, "waits", "every batch is full"),
        (3.0, "placed", "on runner r0 with 11 pages (placement 1)"),
    ]


def test_a_waiting_request_says_what_keeps_it_from_each_runner():
    driver = ready()
    for number in range(3):
        driver.attach(f"r{number}", pages=11)
    driver.enqueue("x0", prompt=100)
    driver.enqueue("x1", prompt=100)
    driver.enqueue("x2", prompt=100)
    driver.enqueue("a", prompt=100)
    driver.send(events.RunnerShuttingDown(InstanceName("r1"), "1", 30.0))
    driver.detach("r2")
    assert refusing(driver, "a") == {
        "r0": "it needs 11 pages and 0 are free",
        "r1": "its runners are draining",
        "r2": "its runners are down",
    }
    driver.cancel("a")
    assert not explained(driver, "a").runners


def test_a_tenant_reads_no_name_of_another():
    driver = ready(max_passed_over=1)
    driver.attach(pages=20)
    driver.enqueue("holds", prompt=200, max_tokens=64)
    driver.enqueue("large", prompt=250, max_tokens=64, tenant="umbrella")
    for number in range(4):
        driver.enqueue(f"s{number}", prompt=1, max_tokens=1)
    driver.enqueue("a", prompt=17, max_tokens=64)
    assert reserved(driver) == {"r0": "large"}
    assert refusing(driver, "a") == {"r0": "it is reserved for large of tenant umbrella"}
    assert refusing(driver, "a", "acme") == {"r0": "it is reserved for another tenant"}
    assert "umbrella" not in str(explained(driver, "a", "acme"))


def test_a_request_of_another_tenant_is_as_unknown_as_one_that_never_was():
    driver = ready(queue_limit=1)
    driver.enqueue("waits")
    driver.enqueue("refused", tenant="umbrella")
    for request in ("waits", "refused"):
        assert explained(driver, request).tenant == ("acme" if request == "waits" else "umbrella")
        with pytest.raises(NotFound) as theirs:
            explained(driver, request, "initech")
        with pytest.raises(NotFound) as never:
            explained(driver, "never", "initech")
        assert theirs.value.message.replace(request, "") == never.value.message.replace("never", "")


def test_a_quota_is_named_with_the_account_and_how_long_it_kept_the_request():
    driver = ready()
    driver.state(pools=(pool(limits=(("*", Limits(concurrency=1)),)),))
    driver.attach()
    driver.enqueue("a")
    driver.enqueue("b")
    assert explained(driver, "b").position == 1
    driver.clock.advance(2.0)
    driver.finish("a")
    assert story(driver, "b")[1:3] == [
        (0.0, "held", "tenant acme is over its concurrency 1"),
        (2.0, "let in", "its quota lets it into the queue"),
    ]


def test_what_ran_before_a_new_scheduler_begins_with_where_it_ran():
    driver = ready()
    driver.gateway("g0", driver.live("a", epoch=3))
    assert story(driver, "a")[0] == (
        0.0,
        "adopted",
        "it ran on runner r0 (placement 3) when this scheduler heard of it",
    )


def test_a_request_whose_gateway_has_gone_has_ended():
    driver = ready()
    driver.attach(pages=20)
    driver.enqueue("runs", prompt=200, max_tokens=64)
    driver.enqueue("waits", prompt=200, max_tokens=64)
    gateway = driver.scheduler.requests[RequestId("waits")].gateway
    assert not explained(driver, "waits").ended
    driver.send(events.GatewayDisconnected(gateway))
    for _ in range(60):
        driver.wait(1.0)
        driver.report("r0")
    for request in ("runs", "waits"):
        assert explained(driver, request).ended
        _, event, detail = story(driver, request)[-1]
        assert (event, detail) == ("ended", "its gateway has gone, or does not know it any more")
