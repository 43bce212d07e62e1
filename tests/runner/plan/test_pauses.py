"""Prompts first: decodes without room in the iteration are paused, keep their pages, and are paused four times at most
(SW-11, SW-13, SW-14). Splitwise's name can be chosen once runners have roles; the rules are there as data."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from motet.domain import PAGE_TOKENS, pages_for
from motet_runner.interface import State
from motet_runner.plan import NOT_YET, Iteration, Sequence, compose
from motet_runner.plan.presets import SPLITWISE_MACHINE
from tests.runner.plan.fake_device import new

SMALL = replace(SPLITWISE_MACHINE, prefill_tokens=20)


class Machine:
    """Composes and computes, with as many pages as `pages`. Nothing else decides."""

    def __init__(self, *, pages: int = 1000, places: int = 64) -> None:
        self.pages, self.places = pages, places
        self.sequences: list[Sequence] = []
        self.arrivals = 0

    @property
    def free_pages(self) -> int:
        return self.pages - sum(len(sequence.pages) for sequence in self.sequences)

    def add(self, request: str, *, prompt: int, max_tokens: int = 100) -> Sequence:
        added = new(request, prompt=prompt, max_tokens=max_tokens)
        self.arrivals += 1
        tokens = list(added.prompt)
        sequence = Sequence(
            new=added,
            arrival=self.arrivals,
            promise=added.promise,
            tokens=tokens,
            state=State.WAITING,
            page_tokens=PAGE_TOKENS,
        )
        self.sequences.append(sequence)
        return sequence

    def step(self) -> Iteration:
        iteration = compose(self.sequences, SMALL, chunk_tokens=1, places=self.places, free_pages=self.free_pages)
        iteration.begin()
        for work in iteration.work:
            sequence = work.sequence
            sequence.pages = [0] * max(len(sequence.pages), pages_for(work.start + work.count, PAGE_TOKENS))
            sequence.scheduled += work.count
            if work.samples:
                sequence.tokens.append(0)
            if sequence.output_tokens == sequence.new.sampling.max_tokens:
                self.sequences.remove(sequence)
        return iteration

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def names(work) -> list[str]:
    return [str(one.sequence.request) for one in work]


def paused(iteration: Iteration) -> list[str]:
    return [str(sequence.request) for sequence in iteration.paused]


def test_a_prompt_takes_the_room_of_decodes_which_keep_their_pages() -> None:
    machine = Machine()
    old = machine.add("old", prompt=10)
    machine.step()
    machine.add("prompt", prompt=20)
    pages, tokens = list(old.pages), len(old.tokens)
    iteration = machine.step()
    assert (names(iteration.prefills), names(iteration.decodes), paused(iteration)) == (["prompt"], [], ["old"])
    assert (old.pages, len(old.tokens), old.paused_times) == (pages, tokens, 1)
    assert names(machine.step().decodes) == ["old", "prompt"]


def test_a_decode_shares_the_iteration_with_a_prompt_that_leaves_room() -> None:
    machine = Machine()
    machine.add("old", prompt=10)
    machine.step()
    machine.add("prompt", prompt=19)
    iteration = machine.step()
    assert (names(iteration.prefills), names(iteration.decodes), paused(iteration)) == (["prompt"], ["old"], [])


def test_prompts_are_taken_whole_by_arrival_and_the_first_one_however_long() -> None:
    machine = Machine()
    for request, prompt in (("long", 50), ("next", 15), ("too long", 6), ("short", 1)):
        machine.add(request, prompt=prompt)
    assert names(machine.step().prefills) == ["long"]
    assert names(machine.step().prefills) == ["next"]
    assert names(machine.step().prefills) == ["too long", "short"]


def test_a_paused_decode_goes_before_one_that_was_not() -> None:
    machine = Machine()
    for request in ("a", "b"):
        machine.add(request, prompt=5)
    machine.step()
    machine.sequences[1].paused = True
    machine.add("prompt", prompt=19)
    iteration = machine.step()
    assert (names(iteration.decodes), paused(iteration)) == (["b"], ["a"])


def test_a_decode_that_was_paused_four_times_goes_before_every_prompt() -> None:
    machine = Machine()
    old = machine.add("old", prompt=10)
    machine.step()
    for index in range(4):
        machine.add(f"p{index}", prompt=20, max_tokens=1)
        assert paused(machine.step()) == ["old"]
    for index in range(4, 8):
        machine.add(f"p{index}", prompt=20, max_tokens=1)
        iteration = machine.step()
        assert (names(iteration.decodes), names(iteration.prefills)) == (["old"], [f"p{index}"])
    assert old.paused_times == 4


def test_decodes_without_a_page_are_paused_and_newcomers_wait() -> None:
    machine = Machine(pages=3)
    for request in ("growing", "other"):
        machine.add(request, prompt=16)
        machine.step()
    machine.add("newcomer", prompt=20)
    for times in (1, 2):
        iteration = machine.step()
        assert (names(iteration.work), paused(iteration)) == (["growing"], ["other"])
        assert machine.sequences[1].paused_times == times


def test_nobody_is_paused_for_want_of_pages_when_nobody_else_could_run() -> None:
    machine = Machine(pages=1)
    machine.add("alone", prompt=16)
    assert [names(machine.step().work) for _ in range(2)] == [["alone"], ["alone"]]


def test_the_name_splitwise_waits_for_roles() -> None:
    assert "splitwise" in NOT_YET
    assert (SPLITWISE_MACHINE.prefill_tokens, SPLITWISE_MACHINE.pauses) == (2048, 4)


@given(
    arrivals=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=25),
    places=st.integers(1, 30),
)
def test_nobody_is_paused_more_often_than_allowed_and_everybody_finishes(
    arrivals: list[tuple[int, int, int]], places: int
) -> None:
    machine = Machine(places=places)
    everybody = []
    for index, (prompt, max_tokens, gap) in enumerate(arrivals):
        machine.run(gap)
        everybody.append(machine.add(f"r{index}", prompt=prompt, max_tokens=max_tokens))
    steps = 0
    while machine.sequences:
        before = {sequence.request: len(sequence.pages) for sequence in machine.sequences}
        iteration = machine.step()
        steps += 1
        assert iteration, "somebody waits, and nothing runs"
        assert len(iteration.work) + len(iteration.paused) <= places
        assert all(len(sequence.pages) == before[sequence.request] for sequence in iteration.paused)
        free = [work for work in iteration.decodes if work.sequence.paused_times < SMALL.pauses]
        if len(iteration.prefills) != 1:
            assert iteration.prefill_tokens + len(free) <= 20
    assert all(sequence.paused_times <= SMALL.pauses for sequence in everybody)
    assert steps <= sum(max_tokens + SMALL.pauses + 1 for _, max_tokens, _ in arrivals)
