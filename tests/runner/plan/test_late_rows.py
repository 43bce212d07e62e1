"""Sequences that sit out iterations because their masks are late still run: nobody is parked or accused because of
them."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from motet.domain import Digest, RequestId
from motet_runner.interface import NewSequence, StateChanged
from motet_runner.plan import Planner, StepPlan
from motet_runner.plan.sequence_memory import MAX_PARKED
from motet_runner.row_mask import RowMask
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new


@dataclass(eq=False)
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


def with_a_late_row(planner: Planner) -> LateDevice:
    device = LateDevice(planner)
    device.add("late", prompt=20, max_tokens=40)
    while not device.masks["late"].late:
        device.step()
    return device


@pytest.mark.parametrize("preset", ["paged-chunk", "request-level"])
def test_nobody_starts_in_place_of_a_late_row(preset: str) -> None:
    planner = make_planner(preset=preset, tpot_seconds=1.0)
    assert planner.cap is not None
    if preset == "paged-chunk":
        planner.cap.sequences = 1
    device = with_a_late_row(planner)
    planner.commands.add(new("plain"))
    for _ in range(3):
        device.step()
    assert "plain" not in device.computed
    device.make("late")
    device.run()
    assert "plain" in device.finished


def test_nobody_makes_way_while_a_late_row_will_go_on() -> None:
    """Nobody may be a victim: the newest one would end."""
    planner = make_planner(pages=6, preset="paged-promises")
    planner.commands.set_overcommit(3.0)
    device = with_a_late_row(planner)
    planner.commands.add(new("other", max_tokens=80))
    for sequence in planner.sequences:
        sequence.parked_times = MAX_PARKED
    for _ in range(90):
        device.step()
    other = planner.sequences.get(RequestId("other"))
    assert other is not None
    assert planner.memory.free == 0
    assert not planner.sequences.parked()
    device.make("late")
    device.run()
    assert "late" in device.finished


class AccusedDevice(LateDevice):
    """It notes who would be accused if the engine died: in iterations, and while masks are being made."""

    def accused(self) -> str:
        """By the last event outside."""
        told = [event for event in self.events if isinstance(event, StateChanged)]
        of_each = {event.request: event.alone for event in told}
        (accused,) = [request for request, alone in of_each.items() if alone] or [""]
        return accused

    def launch(self, plan: StepPlan) -> None:
        if plan.rows:
            making = {request for request, mask in self.masks.items() if mask.late}
            busy = making.union(self.rows[step.row].request for step in plan.rows if step.row in self.rows)
            busy.update(join.request for join in plan.joins)
            assert self.accused() in ("", *busy)
            assert not self.accused() or busy == {self.accused()}
        super().launch(plan)


def test_a_load_is_in_no_hurry_while_a_row_is_late() -> None:
    planner = make_planner()
    planner.commands.load_adapter(Digest("sha256:a"), adapter_layout(3))
    device = with_a_late_row(planner)
    planner.commands.add(new("other", adapter="sha256:a"))
    plan = device.step()
    assert plan.loading
    assert not plan.hurry


def test_a_suspect_is_announced_alone_while_its_mask_is_made() -> None:
    planner = make_planner()
    device = AccusedDevice(planner)
    device.add("late", engines_lost=1)
    planner.commands.add(new("innocent", engines_lost=1))
    planner.commands.add(new("plain"))
    while not device.masks["late"].late:
        device.step()
    computed = dict(device.computed)
    for _ in range(5):
        device.step()
        assert device.accused() == "late"
    assert device.computed == computed
    device.make("late")
    device.run()
    assert device.finished.keys() == {"late", "innocent", "plain"}


@pytest.mark.parametrize("gone", [False, True])
def test_no_suspect_is_computed_while_a_mask_is_made(*, gone: bool) -> None:
    planner = make_planner()
    device = AccusedDevice(planner)
    device.add("late")
    device.add("masked", max_tokens=60)
    device.make("masked")
    planner.commands.add(new("plain", max_tokens=60))
    for _ in range(3):
        device.step()
    assert device.masks["late"].late
    planner.commands.add(new("suspect", engines_lost=1))
    if gone:
        planner.commands.cancel(RequestId("late"))
    before = dict(device.computed)
    for _ in range(5):
        device.step()
    assert device.accused() == ""
    assert "suspect" not in device.computed
    assert device.computed["plain"] == before["plain"] + 5, "others go on"
    assert device.computed["masked"] == before["masked"], "no other mask begins, so that the suspect's turn comes"
    device.make("late")
    device.run()
    assert {"suspect", "masked", "plain"} <= device.finished.keys()
