"""Drains: the operator declares a set, and each runner gets an order to drain or to take work."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from motet.domain import InstanceName, RequestId
from motet.runner_info import RunnerIdentity
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.catalog import SavedCatalog
from tests.scheduler.builders import SchedulerDriver, entry, ready


def declare(
    driver: SchedulerDriver, *instances: str, incarnation: str = "1", deadline: float = 10.0
) -> list[effects.Effect]:
    return driver.send(
        events.DrainsDeclared(
            tuple(
                events.DrainRequested(RunnerIdentity(instance=instance, incarnation=incarnation), deadline)
                for instance in instances
            )
        )
    )


def orders(driver: SchedulerDriver) -> list[tuple[str, str]]:
    """The orders in the last effects: the name of the runner, and drain or work."""
    return [
        (str(effect.instance), "drain" if isinstance(effect, effects.DrainRunner) else "work")
        for effect in driver.effects
        if isinstance(effect, effects.DrainRunner | effects.TakeWork)
    ]


def test_every_runner_that_attaches_gets_an_order_to_drain_or_to_take_work():
    driver = ready()
    driver.attach("r0")
    assert orders(driver) == [("r0", "work")]
    declare(driver, "r1")
    assert orders(driver) == []
    driver.attach("r1")
    assert orders(driver) == [("r1", "drain")]


def test_a_drain_that_leaves_the_set_is_cancelled_and_the_runner_gets_requests():
    driver = ready()
    driver.attach()
    declare(driver, "r0")
    assert orders(driver) == [("r0", "drain")]
    driver.enqueue("a")
    assert driver.where("a") == ""
    declare(driver)
    assert orders(driver) == [("r0", "work")]
    assert driver.where("a") == "r0", "the waiting request is placed there at once"


def test_an_unchanged_set_of_drains_sends_runners_nothing():
    driver = ready()
    driver.attach("r0", live=(entry("a", 2),))
    declare(driver, "r0")
    declare(driver, "r0")
    assert orders(driver) == []


def test_a_drain_declared_before_its_runner_attaches_again_is_not_over():
    driver = SchedulerDriver(saved=SavedCatalog(runners=(InstanceName("r0"),)))
    driver.gateway()
    declare(driver, "r0")
    assert driver.of(effects.ReportDrained) == [], "the runner may come back with requests"
    driver.wait(1.0)  # settled without it
    assert driver.of(effects.ReportDrained) == []
    driver.attach("r0", live=(entry("a", 2),))
    assert orders(driver) == [("r0", "drain")]
    assert driver.of(effects.ReportDrained) == []


def test_a_drain_of_a_missing_runner_ends_after_the_time_to_forget_a_runner():
    driver = ready()
    declare(driver, "r0")
    driver.wait(driver.scheduler.config.forget_runner - 1)
    assert driver.of(effects.ReportDrained) == []
    driver.wait(2.0)
    assert [one.runner.instance for one in driver.of(effects.ReportDrained)] == ["r0"]
    driver.wait(1.0)
    assert driver.of(effects.ReportDrained) == [], "said once"
    declare(driver, "late")
    assert [one.runner.instance for one in driver.of(effects.ReportDrained)] == ["late"]


def test_a_drained_runner_whose_stream_breaks_is_given_time_to_come_back():
    driver = ready()
    driver.attach("r0", live=(entry("a", 2),))
    declare(driver, "r0")
    driver.detach("r0")
    driver.wait(1.0)
    assert driver.of(effects.ReportDrained) == []
    driver.attach("r0", live=(entry("a", 2),))
    assert orders(driver) == [("r0", "drain")]
    driver.detach("r0")
    driver.wait(driver.scheduler.config.forget_runner + 1)
    assert [one.runner.instance for one in driver.of(effects.ReportDrained)] == ["r0"]


def test_the_drain_of_an_incarnation_ends_when_a_new_one_attaches():
    driver = ready()
    driver.attach("r0", live=(entry("a", 2),))
    declare(driver, "r0")
    driver.attach("r0", incarnation="2")
    assert orders(driver) == [("r0", "work")]
    driver.wait(0.1)
    assert [one.runner.incarnation for one in driver.of(effects.ReportDrained)] == ["1"]
    declare(driver, "r0", incarnation="2")
    assert orders(driver) == [("r0", "drain")]


def test_a_drain_without_an_incarnation_applies_to_any():
    driver = ready()
    declare(driver, "r0", incarnation="")
    driver.attach("r0", incarnation="7")
    assert orders(driver) == [("r0", "drain")]


def test_a_runner_that_left_because_it_was_drained_is_not_reported_as_down():
    driver = ready()
    driver.attach()
    declare(driver, "r0")
    driver.send(events.RunnerDetached(InstanceName("r0"), "1"))
    declare(driver)  # the runner is gone, and its drain with it
    driver.enqueue("a")
    assert driver.scheduler.requests[RequestId("a")].waiting_reason == "no runner of this model is up"
    driver.attach()
    assert orders(driver)[-1] == ("r0", "work")
    assert driver.where("a") == "r0"


def test_the_first_deadline_holds_while_the_drain_stays_in_the_set_and_a_new_drain_has_a_new_one():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.enqueue("a")
    here = driver.where("a")
    declare(driver, here, deadline=10.0)
    driver.wait(6.0)
    driver.report(here, entry("a", 4))
    declare(driver, here, deadline=10.0)
    driver.detach(here)
    driver.attach(here, live=(entry("a", 4),))
    assert [effect.deadline for effect in driver.of(effects.DrainRunner)] == [4.0], (
        "sent again with the rest of the time"
    )
    driver.wait(3.0)
    assert driver.where("a") == here
    driver.wait(1.5)
    assert driver.where("a") not in ("", here), "requests that run at the deadline move"
    declare(driver)
    declare(driver, here, deadline=10.0)
    assert [effect.deadline for effect in driver.of(effects.DrainRunner)] == [10.0]


def test_a_reconnected_operator_gets_drained_reports_again():
    driver = ready()
    driver.attach("r0")
    declare(driver, "r0")
    assert driver.of(effects.ReportDrained)
    declare(driver, "r0")
    assert driver.of(effects.ReportDrained)


def test_a_drained_report_names_the_revision_of_its_set():
    driver = ready()
    driver.attach("r0")
    asked = (events.DrainRequested(RunnerIdentity(instance="r0", incarnation="1"), 10.0),)
    driver.send(events.DrainsDeclared(asked, revision=7))
    assert [one.revision for one in driver.of(effects.ReportDrained)] == [7]


def test_a_runner_whose_process_stops_takes_no_work_even_if_it_is_not_in_the_set():
    driver = ready()
    driver.attach("r0")
    driver.send(events.RunnerShuttingDown(InstanceName("r0"), "1", 10.0))
    declare(driver, "r0")
    declare(driver)
    driver.enqueue("a")
    assert driver.where("a") == ""
    driver.attach("r0", incarnation="2")
    assert driver.where("a") == "r0"


def test_the_shutdown_of_an_earlier_incarnation_does_not_drain_the_next_one():
    driver = ready()
    driver.attach("r0", incarnation="2")
    driver.send(events.RunnerShuttingDown(InstanceName("r0"), "1", 10.0))
    driver.enqueue("a")
    assert driver.where("a") == "r0"


def test_after_a_new_term_every_runner_gets_its_order_again():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    declare(driver, "r1")
    driver.send(events.TermRaised())
    assert sorted(orders(driver)) == [("r0", "work"), ("r1", "drain")]


class RandomDrains(RuleBasedStateMachine):
    """Operators, schedulers and runners connect and disconnect in any order. A runner follows its last order."""

    NAMES = ("r0", "r1", "r2")

    def __init__(self) -> None:
        super().__init__()
        self.driver = SchedulerDriver()
        self.wanted: set[tuple[str, str]] = set()
        self.declared = False
        self.incarnations = dict.fromkeys(self.NAMES, 0)
        self.orders: dict[str, str] = {}
        """The last order of this scheduler to each attached runner."""
        self.ending: set[str] = set()

    def send(self, event: events.Event) -> None:
        self.driver.send(event)
        for name, order in orders(self.driver):
            assert name in self.orders, "an order on a closed stream"
            self.orders[name] = order

    def declare(self) -> None:
        self.declared = True
        drains = (
            events.DrainRequested(RunnerIdentity(instance=name, incarnation=incarnation), 5.0)
            for name, incarnation in sorted(self.wanted)
        )
        self.send(events.DrainsDeclared(tuple(drains)))

    @rule(name=st.sampled_from(NAMES), known=st.booleans())
    def toggle_drain(self, name: str, known: bool) -> None:
        mine = {one for one in self.wanted if one[0] == name}
        if mine:
            self.wanted -= mine
        else:
            self.wanted.add((name, str(self.incarnations[name]) if known else ""))
        self.declare()

    @rule(known=st.booleans())
    def operator_connects_again(self, known: bool) -> None:
        """It may be another operator, which does not know the incarnations yet."""
        self.wanted = {(name, incarnation if known else "") for name, incarnation in self.wanted}
        self.send(events.OperatorConnected())
        self.declare()

    @rule(name=st.sampled_from(NAMES), again=st.booleans(), busy=st.booleans())
    def attach(self, name: str, again: bool, busy: bool) -> None:
        if not again:
            self.incarnations[name] += 1
            self.ending.discard(name)
        self.orders[name] = "nothing"
        self.driver.attach(
            name, incarnation=str(self.incarnations[name]), live=(entry(f"at {name}", 2),) if busy else ()
        )
        for who, order in orders(self.driver):
            self.orders[who] = order
        if name in self.ending:
            self.send(events.RunnerShuttingDown(InstanceName(name), str(self.incarnations[name]), 5.0))

    @rule(name=st.sampled_from(NAMES))
    def detach(self, name: str) -> None:
        if self.orders.pop(name, None) is not None:
            self.driver.detach(name, incarnation=str(self.incarnations[name]))

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: str) -> None:
        if name in self.orders:
            self.ending.add(name)
            self.send(events.RunnerShuttingDown(InstanceName(name), str(self.incarnations[name]), 5.0))

    @rule()
    def restart(self) -> None:
        saved, now = self.driver.scheduler.catalog_to_save(), self.driver.clock()
        self.driver = SchedulerDriver(saved=saved, now=now + 1)
        self.orders = {}
        self.declared = False

    @rule()
    def raise_term(self) -> None:
        self.orders = dict.fromkeys(self.orders, "nothing")
        self.send(events.TermRaised())

    @rule(seconds=st.sampled_from((0.1, 3.0, 40.0)))
    def wait(self, seconds: float) -> None:
        self.driver.clock.advance(seconds)
        self.send(events.Tick())

    @invariant()
    def the_last_order_follows_the_set(self) -> None:
        for name, order in self.orders.items():
            wanted = self.declared and {(name, ""), (name, str(self.incarnations[name]))} & self.wanted
            assert order == ("drain" if wanted else "work")
            runner = self.driver.scheduler.runners[InstanceName(name)]
            assert runner.takes_work == (not wanted and name not in self.ending)


RandomDrains.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRandomDrains = RandomDrains.TestCase
