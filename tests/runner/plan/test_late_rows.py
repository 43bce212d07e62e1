"""Sequences that sit out iterations because their masks are late still run: nobody is parked or accused because of
them."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from motet.domain import RequestId
from motet_runner.interface import NewSequence
from motet_runner.plan import Planner, StepPlan
from motet_runner.plan.sequence_memory import MAX_PARKED
from motet_runner.row_mask import RowMask
from tests.runner.plan.fake_device import FakeDevice, make_planner, new


@dataclass
class FakeMask:
    late: bool = False
    failure: None = None


@dataclass
class LateDevice(FakeDevice):
    """The masks of `refused` requests are late from their next token on, until somebody makes them."""

    planner: Planner
    refused: set[str] = field(default_factory=set)
    masks: dict[str, FakeMask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.planner)

    def add(self, request: str, **how: Any) -> None:
        self.planner.commands.add(self.masked(new(request, **how)))

    def masked(self, one: NewSequence) -> NewSequence:
        self.masks[one.request] = mask = FakeMask()
        self.refused.add(one.request)
        return replace(one, mask=cast("RowMask", mask))

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        _, result = self.launched[-1]
        late = [step for step in plan.rows if step.samples and self.rows[step.row].request in self.refused]
        for step in late:
            row = self.rows[step.row]
            row.tokens.pop()
            self.masks[row.request].late = True
        result.late = tuple(step.row for step in late)

    def make(self, request: str) -> None:
        self.refused.discard(request)
        self.masks[request].late = False


@pytest.mark.parametrize("spared", [False, True])
def test_a_sequence_at_its_promise_waits_while_the_only_other_one_is_late(*, spared: bool) -> None:
    """Spared ones have waited long enough. None of them may be a victim, and there is no room to extend."""
    planner = make_planner(pages=6, preset="paged-promises", protect_after_steps=0 if spared else 1000)
    planner.commands.supervised = True
    device = LateDevice(planner)
    device.add("late", promise=5, max_tokens=70)
    planner.commands.add(new("plain", prompt=5, max_tokens=60, promise=1))
    if spared:
        for sequence in planner.sequences:
            sequence.parked_times = MAX_PARKED
    for _ in range(30):
        device.step()
    plain = planner.sequences.get(RequestId("plain"))
    assert plain is not None
    assert plain.stands_at_promise
    device.make("late")
    device.run()
    assert device.finished.keys() == {"late", "plain"}
