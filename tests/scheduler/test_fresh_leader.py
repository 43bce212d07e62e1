"""A scheduler that has just begun to lead hears its peers one after the other. What only the first of them can know is
no reason to refuse anything, or to change what is served."""

import pytest

from motet.domain import Digest, RequestId
from motet.runner_info import Failure
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import AdapterStage
from tests.scheduler.builders import GROUP, SchedulerDriver, adapter, pool

OLD, NEW = "sha256:old", "sha256:new"
PATIENCE = 10.0


def fresh(*pools, adapters=()):
    """As in a cluster, where no catalog is saved."""
    driver = SchedulerDriver(report_patience=PATIENCE)
    driver.send(events.OperatorConnected())
    driver.gateway()
    driver.state(*adapters, pools=pools)
    return driver


def stream(driver):
    """One that a client reads: only a large runner holds it."""
    driver.enqueue("stream", prompt=16, max_tokens=150 * 16, delivered=500, epoch=3)


@pytest.mark.parametrize("first", ["the runner", "the stream"])
def test_a_stream_waits_for_the_runner_that_holds_it(first):
    driver = fresh(pool(pool="default/small"), pool(pool="default/large"))
    for what in (first, "the runner" if first == "the stream" else "the stream"):
        if what == "the stream":
            stream(driver)
        else:
            driver.attach("small-0", pages=50, pool="default/small")
        assert not driver.of(effects.SendRefused)
    driver.wait(PATIENCE - 0.01)
    assert not driver.of(effects.SendRefused)
    driver.attach("large-0", pages=200, pool="default/large")
    assert driver.where("stream") == "large-0"


def test_a_stream_that_no_runner_holds_is_refused_when_none_is_missed_any_more():
    driver = fresh(pool(pool="default/small"), pool(pool="default/large"))
    stream(driver)
    driver.attach("small-0", pages=50, pool="default/small")
    driver.wait(PATIENCE - 0.01)
    driver.wait(0.1)
    assert [one.failure.code for one in driver.of(effects.SendRefused)] == ["context_length_exceeded"]
    assert RequestId("stream") not in driver.scheduler.requests


def test_a_stream_is_refused_as_soon_as_all_runners_are_back():
    driver = fresh(pool(replicas=2))
    driver.attach("r0", pages=50)
    stream(driver)
    driver.attach("r1", pages=50)
    assert driver.of(effects.SendRefused)


def test_before_the_operator_has_spoken_any_runner_may_still_come():
    driver = SchedulerDriver(report_patience=PATIENCE)
    driver.gateway()
    driver.attach("small-0", pages=50)
    stream(driver)
    assert not driver.of(effects.SendRefused)
    assert not driver.scheduler.state.bases.known(GROUP)
    driver.state()
    assert driver.of(effects.SendRefused)
    assert driver.scheduler.state.bases.known(GROUP)


def rollout(*, replicas=3):
    return fresh(pool(replicas=replicas), adapters=[adapter()])


def test_the_first_runner_of_a_rollout_decides_nothing_for_its_group():
    driver = rollout()
    driver.attach("new", base=NEW)
    assert not driver.of(effects.EnsureAdapter)
    assert not driver.of(effects.PublishCatalog)
    driver.attach("old-1", base=OLD)
    assert driver.scheduler.catalog is None
    driver.attach("old-2", base=OLD)
    (order,) = driver.of(effects.EnsureAdapter)
    assert order.instance != "new"
    assert driver.scheduler.catalog.groups[0].base_digest == OLD
    driver.certify(
        instance="new", certificate=None, digest=Digest(""), stage=AdapterStage.NONE, failure=Failure("a", "b")
    )
    assert not driver.of(effects.ReportAdapter)


@pytest.mark.parametrize(("replicas", "decides"), [(3, True), (4, False)])
def test_most_of_the_runners_decide_without_those_that_are_missed(replicas, decides):
    driver = rollout(replicas=replicas)
    driver.attach("old-1", base=OLD)
    driver.attach("old-2", base=OLD)
    assert (driver.scheduler.catalog is not None) is decides
    assert bool(driver.of(effects.EnsureAdapter)) is decides


def test_a_runner_that_stays_away_is_not_waited_for_long():
    driver = rollout(replicas=2)
    driver.attach("new", base=NEW)
    driver.wait(PATIENCE - 0.01)
    assert driver.scheduler.catalog is None
    driver.wait(0.1)
    assert driver.scheduler.catalog.groups[0].base_digest == NEW
    assert driver.of(effects.EnsureAdapter)


def test_what_is_known_of_a_group_is_outvoted_only_by_more_than_may_come_back():
    before = rollout()
    for name in ("a", "b", "c"):
        before.attach(name, base=OLD)
    driver = SchedulerDriver(saved=before.scheduler.catalog_to_save(), startup_wait=0.0, report_patience=PATIENCE)
    driver.attach("a", base=NEW)
    assert driver.scheduler.state.bases.of(GROUP).model.digest == OLD
    driver.attach("b", base=NEW)
    assert driver.scheduler.state.bases.of(GROUP).model.digest == NEW
