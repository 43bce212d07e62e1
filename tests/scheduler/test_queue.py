import sys
from functools import partial
from itertools import count, islice
from random import Random

import pytest

from motet.domain import BASE, RequestId, Tenant
from motet.runner_info import Capacity, RequestClass, RunnerIdentity, Tier
from motet_scheduler.policy import class_queue, effects, expected_order, ordered_heads, placement, waiting_heads
from motet_scheduler.policy.class_queue import COST_OF_TRY, HEADS_OF_A_LOOK, MAX_COUNTED, MAX_LOOKED, ClassQueue
from motet_scheduler.policy.limit_changes import MAX_COST
from motet_scheduler.policy.order import order_of
from motet_scheduler.policy.ordered_heads import FEW, SLACK, OrderedHeads
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.rooms import Rooms
from motet_scheduler.policy.runner_choice import choose
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.shares import Shares
from motet_scheduler.policy.values import BaseModel, SchedulerConfig
from motet_scheduler.policy.waiting_heads import Waiting
from tests.scheduler.builders import GROUP, ready

INTERACTIVE, STANDARD, BATCH = RequestClass
MAX_SEARCHES = 6
"""In sorted lists, of a decision that places one request. One list more in the queue costs two or more."""


def replace_searches(monkeypatch, replaced):
    """In all sorted lists of the queue."""
    for module in (class_queue, ordered_heads, waiting_heads):
        for search in {"insort", "bisect_left", "bisect_right"} & vars(module).keys():
            monkeypatch.setattr(module, search, replaced(getattr(module, search)))


class WaitingRequests:
    """A queue and the requests in it, by name. They wait for one runner."""

    def __init__(self, max_passed_over=3):
        self.queue = Queue(SchedulerConfig(max_passed_over=max_passed_over))
        self.by_name = {}
        self._sequences = count()
        self.runner = Runner(RunnerIdentity(instance="r0", incarnation="1"), "", Capacity(pages=1), 1.0)
        self.runner.base = BaseModel(digest="base")

    def add(self, name, *, age=0.0, tenant="acme", request_class=STANDARD, tokens=1, adapter="", digest=BASE):
        request = Request(
            id=RequestId(name),
            gateway="g0",
            tenant=Tenant(tenant),
            group=GROUP,
            digest=digest,
            base="base",
            request_class=request_class,
            prompt_tokens=tokens,
            max_tokens=1,
            asked_at=100.0 - age,
            sequence=next(self._sequences),
            adapter=adapter,
        )
        self.by_name[name] = request
        self.queue.add(request)

    def place(self, name):
        """When all have been tried."""
        for request in self.queue.heads():
            if request.waits_for is None:
                self.queue.wait_for(request, "base", {})
        self.queue.remove_placed(self.by_name[name], self.runner)

    def names(self):
        return [request.id for request in filter(None, self.queue.in_order())]

    def overdue(self):
        for request in self.queue.heads():
            if request.waits_for is None:
                self.queue.wait_for(request, "base", {})
        return [
            request.id for runners_of in self.queue.overdue() for request in self.queue.overdue_alike(runners_of, 1)
        ]

    def all_overdue(self):
        self.overdue()
        return [request.id for request in self.queue.overdue_alike("base", 100)]

    def oldest_of_each_flow(self):
        return [request.id for request in self.queue.heads()]


def test_the_more_urgent_class_comes_first_whatever_the_age():
    waiting = WaitingRequests()
    waiting.add("old", age=60, request_class=BATCH)
    waiting.add("normal", request_class=STANDARD)
    waiting.add("urgent", request_class=INTERACTIVE)
    assert waiting.names() == ["urgent", "normal", "old"]


def test_of_one_tenant_the_oldest_is_first_even_if_it_arrives_late():
    waiting = WaitingRequests()
    waiting.add("young", age=1)
    waiting.add("moved here with its age", age=9)
    assert waiting.names() == ["moved here with its age", "young"]


def test_equal_ages_go_in_the_order_they_came():
    waiting = WaitingRequests()
    for name in "abc":
        waiting.add(name)
    assert waiting.names() == ["a", "b", "c"]


def test_each_tenant_offers_only_its_oldest():
    waiting = WaitingRequests()
    waiting.add("a1", age=9, tenant="a")
    waiting.add("a2", age=8, tenant="a")
    waiting.add("b1", age=7, tenant="b")
    assert waiting.oldest_of_each_flow() == ["a1", "b1"]


