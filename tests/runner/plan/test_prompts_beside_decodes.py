"""How many prompt tokens an iteration takes beside decodes: as many as the measured costs allow."""

from dataclasses import dataclass, replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.domain import ParkMethod, RequestId
from motet_runner.plan import PRESETS, DecodeRows, Planner, RowStep, StepPlan, StepResult
from motet_runner.plan.presets import UNBOUNDED
from motet_runner.step_costs import LEAST_BESIDE, StepCosts
from tests.runner.plan.fake_device import FakeDevice, make_planner, new

SLOWDOWN = 2.0
CHUNK = 256


@dataclass
class Machine:
    """What an iteration takes on it, in milliseconds."""

    step: float = 5.0
    of_a_row: float = 1.0
    of_a_token: float = 1.0
    of_a_hundred_before: float = 0.0
    """How much more a prompt token takes for each hundred tokens before it"""
    factor: float = 1.0
    """Of whatever disturbs it"""

    def alone(self, decodes: int) -> float:
        return self.step + decodes * self.of_a_row

    def takes(self, plan: StepPlan) -> float:
        prompts = (
            step.count * (self.of_a_token + self.of_a_hundred_before * step.start / 100) for step in plan.prefills
        )
        return self.factor * (self.alone(len(plan.decodes)) + sum(prompts))


class TimedDevice(FakeDevice):
    def __init__(self, planner: Planner, costs: StepCosts, machine: Machine) -> None:
        super().__init__(planner)
        self.costs = costs
        self.machine = machine

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        _, result = self.launched[-1]
        if plan.rows:
            result = replace(result, seconds=self.machine.takes(plan) / 1000)
        self.launched[-1] = plan, result
        self.costs.learn(plan, result)


def learned() -> StepCosts:
    return StepCosts(prefill_seconds_per_token=0.001, swap_seconds_per_page=1.0, decode_slowdown=SLOWDOWN)


def device_with(machine: Machine, *, preset: str = "paged-chunk", places: int = 8) -> TimedDevice:
    costs = learned()
    beside = costs.prompt_tokens_beside
    planner = make_planner(pages=2000, preset=preset, places=places, chunk_tokens=CHUNK, beside=beside)
    return TimedDevice(planner, costs, machine)


def plan_of(decodes: int, prompt_tokens: int) -> StepPlan:
    rows = DecodeRows(tuple(range(decodes)), (10,) * decodes)
    return StepPlan(number=1, decodes=rows, prefills=(RowStep(99, 0, prompt_tokens, False),) if prompt_tokens else ())


def learn(costs: StepCosts, machine: Machine, decodes: int, prompt_tokens: int = 0, times: int = 1) -> None:
    plan = plan_of(decodes, prompt_tokens)
    for _ in range(times):
        costs.learn(plan, StepResult(number=1, seconds=machine.takes(plan) / 1000))


def begin(device: FakeDevice, *, decodes: int) -> None:
    """`decodes` sequences decode, and have decoded for a while."""
    for number in range(decodes):
        device.planner.commands.add(new(f"decode {number}", prompt=4, max_tokens=2000))
    for _ in range(10):
        device.step()


def test_a_long_prompt_makes_no_iteration_longer_than_the_slowdown_allows() -> None:
    machine = Machine(of_a_row=2, of_a_hundred_before=0.05)
    device = device_with(machine)
    begin(device, decodes=5)
    device.planner.commands.add(new("long", prompt=1500, max_tokens=1))
    took = []
    while (plan := device.step()).prefills:
        assert len(plan.decodes) == 5
        took.append(machine.takes(plan) / machine.alone(5))
    assert max(took[5:]) < SLOWDOWN * 1.15
    assert median(took) > SLOWDOWN * 0.85, "the prompt gets the time that it may have"


