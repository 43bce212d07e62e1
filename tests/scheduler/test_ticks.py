"""What one tick takes does not grow with how many requests wait, or came and went before it."""

import sys

import pytest

from motet_scheduler.policy import effects, events, placement
from motet_scheduler.policy.deadlines import SWEPT_AT_ONCE
from motet_scheduler.policy.expected_order import FLOWS_AT_ONCE
from tests.scheduler.builders import ready


def many_wait(count, **config):
    driver = ready(**config)
    driver.scheduler.check = lambda: None  # it counts all requests, at each event
    driver.attach(pages=10)
    for number in range(count):
        driver.enqueue(f"{number}", prompt=1, max_tokens=150, base="sha256:base", tenant=f"t{number}", deadline=50.0)
    return driver


def calls_of_a_tick(driver):
    calls = []
    driver.clock.advance(0.1)
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        driver.scheduler.handle(events.Tick(), driver.clock())
    finally:
        sys.setprofile(None)
    return len(calls)


def test_five_times_as_many_waiting_requests_are_no_more_work_for_a_tick():
    few, many = (calls_of_a_tick(many_wait(count, forget_runner=0.0)) for count in (401, 2001))
    assert many < 1.1 * few


def test_a_tick_looks_at_a_bounded_number_of_positions(monkeypatch):
    monkeypatch.setattr(placement, "LOOKED_AT_ONCE", 10)
    driver, looked = many_wait(16), []
    monkeypatch.setattr(
        placement.Positions, "report", lambda _self, request, position: looked.append((position, request.id))
    )
    for moment in range(4):
        driver.wait(1.0)
        assert len(looked) <= 10 * (moment + 1)
    each = [(number, f"{number}") for number in range(1, 16)]
    assert looked == [*each, *each, *each[:10]]


def test_a_tick_looks_at_a_bounded_number_of_flows(monkeypatch):
    """To know who is the first, all have to be looked at. Each tenant here has one."""
    monkeypatch.setattr(placement, "LOOKED_AT_ONCE", 10)
    driver, looked = many_wait(1 + 12 * FLOWS_AT_ONCE), []
    monkeypatch.setattr(placement.Positions, "report", lambda _self, _request, position: looked.append(position))
    driver.wait(1.0)
    assert looked == []
    driver.wait(0.1)
    assert looked == [*range(1, 10)], "one more look was for the last flows"


def test_who_leaves_while_it_is_found_out_who_is_the_first_counts_in_no_position(monkeypatch):
    monkeypatch.setattr(placement, "LOOKED_AT_ONCE", 10)
    driver, looked = many_wait(1 + 12 * FLOWS_AT_ONCE), []
    monkeypatch.setattr(
        placement.Positions, "report", lambda _self, request, position: looked.append((position, request.id))
    )
    driver.wait(1.0)
    driver.cancel("1")
    driver.wait(0.1)
    assert looked == [(number, f"{number + 1}") for number in range(1, 9)]


def test_no_tick_tells_many_positions_and_asks_how_many_runners_are_needed(monkeypatch):
    monkeypatch.setattr(placement, "LOOKED_AT_ONCE", 10)
    driver = many_wait(17)
    driver.cancel("1")
    driver.wait(1.0)
    assert len(driver.of(effects.SendPosition)) == 10
    assert not driver.scheduler.capacity.figures
    driver.wait(driver.scheduler.next_due() - driver.clock())
    assert not driver.of(effects.SendPosition)
    assert driver.scheduler.capacity.figures["default/demo"].waiting == 15


def test_the_autoscaler_is_late_only_once(monkeypatch):
    """Also when ticks come late, and each tells many positions."""
    monkeypatch.setattr(placement, "LOOKED_AT_ONCE", 10)
    driver = many_wait(65)
    driver.wait(1.0)
    driver.wait(1.0)
    assert driver.scheduler.capacity.figures["default/demo"].waiting == 64


def test_positions_are_in_the_order_of_age_whatever_the_tenant(monkeypatch):
    driver, looked = many_wait(1), []
    for name, tenant, age in (("d", "a", 1.0), ("b", "b", 3.0), ("a", "a", 4.0), ("c", "a", 2.0)):
        driver.enqueue(name, prompt=1, max_tokens=150, tenant=tenant, age=age)
    monkeypatch.setattr(placement.Positions, "report", lambda _self, request, _position: looked.append(request.id))
    driver.wait(1.0)
    assert looked == ["a", "b", "c", "d"]


def test_a_tenant_that_sends_faster_than_positions_are_told_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(placement, "LOOKED_AT_ONCE", 10)
    driver, looked = many_wait(1), []
    driver.enqueue("first", prompt=1, max_tokens=150, tenant="b")
    monkeypatch.setattr(placement.Positions, "report", lambda _self, request, _position: looked.append(request.id))
    for number in range(10):
        for one in range(40):
            driver.enqueue(f"a{number}.{one}", prompt=1, max_tokens=150, tenant="a")
            if number > 1:
                driver.cancel(f"a{number - 2}.{one}")
        driver.wait(1.0)
    assert looked.count("first") > 2


@pytest.mark.parametrize("left", [0, 3])
def test_stale_deadlines_are_removed_in_parts(left):
    driver = many_wait(2 * SWEPT_AT_ONCE + 1)
    for number in range(1, 2 * SWEPT_AT_ONCE + 1 - left):
        driver.cancel(f"{number}")
    deadlines, sizes = driver.scheduler.lifecycle.deadlines, []
    for _ in range(3):
        driver.wait(0.2)
        sizes.append(len(deadlines))
    assert sizes == [SWEPT_AT_ONCE + 1 + left, 1 + left, left]