def test_a_tenants_next_request_has_its_turn_by_what_the_tenant_was_given():
    waiting = WaitingRequests()
    for number in range(3):
        waiting.add(f"a{number}", age=9, tenant="a")
        waiting.add(f"b{number}", age=1, tenant="b", tokens=30)
    order = []
    while waiting.names():
        predicted = waiting.names()
        order.append(waiting.oldest_of_each_flow()[0])
        assert predicted[0] == order[-1]
        waiting.place(order[-1])
    assert order == ["a0", "b0", "a1", "a2", "b1", "b2"]


def test_the_order_that_is_told_is_that_in_which_they_are_placed():
    waiting = WaitingRequests()
    for number in range(4):
        waiting.add(f"a{number}", age=9, tenant="a", tokens=10 + number)
        waiting.add(f"b{number}", age=1, tenant="b", tokens=24)
        waiting.add(f"c{number}", age=5, tenant="c", tokens=7)
    told, order = waiting.names(), []
    while waiting.names():
        order.append(waiting.oldest_of_each_flow()[0])
        waiting.place(order[-1])
    assert told == order


def test_the_first_in_the_order_that_is_told_cost_no_look_at_all_others(monkeypatch):
    """A hundred thousand may wait, and each event looks at a thousand of them at most."""
    waiting = WaitingRequests()
    for n in range(1000):
        waiting.add(f"{n:03}", tenant=f"t{n % 2}")
    looked, cost = [], Shares.cost
    monkeypatch.setattr(Shares, "cost", lambda shares, request: looked.append(request) or cost(shares, request))
    told = filter(None, waiting.queue.in_order())
    first = [next(told).id for _ in range(10)]
    assert len(looked) <= 12
    for name in first:
        waiting.place(name)
    waiting.add("new")
    assert first + [request.id for request in told] == [f"{n:03}" for n in range(1000)], "not as they waited then"


def test_of_a_tenant_with_many_adapters_few_flows_are_looked_at_in_one_step(monkeypatch):
    waiting, chance, looked = WaitingRequests(), Random(3), []
    for n in range(1000):
        waiting.add(
            f"{n}", age=chance.random(), tenant="few" if n % 100 == 0 else "many", adapter=f"default/a{n % 400}"
        )
    look = expected_order.heappush
    monkeypatch.setattr(expected_order, "heappush", lambda flows, one: looked.append(one) or look(flows, one))
    told, in_one_step = [], []
    for request in waiting.queue.in_order():
        told.append(request)
        in_one_step.append(len(looked))
        looked.clear()
    assert max(in_one_step) <= expected_order.FLOWS_AT_ONCE + 1
    assert told[:24] == 24 * [None], "of 400 flows"
    first, order = [request.id for request in told if request is not None][:10], []
    while len(waiting.queue):
        order.append(waiting.oldest_of_each_flow()[0])
        waiting.place(order[-1])
    assert first == order[:10]


def test_removing_from_the_middle_keeps_the_others_in_order():
    waiting = WaitingRequests()
    for name in "abcde":
        waiting.add(name)
    waiting.queue.remove(waiting.by_name["c"])
    assert waiting.names() == ["a", "b", "d", "e"]
    assert len(waiting.queue) == 4


def test_only_an_overdue_request_may_be_placed():
    waiting = WaitingRequests(max_passed_over=2)
    waiting.add("patient", tenant="a")
    for n in range(3):
        waiting.add(f"quick{n}", tenant=f"b{n}")
    waiting.place("quick0")
    assert waiting.overdue() == []
    waiting.place("quick1")
    assert waiting.overdue() == ["patient"]
    waiting.place("patient")
    assert waiting.overdue() == []


def test_more_urgent_requests_go_first_without_counting_as_a_pass():
    waiting = WaitingRequests(max_passed_over=3)
    waiting.add("batch", request_class=BATCH)
    for n in range(9):
        waiting.add(f"chat{n}", request_class=INTERACTIVE)
        waiting.place(f"chat{n}")
    assert waiting.overdue() == []


def test_a_less_urgent_request_that_is_placed_first_counts_as_passing():
    waiting = WaitingRequests(max_passed_over=2)
    waiting.add("large", request_class=INTERACTIVE)
    for n in range(2):
        waiting.add(f"small{n}", age=60, request_class=BATCH)
    waiting.place("small0")
    assert waiting.overdue() == []
    waiting.place("small1")
    assert waiting.overdue() == ["large"]


def test_what_a_class_gets_as_its_floor_passes_no_more_urgent_request():
    waiting = WaitingRequests(max_passed_over=1)
    waiting.add("large", request_class=INTERACTIVE)
    waiting.add("small", request_class=STANDARD)
    waiting.queue.early = STANDARD
    waiting.place("small")
    assert waiting.overdue() == []


