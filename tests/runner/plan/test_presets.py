"""Every preset through a whole planner, one iteration ahead or not: who runs when, and that everybody finishes."""

from collections import deque
from collections.abc import Sequence as Items
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.domain import PAGE_TOKENS, pages_for
from motet.errors import Declined
from motet_runner.interface import Finish
from motet_runner.plan import PRESETS, Planner, Preset, StepPlan
from motet_runner.plan.joining import PASSED_OVER_AT_MOST
from motet_runner.plan.presets import SPLITWISE_MACHINE
from tests.runner.plan.fake_device import FakeDevice, make_planner, new

ALL = PRESETS | {"splitwise machine": SPLITWISE_MACHINE}
PAGES, PLACES = 12, 4
arrivals = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 5)), min_size=1, max_size=12)


class Running:
    """A planner under a preset, sent requests by arrival; those that are declined wait in order."""

    def __init__(self, preset: Preset, *, ahead: int = 0, **limits) -> None:
        self.planner: Planner = make_planner(preset=preset, **({"pages": PAGES, "places": PLACES} | limits))
        self.device = FakeDevice(self.planner, ahead=ahead)
        self.queue: deque = deque()
        self.numbers = count()

    def ask(self, prompt: int, max_tokens: int, *, promise: int | None = None) -> str:
        name = f"r{next(self.numbers):03}"
        self.queue.append(new(name, prompt=prompt, max_tokens=max_tokens, promise=promise))
        return name

    def step(self) -> StepPlan:
        while self.queue:
            try:
                self.planner.commands.add(self.queue[0])
            except Declined:
                break
            self.queue.popleft()
        return self.device.step()

    @property
    def busy(self) -> bool:
        return bool(self.queue) or self.planner.has_work()

    def names(self, plan: StepPlan) -> list[str]:
        return sorted(self.device.requests(plan.rows))


def ask_all(running: Running, asked: Items[tuple[int, int, int]]) -> None:
    for prompt, max_tokens, gap in asked:
        for _ in range(gap):
            running.step()
        running.ask(prompt, max_tokens)


@settings(max_examples=40)
@given(
    asked=arrivals, name=st.sampled_from(sorted(ALL)), ahead=st.integers(0, 1), overcommit=st.sampled_from([1.0, 2.0])
)
def test_under_every_preset_everybody_finishes_within_the_bounds(
    asked: list[tuple[int, int, int]], name: str, ahead: int, overcommit: float
) -> None:
    """OR-09, S3-05, SW-14. FakeDevice checks each step that the KV of all earlier tokens is where it should be."""
    running = Running(ALL[name], ahead=ahead)
    running.planner.commands.set_overcommit(overcommit)
    ask_all(running, asked)
    while running.busy:
        plan = running.step()
        assert len(plan.rows) <= PLACES
        for sequence in running.planner.sequences:
            assert sequence.paused_times <= ALL[name].pauses
            assert sequence.passed_over <= PASSED_OVER_AT_MOST
    finished = running.device.finished
    assert [len(tokens) for _, (tokens, _) in sorted(finished.items())] == [max_tokens for _, max_tokens, _ in asked]
    assert {finish for _, finish in finished.values()} == {Finish.LENGTH}


@settings(max_examples=40)
@given(asked=arrivals, name=st.sampled_from(["orca", "ft-max", "punica", "paged-chunk"]))
def test_one_iteration_ahead_an_earlier_sequence_has_run_at_least_as_often(
    asked: list[tuple[int, int, int]], name: str
) -> None:
    """OR-07, of sequences that still have tokens to ask for."""
    running = Running(ALL[name], ahead=1)
    ask_all(running, asked)
    while running.busy:
        running.step()
        ran = [running.device.iterations.get(s.request, 0) for s in running.planner.sequences if s.may_be_scheduled]
        assert ran == sorted(ran, reverse=True)


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_finished_sequence_makes_place_for_the_next_iteration(name: str) -> None:
    """S3-07: its pages and its place are free as soon as its last token is known."""
    running = Running(ALL[name], places=1, pages=4)
    first, second = running.ask(20, 3), running.ask(20, 3)
    for _ in range(3):
        assert running.names(running.step()) == [first]
    assert running.planner.memory.pages.free == 4
    assert running.names(running.step()) == [second]


@pytest.mark.parametrize("name", sorted(set(ALL) - {"request-level"}))
def test_a_newcomer_joins_the_running_batch(name: str) -> None:
    running = Running(ALL[name])
    first = running.ask(5, 20)
    running.step()
    second = running.ask(5, 20)
    assert running.names(running.step()) == [first, second]


def test_no_iteration_computes_more_tokens_than_those_that_are_needed() -> None:
    """OR-03: prompts of different lengths and single tokens lie side by side, without padding."""
    running = Running(ALL["orca"], pages=100)
    for prompt in (3, 50, 17):
        running.ask(prompt, 5)
    plan = running.step()
    assert sorted(row.count for row in plan.rows) == [3, 17, 50]
    running.ask(40, 5)
    assert sorted(row.count for row in running.step().rows) == [1, 1, 1, 40]


def test_a_promise_of_the_whole_context_is_kept_to_the_end() -> None:
    running = Running(ALL["ft-max"], pages=PAGES)
    running.ask(5, 20, promise=PAGES)
    running.ask(5, 20, promise=PAGES)
    running.step()
    sequence = next(iter(running.planner.sequences))
    assert (len(running.planner.sequences), sequence.promise) == (1, PAGES)
    assert len(sequence.pages) == pages_for(5, PAGE_TOKENS)
