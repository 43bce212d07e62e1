"""What a plan and a result say, one fact at a time, and what each leaves in the books."""

import pytest

from motet.domain import Digest, ParkMethod, RequestId
from motet_runner.interface import Logprobs, OverflowAhead, ParkedNow, State
from motet_runner.plan import Copy, DeviceBudget, LoadArrived, LoadFailed, PageAllocator, StepPlan, StepResult, Tier
from motet_runner.plan.prompt_scores import PromptScores
from motet_runner.plan.sequence_memory import MAX_PARKED
from motet_runner.plan.step_plan import AdapterLoad
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new

A, B = RequestId("a"), RequestId("b")
X = Digest("x")


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": {0: Logprobs(-1.0)}},
        {"prompt_logprobs": {0: PromptScores(0, [], finite=True)}},
        {"out_of_memory": (0,)},
        {"retries": 1},
        {"arrived": (LoadArrived(1, 0.5),)},
        {"failed": (LoadFailed(1, None),)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_result_that_brings_one_thing_more_brings_not_only_tokens(more) -> None:
    assert StepResult(number=1, sampled=(7, None), model_calls=2, seconds=1.0).only_tokens
    assert not StepResult(number=1, sampled=(7,), **more).only_tokens


@pytest.mark.parametrize(
    "more",
    [
        {"copies": (Copy(Tier.DEVICE, (1,), Tier.HOST, (2,)),)},
        {"moves": ({1: 2},)},
        {"leaves": (0,)},
        {"joins": (None,)},
        {"gone": (X,)},
        {"loads": (AdapterLoad(1, X, adapter_layout(2)),)},
        {"loading": {1: 5}},
        {"prefills": (None,)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_plan_that_changes_one_thing_is_not_only_of_decodes(more) -> None:
    assert StepPlan(number=1).only_decodes
    assert not StepPlan(number=1, **more).only_decodes


@pytest.mark.parametrize(("pages", "evicted"), [(6, []), (7, [X]), (10, [X]), (11, None)])
def test_no_adapter_is_evicted_for_pages_that_are_just_free(pages, evicted) -> None:
    budget = DeviceBudget(PageAllocator(10), max_adapters=4)
    assert budget.grant(X, 4, lambda _: False) is not None
    assert budget.reclaim(pages, lambda _: False) == evicted


def test_a_sequence_for_whose_row_memory_did_not_suffice_is_given_up() -> None:
    device = FakeDevice(make_planner())
    for name in "ab":
        device.planner.commands.add(new(name))
    plan = device.planner.plan()
    assert plan is not None
    device.launch(plan)
    _, result = device.launched.popleft()
    row = next(number for number, row in device.rows.items() if row.request == "a")
    result.out_of_memory = (row,)
    device.planner.collect(result)
    outputs, _ = device.planner.take_outputs()
    assert [(one.request, type(one.error).__name__) for one in outputs if one.error] == [("a", "Overloaded")]
    assert (device.planner.sequences.get(A), len(device.planner.sequences.get(B).tokens)) == (None, 6)


def test_a_parked_sequence_announces_nothing() -> None:
    """Not even when the token that it was parked before is the first of its last promised page."""
    planner = make_planner()
    planner.commands.supervised = True
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=16, max_tokens=100, promise=2))
    device.launch(planner.plan())
    assert planner.commands.park(A, 1, promise=2, wanted=4, method=ParkMethod.RECOMPUTE)
    planner.collect(device.launched.popleft()[1])
    _, events = planner.take_outputs()
    assert [type(one) for one in events if isinstance(one, ParkedNow | OverflowAhead)] == [ParkedNow]
    assert len(planner.sequences.get(A).tokens) == 17


def test_every_promise_but_the_last_is_announced_once() -> None:
    device = FakeDevice(make_planner())
    device.planner.commands.add(new("a", prompt=5, max_tokens=100, promise=1))
    device.run()
    assert [event.promise for event in device.events if isinstance(event, OverflowAhead)] == [1, 2, 4]


def test_a_sequence_is_parked_by_order_only_so_often_and_its_report_counts() -> None:
    planner = make_planner()
    planner.commands.supervised = True
    planner.commands.add(new("a", prompt=5, max_tokens=100, promise=2))
    for times in range(1, MAX_PARKED + 1):
        sequence = planner.sequences.get(A)
        assert planner.commands.park(A, 1, sequence.promise, wanted=3, method=ParkMethod.RECOMPUTE)
        assert sequence.entry().parked_times == times
        assert planner.commands.resume(A, 1, promise=sequence.wanted)
    assert not planner.commands.park(A, 1, planner.sequences.get(A).promise, wanted=3, method=ParkMethod.RECOMPUTE)


def test_from_its_second_park_on_a_sequence_wants_all_that_it_can_need() -> None:
    planner = make_planner()
    planner.commands.supervised = True
    planner.commands.add(new("a", prompt=5, max_tokens=100, promise=2))
    wanted = []
    for _ in range(2):
        sequence = planner.sequences.get(A)
        planner.commands.park(A, 1, sequence.promise, wanted=3, method=ParkMethod.RECOMPUTE)
        wanted.append(sequence.wanted)
        planner.commands.resume(A, 1, promise=sequence.wanted)
    assert wanted == [3, 7]


def test_who_stands_at_its_promise_is_extended_in_the_iteration_that_parks_another() -> None:
    planner = make_planner(pages=4)
    device = FakeDevice(planner)
    for name in "ab":
        planner.commands.add(new(name, prompt=5, max_tokens=40, promise=2))
    while not any(isinstance(event, ParkedNow) for event in device.events):
        device.step()
    assert (planner.sequences.get(A).promise, planner.sequences.get(B).state) == (3, State.PARKED)


def test_sequences_know_their_tokens_while_a_round_goes_on() -> None:
    planner = make_planner()
    device = FakeDevice(planner, checks_each=10_000)
    planner.commands.add(new("a", max_tokens=30))
    for _ in range(20):
        device.step()
        assert len(planner.sequences.get(A).tokens) == 5 + len(device.tokens["a"])


def test_tokens_of_a_round_come_before_those_of_the_iteration_that_ended_it() -> None:
    planner = make_planner()
    device = FakeDevice(planner, checks_each=10_000)
    planner.commands.add(new("a", max_tokens=30))
    for _ in range(5):
        device.step()
    for name in ("", "b"):
        if name:
            planner.commands.add(new(name))
        device.launch(planner.plan())
        planner.collect(device.launched.popleft()[1])
    outputs, _ = planner.take_outputs()
    places = [one.index for one in outputs if one.request == "a"]
    assert places == sorted(places)
    assert len(places) == 2


def test_pages_that_make_room_for_an_adapter_are_given_back_where_they_are_then() -> None:
    planner = make_planner(pages=8)
    device = FakeDevice(planner)
    for name in "ab":
        planner.commands.add(new(name, prompt=40, max_tokens=8, promise=3))
    for _ in range(5):
        device.step()
    before = planner.sequences.get(B).pages
    planner.commands.cancel(A)
    planner.commands.load_adapter(X, adapter_layout(4))
    planner.commands.add(new("c", prompt=5, max_tokens=5, adapter="x"))
    device.run()
    assert planner.memory.pages.free == 4
    assert set(device.finished) == {"b", "c"}
    assert before