def test_of_two_overdue_requests_the_more_urgent_one_comes_first():
    waiting = WaitingRequests(max_passed_over=1)
    waiting.add("large", tenant="a", request_class=BATCH)
    waiting.add("small", tenant="b", request_class=BATCH)
    waiting.place("small")
    assert waiting.overdue() == ["large"]
    waiting.add("large chat", tenant="a", request_class=INTERACTIVE)
    waiting.add("small", tenant="c", request_class=BATCH)
    waiting.place("small")
    assert waiting.all_overdue() == ["large chat", "large"]


def test_placing_in_order_passes_no_request_over():
    waiting = WaitingRequests(max_passed_over=1)
    for name in "abcd":
        waiting.add(name)
    for name in "abc":
        waiting.place(name)
        assert waiting.overdue() == []


def test_who_was_given_more_is_passed_by_nobody_whose_turn_it_is():
    """However old its request is."""
    waiting = WaitingRequests(max_passed_over=2)
    for n in range(9):
        waiting.add(f"{n}", tenant=f"t{n}")
    waiting.add("before", tenant="given much", tokens=1000)
    waiting.place("before")
    waiting.add("old", age=60, tenant="given much")
    for n in range(9):
        waiting.place(f"{n}")
    assert waiting.overdue() == []


def test_earlier_passes_do_not_count_for_a_later_request():
    waiting = WaitingRequests(max_passed_over=1)
    waiting.add("first", age=9, tenant="a")
    waiting.add("quick", age=5, tenant="b")
    waiting.place("quick")
    waiting.add("later", tenant="c")
    assert waiting.all_overdue() == ["first"]
    waiting.add("quick too", tenant="d")
    waiting.place("quick too")
    assert waiting.all_overdue() == ["first", "later"]


def test_what_waits_behind_an_overdue_request_of_its_tenant_was_passed_as_often():
    waiting = WaitingRequests(max_passed_over=2)
    waiting.add("first", age=9, tenant="a")
    waiting.add("second", age=9, tenant="a")
    for n in range(2):
        waiting.add(f"quick{n}", age=8, tenant=f"b{n}")
        waiting.place(f"quick{n}")
    waiting.queue.remove(waiting.by_name["first"])
    assert waiting.overdue() == ["second"]


def test_what_runs_elsewhere_passes_nobody():
    waiting = WaitingRequests(max_passed_over=1)
    waiting.add("large", tenant="a")
    waiting.add("elsewhere", tenant="b")
    waiting.queue.wait_for(waiting.by_name["large"], "another base", {})
    waiting.place("elsewhere")
    assert waiting.overdue() == []


@pytest.mark.parametrize("share", [1, FEW + 1])
def test_those_that_are_to_be_tried_again_leave_the_others_where_they_wait(share):
    waiting = WaitingRequests()
    for n in range(60):
        waiting.add(f"{n}", tenant=f"t{n}")
        waiting.queue.wait_for(waiting.by_name[f"{n}"], "even" if n % 2 == 0 else "odd", {0: (n % 3, 0)})
    again = [waiting.by_name[f"{n}"] for n in range(0, 2 * share, 2)]
    waiting.queue.try_again([*again, again[0]])
    (tried,) = [one for one in waiting.queue.class_queues.values() if len(one)]
    assert [request for *_, request in tried.untried_heads] == again
    assert all(request.waits_for is None for request in again)
    left = [request.id for request in tried.with_adapter(BASE, ["even"])]
    assert len(tried.waiting["even"].heads) == len(left) == 30 - share
    assert len(tried.waiting["odd"].heads) == 30


def test_that_all_are_to_be_tried_again_costs_no_search_for_each(monkeypatch):
    waiting = WaitingRequests()
    for n in range(50):
        waiting.add(f"{n}", tenant=f"t{n}")
        waiting.queue.wait_for(waiting.by_name[f"{n}"], "base", {0: (1, 0)})
    replace_searches(monkeypatch, lambda _: lambda *_: pytest.fail("it was searched for"))
    monkeypatch.setattr(waiting_heads, "bisect_left", lambda *_: 0)  # of the only need, when nobody is left
    waiting.queue.try_again(list(waiting.by_name.values()))
    (tried,) = [one for one in waiting.queue.class_queues.values() if len(one)]
    assert [request for *_, request in tried.untried_heads] == list(waiting.by_name.values())
    assert not tried.waiting


