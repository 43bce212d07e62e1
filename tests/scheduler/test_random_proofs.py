"""Runners come, go, break, answer, refuse and stay silent; revisions change. The laws of what is proved hold:

- each check ends, served or refused with a reason, if a runner lives that answers;
- what serves is withdrawn if every known runner has refused it, and only then: after an answer, or once a runner is
  forgotten;
- the check of one adapter holds up no other's;
- nothing begins to serve on the word of a runner that proves nothing, while another one has refused it;
- the status says what is true;
- a runner that is known to refuse what serves gets no request for it, and no load;
- runners are told who has proved what serves as long as nobody has refused it.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from motet.domain import Digest, RequestId
from motet.errors import AdapterUnproved
from motet.runner_info import Failure
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.revision_state import Standing
from motet_scheduler.policy.values import AdapterReadiness, AdapterRef, AdapterStage, Certificate
from tests.scheduler.builders import SchedulerDriver, adapter, ready

WRONG = Failure.of(AdapterUnproved("Its results are wrong.", reason="ProofFailed"))
NO_EFFECT = Failure.of(AdapterUnproved("It moves no logit.", reason="NoEffect"))
AWAY = Failure("adapter_fetch_failed", "away", 5.0)

INSTANCES = ("r0", "r1", "r2")
NAMES = ("pirate", "poet")
GOOD, USELESS, SILENT = "good", "useless", "silent"
"""What a revision is. Of a silent one no order is ever answered, but for that the runner is at work."""
KINDS = (GOOD, GOOD, GOOD, USELESS, SILENT)


@dataclass
class Start:
    incarnation: str
    broken: bool
    proves: bool
    orders: dict[str, effects.EnsureAdapter] = field(default_factory=dict)
    """The last one for each adapter"""


class RandomProofs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.driver = ready(load_retry=10.0, forget_runner=30.0)
        self.runners: dict[str, Start] = {}
        self.starts = 0
        self.stamps = dict.fromkeys(NAMES, 0)
        self.kinds: dict[tuple[str, str], str] = {}
        self.refused: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        """Digest → the starts of runners that have refused it"""
        self.told: dict[str, effects.ReportAdapter] = {}
        self.requests = self.leaders = 0

    # ------------------------------------------------------------------------------------------------------- carrying

    def kind_of(self, name: str, stamp: str) -> str:
        return self.kinds[name, stamp]

    def digest_of(self, name: str, stamp: str) -> Digest:
        return Digest("sha256:" + f"{NAMES.index(name):032x}{int(stamp):032x}")

    def entry(self, name):
        return self.driver.scheduler.adapters.by_name[adapter(name).ref.object]

    def state_adapters(self):
        self.send(
            lambda: self.driver.state(
                *(adapter(name, stamp=str(stamp), min_replicas=2) for name, stamp in self.stamps.items())
            )
        )

    def send(self, happens, *, about=()):
        """`about`: the adapters of which a runner tells something"""
        adapters = self.driver.scheduler.adapters
        served = {one.spec.ref.object: one.serving for one in adapters if one.serving is not None}
        before = {*self.driver.scheduler.runners}
        decided = happens()
        forgotten = before - {*self.driver.scheduler.runners}
        gone = [
            one
            for one, serving in served.items()
            if one in adapters.by_name and adapters.by_name[one].serving is None and serving is not None
        ]
        for one in gone:
            assert one.name in about or forgotten, "what serves was withdrawn without an answer about it"
            refused_by = self.refused[served[one].digest]
            known = {runner.start for runner in self.driver.scheduler.runners.values()}
            assert known <= refused_by, "what serves was withdrawn, and a runner has not refused it"
            assert any(isinstance(effect, effects.SaveCatalog) and effect.outdates for effect in decided)
        for effect in decided:
            if isinstance(effect, effects.EnsureAdapter) and effect.stage is AdapterStage.CERTIFIED:
                self.runners[effect.instance].orders[effect.ref.name] = effect
            elif isinstance(effect, effects.EnsureAdapter):
                noted, start = self.noted(effect.ref.name), self.runners[effect.instance]
                assert (effect.instance, start.incarnation) not in noted, "a runner that refuses it is to load it"
                assert bool(effect.proved_builds) is (self.is_proved(effect.ref.name) and not noted)
            elif isinstance(effect, effects.ReportAdapter):
                self.told[effect.ref.name] = effect

    def answer(self, instance: str, name: str, *, passes: bool = False):
        """An order about an adapter is answered as the runner finds it."""
        start = self.runners[instance]
        order = start.orders[name]
        asked = self.entry(name).asked_for
        stamp = asked.content_stamp if asked is not None else str(self.stamps[name])
        kind, digest = self.kind_of(name, stamp), self.digest_of(name, stamp)
        if kind == SILENT:
            return
        del start.orders[name]
        failure = None
        if passes:
            failure = AWAY
        elif start.proves and (start.broken or kind == USELESS):
            failure = WRONG if start.broken else NO_EFFECT
            self.refused[digest].add((instance, start.incarnation))
        by = {"proved_by": ("torch",), "proved_builds": ("this",)} if start.proves else {}
        certificate = Certificate(digest=digest, rank=8, **by) if failure is None else None
        refused = bool(asked is not None and self.entry(name).state_of(asked).refusals)
        served = self.entry(name).serving
        self.send(
            lambda: self.driver.certify(
                name,
                digest if failure is None else Digest(""),
                instance=instance,
                order=order.order,
                stage=AdapterStage.NONE if failure else AdapterStage.CERTIFIED,
                certificate=certificate,
                failure=failure,
            ),
            about=(name,),
        )
        if failure is None and not start.proves and refused:
            assert self.entry(name).serving == served, "it serves, and nobody has proved it whom one has refused"

    def unanswered(self):
        return [(instance, name) for instance, start in self.runners.items() for name in start.orders]

    # ---------------------------------------------------------------------------------------------------------- rules

    @initialize(
        kinds=st.tuples(*[st.sampled_from(KINDS)] * len(NAMES)),
        broken=st.lists(st.booleans(), min_size=1, max_size=3),
        proves=st.lists(st.sampled_from([True, True, False]), min_size=3, max_size=3),
    )
    def begin(self, kinds, broken, proves):
        self.kinds = {(name, "0"): kind for name, kind in zip(NAMES, kinds, strict=True)}
        self.state_adapters()
        for instance, is_broken, one_proves in zip(INSTANCES, broken, proves, strict=False):
            self.starts_anew(instance, is_broken, one_proves)

    @rule(instance=st.sampled_from(INSTANCES), broken=st.booleans(), proves=st.sampled_from([True, True, False]))
    def starts_anew(self, instance, broken, proves):
        self.starts += 1
        incarnation = str(self.starts)
        self.runners[instance] = Start(incarnation, broken, proves)
        self.send(lambda: self.driver.attach(instance, incarnation=incarnation))

    @rule(instance=st.sampled_from(INSTANCES))
    def stream_breaks(self, instance):
        if (start := self.runners.get(instance)) is not None:
            start.orders.clear()
            self.send(lambda: self.driver.detach(instance, start.incarnation))

    @rule(instance=st.sampled_from(INSTANCES))
    def stream_is_back(self, instance):
        if instance in self.runners:
            self.says_hello(instance)

    def says_hello(self, instance):
        start = self.runners[instance]
        refused = {digest: WRONG for digest, by in self.refused.items() if (instance, start.incarnation) in by}
        self.send(
            lambda: self.driver.attach(instance, incarnation=start.incarnation, refused=refused),
            about=NAMES if refused else (),
        )

    @rule()
    def another_scheduler_leads(self):
        """It knows what the last one has saved, and what runners say."""
        before = self.driver
        attached = [one.instance for one in before.scheduler.runners.values() if one.attached]
        noted = {name: self.noted(name) if self.entry(name).serving is not None else set() for name in NAMES}
        self.driver = SchedulerDriver(
            saved=before.scheduler.catalog_to_save(),
            now=before.clock(),
            first_order=1 << 20 * (1 + self.leaders),
            load_retry=10.0,
            forget_runner=30.0,
        )
        self.leaders += 1
        self.driver.gateway()
        for start in self.runners.values():
            start.orders.clear()
        self.state_adapters()
        for instance in attached:
            self.says_hello(instance)
        for name in NAMES:
            if self.entry(name).serving is not None:
                here = {start for start in noted[name] if start[0] in attached}
                assert here <= self.noted(name), "a new leader has forgotten who refuses it"

    @rule(which=st.integers(0, 5), passes=st.sampled_from([False, False, True]))
    def one_answers(self, which, passes):
        if open_ := self.unanswered():
            self.answer(*open_[which % len(open_)], passes=passes)

    @rule()
    def all_answer(self):
        for _ in INSTANCES:
            for instance, name in self.unanswered():
                self.answer(instance, name)

    @rule()
    def all_say_that_they_work(self):
        for instance, name in self.unanswered():
            order = self.runners[instance].orders[name]
            stage = {"stage": AdapterStage.NONE, "certificate": None}
            self.send(
                lambda one=(name, instance, order.order), stage=stage: self.driver.certify(
                    one[0], Digest(""), instance=one[1], order=one[2], **stage
                )
            )

    @rule(instance=st.sampled_from(INSTANCES))
    def breaks(self, instance):
        """Its device, or its other kernels: what it has is proved again, and is wrong."""
        start = self.runners.get(instance)
        runner = self.driver.scheduler.runners.get(instance)
        if start is None or runner is None or not runner.attached or not start.proves:
            return
        start.broken = True
        for name in NAMES:
            if (serving := self.entry(name).serving) is not None:
                self.refused[serving.digest].add((instance, start.incarnation))
                news = events.AdapterStateChanged(
                    instance=runner.instance,
                    ref=AdapterRef("default", name, 1),
                    digest=serving.digest,
                    stage=AdapterStage.NONE,
                    failure=WRONG,
                )
                self.send(lambda news=news: self.driver.send(news), about=(name,))

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(KINDS))
    def another_revision(self, name, kind):
        self.stamps[name] += 1
        self.kinds[name, str(self.stamps[name])] = kind
        self.state_adapters()

    @rule(name=st.sampled_from(NAMES))
    def a_request_comes(self, name):
        if (serving := self.entry(name).serving) is None:
            return
        self.requests += 1
        request = f"q{self.requests}"
        self.send(lambda: self.driver.enqueue(request, digest=serving.digest, adapter=f"default/{name}"))
        known = self.driver.scheduler.requests.get(RequestId(request))
        if known is not None and known.placement is not None:
            placed = known.placement
            assert (placed.instance, placed.incarnation) not in self.noted(name), "a runner that refuses it gets it"
            self.send(lambda: self.driver.finish(request))

    def is_proved(self, name):
        return self.entry(name).serving.certificate.is_proof

    def noted(self, name):
        one = self.entry(name)
        return {refusal.runner for refusal in one.state_of(one.serving.key).refusals}

    @rule(seconds=st.sampled_from([1.0, 11.0, 31.0]))
    def time_passes(self, seconds):
        self.send(lambda: self.driver.wait(seconds))

    # ----------------------------------------------------------------------------------------------------------- laws

    @invariant()
    def status_is_true(self):
        state = self.driver.scheduler.state
        for one in state.adapters:
            report, entry = state.reports.report(one), state.reports.entry(one, self.driver.scheduler.runners)
            assert report.serving == entry.digest
            assert (report.state in (AdapterReadiness.READY, AdapterReadiness.COLD)) is bool(report.serving)
            assert (report.failure is not None) is one.newest.ended
            if report.serving:
                known = {runner.start for runner in self.driver.scheduler.runners.values()}
                warned = bool(report.certificate.warnings)
                noted = {refusal.runner for refusal in one.state_of(one.serving.key).refusals}
                assert warned is bool(noted)
                assert noted <= self.refused[report.serving]
                assert noted <= known, "it warns of a runner that is gone"
                for runner in self.driver.scheduler.runners.values():
                    may = runner.may_serve(report.serving, str(one.spec.ref.object))
                    assert may is (runner.start not in noted), "the status says another thing than placement does"
            elif not one.newest.ended:
                assert report.state is AdapterReadiness.LOADING

    def teardown(self):
        """All answer what they are asked, as they find it, and nothing else happens."""
        for _ in range(25):
            for instance, name in self.unanswered():
                self.answer(instance, name)
            self.send(lambda: self.driver.wait(5.0))
        attached = {
            instance: start
            for instance, start in self.runners.items()
            if (runner := self.driver.scheduler.runners.get(instance)) is not None and runner.attached
        }
        for name in NAMES if attached else ():
            one, stamp = self.entry(name), str(self.stamps[name])
            kind, newest = self.kind_of(name, stamp), one.newest
            if kind == SILENT:
                continue
            assert newest.standing is not Standing.WANTED, "its check has not ended"
            healthy = any(start.proves and not start.broken for start in attached.values())
            if kind == GOOD and healthy:
                assert newest.standing is Standing.PROVED, newest
                assert one.serving.digest == self.digest_of(name, stamp)
            # Once a runner that proves has said so, nobody else is asked: it is the adapter's own fault.
            moves_nothing = newest.standing is Standing.FAILED and newest.failure == NO_EFFECT
            if all(not start.proves for start in attached.values()) and not moves_nothing:
                assert one.serving is not None, "nobody is there that refuses it, and it does not serve"
            if one.serving is not None:
                assert {runner.start for runner in self.driver.scheduler.runners.values()} - self.noted(name), (
                    "all have refused what serves"
                )
            if newest.ended:
                assert newest.failure is not None
                report = self.told[name]
                assert report.failure is not None
                assert report.failure.message.startswith(newest.failure.message)
            if one.serving is not None and one.serving.key != one.wanted and healthy:
                serves = self.kind_of(name, one.serving.key.content_stamp)
                assert serves != GOOD or one.state_of(one.serving.key).standing is Standing.PROVED


@pytest.mark.timeout(300)
def test_proofs_end_and_the_status_is_true_whatever_runners_do():
    run_state_machine_as_test(
        RandomProofs,
        settings=settings(
            max_examples=30,
            stateful_step_count=20,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("part", range(4))
def test_proofs_end_and_the_status_is_true_in_plain_random_runs(part):
    """Hypothesis seldom has a runner go just while it is asked, and stay away."""
    for seed in range(part * 100, part * 100 + 100):
        try:
            plain_run(Random(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def plain_run(random: Random) -> None:
    run = RandomProofs()
    broken = random.choices([False, True], k=random.randint(1, 3))
    run.begin(random.choices(KINDS, k=len(NAMES)), broken, random.choices([True, True, False], k=3))
    steps = [
        lambda: run.one_answers(random.randrange(6), passes=random.random() < 0.2),
        run.all_answer,
        lambda: run.starts_anew(random.choice(INSTANCES), random.random() < 0.5, proves=random.random() < 0.7),
        run.all_say_that_they_work,
        run.another_scheduler_leads,
        lambda: run.stream_breaks(random.choice(INSTANCES)),
        lambda: run.stream_is_back(random.choice(INSTANCES)),
        lambda: run.breaks(random.choice(INSTANCES)),
        lambda: run.another_revision(random.choice(NAMES), random.choice(KINDS)),
        lambda: run.time_passes(random.choice([1.0, 11.0, 31.0])),
        lambda: run.a_request_comes(random.choice(NAMES)),
    ]
    for _ in range(random.randint(4, 16)):
        random.choices(steps, weights=[6, 2, 1, 2, 1, 2, 1, 1, 1, 3, 3])[0]()
        run.status_is_true()
    run.teardown()
