"""Nobody waits whom a runner that may take him has room for. This holds after each event and the `TryMore`s that follow
it, however few requests and runners are looked at at once."""

import random
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from motet.domain import BASE, Digest
from motet.errors import ParameterUnavailable
from motet.runner_info import Failure, RequestClass
from motet_scheduler.policy import class_queue, events, placement, queue, rooms, waiting_heads
from motet_scheduler.policy.runner_choice import Chosen, choose
from tests.scheduler.builders import GROUP, PIRATE, POET, adapter, entry, pool, ready, who_fits

INSTANCES = ("r0", "r1", "r2")
NAMES = {BASE: "", PIRATE: "default/pirate", POET: "default/poet"}
MAX_TRIES = 500
"""`TryMore`s after one event. There are far fewer requests and runners."""
SIZES = st.sampled_from((1, 8, 16, 32, 64, 100, 150, 200))
CLASSES, DIGESTS = st.sampled_from(RequestClass), st.sampled_from((BASE, BASE, PIRATE, POET))


class NobodyWaits(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.few = [
            patch.object(class_queue, "MAX_FEW", 1),
            patch.object(waiting_heads, "MAX_FEW", 1),
            patch.object(waiting_heads, "LOOKED_FIRST", 1),
            patch.object(waiting_heads, "MANY", 1),
            patch.object(placement, "PLACED_AT_ONCE", 2),
            patch.object(placement, "SEARCHED_AT_ONCE", 2),
            patch.object(rooms, "MAX_WOKEN", 1),
            patch.object(rooms, "MAX_ASKED", 1),
            patch.object(queue, "MAX_FREED", 1),
        ]
        for one in self.few:
            one.start()
        self.count = 0

    def teardown(self):
        for one in self.few:
            one.stop()

    @initialize(
        examined=st.sampled_from((1, 2)),
        headroom=st.sampled_from((2, 3, 4)),
        pages=st.lists(st.sampled_from((8, 16, 30, 40)), min_size=2, max_size=3),
        places=st.lists(st.sampled_from((2, 3, 4, 6, 8)), min_size=3, max_size=3),
        slots=st.sampled_from((1, 8)),
        rank_bytes=st.sampled_from((0, 1)),
    )
    def begin(self, *, examined, headroom, pages, places, slots, rank_bytes):
        floors = {"standard_floor": 0.3, "batch_floor": 0.2}
        how = {"max_passed_over": 3, "tenants_examined": examined, "avoid_after_decline": 0.5}
        self.driver = ready(headroom_one_in=headroom, **floors, **how)
        self.capacity = {"adapter_slots": slots, "adapter_rank_bytes": rank_bytes, "page_bytes": 4}
        for name, most, sequences in zip(INSTANCES, pages, places, strict=False):
            self.driver.attach(name, pages=most, max_sequences=sequences, **self.capacity)
        self.limit(0)
        for order in list(self.driver.orders):
            if order[0] in INSTANCES:
                digest = {"pirate": PIRATE, "poet": POET}[order[1].name]
                self.driver.certify(order[1].name, digest, instance=order[0])

    def pick(self, n, *, waiting):
        """The id and the epoch of one of those that wait, or run, if there is one."""
        found = sorted((one.id, one.epoch) for one in self.driver.scheduler.requests.values() if one.waiting is waiting)
        return found[n % len(found)] if found else None

    def incarnation(self, name):
        """Of a runner that is attached."""
        runner = self.driver.scheduler.runners.get(name)
        return runner.identity.incarnation if runner is not None and runner.attached else None

    @rule(asked=st.lists(st.tuples(st.sampled_from("abcdef"), DIGESTS, CLASSES, SIZES), min_size=4, max_size=8))
    def ask(self, asked):
        for tenant, digest, request_class, size in asked:
            self.count += 1
            how = {"adapter": NAMES[digest], "request_class": request_class, "max_tokens": size, "q80": size}
            self.driver.enqueue(f"q{self.count:03}", tenant=tenant, digest=digest, **how)
            self.try_more()

    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=3))
    def finish(self, numbers):
        for n in numbers:
            if (running := self.pick(n, waiting=False)) is not None:
                self.driver.finish(*running)
                self.check()

    @rule(n=st.integers(0, 30), how=st.sampled_from(("lose", "decline", "decline for good", "cancel")))
    def come_to_nothing(self, n, how):
        if (found := self.pick(n, waiting=how == "cancel")) is None:
            return
        request, epoch = found
        if how == "cancel":
            self.driver.cancel(request)
            return
        if how != "lose":
            instance = self.driver.scheduler.requests[request].placement.instance
            failure = Failure("declined", "a moment") if how == "decline" else Failure.of(ParameterUnavailable("never"))
            self.driver.send(events.RunnerDeclined(instance, request, epoch, failure))
        if request in self.driver.scheduler.requests:
            self.driver.lose(request, epoch)

    @rule(name=st.sampled_from(INSTANCES), seconds=st.sampled_from((0.1, 1.0)), foreign=st.integers(0, 2))
    def wait_and_report(self, name, seconds, foreign):
        """Some that it has are of another gateway."""
        self.driver.wait(seconds)
        if (incarnation := self.incarnation(name)) is not None:
            live = tuple(entry(f"x{name}{n}", 3, gateway="another") for n in range(foreign))
            self.driver.report(name, *live, incarnation=incarnation)

    def limit(self, most):
        self.driver.state(adapter("pirate", max_replicas=most), adapter("poet"))

    @rule(
        what=st.one_of(
            st.tuples(st.just("limit"), st.integers(0, 3)),
            st.tuples(st.just("overcommit"), st.sampled_from((0.8, 1.0, 1.3))),
            st.tuples(st.just("detach"), st.sampled_from(INSTANCES)),
            st.tuples(st.just("leave"), st.sampled_from(INSTANCES)),
            st.tuples(st.just("attach"), st.sampled_from(INSTANCES)),
        )
    )
    def disturb(self, what):
        match what:
            case ("limit", most):
                self.limit(most)
            case ("overcommit", factor):
                self.driver.send(events.OvercommitSet(pool().pool, factor))
            case ("detach", name) if (incarnation := self.incarnation(name)) is not None:
                self.driver.detach(name, incarnation)
            case ("leave", name) if (incarnation := self.incarnation(name)) is not None:
                self.driver.detach(name, incarnation)
                self.driver.wait(self.driver.scheduler.config.forget_runner)
                assert name not in self.driver.scheduler.runners
            case ("attach", name):
                self.count += 1
                how = {"pages": 30, "max_sequences": 6} | self.capacity
                self.driver.attach(name, incarnation=f"after {self.count}", **how)

    def try_more(self):
        for _ in range(MAX_TRIES):
            if not self.driver.scheduler.more_to_try:
                return
            self.driver.send(events.TryMore())
        raise AssertionError("it is tried for ever")

    @invariant()
    def check(self):
        self.try_more()
        assert list(who_fits(self.driver)) == []

    @invariant()
    def no_head_keeps_a_request_for_another_adapter_that_is_there(self):
        state, queue = self.driver.scheduler.state, self.driver.scheduler.state.queue(GROUP)
        for share in (share for one in queue.class_queues.values() for share in one.shares):
            for head, *others in share.flows.values():
                for *_, request in others:
                    if request.digest != head[-1].digest:
                        reserved, kept = queue.reserved_from(request), queue.kept_from(request)
                        able, config = state.runners_for(request), state.config
                        found = choose(request, able, config, state.now, reserved=reserved, kept=kept)
                        there = request.digest == BASE or (found and request.digest in found.runner.adapters.tiers)
                        assert not (isinstance(found, Chosen) and there), f"{request.id} waits for {head[-1].id}"