def test_when_all_are_to_be_tried_again_no_head_is_moved_alone(monkeypatch):
    """A tenant may have thousands, and all are to be tried again in one event."""
    waiting, chance = WaitingRequests(), Random(4)
    for n in range(300):
        waiting.add(f"{n}", age=chance.random(), tenant=f"t{n % 3}", adapter=f"default/a{n}")
        if n % 7:
            waiting.queue.wait_for(waiting.by_name[f"{n}"], chance.choice(["base", "digest"]), {0: (1, 0)})
    (class_queue,) = [one for one in waiting.queue.class_queues.values() if len(one)]
    in_order = sorted(waiting.by_name.values(), key=order_of)
    with monkeypatch.context() as alone:
        alone.setattr(OrderedHeads, "add", lambda *_: pytest.fail("one was moved"))
        waiting.queue.try_all_again()
    assert not class_queue.waiting
    assert [request for *_, request in class_queue.untried_heads] == in_order
    assert all(one.waits_for is None for one in in_order)
    for one in chance.sample(in_order, 290):
        waiting.queue.remove(one)
        in_order.remove(one)
    assert [request for *_, request in class_queue.untried_heads] == in_order


def test_an_adapter_for_which_nobody_waits_any_more_leaves_nothing():
    tried = Waiting()
    waiting = WaitingRequests()
    for name in ("stays", "leaves"):
        waiting.add(name)
        request = waiting.by_name[name]
        request.digest, request.page_needs = name, {0: (1, 0)}
        tried.add(request)
    tried.discard(waiting.by_name["leaves"])
    assert [request.id for *_, request in tried.heads] == ["stays"]
    assert not list(tried.with_adapter("leaves"))


def test_heads_that_come_go_and_get_later_turns_are_found_in_order():
    chance = Random(1)
    waiting, heads, here = WaitingRequests(), OrderedHeads(), []
    for n in range(300):
        waiting.add(f"{n}", age=chance.random(), tenant=f"t{n % 7}")
    for _ in range(3000):
        request = waiting.by_name[f"{chance.randrange(300)}"]
        if request in here:
            here.remove(request)
            heads.discard(request)
        elif chance.random() < len(here) / 100:
            request.share.counter += chance.random()
        else:
            here.append(request)
            heads.add(request)
        assert len(heads) == len(here)
        if chance.random() < 0.2:
            found = [head[3] for head in islice(heads, chance.randrange(1, 9))]
            assert found == sorted(here, key=order_of)[: len(found)]
    assert len(heads._entries) <= 2 * len(heads) + SLACK, "what has left is forgotten"  # noqa: SLF001


def test_heads_that_were_passed_as_often_as_allowed_are_not_looked_at_again():
    chance, waiting, heads, here = Random(3), WaitingRequests(), OrderedHeads(), []
    for n in range(60):
        waiting.add(f"{n}", age=chance.random(), adapter=f"default/a{n}")
    for _ in range(3000):
        request = waiting.by_name[f"{chance.randrange(60)}"]
        if request not in here:
            request.passes = chance.choice((0, 0, 3))
            here.append(request)
            heads.add(request)
        elif chance.random() < 0.4:
            here.remove(request)
            heads.discard(request)
        else:
            request.passes = min(3, request.passes + 1)
        first = sorted(here, key=order_of)[:8]
        found = [request for *_, request in heads.of_tenant(request.share, most=8, allowed=3)]
        while first and first[0].passes == 3:
            del first[0]
        assert found == first


def test_of_heads_that_are_all_overdue_only_those_that_count_are_looked_at():
    waiting, heads = WaitingRequests(), OrderedHeads()
    for n in range(60):
        waiting.add(f"{n:02}", adapter=f"default/a{n}")
        waiting.by_name[f"{n:02}"].passes = 3
        heads.add(waiting.by_name[f"{n:02}"])
    share = waiting.by_name["00"].share
    assert heads.of_tenant(share, most=8, allowed=3) == []
    assert heads.of_tenants[share].overdue == 8


class OneRunner(WaitingRequests):
    """It has pages for any of them, and knows whose turn is first in what waits for it."""

    def __init__(self):
        super().__init__()
        self.runner = Runner(RunnerIdentity(instance="r0", incarnation="1"), "", Capacity(pages=1000), 1.0)
        self.tried = Waiting()

    def wait(self, name, pages, **how):
        self.add(name, **how)
        request = self.by_name[name]
        request.page_needs = {id(self.runner.capacity): (pages, 0)}
        self.tried.add(request)
        return request