def test_answers_that_another_runner_began_are_computed_again_in_large_pieces() -> None:
    """Their readers wait for the next token, as those of decodes do."""
    device = device_with(Machine())
    begin(device, decodes=5)
    names = ["lost 0", "lost 1", "lost 2"]
    for name in names:
        device.planner.commands.add(new(name, prompt=20, max_tokens=1000, delivered=(1,) * 200))
    iterations = 0
    while any(sequence.resumes for sequence in device.planner.sequences):
        plan = device.step()
        iterations += 1
        assert len(plan.decodes) >= 5, "decodes go on beside them"
    assert iterations == -(-3 * 220 // CHUNK)
    assert not device.step().prefills


def test_answers_that_another_runner_began_go_before_prompts_which_keep_to_the_limit() -> None:
    machine = Machine()
    device = device_with(machine)
    begin(device, decodes=5)
    device.planner.commands.add(new("fresh", prompt=1500, max_tokens=1))
    device.planner.commands.add(new("lost", prompt=20, max_tokens=1000, delivered=(1,) * 400))
    assert device.requests(device.step().prefills) == ["lost"]
    plan = device.step()
    assert device.requests(plan.prefills) == ["lost", "fresh"]
    assert plan.prefills[0].count == 420 - CHUNK
    assert 0 < plan.prefills[1].count <= machine.alone(5)
    assert device.step().prefill_tokens <= machine.alone(6) * 1.5


def test_an_answer_that_is_parked_here_keeps_to_the_limit_when_it_comes_back() -> None:
    """Memory is short then, again and again: its neighbours must not pay for that each time."""
    device = device_with(Machine())
    begin(device, decodes=5)
    planner = device.planner
    planner.commands.add(new("moved", prompt=20, max_tokens=1000, delivered=(1,) * 200))
    for _ in range(5):
        device.step()
    sequence = planner.sequences.get(RequestId("moved"))
    assert sequence is not None
    assert planner.commands.park(
        sequence.request, sequence.new.epoch, sequence.promise, sequence.promise, ParkMethod.RECOMPUTE
    )
    assert 0 < device.step().prefill_tokens <= Machine().alone(5), "nobody supervises, so it comes back by itself"


def test_alone_a_prompt_takes_large_pieces_again() -> None:
    device = device_with(Machine())
    begin(device, decodes=5)
    for number in range(5):
        device.planner.commands.cancel(f"decode {number}")
    device.planner.commands.add(new("long", prompt=1000, max_tokens=1))
    assert device.step().prefill_tokens == CHUNK


def test_before_anything_was_measured_only_the_size_of_a_piece_counts() -> None:
    assert learned().prompt_tokens_beside(3, 1) == UNBOUNDED
    planner = make_planner(pages=200, chunk_tokens=CHUNK, beside=learned().prompt_tokens_beside)
    device = FakeDevice(planner)
    planner.commands.add(new("short", prompt=4, max_tokens=20))
    device.step()
    planner.commands.add(new("long", prompt=1000, max_tokens=5))
    assert device.step().prefill_tokens == CHUNK


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if not preset.chunked])
def test_presets_that_take_prompts_whole_compose_as_before(preset: str) -> None:
    limited = device_with(Machine(), preset=preset)
    free = FakeDevice(make_planner(pages=2000, preset=preset, chunk_tokens=CHUNK))
    for device in (limited, free):
        begin(device, decodes=5)
        for name in ("long", "longer"):
            device.planner.commands.add(new(name, prompt=150 * len(name), max_tokens=1))
    for _ in range(5):
        assert limited.step().prefill_tokens == free.step().prefill_tokens


def test_one_iteration_that_was_disturbed_changes_little_and_not_for_long() -> None:
    machine, costs = Machine(), learned()
    learn(costs, machine, decodes=8, times=20)
    learn(costs, machine, decodes=8, prompt_tokens=13, times=20)
    before = costs.prompt_tokens_beside(8, 1)
    learn(costs, Machine(factor=100), decodes=8, prompt_tokens=13)
    assert costs.prompt_tokens_beside(8, 1) >= before // 1.5
    learn(costs, machine, decodes=8, prompt_tokens=9, times=3)
    assert costs.prompt_tokens_beside(8, 1) == pytest.approx(before, abs=1)


def test_a_disturbed_decode_lets_no_prompt_take_all_of_the_next_iterations() -> None:
    machine, costs = Machine(), learned()
    learn(costs, machine, decodes=8, times=20)
    before = costs.prompt_tokens_beside(8, 1)
    learn(costs, Machine(factor=100), decodes=8)
    assert costs.prompt_tokens_beside(8, 1) <= 1.5 * before
    learn(costs, machine, decodes=8, times=3)
    assert costs.prompt_tokens_beside(8, 1) == pytest.approx(before, abs=1)


def test_where_more_wait_for_their_first_token_than_decode_they_get_more_time() -> None:
    costs = learned()
    learn(costs, Machine(), decodes=3, times=5)
    assert [costs.prompt_tokens_beside(3, prompts) for prompts in (1, 3, 6, 9)] == [8, 8, 16, 24]


def test_iterations_of_about_as_many_rows_stand_in_for_those_that_were_never_seen() -> None:
    costs = learned()
    learn(costs, Machine(), decodes=20)
    learn(costs, Machine(of_a_row=0), decodes=2)
    assert costs.prompt_tokens_beside(18, 1) == 25
    assert costs.prompt_tokens_beside(3, 1) == LEAST_BESIDE


