"""Random events against a small model of the world: the invariants of the design hold after every one.

The model plays gateways and runners that obey the protocol but are late, forgetful and fickle: submissions get lost,
runners decline, restart and go away, reports come whenever they like.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from motet.fleet import BookEntry, Failure, RequestClass, RunnerIdentity, SequenceState
from motet.model import BASE, RequestId
from motet_scheduler.policy import effects as do
from motet_scheduler.policy import events as on
from motet_scheduler.policy.values import Instance, Promise
from tests.scheduler.builders import PIRATE, Told, adapter, pool

INSTANCES = ("r0", "r1", "r2")
PAGES = {"r0": 8, "r1": 16, "r2": 24}
MAX_PASSED_OVER = 4


class Running:
    """A request in the model's runners."""

    def __init__(self, epoch, pages, digest):
        self.epoch = epoch
        self.pages = pages
        self.digest = digest
        self.parked = False


class World(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.told = Told(max_passed_over=MAX_PASSED_OVER, avoid=0.2)
        self.count = 0
        self.incarnations = dict.fromkeys(INSTANCES, 0)
        self.attached = set()
        self.books = {name: {} for name in INSTANCES}
        self.placed = {}
        """Request -> (instance, incarnation, epoch, promise) as its gateway knows it."""
        self.waiting = set()
        self.answered = set()
        self.epochs = {}
        self.arrival = []
        self.passes = {}
        self.say(on.SupervisorConnected())
        self.say(on.GatewayConnected("g0"))
        self.say(on.CatalogStated((pool(),), (adapter(),)))

    # ------------------------------------------------------------------------------------------------------- carrying

    def say(self, event):
        self.carry_out_all(self.told.tell(event))

    def carry_out_all(self, effects):
        for effect in effects:
            self.carry_out(effect)
            if isinstance(effect, do.Place | do.Readmit):
                ledger = self.told.scheduler.runners[effect.instance].ledger
                assert ledger.promised <= ledger.limit, "promised more than there is"

    def carry_out(self, effect):
        match effect:
            case do.Place():
                assert effect.request not in self.answered, "placed after its end"
                assert effect.epoch > self.epochs.get(effect.request, 0), "an epoch was used twice"
                assert effect.instance in self.attached, "placed on a runner whose stream is gone"
                runner = self.told.scheduler.runners[effect.instance]
                assert runner.drain is None, "placed on a runner that drains"
                self.epochs[effect.request] = effect.epoch
                self.count_passes(effect.request)
                self.passes.pop(effect.request, None)  # its turn came; if it is lost, it waits anew
                self.waiting.discard(effect.request)
                self.placed[effect.request] = effect
            case do.Refuse():
                self.waiting.discard(effect.request)
                self.placed.pop(effect.request, None)
                self.answered.add(effect.request)
            case do.CancelAtRunner():
                known = self.books[effect.instance].get(effect.request)
                if known is not None and known.epoch == effect.epoch:
                    del self.books[effect.instance][effect.request]
            case do.Readmit():
                known = self.books[effect.instance].get(effect.request)
                if known is not None and known.epoch == effect.epoch and known.parked:
                    known.parked, known.pages = False, effect.promise.pages

    def count_passes(self, request):
        """Charge every older request that still waits."""
        if request not in self.arrival:
            return
        for older in self.arrival[: self.arrival.index(request)]:
            if older in self.waiting:
                self.passes[older] = self.passes.get(older, 0) + 1

    def pick(self, names, data):
        return data.draw(st.sampled_from(sorted(names))) if names else None

    # -------------------------------------------------------------------------------------------------------- gateway

    @rule(
        prompt=st.integers(1, 100),
        max_tokens=st.integers(1, 200),
        q80=st.integers(0, 100),
        tenant=st.sampled_from("abc"),
        request_class=st.sampled_from(RequestClass),
        digest=st.sampled_from((BASE, PIRATE)),
        deadline=st.sampled_from((0.0, 5.0)),
    )
    def enqueue(self, **how):
        self.enqueue_one(**how)

    def enqueue_one(self, **how):
        self.count += 1
        name = f"q{self.count:03}"
        if how.get("digest") == PIRATE and self.told.scheduler.adapters.source_of(PIRATE) is None:
            how["digest"] = BASE
        self.waiting.add(name)
        self.arrival.append(name)
        prompt = how.pop("prompt")
        self.carry_out_all(self.told.enqueue(name, prompt=prompt, **how))

    @rule(large=st.integers(60, 200), small=st.integers(4, 12))
    def crowd(self, large, small):
        """One long request, and a crowd of short ones behind it that would each fit before it does."""
        self.enqueue_one(prompt=16, max_tokens=large, tenant="a", request_class=RequestClass.BATCH)
        for n in range(small):
            self.enqueue_one(prompt=1, max_tokens=8, tenant=f"t{n}", request_class=RequestClass.INTERACTIVE)

    @rule(data=st.data())
    def submit(self, data):
        """What was placed arrives at its runner, if that is still the same one."""
        name = self.pick(self.placed, data)
        if name is None:
            return
        place = self.placed[name]
        if place.incarnation != str(self.incarnations[place.instance]):
            self.lose(name, place.epoch)
            return
        known = self.books[place.instance].get(name)
        if known is None or known.epoch < place.epoch:
            self.books[place.instance][name] = Running(place.epoch, place.promise.pages, BASE)

    @rule(data=st.data(), twice=st.booleans())
    def finish(self, data, twice):
        name = self.pick(self.placed, data)
        if name is None:
            return
        place = self.placed.pop(name)
        self.answered.add(name)
        known = self.books[place.instance].get(name)
        if known is not None and known.epoch == place.epoch:
            del self.books[place.instance][name]
        self.say(on.RequestFinished(RequestId(name), place.epoch))
        if twice:
            self.say(on.RequestFinished(RequestId(name), place.epoch))

    @rule(data=st.data(), twice=st.booleans())
    def decline(self, data, twice):
        name = self.pick(self.placed, data)
        if name is None:
            return
        place = self.placed[name]
        self.books[place.instance].pop(name, None)
        if place.instance in self.attached:
            failure = Failure("declined", "not in the mood")
            self.say(on.RunnerDeclined(place.instance, RequestId(name), place.epoch, failure))
        self.lose(name, place.epoch)
        if twice:
            again = self.told.tell(on.RequestLost("g0", RequestId(name), place.epoch))
            assert not again, "the same loss twice is one loss"

    def lose(self, name, epoch):
        del self.placed[name]
        self.waiting.add(name)
        self.say(on.RequestLost("g0", RequestId(name), epoch))

    @rule(data=st.data())
    def cancel(self, data):
        name = self.pick(self.waiting, data)
        if name is not None:
            self.waiting.discard(name)
            self.answered.add(name)
            self.say(on.CancelAsked(RequestId(name)))

    @rule()
    def gateway_reconnects(self):
        live = tuple(
            self.told.live(
                name,
                instance=place.instance,
                epoch=place.epoch,
                pages=place.promise.pages,
                incarnation=place.incarnation,
            )
            for name, place in sorted(self.placed.items())
        )
        waiting = sorted(self.waiting)
        self.say(on.GatewayGone("g0"))
        self.say(on.GatewayConnected("g0", live))
        self.arrival = [name for name in self.arrival if name not in waiting] + waiting
        for name in waiting:
            self.passes.pop(name, None)
            self.carry_out_all(self.told.enqueue(name, max_tokens=16, epoch=self.epochs.get(name, 0)))

    # -------------------------------------------------------------------------------------------------------- runners

    @rule(name=st.sampled_from(INSTANCES), restarted=st.booleans())
    def attach(self, name, restarted):
        if restarted or not self.incarnations[name]:
            self.incarnations[name] += 1
            self.books[name] = {}
        self.attached.add(name)
        self.carry_out_all(
            self.told.attach(
                name,
                pages=PAGES[name],
                max_sequences=6,
                incarnation=str(self.incarnations[name]),
                live=self.book(name),
            )
        )

    @rule(name=st.sampled_from(INSTANCES))
    def detach(self, name):
        if name in self.attached:
            self.attached.discard(name)
            self.say(on.RunnerDetached(Instance(name), str(self.incarnations[name])))

    @rule(name=st.sampled_from(INSTANCES))
    def report(self, name):
        if name in self.attached:
            self.say(
                on.RunnerReported(
                    instance=Instance(name), incarnation=str(self.incarnations[name]), live=self.book(name)
                )
            )

    @rule(data=st.data(), name=st.sampled_from(INSTANCES), extra=st.integers(1, 4))
    def extend(self, data, name, extra):
        running = [r for r, one in self.books[name].items() if not one.parked]
        free = PAGES[name] - sum(one.pages for one in self.books[name].values() if not one.parked)
        request = self.pick(running, data)
        if request is not None and extra <= free:
            one = self.books[name][request]
            one.pages += extra
            self.say(on.PromiseChanged(Instance(name), RequestId(request), one.epoch, Promise(one.pages)))

    @rule(data=st.data(), name=st.sampled_from(INSTANCES))
    def park(self, data, name):
        request = self.pick([r for r, one in self.books[name].items() if not one.parked], data)
        if request is not None:
            one = self.books[name][request]
            one.parked, one.pages = True, min(2 * one.pages, PAGES[name])
            self.say(on.RequestParked(Instance(name), RequestId(request), one.epoch, Promise(one.pages)))

    @rule(name=st.sampled_from(INSTANCES), hung=st.booleans())
    def condemn(self, name, hung):
        identity = RunnerIdentity(instance=name, incarnation=str(self.incarnations[name]))
        self.say(on.RunnerCondemned(identity, "it does not move", hung))

    @rule(name=st.sampled_from(INSTANCES))
    def drain(self, name):
        if name in self.told.scheduler.runners:
            self.say(on.DrainAsked(self.told.scheduler.runners[Instance(name)].identity, 1.0))

    @rule(seconds=st.sampled_from((0.05, 0.5, 3.0)))
    def wait(self, seconds):
        self.told.clock.advance(seconds)
        self.say(on.Tick())

    def book(self, name):
        return tuple(
            BookEntry(
                request=RequestId(request),
                epoch=one.epoch,
                pages=one.pages,
                gateway="g0",
                digest=one.digest,
                state=SequenceState.PARKED if one.parked else SequenceState.DECODE,
            )
            for request, one in sorted(self.books[name].items())
        )

    # ----------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def every_request_is_placed_refused_ended_or_waits_with_a_reason(self):
        known = self.told.scheduler.requests
        for name in self.waiting:
            assert known[RequestId(name)].waiting, f"{name} hangs: its gateway waits and the scheduler does not"
        for name in self.placed:
            assert name in known
        for name in self.answered:
            assert name not in known

    @invariant()
    def one_live_placement_per_request_is_the_one_its_gateway_knows(self):
        for name, place in self.placed.items():
            placement = self.told.scheduler.requests[RequestId(name)].placement
            assert placement is None or placement.epoch == place.epoch

    @invariant()
    def nobody_was_passed_over_more_often_than_allowed(self):
        assert all(self.passes.get(name, 0) <= MAX_PASSED_OVER for name in self.waiting)

    def teardown(self):
        """With runners that behave from now on, everything that waits is placed and ends, or is refused."""
        for name in INSTANCES:
            self.incarnations[name] += 1
            self.books[name] = {}
            self.attached.add(name)
            self.carry_out_all(
                self.told.attach(name, pages=PAGES[name], max_sequences=6, incarnation=str(self.incarnations[name]))
            )
        for _ in range(2 * self.count + 10):
            for request in sorted(self.placed):
                place = self.placed[request]  # it may have moved since
                if place.incarnation == str(self.incarnations[place.instance]):
                    del self.placed[request]
                    self.answered.add(request)
                    self.say(on.RequestFinished(RequestId(request), place.epoch))
                else:
                    self.lose(request, place.epoch)
            for name in INSTANCES:
                self.report(name)
            self.wait(3.0)
        assert not self.waiting, "these wait for ever"
        assert not self.placed
        assert not self.told.scheduler.requests
        for runner in self.told.scheduler.runners.values():
            assert not runner.lines, "promises were left behind"


World.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestWorld = World.TestCase