@pytest.mark.parametrize("examined", [4, 32, 1000])
def test_the_first_of_those_that_fit_are_found_in_their_order(examined):
    chance = Random(2)
    there = OneRunner()
    requests = [
        there.wait(f"{n}", chance.randrange(1, 9), age=chance.random(), tenant=f"t{n % 50}") for n in range(400)
    ]
    for _ in range(40):
        chance.choice(requests).share.counter += chance.random()
        chance.choice(requests).avoid = {"r0": 1e9} if chance.random() < 0.3 else {}
        free = chance.randrange(10)
        fit = sorted((one for one in requests if one.page_needs[id(there.runner.capacity)][0] <= free), key=order_of)
        if len(fit) > examined:
            fit = [one for one in fit if not one.avoid][:examined]
        assert [head[3] for head in sorted(there.tried.that_fit(there.runner, free, examined))] == fit


def test_those_that_need_more_and_have_their_turn_before_cost_no_look(monkeypatch):
    there = OneRunner()
    for n in range(1000):
        there.wait(f"large{n}", 90, age=9, tenant=f"l{n}")
        there.wait(f"small{n}", 1 + n % 3, tenant=f"s{n}")
    looked, heads_in_order = [], OrderedHeads.__iter__

    def look(heads):
        for head in heads_in_order(heads):
            looked.append(head)
            yield head

    monkeypatch.setattr(OrderedHeads, "__iter__", look)
    assert [head[3].id for head in there.tried.that_fit(there.runner, 3, 32)] == [f"small{n}" for n in range(32)]
    assert len(looked) <= 40 + waiting_heads.LOOKED_FIRST


def test_those_given_least_are_found_once_for_all_runners(monkeypatch):
    there = OneRunner()
    for n in range(40):
        there.wait(f"{n}", 1 + n % 3, age=40 - n, tenant=f"t{n % 4}", adapter=f"a{n}").share.counter = float(n % 4)
    walks, given_least = [], OrderedHeads.given_at_most
    monkeypatch.setattr(OrderedHeads, "given_at_most", lambda *one: walks.append(one) or given_least(*one))
    lowest = {}
    for free in (1, 2, 3):
        found = there.tried.that_fit(there.runner, free, 32, highest=0.0, lowest=lowest)
        assert [int(head[3].id) for head in found] == [n for n in range(0, 40, 4) if 1 + n % 3 <= free]
    assert len(walks) == 1


def test_of_those_given_least_only_the_first_that_fit_are_looked_at():
    there, calls, lowest = OneRunner(), [], {}
    for n in range(200):
        there.wait(f"{n}", 1, age=200 - n, tenant="a", adapter=f"a{n}")
    look = partial(there.tried.that_fit, there.runner, 3, 2, highest=0.0, lowest=lowest)
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        first, again = look(), look()
    finally:
        sys.setprofile(None)
    assert [head[3].id for head in first] == [head[3].id for head in again] == ["0", "1"]
    assert len(calls) < 250


@pytest.mark.parametrize("most", [3, 40, 400])
def test_those_given_least_are_found_in_their_order_unless_they_are_many(most):
    chance, there = Random(3), OneRunner()
    requests = [there.wait(f"{n}", 1, age=chance.random(), tenant=f"t{n % 20}") for n in range(300)]
    for _ in range(40):
        chance.choice(requests).share.counter += chance.randrange(3)
        counter = chance.randrange(3)
        those = sorted((one for one in requests if one.share.counter <= counter), key=order_of)
        found = there.tried.heads.given_at_most(counter, most)
        assert (found and [head[3] for head in found]) == (those if len(those) <= most else None)


@pytest.mark.parametrize("count", [40, 300])
def test_those_given_least_are_tried_in_parts_until_all_were(count):
    waiting, tried, last = WaitingRequests(), [], None
    for n in range(count):
        waiting.add(f"{n:03}", tenant="a", adapter=f"default/a{n}")
        waiting.queue.wait_for(waiting.by_name[f"{n:03}"], "base", {})
    first_for = partial(waiting.queue.class_queues[STANDARD].first_for, waiting.queue.bases, 0.0)
    while not tried or last is not None:
        part, last = first_for(last, fits=lambda request: int(request.id) % 2, examined=8)
        tried += part
    assert [int(head[3].id) for head in tried] == [*range(1, count, 2)]


def test_those_given_least_are_not_tried_where_room_lacks_a_slot_for_their_adapter():
    there, room = OneRunner(), Rooms(0)
    there.runner = Runner(there.runner.identity, "", Capacity(pages=100, adapter_slots=1), 1.0)
    there.runner.record_promise(("runs", 1), 1, "digest0", 0.0)
    room.freed(there.runner)
    assert list(room) == [there.runner]
    waiting = [there.wait("runs there", 99, digest="digest0"), there.wait("base", 99, digest=BASE)]
    waiting += [there.wait("needs a slot", 99, digest="digest1"), there.wait("large", 100, digest="digest0")]
    assert [room.may_hold(one) for one in waiting] == [True, True, False, False]