def test_one_short_decode_long_ago_does_not_hold_up_prompts_that_always_wait() -> None:
    """Its number of rows is the nearest one, and while prompts wait, the decodes are not seen alone again."""
    costs, machine = learned(), Machine(step=150)
    learn(costs, machine, decodes=10, times=20)
    learn(costs, replace(machine, factor=0.3), decodes=12)
    for _ in range(30):
        learn(costs, machine, 14, min(CHUNK, costs.prompt_tokens_beside(14, 1)))
    assert machine.alone(14) / 2 < costs.prompt_tokens_beside(14, 1) < machine.alone(14)


def test_prompts_beside_few_decodes_are_not_free_because_iterations_usually_have_many() -> None:
    """What computing a parked sequence again costs decides between that and copying it."""
    costs, machine = learned(), Machine(step=1.0, of_a_row=1.0, of_a_token=0.25)
    learn(costs, machine, 1)
    learn(costs, machine, 16, times=50)
    learn(costs, machine, 1, prompt_tokens=32, times=50)
    assert costs.prefill_seconds_per_token == pytest.approx(machine.of_a_token / 1000, rel=0.1)


def test_an_iteration_that_memory_did_not_hold_at_once_teaches_nothing() -> None:
    costs = learned()
    learn(costs, Machine(), decodes=20)
    costs.learn(plan_of(20, 0), StepResult(number=1, seconds=10.0, retries=1))
    assert costs.prompt_tokens_beside(20, 1) == 25


@given(
    decodes=st.integers(1, 40),
    prompts=st.integers(1, 40),
    seen=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300), st.just(0.0) | st.floats(1e-6, 1e6)), max_size=60),
)
def test_whatever_was_measured_a_prompt_goes_on_and_gets_over_it(
    decodes: int, prompts: int, seen: list[tuple[int, int, float]]
) -> None:
    """`seen`: rows that decode, prompt tokens, seconds. After it, the machine is as it should be."""
    costs, machine = learned(), Machine()
    for rows, tokens, seconds in seen:
        costs.learn(plan_of(rows, tokens), StepResult(number=1, seconds=seconds))
        assert costs.prompt_tokens_beside(decodes, prompts) >= LEAST_BESIDE
    learn(costs, machine, decodes, times=150)
    for _ in range(150):
        learn(costs, machine, decodes, min(CHUNK, costs.prompt_tokens_beside(decodes, 1)))
    fair = (SLOWDOWN - 1) * machine.alone(decodes) / machine.of_a_token
    assert costs.prompt_tokens_beside(decodes, 1) == pytest.approx(max(LEAST_BESIDE, fair), rel=0.1, abs=1)


class ArrivalsOnAMachine(RuleBasedStateMachine):
    """Requests come and go on a machine that is disturbed now and then."""

    @initialize(step=st.floats(0.1, 50), row=st.floats(0, 5), token=st.floats(0.001, 5))
    def start(self, step: float, row: float, token: float) -> None:
        self.device = device_with(Machine(step, row, token))
        self.names = 0
        self.plan = StepPlan(number=0)

    @rule(prompt=st.integers(1, 600), max_tokens=st.integers(1, 30))
    def arrives(self, prompt: int, max_tokens: int) -> None:
        if len(self.device.planner.sequences) < 12:
            self.device.planner.commands.add(new(f"r{self.names}", prompt=prompt, max_tokens=max_tokens))
            self.names += 1

    @rule(factor=st.floats(1, 1000), steps=st.integers(1, 20))
    def is_disturbed(self, factor: float, steps: int) -> None:
        self.device.machine.factor = factor
        self.runs(steps)
        self.device.machine.factor = 1.0

    @rule(steps=st.integers(1, 20))
    def runs(self, steps: int) -> None:
        for _ in range(steps):
            self.plan = self.device.step()

    @precondition(lambda self: self.plan.rows)
    @invariant()
    def each_kind_goes_on(self) -> None:
        """Nobody waits: all that decode have their token, and some prompt its tokens, if anybody has one to compute."""
        plan = self.plan
        assert plan.prefill_tokens <= CHUNK
        if plan.decodes and plan.prefills:
            unfinished = any(not step.samples for step in plan.prefills)
            assert plan.prefill_tokens >= LEAST_BESIDE or not unfinished

    def teardown(self) -> None:
        if hasattr(self, "device"):
            self.device.run(at_most=20_000)
            assert len(self.device.finished) == self.names


TestArrivalsOnAMachine = ArrivalsOnAMachine.TestCase
TestArrivalsOnAMachine.settings = settings(max_examples=12, stateful_step_count=15)
