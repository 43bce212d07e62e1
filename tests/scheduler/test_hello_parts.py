"""A gateway tells in parts what runs: until it has told everything, nothing of it is ended or moved."""

from motet.domain import RequestId
from motet.runner_info import RunnerIdentity
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import Limits
from tests.scheduler.builders import SchedulerDriver, entry, pool, ready


def again(driver: SchedulerDriver, *running: str) -> None:
    """The gateway connects again. Its first part has these, and others follow."""
    driver.send(events.GatewayConnected("g0", tuple(driver.live(name) for name in running), more=True))


def told(driver: SchedulerDriver, *running: str, more: bool = False) -> None:
    driver.send(events.GatewayTold("g0", tuple(driver.live(name) for name in running), more=more))


def three_running(**config: float) -> SchedulerDriver:
    driver = ready(**config)
    driver.attach()
    for name in "abc":
        driver.enqueue(name)
    return driver


def test_what_no_part_names_has_ended_after_the_last_one():
    driver = three_running()
    again(driver, "a")
    told(driver, more=True)
    assert list(driver.scheduler.requests) == ["a", "b", "c"]
    told(driver, "c")
    assert list(driver.scheduler.requests) == ["a", "c"]
    assert [name for name, _ in driver.ledger()] == ["a", "c"]


def test_what_waits_is_enqueued_again_after_all_parts_and_has_no_place_before():
    driver = ready()
    driver.enqueue("a")
    again(driver)
    driver.attach()
    assert not driver.of(effects.SendPlaced)
    told(driver)
    driver.enqueue("a")
    assert driver.where("a") == "r0"


def test_a_new_scheduler_knows_all_that_the_parts_name():
    driver = ready()
    driver.attach(live=tuple(entry(name, 2) for name in "abcd"))
    again(driver, "a", "b")
    told(driver, "c", more=True)
    told(driver, "d")
    assert [driver.where(name) for name in "abcd"] == ["r0"] * 4


def test_nothing_of_a_gateway_moves_before_it_has_told_everything():
    """It may name the placement before, in a message that is under way."""
    driver = three_running(unlisted_timeout=2.0)
    driver.attach("r1")
    again(driver)
    for _ in range(4):
        driver.wait(1)
        driver.report("r0")
        assert not driver.of(effects.SendPlaced)
    told(driver, "a", "b", "c")
    moved = []
    for _ in range(4):
        driver.wait(1)
        moved += [one.request for one in driver.of(effects.SendPlaced)]
        driver.report("r0")
        moved += [one.request for one in driver.of(effects.SendPlaced)]
    assert sorted(moved) == ["a", "b", "c"]


def test_a_gateway_that_breaks_off_has_ended_nothing():
    driver = three_running()
    driver.report("r0", *(entry(name, 2) for name in "abc"))
    again(driver, "a")
    driver.send(events.GatewayDisconnected("g0"))
    driver.wait(1)
    assert list(driver.scheduler.requests) == ["a", "b", "c"]
    told(driver, "x")
    assert list(driver.scheduler.requests) == ["a", "b", "c"], "a part after the end"


def test_what_moves_and_still_runs_as_a_later_part_says_goes_on_as_it_was():
    """It waits for room elsewhere, and its gateway has not been told. Its tenant has paid for it."""
    driver = ready()
    driver.state(pools=(pool(limits=(("acme", Limits(requests_per_minute=60)),)),))
    driver.attach()
    driver.enqueue("a")
    driver.report("r0", entry("a", 2))
    draining = events.DrainRequested(RunnerIdentity(instance="r0", incarnation="1"), 0.0)
    driver.send(events.DrainsDeclared((draining,), 1))
    driver.wait(1)
    assert driver.where("a") == ""
    request = driver.scheduler.requests[RequestId("a")]
    again(driver)
    driver.report("r0", entry("a", 2))
    driver.wait(1)
    told(driver, "a")
    assert driver.scheduler.requests == {"a": request}
    assert driver.where("a") == "r0"
    assert request.draw.charged


def test_what_moves_and_no_part_names_has_ended():
    driver = three_running()
    driver.detach()
    driver.lose("a")
    again(driver, "b")
    driver.wait(1)
    told(driver, "c")
    assert list(driver.scheduler.requests) == ["b", "c"]
