"""Sends random events to a supervisor: runners lose its orders and report late, and a scheduler connects and
disconnects.

The model's engine obeys an order only if its epoch and promise are current and enough pages are free. A sequence at its
promise waits. After any events: promises fit the runner, no sequence is parked more than three times, and once messages
arrive again all sequences finish.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from motet import promises
from motet.domain import PAGE_TOKENS, RequestId, pages_for
from motet.runner_info import RequestClass, RunnerRequest, SequenceState
from motet_supervisor.policy import effects, events
from tests.supervisor.builders import R0, SupervisorDriver

PAGES = 48
MOST_SEQUENCES = 60
"""At a time. More of them wait for the same runner, and show nothing else."""
ROUNDS_WITHOUT_A_TOKEN = 60
"""In which orders arrive. That is longer than any wait of the supervisor."""


class Sequence:
    def __init__(self, prompt, max_tokens, promise, request_class):
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.made = 0
        self.promise = promise
        self.request_class = request_class
        self.parked = False
        self.parked_times = 0

    @property
    def limit(self):
        return promises.max_pages(self.prompt, self.max_tokens, page_tokens=PAGE_TOKENS)

    @property
    def stuck(self):
        return pages_for(self.prompt + self.made, PAGE_TOKENS) > self.promise


class RandomEvents(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.driver = SupervisorDriver()
        self.sequences = {}
        self.count = 0
        self.steps = 0
        self.orders_get_lost = False
        """Orders to the runner are lost."""
        self.scheduler = True
        self.parked_wants = {}
        self.send(events.SchedulerConnected(1, 1))
        self.carry_out_all(self.driver.connect(pages=PAGES, page_bytes=1, host_bytes=8))

    # ------------------------------------------------------------------------------------------------------- carrying

    def send(self, event):
        self.carry_out_all(self.driver.send(event))

    def carry_out_all(self, decided):
        for effect in list(decided):
            self.carry_out(effect)

    def carry_out(self, effect):
        one = self.sequences.get(getattr(effect, "request", None))
        match effect:
            case effects.Extend():
                assert effect.extended > effect.pages
                if one is not None:
                    assert effect.extended <= max(one.limit, one.promise), "extended beyond the longest answer"
                obeyed = not self.orders_get_lost and one is not None and not one.parked and one.promise == effect.pages
                if obeyed and effect.extended - one.promise <= self.free:
                    one.promise = effect.extended
            case effects.Park():
                if not self.orders_get_lost and one is not None and not one.parked and one.promise == effect.pages:
                    self.park(effect.request, one, effect.doubled)
            case effects.Resume():
                if not self.orders_get_lost and one is not None and one.parked and one.promise == effect.pages:
                    self.resume(effect.request, one)
            case effects.ReportParked():
                self.parked_wants[effect.request] = effect.wanted
            case effects.ReportAllParked():
                self.parked_wants = {parked.request: parked.wanted for parked in effect.requests}
            case effects.ReportResumed():
                self.parked_wants.pop(effect.request, None)

    @property
    def free(self):
        return PAGES - sum(one.promise for one in self.sequences.values() if not one.parked)

    def park(self, name, one, wanted):
        assert one.promise <= wanted <= PAGES, "the promise never fits the runner"
        one.parked, one.promise = True, wanted
        one.parked_times += 1
        assert one.parked_times <= 3, "parked too often"
        self.send(events.RequestParked(R0, RequestId(name), 1, wanted, "recompute"))

    def resume(self, name, one):
        if one.promise <= self.free:
            one.parked = False
            self.send(events.RequestResumed(R0, RequestId(name), 1, one.promise))

    def entry(self, name):
        one = self.sequences[name]
        return RunnerRequest(
            request=RequestId(name),
            epoch=1,
            pages=one.promise,
            pages_used=0 if one.parked else pages_for(one.prompt + one.made, PAGE_TOKENS),
            state=SequenceState.PARKED if one.parked else SequenceState.DECODE,
            prompt_tokens=one.prompt,
            output_tokens=one.made,
            max_tokens=one.max_tokens,
            request_class=one.request_class,
            parked_times=one.parked_times,
        )

    # ---------------------------------------------------------------------------------------------------------- rules

    @rule(
        prompt=st.integers(1, 40),
        max_tokens=st.integers(1, 200),
        guess=st.integers(1, 4),
        request_class=st.sampled_from(RequestClass),
    )
    def submit(self, prompt, max_tokens, guess, request_class):
        most = promises.max_pages(prompt, max_tokens, page_tokens=PAGE_TOKENS)
        promise = min(pages_for(prompt, PAGE_TOKENS) + guess, most)
        if promise <= self.free and most <= PAGES and len(self.sequences) < MOST_SEQUENCES:
            self.count += 1
            self.sequences[f"s{self.count:03}"] = Sequence(prompt, max_tokens, promise, request_class)

    @rule(max_tokens=st.integers(60, 700), request_class=st.sampled_from(RequestClass))
    def fill_the_runner(self, max_tokens, request_class):
        """Fill the runner with requests that are expected to be short and are not."""
        while self.free >= 2 and len(self.sequences) < MOST_SEQUENCES:
            self.submit(prompt=4, max_tokens=max_tokens, guess=1, request_class=request_class)

    @rule(steps=st.sampled_from((1, 8, 40)))
    def decode(self, steps):
        for _ in range(steps):
            self.steps += 1
            for name, one in list(self.sequences.items()):
                if name not in self.sequences or one.parked or one.stuck:
                    continue
                one.made += 1
                if one.made >= one.max_tokens:
                    del self.sequences[name]
                    self.send(events.RequestEnded(R0, RequestId(name), 1))
                elif (
                    one.promise < one.limit
                    and promises.is_near_promise(one.prompt + one.made, one.promise, page_tokens=PAGE_TOKENS)
                    and not self.orders_get_lost
                ):
                    self.send(events.OverflowAnnounced(R0, self.entry(name)))

    @rule()
    def report(self):
        live = tuple(self.entry(name) for name in self.sequences)
        self.carry_out_all(
            self.driver.report(
                *live,
                steps=self.steps,
                host_bytes_free=8,
                prefill_seconds_per_token=0.001,
                swap_seconds_per_page=0.001,
            )
        )

    @rule(seconds=st.sampled_from((0.1, 1.0, 3.0)))
    def wait(self, seconds):
        self.carry_out_all(self.driver.wait(seconds))

    @rule(orders_get_lost=st.booleans())
    def lose_orders(self, orders_get_lost):
        self.orders_get_lost = orders_get_lost

    @rule()
    def runner_reconnects(self):
        self.send(events.RunnerDisconnected(R0, "1"))
        live = tuple(self.entry(name) for name in self.sequences)
        self.carry_out_all(self.driver.connect(*live, pages=PAGES, page_bytes=1, host_bytes=8))

    @rule()
    def scheduler_comes_or_goes(self):
        self.scheduler = not self.scheduler
        self.send(events.SchedulerConnected(1, 1) if self.scheduler else events.SchedulerDisconnected(1))

    @rule()
    def scheduler_allows_resumes(self):
        if self.scheduler:
            for name, wanted in list(self.parked_wants.items()):
                if wanted <= self.free:
                    self.carry_out_all(self.driver.resumable(name, wanted))

    # ----------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def parked_requests_are_those_without_a_promise(self):
        for runner in self.driver.supervisor.runners.values():
            assert runner.parked_requests == sum(one.parked for one in runner.sequences.values())

    @invariant()
    def promises_fit_the_runner(self):
        assert self.free >= 0

    def teardown(self):
        """Once orders arrive again, all sequences finish."""
        self.orders_get_lost = False
        without = 0
        while self.sequences:
            before = {name: one.made for name, one in self.sequences.items()}
            self.decode(40)
            self.report()
            self.wait(1.0)
            self.scheduler_allows_resumes()
            without = without + 1 if {name: one.made for name, one in self.sequences.items()} == before else 0
            assert without < ROUNDS_WITHOUT_A_TOKEN, "these sequences never finish"


RandomEvents.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRandomEvents = RandomEvents.TestCase
