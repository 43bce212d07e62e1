"""Whatever keeps a request, moves it or ends it: its own tenant reads the cause in its explanation."""

from collections.abc import Callable

import pytest

from motet.domain import InstanceName, RequestId, Tenant
from motet.errors import PoolSaturated
from motet.runner_info import Failure, RequestClass
from motet_scheduler.explanation import explanation
from motet_scheduler.policy import events
from motet_scheduler.policy.catalog import SavedCatalog
from motet_scheduler.policy.values import KeyAccount, Limits, Promise
from tests.scheduler.builders import PIRATE, POET, SchedulerDriver, adapter, pool, ready

R0 = InstanceName("r0")
A = RequestId("a")
OTHER = "umbrella"
"""A tenant whose name the first one must not read."""


def granted(**limits: int) -> SchedulerDriver:
    driver = ready()
    driver.state(pools=(pool(limits=(("*", Limits(**limits)),)),))
    driver.attach(pages=1000, max_sequences=100)
    return driver


def over_concurrency() -> SchedulerDriver:
    driver = granted(concurrency=1)
    driver.enqueue("before")
    driver.enqueue("a")
    return driver


def over_a_rate(request_class: RequestClass) -> SchedulerDriver:
    driver = granted(requests_per_minute=6)
    for number in range(2):
        driver.enqueue(f"before{number}")
    driver.enqueue("a", request_class=request_class)
    return driver


def over_tokens() -> SchedulerDriver:
    driver = granted(tokens_per_minute=60)
    driver.enqueue("a", prompt=100)
    return driver


def over_the_limits_of_its_key() -> SchedulerDriver:
    driver = granted()
    for name in ("before", "a"):
        driver.enqueue(name, api_key=KeyAccount("0123", Limits(concurrency=1)))
    return driver


def over_the_limits_of_its_adapter() -> SchedulerDriver:
    driver = ready()
    driver.state(adapter(limits=Limits(concurrency=1)))
    driver.attach(pages=1000)
    driver.certify()
    for name, tenant in (("before", OTHER), ("a", "acme")):
        driver.enqueue(name, digest=PIRATE, adapter="default/pirate", tenant=tenant)
    return driver


def too_few_pages() -> SchedulerDriver:
    driver = ready()
    driver.attach(pages=20)
    driver.enqueue("before", prompt=200, max_tokens=64, tenant=OTHER)
    driver.enqueue("a", prompt=100)
    return driver


def full_batch() -> SchedulerDriver:
    driver = ready()
    driver.attach(max_sequences=1)
    driver.enqueue("before", tenant=OTHER)
    driver.enqueue("a")
    return driver


def slots_in_use() -> SchedulerDriver:
    driver = ready()
    driver.attach(adapter_slots=1)
    driver.state(adapter(), adapter("poet"))
    driver.certify()
    driver.certify("poet", POET)
    driver.enqueue("before", digest=PIRATE, tenant=OTHER)
    driver.enqueue("a", digest=POET)
    return driver


def parked_go_first() -> SchedulerDriver:
    driver = ready()
    driver.send(events.SupervisorConnected())
    driver.attach(pages=12)
    for name in ("before", "beside"):
        driver.enqueue(name, tenant=OTHER)
    driver.send(events.RequestParked(R0, RequestId("before"), 1, Promise(11)))
    driver.enqueue("a")
    return driver


def no_runner() -> SchedulerDriver:
    driver = ready()
    driver.enqueue("a")
    return driver


def runner_is_down() -> SchedulerDriver:
    driver = ready()
    driver.attach()
    driver.detach()
    driver.enqueue("a")
    driver.wait(1.0)
    return driver


def runner_drains() -> SchedulerDriver:
    driver = ready()
    driver.attach()
    driver.send(events.RunnerShuttingDown(R0, "1", 30.0))
    driver.enqueue("a")
    driver.wait(1.0)
    return driver


def declined() -> SchedulerDriver:
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.send(events.RunnerDeclined(R0, A, 1, Failure.of(PoolSaturated("3 pages are missing"))))
    return driver


def reserved_for_another() -> SchedulerDriver:
    driver = ready(max_passed_over=1)
    driver.attach(pages=20)
    driver.enqueue("holds", prompt=200, max_tokens=64)
    driver.enqueue("large", prompt=250, max_tokens=64, tenant=OTHER)
    for number in range(4):
        driver.enqueue(f"s{number}", prompt=1, max_tokens=1)
    driver.enqueue("a", prompt=17)
    return driver


