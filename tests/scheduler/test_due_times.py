"""A scheduler whose ticks come when `next_due` says so misses nothing: a tick before that does nothing."""

from copy import deepcopy
from math import inf

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from motet.domain import InstanceName, RequestId
from motet.runner_info import Failure
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.catalog import SavedCatalog
from motet_scheduler.policy.request_lifecycle import ENDED_AT_ONCE
from tests.scheduler.builders import PIRATE, SchedulerDriver, adapter, entry, pool, ready, resident
from tests.scheduler.test_random_events import Driver, RandomEvents
from tests.support.quick_copy import quick_copy

MOMENT = 1e-6


class DueDriver(Driver):
    """Sends a tick whenever one is due, and tries one before."""

    def send(self, event):
        decided = super().send(event)
        while self.scheduler.more_to_try:
            decided += super().send(events.TryMore())
        if isinstance(event, events.Tick):
            assert self.scheduler.next_due() > self.clock(), "a tick was of no use"
        return decided

    def pass_time(self, seconds, carry_out):
        end = self.clock() + seconds
        while (due := max(self.scheduler.next_due(), self.clock())) <= end:
            self._try_a_tick_before_its_time(self.clock(), due)
            self.clock.now = due
            carry_out(self.send(events.Tick()))
        self._try_a_tick_before_its_time(self.clock(), end)
        self.clock.now = end

    def _try_a_tick_before_its_time(self, start, due):
        """Just before its time a tick does nothing, although it looks at everything: so nothing was due in between."""
        now, scheduler = max(due - MOMENT, (start + due) / 2), self.scheduler
        if not start < now < due or scheduler.look_from() <= scheduler.look_at:
            return  # what waits is looked at when its turn comes
        left = scheduler.positions.left  # a generator, which has no copy; its end is not looked at
        # Nothing is noted in a tick that does nothing, and to copy what was noted took a third of the time.
        copy = quick_copy(scheduler, {id(left): iter(()), id(scheduler.timelines): scheduler.timelines})
        copy.look_at = now
        assert copy.handle(events.Tick(), now) == [], f"{due - now:.3g} s before its time, a tick does something"


class DueTimes(RandomEvents):
    driver_class = DueDriver
    adapters = (adapter("pirate", max_replicas=1), adapter("poet", min_replicas=1))

    # `RandomEvents` checks these.
    every_request_is_placed_refused_ended_or_waits_with_a_reason = None
    nobody_waits_who_could_be_placed = None
    placements_have_the_gateways_epochs = None
    runners_are_reserved_for_the_overdue_requests_of_now = None

    @rule(seconds=st.sampled_from((0.05, 0.5, 2.0, 12.0)))
    def wait(self, seconds):
        self.driver.pass_time(seconds, self.carry_out_all)


