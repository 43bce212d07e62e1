"""A runner that others are like goes for good: of those that wait, only those are tried again whom that concerns."""

from motet.domain import Digest, RequestId
from motet.errors import AdapterUnproved
from motet.runner_info import Failure, Tier
from motet_scheduler.policy import effects
from motet_scheduler.policy.class_queue import ClassQueue
from tests.scheduler.builders import GROUP, PIRATE, SchedulerDriver, adapter, entry, pool, ready, reserved, resident

WRONG = Failure.of(AdapterUnproved("Its results are wrong."))
ASKS = {"digest": PIRATE, "adapter": "default/pirate"}


def leave(driver, name):
    driver.detach(name)
    driver.wait(driver.scheduler.config.forget_runner)
    assert name not in driver.scheduler.runners


def refusals(driver):
    return [(one.request, one.failure.code) for one in driver.of(effects.SendRefused)]


def serving(*runners, **capacity):
    driver = ready()
    for name in runners:
        driver.attach(name, max_sequences=1, **capacity)
    driver.state(adapter(), pools=(pool(replicas=0),))
    driver.certify(instance=next(iter(driver.orders))[0])
    return driver


def test_after_a_restart_nobody_is_tried_again_who_may_run_on_others_as_well():
    driver = ready()
    for name in ("r0", "r1"):
        driver.attach(name, max_sequences=1)
    for number in range(100):
        driver.enqueue(f"{number}", tenant=f"t{number}")
    driver.attach("r0", incarnation="2", max_sequences=1)
    assert [one.request for one in driver.of(effects.SendPlaced)] == ["2"]
    assert all(one.waits_for is not None for one in driver.scheduler.queues[GROUP].heads())
    assert not driver.scheduler.more_to_try


def test_after_the_last_one_of_its_kind_all_are_tried_again():
    driver = ready()
    driver.attach("small", pages=10, max_sequences=1)
    driver.attach("large", pages=100, max_sequences=1)
    driver.state(pools=(pool(replicas=0),))
    for name in ("a", "b", "c"):
        driver.enqueue(name, prompt=100, max_tokens=800 if name == "c" else 16)
    assert (driver.where("c"), refusals(driver)) == ("", [])
    leave(driver, "large")
    assert refusals(driver) == [("c", "context_length_exceeded")]


def test_a_stream_of_a_replaced_revision_is_refused_when_the_last_one_that_holds_it_goes():
    driver = SchedulerDriver()
    driver.gateway()
    driver.state(adapter())
    driver.attach("r0", resident=resident(PIRATE, Tier.DISK), max_sequences=1)
    driver.attach("r1", live=(entry("x", 2),), max_sequences=1)
    driver.wait(20.0)
    driver.certify(digest=Digest("sha256:newer"))
    driver.enqueue("before", delivered=1, epoch=1, **ASKS)
    driver.report("r1")  # x has ended
    driver.wait(driver.scheduler.config.unsubmitted_timeout)
    driver.report("r1")
    driver.enqueue("a", delivered=8, epoch=1, **ASKS)
    assert driver.scheduler.requests[RequestId("a")].replaced
    driver.enqueue("on r1")
    assert (driver.where("before"), driver.where("a")) == ("r0", "")
    driver.state(adapter(), pools=(pool(replicas=0),))
    leave(driver, "r0")
    assert refusals(driver) == [("a", "model_not_found")]


def test_for_what_a_runner_held_no_request_is_looked_for(monkeypatch):
    """It may hold thousands of adapters."""
    driver, looked = serving("r0", "r1", resident=resident(PIRATE, Tier.DISK)), []
    for name in ("a", "b", "waits"):
        driver.enqueue(name, **ASKS)
    assert driver.where("waits") == ""
    monkeypatch.setattr(ClassQueue, "with_adapter", lambda _self, digest, _bases: looked.append(digest) or [])
    driver.attach("r0", incarnation="2", max_sequences=1)
    assert (driver.where("waits"), looked) == ("r0", [])


def test_who_waits_is_refused_when_only_those_are_left_that_refuse_its_adapter():
    driver = serving("r0", "r1")
    driver.certify(instance="r1", certificate=None, failure=WRONG, order=0)
    assert [driver.enqueue(name, **how) and driver.where(name) for name, how in (("a", ASKS), ("b", {}))] == [
        "r0",
        "r1",
    ]
    driver.enqueue("waits", **ASKS)
    assert driver.where("waits") == ""
    leave(driver, "r0")
    assert ("waits", "adapter_unproved") in refusals(driver)


def test_the_next_process_of_a_runner_that_has_refused_an_adapter_may_take_its_requests():
    driver = serving("r0", "r1")
    driver.certify(instance="r1", certificate=None, failure=WRONG, order=0)
    driver.enqueue("a", **ASKS)
    driver.enqueue("waits", **ASKS)
    assert (driver.where("a"), driver.where("waits")) == ("r0", "")
    driver.attach("r1", incarnation="2", max_sequences=1)
    assert driver.where("waits") == "r1"


def test_an_overdue_request_gets_another_runner_when_the_one_that_is_reserved_for_it_goes():
    driver = ready(max_passed_over=1, headroom_one_in=0)
    for name, pages in (("r0", 6), ("r1", 4)):
        driver.attach(name, pages=10, live=(entry(f"on {name}", pages),))
    driver.enqueue("large", prompt=1, max_tokens=16 * 7 - 1, tenant="large")
    driver.enqueue("small", prompt=1, max_tokens=16 - 1, tenant="small")
    driver.finish("small")
    first = reserved(driver)
    assert set(first.values()) == {"large"}
    leave(driver, *first)
    (other,) = {"r0", "r1"} - first.keys()
    assert reserved(driver) == {other: "large"}
