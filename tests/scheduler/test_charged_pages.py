"""The ledger charges whole promises until the runner's report says less, and never less than the runner charges."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from motet.domain import InstanceName, RequestId
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import Promise
from tests.scheduler.builders import SchedulerDriver, entry, ready

R0 = InstanceName("r0")


def sharing() -> SchedulerDriver:
    """Two choices of one call of 5 pages each; the second shares 4 of them."""
    driver = ready()
    driver.attach(pages=10)
    driver.enqueue("a")
    driver.enqueue("b")
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 5}, "whole promises, as long as the runner has said nothing"
    driver.report("r0", entry("a", 5, charged_pages=5), entry("b", 5, charged_pages=1))
    return driver


def test_a_report_lowers_what_a_request_is_charged_and_others_fit():
    driver = sharing()
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 1}
    driver.enqueue("c", max_tokens=48)
    assert driver.where("c") == "r0"


def test_a_runner_that_does_not_say_what_it_charges_is_charged_the_whole_promise():
    driver = sharing()
    driver.report("r0", entry("a", 5), entry("b", 5))
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 5}


def test_no_report_makes_a_charge_larger_than_the_promise():
    driver = sharing()
    driver.report("r0", entry("a", 5, charged_pages=9), entry("b", 5, charged_pages=5))
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 5}


def test_when_a_request_ends_others_may_pay_for_the_pages_that_it_shared_with_them():
    driver = sharing()
    driver.finish("a")
    assert driver.ledger() == {("b", 1): 5}, "nobody else pays for b's pages any more, as far as is known"
    driver.report("r0", entry("b", 5, charged_pages=2))
    assert driver.ledger() == {("b", 1): 2}


def test_the_charges_of_the_others_never_rise_by_more_than_was_released():
    driver = ready()
    driver.attach(pages=30)
    for name in ("a", "b", "c"):
        driver.enqueue(name)
    driver.report("r0", *(entry(name, 5, charged_pages=charged) for name, charged in (("a", 5), ("b", 1), ("c", 2))))
    driver.finish("a")
    assert sum(driver.ledger().values()) == 8
    assert all(pages <= 5 for pages in driver.ledger().values())


def test_a_report_from_before_an_end_does_not_free_the_pages_again():
    driver = sharing()
    driver.finish("a")
    driver.report("r0", entry("a", 5, charged_pages=5), entry("b", 5, charged_pages=1))
    assert driver.ledger() == {("b", 1): 5}


def test_a_parked_request_no_longer_pays_for_others():
    driver = sharing()
    driver.send(events.SupervisorConnected())
    driver.send(events.RequestParked(R0, RequestId("a"), 1, Promise(10)))
    assert driver.ledger() == {("b", 1): 5}


def test_a_report_that_lists_the_payer_as_parked_says_itself_who_pays():
    driver = sharing()
    driver.report("r0", entry("b", 5, charged_pages=2), entry("a", 10, parked=True))
    assert driver.ledger() == {("b", 1): 2}


def test_a_promise_that_grows_keeps_what_the_request_shares():
    driver = sharing()
    driver.send(events.PromiseChanged(R0, RequestId("b"), 1, Promise(7)))
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 3}


def test_a_resumed_request_is_charged_its_whole_promise():
    driver = sharing()
    driver.send(events.RequestParked(R0, RequestId("b"), 1, Promise(6)))
    driver.send(events.RequestResumed(R0, RequestId("b"), 1, Promise(6)))
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 6}


def test_after_a_new_connection_promises_are_whole_until_the_next_report():
    driver = sharing()
    driver.detach()
    live = (entry("a", 5, charged_pages=5), entry("b", 5, charged_pages=1))
    driver.attach(pages=10, live=live)
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 5}
    driver.report("r0", *live)
    assert driver.ledger() == {("a", 1): 5, ("b", 1): 1}


def test_a_request_that_is_placed_again_is_charged_its_whole_promise():
    driver = sharing()
    driver.lose("b")
    driver.wait(1)
    assert driver.ledger() == {("a", 1): 5, ("b", 2): 5}


# ------------------------------------------------------------------------------------------------ any order of events

PAGES, SHARED = 40, 3
"""The pages of the runner, and those of a prompt that all choices of a call share."""


class Sharing(RuleBasedStateMachine):
    """A runner whose sequences share the pages of their prompt. The oldest of a call pays. Reports arrive late.

    The runner's own ledger is the truth. It hears of a request when it is submitted, and ends it before the scheduler
    hears of that.
    """

    def __init__(self):
        super().__init__()
        self.driver = ready()
        self.count = 0
        self.placed = {}
        """Request -> (epoch, promise, call), of placements that the runner has not got yet."""
        self.running = {}
        """The same, in the order in which the runner got them."""
        self.ended = {}
        """Request -> epoch, of requests whose end the scheduler does not know yet."""
        self.late = []
        """Reports on their way."""

    @initialize()
    def begin(self):
        self.send(self.driver.attach(pages=PAGES))

    def send(self, decided):
        for effect in decided:
            if isinstance(effect, effects.SendPlaced):
                self.placed[effect.request] = (effect.epoch, effect.promise.pages, effect.request.partition(".")[0])
                ledger = self.driver.scheduler.runners[R0].ledger
                assert ledger.promised <= ledger.limit, "placed although the promises exceed the pages"

    def charges(self):
        """What the runner charges to each sequence."""
        payers = set()
        charged = {}
        for name, (_, promise, call) in self.running.items():
            charged[name] = promise - (SHARED if call in payers else 0)
            payers.add(call)
        return charged

    @rule(choices=st.integers(1, 4), max_tokens=st.integers(1, 40), at_once=st.booleans())
    def call(self, choices, max_tokens, at_once):
        self.count += 1
        parent = f"q{self.count}"
        for n in range(choices):
            more = {"parent": RequestId(parent)} if n else {}
            name = f"{parent}.{n}" if n else parent
            self.send(self.driver.enqueue(name, prompt=16 * SHARED, max_tokens=max_tokens, choices=choices, **more))
        if at_once:
            self.running |= self.placed
            self.placed = {}
            self.report()

    @rule(data=st.data())
    def submit(self, data):
        if self.placed:
            name = data.draw(st.sampled_from(sorted(self.placed)))
            self.running[name] = self.placed.pop(name)

    @rule(data=st.data())
    def end(self, data):
        if self.running:
            name = data.draw(st.sampled_from(sorted(self.running)))
            self.ended[name] = self.running.pop(name)[0]

    @rule(data=st.data())
    def hear_of_an_end(self, data):
        if self.ended:
            name = data.draw(st.sampled_from(sorted(self.ended)))
            self.send(self.driver.finish(name, self.ended.pop(name)))

    @rule(data=st.data(), extra=st.integers(1, 3))
    def extend(self, data, extra):
        if self.running and not self.late and sum(self.charges().values()) + extra <= self.free_of_whole_promises():
            name = data.draw(st.sampled_from(sorted(self.running)))
            epoch, promise, call = self.running[name]
            self.running[name] = (epoch, promise + extra, call)
            self.send(self.driver.send(events.PromiseChanged(R0, RequestId(name), epoch, Promise(promise + extra))))

    def free_of_whole_promises(self):
        """The supervisor extends only if all that is on its way fits, too."""
        return PAGES - sum(promise for _, promise, _ in self.placed.values())

    @rule()
    def report(self):
        charged = self.charges()
        self.late.append(
            tuple(
                entry(name, promise, epoch=epoch, charged_pages=charged[name])
                for name, (epoch, promise, _) in self.running.items()
            )
        )

    @rule(all_of_them=st.booleans())
    def hear_reports(self, all_of_them):
        for report in self.late if all_of_them else self.late[:1]:
            self.send(self.driver.report("r0", *report))
        self.late = [] if all_of_them else self.late[1:]

    @rule(seconds=st.sampled_from((0.1, 1.0)))
    def wait(self, seconds):
        self.send(self.driver.wait(seconds))

    @invariant()
    def the_ledger_charges_at_least_what_the_runner_charges(self):
        ledger = self.driver.ledger()
        running = sum(self.charges().values())
        on_their_way = sum(promise for _, promise, _ in self.placed.values())
        known = {(name, epoch) for name, (epoch, _, _) in (self.running | self.placed).items()}
        if known <= set(ledger):
            assert sum(ledger.values()) >= running + on_their_way

    @invariant()
    def no_charge_exceeds_its_promise(self):
        ledger = self.driver.ledger()
        for name, (epoch, promise, _) in (self.running | self.placed).items():
            assert ledger.get((name, epoch), 1) <= promise


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
