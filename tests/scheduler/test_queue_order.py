"""The queue's indices change no decision: a scheduler with a queue that has none decides the same, event by event."""

from contextlib import nullcontext
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from motet.domain import BASE
from motet.runner_info import RequestClass
from motet_scheduler.policy import effects, waiting_heads
from motet_scheduler.policy.order import order_of
from motet_scheduler.policy.queue import Outcome, Queue
from tests.scheduler.builders import GROUP, PIRATE, POET, adapter, ready

INSTANCES = ("r0", "r1", "r2")
PAGES = {"r0": 16, "r1": 12, "r2": 12}
MAX_PASSED_OVER = 3
MANY = 1000
"""More than wait here: then nobody is left for the next scan, which a queue without memory does not know."""


class PlainQueue(Queue):
    """Sorts all, and tries the first of each flow on every runner, until nothing more has a place. It does not ask what
    they wait for, nor what they need, nor how much room a runner has."""

    runners = ()

    def with_room(self, needs, kept):
        return self.runners

    def try_class(self, request_class, config, place):
        for runner, overdue in list(self.reserved.items()):
            if overdue.request_class is request_class and (outcome := place(overdue, [runner])) is not None:
                yield outcome
        class_queue, last = self.class_queues[request_class], None
        while (found := self.next_place(class_queue, last, place)) is not None:
            outcome, last = found
            yield outcome

    def next_place(self, class_queue, last, place):
        for request in self.oldest_of_each_flow(class_queue):
            first = request.waits_for is None
            order = order_of(request)
            if last is not None and order <= last:
                continue
            outcome = place(request, [])
            if outcome is not None:
                return outcome, order
            if first and class_queue.is_overdue(request):
                return Outcome.OVERDUE, order
        return None

    @staticmethod
    def oldest_of_each_flow(class_queue):
        oldest = {}
        for *_, request in sorted(class_queue.unordered()):
            own = request.digest if request.replaced else request.adapter
            oldest.setdefault((request.tenant, request.base, own, request.size), request)
        return sorted(oldest.values(), key=order_of)


def scheduler(queue, slots, rank_bytes, max_replicas, headroom):
    how = {"max_passed_over": MAX_PASSED_OVER, "tenants_examined": MANY, "avoid_after_decline": 0.5}
    driver = ready(headroom_one_in=headroom, standard_floor=0.3, batch_floor=0.2, **how)
    driver.scheduler.queues[GROUP] = queue(driver.scheduler.config)
    how = {"max_sequences": 4, "adapter_slots": slots, "adapter_rank_bytes": rank_bytes, "page_bytes": 4}
    for name in INSTANCES:
        driver.attach(name, pages=PAGES[name], **how)
    driver.scheduler.queues[GROUP].runners = driver.scheduler.state.runners_of(GROUP)
    driver.state(adapter("pirate", max_replicas=max_replicas), adapter("poet"))
    for name, digest in (("pirate", PIRATE), ("poet", POET)):
        for order in list(driver.orders):
            if order[1].name == name:
                driver.certify(name, digest, instance=order[0])
    return driver


ADAPTERS = {BASE: "", PIRATE: "default/pirate", POET: "default/poet"}
ASK = st.tuples(
    st.just("ask"),
    st.sampled_from("abcdef"),
    st.sampled_from((BASE, BASE, PIRATE, POET)),
    st.sampled_from(RequestClass),
    st.sampled_from((8, 16, 32, 64, 100, 150, 200)),
)
FINISH = st.tuples(st.just("finish"), st.integers(0, 20))
STEPS = st.one_of(
    *(4 * [ASK]),
    *(2 * [FINISH]),
    st.tuples(st.just("lose"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("report"), st.sampled_from(INSTANCES)),
    st.tuples(st.just("limit"), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from((0.1, 1.0))),
)


def pick(driver, n, *, waiting):
    """The name and the epoch of one of those that wait, or run, if there is one."""
    found = sorted((one.id, one.epoch) for one in driver.scheduler.requests.values() if one.waiting is waiting)
    return found[n % len(found)] if found else None


def take(driver, number, step):
    """Returns what was decided about requests."""
    driver.effects = []
    match step:
        case ("ask", tenant, digest, request_class, tokens):
            how = {"adapter": ADAPTERS[digest], "request_class": request_class, "max_tokens": tokens, "q80": tokens}
            driver.enqueue(f"q{number:03}", tenant=tenant, digest=digest, **how)
        case ("finish", n) if (running := pick(driver, n, waiting=False)) is not None:
            driver.finish(*running)
        case ("lose", n) if (running := pick(driver, n, waiting=False)) is not None:
            driver.lose(*running)
        case ("cancel", n) if (waiting := pick(driver, n, waiting=True)) is not None:
            driver.cancel(waiting[0])
        case ("report", name):
            driver.report(name)
        case ("limit", most):
            driver.state(adapter("pirate", max_replicas=most), adapter("poet"))
        case ("wait", seconds):
            driver.wait(seconds)
    return [
        (type(effect), effect.request, effect.instance if isinstance(effect, effects.SendPlaced) else "")
        for effect in driver.effects
        if isinstance(effect, effects.SendPlaced | effects.SendRefused)
    ]


SHORT = ("ask", "a", BASE, RequestClass.INTERACTIVE, 8)
ALL_BUT_THE_LAST_PLACES = [
    *(("ask", "a", BASE, RequestClass.STANDARD, 8), ("lose", 0), ("lose", 0)),  # on r0
    *(SHORT, ("lose", 1), ("lose", 1), SHORT, SHORT),  # on r1
    *(("ask", "b", BASE, RequestClass.STANDARD, 150), ("lose", 4)),  # fits on r0 only where nothing is kept from it
    *(3 * [("finish", 1)]),  # now nothing is
]


@settings(max_examples=40, deadline=None)
@example(steps=ALL_BUT_THE_LAST_PLACES, slots=1, rank_bytes=0, max_replicas=0, headroom=2, as_few=False)
@given(
    steps=st.lists(STEPS, min_size=40, max_size=120),
    slots=st.sampled_from((1, 8)),
    rank_bytes=st.sampled_from((0, 1)),
    max_replicas=st.integers(0, 2),
    headroom=st.sampled_from((0, 2)),
    as_few=st.booleans(),
)
def test_a_queue_without_indices_decides_the_same(*, steps, slots, rank_bytes, max_replicas, headroom, as_few):
    """`as_few`: few fit. Else they are looked for as where many do."""
    ours, plain = (scheduler(queue, slots, rank_bytes, max_replicas, headroom) for queue in (Queue, PlainQueue))
    with nullcontext() if as_few else patch.object(waiting_heads, "between", lambda *_: None):
        for number, step in enumerate(steps):
            assert take(ours, number, step) == take(plain, number, step), f"step {number}: {step}"
