"""What an event costs while many adapters can't be served, or wait for their check."""

from time import thread_time

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest, InstanceName
from motet.runner_info import Failure
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import AdapterRef, AdapterStage
from tests.scheduler.builders import PIRATE, SchedulerDriver, adapter, ready
from tests.scheduler.test_proofs import WRONG

BAD = Failure("adapter_incompatible", "It is for another model.")
AWAY = Failure("adapter_fetch_failed", "Its source is away.", retry_after=300.0)


def with_failed(count: int, failure: Failure) -> SchedulerDriver:
    driver = ready()
    driver.scheduler.check = lambda: None  # type: ignore[method-assign]
    driver.attach()
    driver.state(*(adapter(f"a{number}") for number in range(count)))
    while driver.orders:
        for key, order in list(driver.orders.items()):
            del driver.orders[key]
            how = {"stage": AdapterStage.NONE, "certificate": None, "failure": failure}
            driver.certify(key[1].name, Digest(""), order=order, **how)
    return driver


def cost_of_news(driver: SchedulerDriver) -> float:
    ref, name = AdapterRef("default", "other"), InstanceName("r0")
    device = AdapterStage.DEVICE
    begin = thread_time()
    for _ in range(100):
        driver.send(
            events.AdapterStateChanged(instance=name, ref=ref, digest=PIRATE, stage=device, ordered_stage=device)
        )
    return thread_time() - begin


@pytest.mark.parametrize("failure", [BAD, AWAY, WRONG], ids=["bad", "away", "refused"])
def test_an_event_does_not_look_at_adapters_that_have_failed(failure: Failure) -> None:
    few, many = (min(cost_of_news(with_failed(count, failure)) for _ in range(2)) for count in (4, 400))
    assert many < 5 * few


def with_waiting(count: int) -> SchedulerDriver:
    """The runner checks as many as it may at once: the others wait for their first check."""
    driver = ready()
    driver.scheduler.check = lambda: None  # type: ignore[method-assign]
    driver.attach()
    driver.state(*(adapter(f"a{number}") for number in range(count)))
    return driver


def test_an_event_does_not_look_at_adapters_that_wait_for_their_first_check() -> None:
    few, many = (min(cost_of_news(with_waiting(count)) for _ in range(2)) for count in (10, 10_000))
    assert many < 10 * few


@pytest.mark.parametrize("failure", [AWAY, WRONG], ids=["away", "refused"])
def test_all_of_them_are_checked_again_when_a_runner_comes_or_the_time_has_come(failure: Failure) -> None:
    driver = with_failed(3, failure)
    cost_of_news(driver)
    again = driver.attach("r1") if failure is WRONG else driver.wait(failure.retry_after)
    asked = [one for one in again if isinstance(one, effects.EnsureAdapter)]
    assert {one.ref.name for one in asked} == {"a0", "a1", "a2"}


def test_runners_that_come_and_go_put_no_adapter_aside_twice() -> None:
    driver = with_failed(20, AWAY)
    for _ in range(10):
        driver.attach("r1")
        driver.detach("r1")
    assert len(driver.scheduler.adapters.to_check.retry_times) == 20
    again = driver.wait(AWAY.retry_after)
    assert len([one for one in again if isinstance(one, effects.EnsureAdapter)]) == 4, "as many as are checked at once"


def snapshot(*sources: str) -> scheduler_pb2.SyncUp:
    entries = [
        scheduler_pb2.AdapterEntry(ref=common_pb2.AdapterRef(namespace="default", name=f"a{number}"), source=source)
        for number, source in enumerate(sources)
    ]
    return scheduler_pb2.SyncUp(snapshot=scheduler_pb2.CatalogSnapshot(adapters=entries))


def test_what_has_not_changed_is_not_read_again_with_each_snapshot() -> None:
    known: conversion.KnownAdapters = {}
    first, second = (conversion.sync_event(snapshot(*of), known) for of in (("s0", "s1", "s2"), ("s0", "other")))
    assert isinstance(first, events.CatalogReplaced)
    assert isinstance(second, events.CatalogReplaced)
    assert second.adapters[0] is first.adapters[0]
    assert [one.revision.source for one in second.adapters] == ["s0", "other"]
    assert len(known) == 2


def test_of_a_snapshot_only_what_has_changed_is_checked() -> None:
    driver = with_failed(3, WRONG)
    cost_of_news(driver)
    specs = tuple(one.spec for one in driver.scheduler.adapters)
    driver.state(*specs)
    assert not driver.of(effects.EnsureAdapter)
    driver.state(*specs[:2], adapter("a2", stamp="2"))
    assert [one.ref.name for one in driver.of(effects.EnsureAdapter)] == ["a2"]
    driver.state(*specs[:1], adapter("a3"))
    assert [one.ref.name for one in driver.of(effects.EnsureAdapter)] == ["a3"]