@pytest.mark.parametrize("things", [1, 300])
def test_for_how_many_things_others_wait_is_no_matter_to_those_given_least(things):
    waiting, calls = WaitingRequests(), []
    for n in range(300):
        waiting.add(f"{n:03}", tenant="a", adapter=f"default/a{n}")
        waiting.queue.wait_for(waiting.by_name[f"{n:03}"], f"digest{n % things}", {})
    class_queue = waiting.queue.class_queues[STANDARD]
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        none = class_queue.up_to(-1.0, waiting.queue.bases)
        first, last = class_queue.first_for(waiting.queue.bases, 0.0, None, fits=lambda _: True, examined=2)
    finally:
        sys.setprofile(None)
    assert (none, [head[3].id for head in first], last) == ([], ["000", "001"], first[-1])
    assert len(calls) < 200


def test_looks_at_those_given_least_count_for_how_many_one_event_looks():
    """They are made again for each that is placed."""
    waiting = WaitingRequests()
    for n in range(300):
        waiting.add(f"{n:03}", tenant="a", adapter=f"default/a{n}")
        waiting.queue.wait_for(waiting.by_name[f"{n:03}"], "base", {})
    class_queue = waiting.queue.class_queues[STANDARD]
    _, last = class_queue.first_for(waiting.queue.bases, 0.0, None, fits=lambda _: False, examined=2)
    assert (last[3].id, waiting.queue.take_looked()) == ("255", 256 // HEADS_OF_A_LOOK)
    assert class_queue.first_for(waiting.queue.bases, 0.0, last, fits=lambda _: False, examined=2) == ([], None)
    assert waiting.queue.take_looked() == 44 // HEADS_OF_A_LOOK


def test_where_many_fit_the_first_are_found_without_a_look_at_the_others():
    there, calls = OneRunner(), []
    for n in range(200):
        there.wait(f"{n}", 1, age=200 - n, tenant="a", adapter=f"a{n}")
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        found = there.tried.that_fit(there.runner, 3, 2)
    finally:
        sys.setprofile(None)
    assert [head[3].id for head in found] == ["0", "1"]
    assert len(calls) < 100


@pytest.mark.parametrize("others", [0, 300])
def test_where_all_slots_are_in_use_it_is_no_matter_how_many_wait_for_an_adapter_there(others):
    """Also behind hundreds for other adapters."""

    def looks(of_each):
        there, calls = OneRunner(), []
        there.runner = Runner(there.runner.identity, "", Capacity(pages=1000, adapter_slots=8), 1.0)
        for n in range(8):
            there.runner.record_promise((f"x{n}", 1), 1, f"digest{n}", 0.0)
        for n in range(others + 8 * of_each):
            digest = f"other{n}" if n < others else f"digest{n % 8}"
            there.wait(f"{n}", 1 + n % 5, age=9999 - n, tenant=f"t{n}", digest=digest)
        look = partial(there.tried.that_fit, there.runner, 5, 2)
        look()  # the first one of all files them by what they need
        sys.setprofile(lambda _frame, event, _argument: calls.append(event))
        try:
            found = look()
        finally:
            sys.setprofile(None)
        assert [head[3].id for head in sorted(found)][:2] == [f"{others}", f"{others + 1}"]
        return len(calls)

    assert looks(240) < 1.1 * looks(60)


def test_of_adapters_that_nobody_waits_for_no_request_is_looked_for(monkeypatch):
    """A runner that goes may hold thousands."""
    waiting, looked = WaitingRequests(), []
    waiting.add("waits")
    monkeypatch.setattr(ClassQueue, "with_adapter", lambda _self, digest, _bases: looked.append(digest) or [])
    waiting.queue.with_adapters([*(f"digest{n}" for n in range(100)), BASE])
    assert set(looked) == {BASE}


def test_that_adapters_come_and_go_leaves_nothing():
    waiting = WaitingRequests()
    waiting.add("stays", tenant="other")
    waiting.queue.wait_for(waiting.by_name["stays"], "base", {})
    for n in range(50):
        waiting.runner.adapters.replace({f"digest{n}": Tier.DEVICE})
        waiting.add(f"{n}")
        waiting.queue.wait_for(waiting.by_name[f"{n}"], f"digest{n}", {})
        waiting.add("small", tenant="small", request_class=BATCH)
        waiting.queue.remove_placed(waiting.by_name["small"], waiting.runner)
        waiting.queue.try_again([waiting.by_name[f"{n}"]])
        waiting.queue.remove(waiting.by_name[f"{n}"])
        waiting.queue.overdue()
    (tried,) = [one for one in waiting.queue.class_queues.values() if len(one)]
    assert len(tried._passes) <= 2  # noqa: SLF001


def test_a_placement_of_a_tenant_with_one_adapter_looks_at_no_others(monkeypatch):
    """Of others, hundreds may each wait for runners of its own."""
    waiting, looked, of_tenant = WaitingRequests(), [], OrderedHeads.of_tenant
    adapters = [f"digest{n}" for n in range(200)]
    waiting.runner.adapters.replace(dict.fromkeys(adapters, Tier.DEVICE))
    for one in adapters:
        waiting.add(one, age=9, tenant=one)
        waiting.queue.wait_for(waiting.by_name[one], one, {})
    waiting.add("small", tenant="small")
    waiting.add("its next", tenant="small")
    monkeypatch.setattr(OrderedHeads, "of_tenant", lambda *given: looked.append(given) or of_tenant(*given))
    waiting.place("small")
    assert len(looked) <= 1
    (class_queue,) = [one for one in waiting.queue.class_queues.values() if len(one)]
    assert len(class_queue._passes) == 200  # noqa: SLF001


@pytest.mark.parametrize("adapters", [2, 20])
def test_those_that_were_passed_are_counted_whatever_they_wait_for(adapters):
    """Of a tenant with fewer adapters than heads wait for, and with more."""
    waiting = WaitingRequests(max_passed_over=3)
    names = [f"digest{n}" for n in range(5)]
    waiting.runner.adapters.replace(dict.fromkeys(names, Tier.DEVICE))
    for n in range(adapters):
        waiting.add(f"large{n}", age=1000 - n, adapter=f"default/large{n}")
        waiting.queue.wait_for(waiting.by_name[f"large{n}"], names[n % 5], {})
    for one in names:
        waiting.add(one, age=500, tenant=one)
        waiting.queue.wait_for(waiting.by_name[one], one, {})
    for n in range(3):
        waiting.add(f"small{n}", age=1 - n, adapter=f"default/small{n}")
        waiting.queue.remove_placed(waiting.by_name[f"small{n}"], waiting.runner)
    assert {waiting.by_name[f"large{n}"].passes for n in range(adapters)} == {3}


def tried(waiting):
    return {request.id for request in waiting.by_name.values() if request.waits_for is not None}


def test_when_a_limit_changes_each_scan_has_few_tried_again():
    waiting = WaitingRequests()
    for n in range(900):
        waiting.add(f"{n}", age=900 - n, tenant=f"t{n}", adapter="default/pirate" if n % 2 else "")
    for request in waiting.queue.heads():
        waiting.queue.wait_for(request, "base", {0: (1, 0)})
    changes = waiting.queue.limit_changes
    waiting.queue.limits_changed({"default/pirate"})
    while changes.under_way:
        before = len(tried(waiting))
        changes.go_on()
        assert before - len(tried(waiting)) <= MAX_COST // COST_OF_TRY + MAX_LOOKED
    assert tried(waiting) == {f"{n}" for n in range(0, 900, 2)}, "the others have other runners"


def test_those_that_come_and_go_while_a_limit_changes_are_where_they_belong():
    """The limit changes again before all are tried again, more often than that takes."""
    waiting, drawn, names = WaitingRequests(), Random(0), iter(range(10_000))

    def come():
        adapter = drawn.choice(("", "default/pirate", "default/poet"))
        name = f"{next(names)}"
        waiting.add(name, age=drawn.randrange(100), tenant=f"t{drawn.randrange(300)}", adapter=adapter)
        if drawn.random() < 0.5 and (heads := [one for one in waiting.queue.heads() if one.waits_for is None]):
            waiting.queue.wait_for(drawn.choice(heads), "base", {0: (1, 0)})

    for _ in range(1000):
        come()
    for step in range(60):
        waiting.queue.limits_changed({"default/pirate"} if step % 2 else {"default/poet"})
        waiting.queue.limit_changes.go_on()
        for name in drawn.sample(sorted(waiting.by_name), 3):
            waiting.queue.remove(waiting.by_name.pop(name))
            come()
    waiting.queue.limits_changed({"default/pirate", "default/poet"})
    while waiting.queue.limit_changes.under_way:
        waiting.queue.limit_changes.go_on()
    assert tried(waiting)
    assert {waiting.by_name[name].adapter for name in tried(waiting)} == {""}
    oldest = {}
    for *_, request in sorted(waiting.queue.unordered()):
        oldest.setdefault((request.tenant, request.adapter), request)
    assert waiting.queue.heads() == sorted(oldest.values(), key=order_of)


def test_each_adapter_of_a_tenant_has_a_flow_of_its_own_however_many_there_are():
    waiting = WaitingRequests()
    for n in range(500):
        waiting.add(f"{n}", age=-n, adapter=f"default/a{n % 250}")
    assert waiting.oldest_of_each_flow() == [f"{n}" for n in range(250)]
    waiting.queue.remove(waiting.by_name["0"])
    waiting.add("late", age=-500, adapter="default/a1")
    assert waiting.oldest_of_each_flow() == [f"{n}" for n in range(1, 251)]


def test_of_a_tenants_many_heads_the_oldest_are_overdue_as_soon_as_others_have_passed_them():
    """However often it is given more meanwhile. The others are when these have gone."""
    waiting = WaitingRequests()
    large = [f"large{n}" for n in range(2 * MAX_COUNTED)]
    for n, name in enumerate(large):
        waiting.add(name, age=1000 - n, adapter=f"default/{name}")
    for n in range(3):
        waiting.add(f"small{n}", age=1 - n, adapter=f"default/small{n}")
        waiting.place(f"small{n}")
    assert waiting.all_overdue() == large[:MAX_COUNTED]
    for name in large[:MAX_COUNTED]:
        waiting.queue.remove(waiting.by_name[name])
    assert waiting.all_overdue() == []
    for n in range(3, 6):
        waiting.add(f"small{n}", age=1 - n, adapter=f"default/small{n}")
        waiting.place(f"small{n}")
    assert waiting.all_overdue() == large[MAX_COUNTED:]


def test_a_decision_searches_few_lists(monkeypatch):
    """The one that gets the place of one that ends, and the next of its tenant, are searched for in few lists."""
    driver = ready()
    driver.attach(pages=8, max_sequences=4)
    for n in range(200):
        driver.enqueue(f"q{n:03}", tenant=f"t{n % 50:02}", prompt=16, max_tokens=16 + 16 * (n % 2))
    searches = []
    replace_searches(monkeypatch, lambda search: lambda *given: searches.append(1) or search(*given))
    for _ in range(20):
        searches.clear()
        running = min(one.id for one in driver.scheduler.requests.values() if not one.waiting)
        driver.finish(running)
        assert len(driver.of(effects.SendPlaced)) == 1
        assert len(searches) <= MAX_SEARCHES


def test_a_decision_asks_few_of_many_runners(monkeypatch):
    """The one that has room, and those of which others were told that they have changed."""
    driver = ready(headroom_one_in=4)
    for n in range(50):
        driver.attach(f"r{n:02}", pages=40, max_sequences=8)
    for n in range(600):  # so that those who were given least always wait
        driver.enqueue(f"q{n:03}", tenant=f"t{n % 50:02}", prompt=16, max_tokens=16 + 16 * (n % 2))
    asked = []

    def count_and_choose(request, runners, *args, **how):
        asked.append(len(runners))
        return choose(request, runners, *args, **how)

    monkeypatch.setattr(placement, "choose", count_and_choose)
    for _ in range(20):
        running = min(one.id for one in driver.scheduler.requests.values() if not one.waiting)
        driver.finish(running)
        assert driver.of(effects.SendPlaced)
    assert max(asked) <= 3


def test_a_group_that_nobody_uses_any_more_leaves_nothing():
    driver = ready(forget_runner=10.0)
    for n in range(3):
        driver.enqueue(f"q{n}", group=f"default/g{n}")
        driver.attach(f"r{n}", group=f"default/r{n}")
    assert len(driver.scheduler.queues) == 6
    for n in range(3):
        driver.cancel(f"q{n}")
        driver.detach(f"r{n}")
    driver.wait(5)
    assert set(driver.scheduler.queues) == {f"default/r{n}" for n in range(3)}, "their runners may come back"
    driver.wait(6)
    driver.wait(0.1)
    assert not driver.scheduler.queues
    assert not driver.scheduler.state.by_group


@pytest.mark.parametrize("every", [1, 2, 7, 100])
def test_the_sample_of_requests_is_taken_across_flows(every):
    driver, chance = ready(), Random(every)
    for n in range(60):
        driver.enqueue(f"{n}", tenant=f"t{chance.randrange(9)}", request_class=chance.choice(list(RequestClass)))
    queue = driver.scheduler.queues[GROUP]
    assert queue.one_in(every) == [request for *_, request in queue.unordered()][::every]
