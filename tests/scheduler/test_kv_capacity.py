"""Adapters in use take pages that KV cannot have: scheduler and supervisor follow what the runner reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import InstanceName
from motet_scheduler.policy import effects, events
from tests.scheduler.builders import entry, ready
from tests.support.fake_engine import SlowEngines, tokens_of
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system

R0 = InstanceName("r0")
LENGTH = 159
"""With a prompt of one token, a request of this length takes exactly ten pages."""


def runner(pages=10):
    driver = ready()
    driver.attach(pages=pages)
    return driver


def test_requests_are_placed_in_the_pages_that_the_runner_reports():
    driver = runner()
    driver.report("r0", pages=8)
    driver.enqueue("a")
    driver.enqueue("b")
    assert (driver.where("a"), driver.where("b")) == ("r0", ""), "each needs five pages"
    driver.report("r0", entry("a", 5), pages=10)
    assert driver.where("b") == "r0"


@pytest.mark.parametrize(("reported", "pages"), [(0, 10), (7, 7), (10, 10), (11, 10)])
def test_a_report_without_pages_means_all_of_them_and_none_means_more(reported, pages):
    driver = runner()
    driver.report("r0", pages=6)
    driver.report("r0", pages=reported)
    assert driver.scheduler.runners[R0].ledger.capacity == pages


def test_the_pages_stay_what_they_were_while_the_runner_connects_again():
    driver = runner()
    driver.report("r0", pages=6)
    driver.detach()
    driver.attach(pages=10)
    assert driver.scheduler.runners[R0].ledger.capacity == 6


def test_promises_that_exceed_the_pages_now_stay_and_nothing_is_added():
    driver = runner()
    driver.enqueue("a")
    driver.enqueue("b")
    driver.report("r0", entry("a", 5), entry("b", 5), pages=6)
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 5}
    driver.enqueue("c", max_tokens=1)
    assert not driver.where("c")


STEPS = st.lists(st.tuples(st.sampled_from(["enqueue", "report", "finish"]), st.integers(1, 40)), max_size=40)


@given(STEPS, st.sampled_from([1.0, 1.5]))
def test_no_placement_makes_the_promises_exceed_what_was_reported_times_overcommit(steps, factor):
    driver = runner(pages=40)
    driver.send(events.SupervisorConnected())
    driver.send(events.OvercommitSet("default/demo", factor))
    reported, live = 40, {}
    for number, (what, size) in enumerate(steps):
        match what:
            case "enqueue":
                driver.enqueue(f"q{number}", prompt=1, max_tokens=16 * size)
            case "report":
                reported = size
                driver.report("r0", *(entry(name, pages) for name, pages in live.items()), pages=size)
            case "finish" if live:
                name = sorted(live)[size % len(live)]
                del live[name]
                driver.finish(name)
        placed = {one.request: one.promise.pages for one in driver.of(effects.SendPlaced)}
        live |= placed
        assert not placed or sum(live.values()) <= reported * factor


async def test_scheduler_and_supervisor_follow_a_runner_over_grpc(folder):
    engines = SlowEngines(0.02, pages=20)
    async with in_process_system(folder) as system:
        served = await system.runner("r0", engines)
        (engine,) = engines.made
        known = system.control.scheduler.runners[R0]
        watched = system.control.supervisor_service.supervisor.runners[R0]
        engine.ledger.capacity = 12
        await until(lambda: known.ledger.capacity == watched.kv_pages == 12)
        assert watched.free == 12
        answers = [system.gateway.start(f"{n}", prompt=(n,), max_tokens=LENGTH, q80=LENGTH) for n in range(2)]
        await until(lambda: known.ledger.promised == 10, why="one of two requests of ten pages on twelve")
        await until(lambda: any(one.tokens for one in system.gateway.live()))
        assert known.ledger.promised == 10
        engine.ledger.capacity = 20
        await until(lambda: known.ledger.promised == 20)
        engines.hurry()
        for n, answer in enumerate(answers):
            assert await answer == tokens_of((n,), 7, LENGTH)
        assert all(len(asked.placements) == 1 for asked in system.gateway.asked.values()), "a request was declined"
        metrics = served.service.metrics
        assert metrics.pages._value.get() == 20
