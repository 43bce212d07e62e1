"""What its runner says has ended still belongs to its gateway, which may read slowly or be away for a moment."""

from motet_scheduler.policy import events
from motet_scheduler.policy.request_lifecycle import MAX_UNANSWERED_TIMES
from motet_scheduler.policy.values import Limits
from tests.scheduler.builders import SchedulerDriver, entry, pool, ready


def ended(*, pages: int = 50) -> SchedulerDriver:
    """`a` of gateway g0 has ended at its runner."""
    driver = ready(unlisted_timeout=10.0)
    driver.attach(pages=pages)
    driver.enqueue("a")
    driver.report("r0", entry("a", 5))
    driver.ended("a")
    return driver


def test_a_gateway_that_is_away_for_a_moment_keeps_the_answers_that_it_still_reads() -> None:
    driver = ended()
    driver.send(events.GatewayDisconnected("g0"))
    for _ in range(9):
        driver.wait(1.0)
        driver.report()
        assert "a" in driver.scheduler.requests
    driver.wait(1.5)
    driver.wait(0.5)
    assert "a" not in driver.scheduler.requests, "its gateway does not come back"


def test_an_answer_that_its_gateway_still_reads_keeps_its_place_of_a_quota() -> None:
    driver = ready()
    driver.state(pools=(pool(limits=(("*", Limits(concurrency=1)),)),))
    driver.gateway("g1")
    driver.attach(pages=50)
    driver.enqueue("a")
    driver.enqueue("c", gateway="g1")
    driver.ended("a")
    driver.send(events.GatewayDisconnected("g0"))
    driver.wait(0.25)
    driver.gateway("g0", driver.live("a"))
    driver.wait(0.25)
    assert driver.where("c") == ""
    driver.finish("a")
    driver.wait(0.25)
    assert driver.where("c") == "r0"


def test_a_gateway_that_comes_back_does_not_take_pages_again_for_what_has_ended() -> None:
    driver = ended(pages=5)
    driver.enqueue("b")
    assert driver.ledger() == {("b", 1): 5}
    driver.send(events.GatewayDisconnected("g0"))
    driver.gateway("g0", driver.live("a", pages=5), driver.live("b", pages=5))
    assert driver.ledger() == {("b", 1): 5}


def test_a_gateway_has_long_to_read_what_has_ended_however_often_it_comes_back() -> None:
    driver = ended()
    driver.attach("r1")
    for _ in range(10 * MAX_UNANSWERED_TIMES - 1):
        driver.wait(1.0)
        driver.report()
        driver.gateway("g0", driver.live("a"))
        assert driver.where("a") == "r0", "its tokens are in the stream that its gateway reads"
    for _ in range(2):
        driver.wait(1.0)
        driver.report()
    assert driver.where("a") == "r1"
    assert not driver.scheduler.lifecycle.unanswered