def place_kept_for_others() -> SchedulerDriver:
    driver = ready()
    driver.attach(pages=1000, max_sequences=32)
    driver.enqueue("before", tenant=OTHER, prompt=1, max_tokens=1)
    for number in range(30):
        driver.enqueue(f"mine{number}")
    driver.enqueue("a")
    return driver


def max_replicas() -> SchedulerDriver:
    driver = ready()
    driver.state(adapter(max_replicas=1))
    driver.attach("r0", pages=12)
    driver.attach("r1", pages=12)
    driver.certify()
    for name, tenant in (("before", OTHER), ("a", "acme")):
        driver.enqueue(name, digest=PIRATE, adapter="default/pirate", prompt=100, tenant=tenant)
    return driver


def just_started() -> SchedulerDriver:
    driver = SchedulerDriver(saved=SavedCatalog(runners=(R0,)))
    driver.gateway()
    driver.enqueue("a")
    driver.wait(0.01)
    return driver


def too_large() -> SchedulerDriver:
    driver = ready()
    driver.attach(pages=8)
    driver.enqueue("a", prompt=300)
    driver.wait(30.0)
    return driver


def full_queue() -> SchedulerDriver:
    driver = ready(queue_limit=1)
    for tenant in (OTHER, "a third"):  # with their parts twice the limit waits
        driver.enqueue(f"of {tenant}", tenant=tenant)
    driver.enqueue("a")
    return driver


def deadline() -> SchedulerDriver:
    driver = ready()
    driver.enqueue("a", deadline=2.0)
    driver.wait(2.5)
    return driver


def lost() -> SchedulerDriver:
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.lose("a")
    return driver


def hung() -> SchedulerDriver:
    driver = ready()
    driver.send(events.SupervisorConnected())
    driver.attach()
    driver.attach("r1")
    driver.enqueue("a")
    where = driver.scheduler.runners[InstanceName(driver.where("a"))]
    driver.send(events.RunnerUnhealthy(where.identity, "its engine has work and took no step", hung=True))
    return driver


def parked() -> SchedulerDriver:
    driver = ready()
    driver.send(events.SupervisorConnected())
    driver.attach(pages=12)
    driver.enqueue("a")
    driver.send(events.RequestParked(R0, A, 1, Promise(12)))
    return driver


def restarted_scheduler() -> SchedulerDriver:
    driver = ready()
    driver.gateway("g0", driver.live("a", epoch=2))
    return driver


CAUSES: dict[Callable[[], SchedulerDriver], str] = {
    over_concurrency: "tenant acme is over its concurrency 1",
    lambda: over_a_rate(RequestClass.BATCH): "tenant acme is over its requestsPerMinute 6",
    lambda: over_a_rate(RequestClass.STANDARD): "is over its requestsPerMinute 6. Send the request again later.",
    over_tokens: "The prompt has 100 tokens, and tenant acme may use 60 in a minute",
    over_the_limits_of_its_key: "API key 0123 is over its concurrency 1",
    over_the_limits_of_its_adapter: "adapter default/pirate is over its concurrency 1",
    too_few_pages: "it needs 11 pages and 3 are free",
    full_batch: "every batch is full",
    slots_in_use: "all adapter slots are in use",
    parked_go_first: "parked requests go first",
    no_runner: "no runner of this model is up",
    runner_is_down: "its runners are down",
    runner_drains: "its runners are draining",
    declined: "by runner r0: 3 pages are missing",
    reserved_for_another: "reserved for another tenant",
    place_kept_for_others: "the last places are kept for tenants that were given less",
    max_replicas: "placement.maxReplicas allows no more",
    just_started: "the scheduler has just started",
    too_large: "a runner holds 8; lower max_tokens",
    full_queue: "Too many requests (2) wait for this model",
    deadline: "waited 2 seconds and no runner could take it: no runner of this model is up",
    lost: "stream broke",
    hung: "its engine has work and took no step",
    parked: "its runner has too little memory",
    restarted_scheduler: "it ran on runner r0 (placement 2) when this scheduler heard of it",
}


@pytest.mark.parametrize("seeded", CAUSES, ids=lambda seeded: CAUSES[seeded][:40])
def test_its_tenant_reads_the_cause_and_no_name_of_another(seeded):
    driver = seeded()
    found = explanation(driver.scheduler, A, Tenant("acme"), driver.clock())
    said = [line.detail for line in found.entries] + [runner.why for runner in found.runners]
    assert any(CAUSES[seeded] in words for words in said), said
    assert OTHER not in str(found)