NobodyWaits.TestCase.settings = settings(
    max_examples=30, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestNobodyWaits = NobodyWaits.TestCase


def test_a_small_request_makes_room_for_one_that_waits():
    """It makes the mean of all smaller, by which pages are kept from tenant `a`."""
    driver = ready(headroom_one_in=2, standard_floor=0.3, batch_floor=0.2, max_passed_over=3)
    for name in INSTANCES[:2]:
        driver.attach(name, pages=30, max_sequences=6)
    interactive, _, batch = RequestClass
    asked = (
        *(("b", interactive, 64), ("c", batch, 200), ("c", interactive, 16)),
        *(("b", interactive, 64), ("a", batch, 32), ("b", interactive, 16)),
    )
    for n, (tenant, request_class, size) in enumerate(asked):
        driver.enqueue(f"{n}", tenant=tenant, request_class=request_class, max_tokens=size, q80=size)
        assert list(who_fits(driver)) == []


def test_an_adapter_that_comes_takes_its_pages_once_also_for_one_that_waits():
    """`small` needs its page, those of its adapter, and leaves 7. Once `urgent` has brought the adapter, it needs 1."""
    driver = ready(headroom_one_in=4)
    driver.attach("r0", pages=30, max_sequences=6, adapter_slots=1, adapter_rank_bytes=1, page_bytes=4)
    driver.state(adapter("pirate"))
    driver.certify("pirate", PIRATE)
    for name in ("first", "second", "third"):
        driver.enqueue(name, tenant="b", request_class=RequestClass.INTERACTIVE, max_tokens=90, q80=90)
    of_pirate = {"tenant": "a", "digest": PIRATE, "adapter": NAMES[PIRATE], "max_tokens": 1, "q80": 1}
    driver.enqueue("small", request_class=RequestClass.STANDARD, **of_pirate)
    assert driver.scheduler.requests["small"].waiting
    driver.enqueue("urgent", request_class=RequestClass.INTERACTIVE, **of_pirate)
    assert not driver.scheduler.requests["urgent"].waiting
    assert list(who_fits(driver)) == []
    assert not driver.scheduler.requests["small"].waiting


@pytest.mark.parametrize("seed", [131, 134])
def test_a_tenant_given_least_has_the_last_places_also_for_what_brings_its_adapter(seed):
    """Of requests that all fit by their own pages, some need more for an adapter that is not there."""
    drawn = random.Random(seed)
    driver = ready(max_passed_over=1000, headroom_one_in=8)
    places = drawn.choice([8, 16])
    driver.attach("r0", pages=60, max_sequences=places, adapter_slots=8, adapter_rank_bytes=64, page_bytes=64 * 8)
    digests = [Digest(f"sha256:{number:064x}") for number in range(1, 4)]
    driver.state(*(adapter(f"a{number}") for number in range(3)))
    for number, digest in enumerate(digests):
        driver.certify(f"a{number}", digest)
    for step in range(120):
        if drawn.random() < 0.6:
            which = drawn.randrange(4)
            how = {"digest": digests[which], "adapter": f"default/a{which}"} if which < 3 else {}
            driver.enqueue(f"{step}", tenant=f"t{drawn.randrange(3)}", max_tokens=drawn.randrange(16, 300), **how)
        else:
            placed = [(one.id, one.placement.epoch) for one in driver.scheduler.requests.values() if one.placement]
            if placed:
                driver.finish(*drawn.choice(placed))
        if list(who_fits(driver)):
            driver.wait(0.1)
        assert list(who_fits(driver)) == []
