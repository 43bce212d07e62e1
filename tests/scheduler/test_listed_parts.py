"""A runner lists in parts what it has: what is not among them is known after the last one, and until a hello is whole,
nothing is placed there."""

from motet.api.v1 import scheduler_pb2
from motet.domain import InstanceName
from motet.runner_info import Capacity, RunnerIdentity, RunnerRequest, SequenceState
from motet_scheduler import conversion
from motet_scheduler.policy import events
from tests.scheduler.builders import GROUP, SchedulerDriver, entry, ready

R0 = RunnerIdentity(instance="r0", incarnation="1", pool="default/demo", group=GROUP)


def attach(driver: SchedulerDriver, *live: RunnerRequest, **how: int) -> None:
    """Others follow."""
    capacity = Capacity(**({"pages": 100} | how))
    driver.send(events.RunnerAttached(identity=R0, address="unix:r0", capacity=capacity, live=live, more=True))


def listed(driver: SchedulerDriver, *live: RunnerRequest, more: bool = False) -> None:
    driver.send(events.RunnerListed(InstanceName("r0"), "1", live, more))


def test_what_no_part_lists_is_missed_after_the_last_one():
    driver = ready(unsubmitted_timeout=2.0)
    driver.attach()
    for name in "abc":
        driver.enqueue(name)
    for _ in range(2):
        driver.report("r0", entry("a", 2), more=True)
        listed(driver, more=True)
        assert [name for name, _ in driver.ledger()] == ["a", "b", "c"]
        listed(driver, entry("b", 2))
        driver.clock.advance(2.5)
    assert [name for name, _ in driver.ledger()] == ["a", "b"]


def test_nothing_is_placed_on_a_runner_before_all_is_known_that_it_has():
    driver = ready()
    attach(driver, entry("a", 4), pages=9)
    driver.enqueue("b", max_tokens=16)
    assert driver.where("b") == ""
    listed(driver, entry("c", 4), more=True)
    assert driver.where("b") == ""
    listed(driver, entry("d", 1))
    assert driver.where("b") == "", "it needs two pages, and none is free"
    driver.ended("c")
    assert driver.where("b") == "r0"


def test_a_report_begins_anew_what_a_hello_has_not_ended():
    driver = ready()
    attach(driver, entry("a", 4))
    driver.report("r0", entry("b", 4))
    assert {name for name, _ in driver.ledger()} == {"a", "b"}
    driver.enqueue("c")
    assert driver.where("c") == "r0"


def test_a_part_that_nobody_waits_for_changes_nothing():
    driver = ready()
    driver.attach()
    listed(driver, entry("a", 4))
    assert not driver.ledger()


def test_a_runner_that_hung_is_well_when_no_part_has_work():
    driver = ready()
    driver.attach()
    driver.report("r0", steps=1)
    driver.send(events.RunnerUnhealthy(R0, "its engine hangs", hung=True))
    loading = {"state": SequenceState.LOADING}
    for last, well in (({}, False), (loading, True)):
        driver.report("r0", entry("a", 2, **loading), steps=1, more=True)
        listed(driver, entry("b", 2, **last))
        assert driver.scheduler.runners[InstanceName("r0")].takes_work is well


def test_parts_are_read():
    one = {"request": "a", "epoch": 1, "promise": {"pages": 2}}
    up = scheduler_pb2.AttachUp(listed={"requests": [one], "more": True})
    event = conversion.attach_event(R0, up)
    assert isinstance(event, events.RunnerListed)
    assert [request.request for request in event.live] == ["a"]
    assert event.more
    report = conversion.attach_event(R0, scheduler_pb2.AttachUp(report={"live": [one], "live_follows": True}))
    assert isinstance(report, events.RunnerReported)
    assert report.more
    assert conversion.runner_attached(scheduler_pb2.RunnerHello(live=[one], live_follows=True)).more