ANY = settings(stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestDueTimes = DueTimes.TestCase
TestDueTimes.settings = settings(ANY, max_examples=5)


@pytest.mark.soak
class TestManyDueTimes(DueTimes.TestCase):
    settings = settings(ANY, max_examples=500)


def test_a_copy_decides_as_a_deep_copy_does_and_the_scheduler_does_not_notice():
    driver = ready()
    driver.send(events.CatalogReplaced((pool(),), ()))
    driver.enqueue("waits", deadline=5.25)
    left = driver.scheduler.positions.left
    due, at = driver.scheduler.next_due(), driver.clock() + 60.0
    copies = [make(driver.scheduler, {id(left): iter(())}) for make in (quick_copy, deepcopy)]
    quick, deep = ([copy.handle(events.Tick(), at), copy.next_due()] for copy in copies)
    assert quick == deep
    assert quick[0] != []
    assert driver.scheduler.next_due() == due


def test_a_scheduler_that_knows_nothing_has_nothing_to_do_after_its_start():
    driver = ready()
    driver.send(events.CatalogReplaced((), ()))
    driver.wait(100)
    driver.wait(100)
    assert driver.scheduler.next_due() == inf


def test_an_idle_scheduler_computes_the_capacity_and_does_nothing_else():
    driver = ready()
    driver.send(events.CatalogReplaced((pool(),), ()))
    driver.attach()
    driver.wait(100)
    dues = []
    for _ in range(5):
        dues.append(driver.scheduler.next_due() - driver.clock())
        driver.clock.now = driver.scheduler.next_due()
        driver.send(events.Tick())
    assert dues == pytest.approx([1.0] * 5)


def test_positions_are_told_in_the_time_scale():
    driver = ready(positions_every=0.05)
    driver.attach(pages=10)
    driver.enqueue("large", prompt=1, max_tokens=150)
    driver.enqueue("waits", prompt=1, max_tokens=150)
    driver.wait(0.2)
    assert driver.scheduler.next_due() <= driver.clock() + 0.05


def run_until(driver, end):
    """Send the ticks that are due until then. Returns what they did, and when."""
    said = []
    while (due := driver.scheduler.next_due()) <= end:
        driver.clock.now = max(due, driver.clock.now)
        said += [(driver.clock.now, type(effect)) for effect in driver.send(events.Tick())]
    driver.clock.now = end
    return said


def test_a_request_is_refused_at_its_deadline():
    driver = ready()
    began = driver.clock()
    driver.enqueue("waits", deadline=5.25)
    assert (began + 5.25, effects.SendRefused) in run_until(driver, began + 20)


def test_who_is_too_large_is_refused_when_the_wait_for_other_runners_ends():
    driver = SchedulerDriver(report_patience=10.125)
    driver.gateway()
    driver.state(pools=(pool(replicas=2),))
    began = driver.clock()
    driver.attach(pages=10)
    driver.enqueue("large", prompt=16 * 20)
    assert (began + 10.125, effects.SendRefused) in run_until(driver, began + 20)


def test_requests_are_placed_when_the_wait_after_a_start_ends():
    driver = SchedulerDriver(saved=SavedCatalog(runners=(InstanceName("gone"),)), startup_wait=2.125)
    began = driver.clock()
    driver.gateway()
    driver.attach()
    driver.enqueue("waits")
    assert (began + 2.125, effects.SendPlaced) in run_until(driver, began + 20)


def test_a_change_of_residency_is_told_after_its_pause():
    driver = ready(residency_pause=0.375)
    driver.attach()
    driver.state(adapter())
    driver.certify()
    run_until(driver, driver.clock() + 5.25)
    driver.report(resident=resident(PIRATE))
    assert driver.of(effects.PublishCatalog)
    driver.report()
    assert not driver.of(effects.PublishCatalog)
    told = driver.clock() + 0.375
    assert (told, effects.PublishCatalog) in run_until(driver, driver.clock() + 5)


def test_a_drained_runner_is_reported_soon_after_its_last_request():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    drain = events.DrainRequested(driver.scheduler.runners[InstanceName("r0")].identity, 100.0)
    driver.send(events.DrainsDeclared((drain,)))
    run_until(driver, driver.clock() + 5.25)
    driver.finish("a")
    assert effects.ReportDrained in [kind for _, kind in run_until(driver, driver.clock() + 0.15)]


def test_a_running_request_of_a_gateway_that_has_gone_ends_soon_after_the_runner_has_dropped_it():
    driver = ready()
    driver.attach()
    driver.enqueue("a")
    driver.report("r0", entry("a", 2))
    driver.send(events.GatewayDisconnected("g0"))
    for _ in range(3):
        run_until(driver, driver.clock() + 1.75)
        driver.report("r0")
    assert driver.scheduler.requests
    run_until(driver, driver.clock() + 0.15)
    assert not driver.scheduler.requests


def test_a_new_operator_soon_knows_that_it_has_heard_all():
    driver = ready()
    driver.attach()
    run_until(driver, driver.clock() + 5.25)
    driver.send(events.OperatorConnected())
    assert effects.ReportedAll in [kind for _, kind in run_until(driver, driver.clock() + 0.15)]


def test_a_request_for_a_base_model_that_is_gone_is_sent_back_soon():
    driver = ready()
    driver.attach(base="sha256:new")
    run_until(driver, driver.clock() + 31.25)
    driver.enqueue("a", base="sha256:old")
    assert effects.SendRefused in [kind for _, kind in run_until(driver, driver.clock() + 0.15)]


def test_a_runner_that_is_away_is_forgotten_in_time():
    driver = ready(forget_runner=30.125)
    driver.attach()
    driver.clock.advance(0.25)
    driver.detach("r0")
    run_until(driver, 1030.25)
    assert driver.scheduler.runners
    run_until(driver, 1030.375)
    assert not driver.scheduler.runners


def test_a_request_tries_the_runner_again_that_declined_it_as_soon_as_it_may():
    driver = ready(avoid_after_decline=0.375)
    driver.attach()
    driver.enqueue("a")
    driver.send(events.RunnerDeclined(InstanceName("r0"), RequestId("a"), 1, Failure("declined", "no")))
    driver.lose("a")
    assert (driver.clock() + 0.75, effects.SendPlaced) in run_until(driver, driver.clock() + 5), (
        "twice: it was lost, too"
    )


def test_another_runner_soon_loads_the_adapter_of_one_that_has_gone():
    driver = ready()
    driver.attach("r0")
    driver.state(adapter(min_replicas=1))
    driver.certify()
    driver.attach("r1")
    run_until(driver, driver.clock() + 0.25)
    driver.detach("r0")
    assert effects.EnsureAdapter in [kind for _, kind in run_until(driver, driver.clock() + 0.1)]


def test_a_request_that_moves_in_a_tick_is_not_due_for_what_it_avoided_long_ago():
    driver = DueDriver()
    driver.gateway()
    driver.attach("r0")
    driver.attach("r1")
    driver.enqueue("a", avoid=("r0",))
    driver.report("r1", entry("a", 2))
    run_until(driver, driver.clock() + 60)
    drain = events.DrainRequested(driver.scheduler.runners[InstanceName("r1")].identity, 1.0)
    driver.send(events.DrainsDeclared((drain,)))
    run_until(driver, driver.clock() + 5)
    assert driver.scheduler.next_due() > driver.clock()


def test_what_a_tick_does_does_not_depend_on_who_has_asked_when_it_is_due():
    """Else a record of events would be replayed to other decisions: nobody asks there."""
    said = []
    for asks in (True, False):
        driver = ready()
        driver.attach(pages=100, max_sequences=1)
        for n in range(2 * ENDED_AT_ONCE):
            driver.enqueue(f"{n}", deadline=5.0)
            driver.finish(f"{n}")
        driver.enqueue("runs")
        driver.enqueue("waits", deadline=5.0)
        if asks:
            driver.scheduler.next_due()
        driver.clock.advance(5.0)
        said.append([driver.send(events.Tick())])
        while driver.scheduler.more_to_try:
            said[-1].append(driver.send(events.TryMore()))
    assert said[0] == said[1]
    assert len(said[0]) > 1, "what has gone is passed by in parts"
