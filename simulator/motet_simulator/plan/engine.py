"""The engine of a simulated runner: the real plan and the real step costs, and times from a profile.

It computes nothing, so it knows each answer's length, and its tokens say only whose they are. Iterations in which the
same sequences only go on are leapt: what comes of them is known beforehand, and so is when they end. Whether it leaps
or steps, the same happens at the same times.
"""

import math
from collections.abc import Callable

from motet.domain import MAX_LORA_RANK, PAGE_TOKENS, RequestId
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.interface import (
    EngineInfo,
    StepOutput,
)
from motet_runner.plan import Copy, LoadArrived, Planner, StepPlan, StepResult, preset_named
from motet_runner.plan.resident_adapters import MAX_BYTES_BESIDE
from motet_runner.planned_engine import PlannedEngine
from motet_runner.step_costs import StepCosts
from motet_simulator.plan.answer import Answer, token_of_each
from motet_simulator.plan.engine_tokens import EOS, VOCABULARY
from motet_simulator.plan.gaps import Gaps
from motet_simulator.plan.leaps import MAX_LEAPT_ITERATIONS, Leaps
from motet_simulator.profiles.profile import EngineSize, Profile, Work
from motet_simulator.profiles.step_times import StepTimes

HURRY_SECONDS = 0.01
"""How long an iteration waits for an adapter when no sequence could run meanwhile."""

WAIT_SECONDS = 0.002
"""How long the loop waits after an iteration that could compute nothing."""


class SimulatedEngine(PlannedEngine):
    """An engine in virtual time."""

    def __init__(self, profile: Profile, *, seed: int, answers: dict[RequestId, Answer], gaps: Gaps) -> None:
        size = profile.engine
        self.now = 0.0
        """When the newest iteration ended."""
        self._times = StepTimes(profile, seed)
        self._overheads = profile.overheads
        self._answers = answers
        self._gaps = gaps
        law = profile.law
        self.costs = StepCosts(
            prefill_seconds_per_token=law.prefill,
            swap_seconds_per_page=profile.overheads.swapped_page,
            decode_slowdown=size.decode_slowdown,
        )
        self.planner = Planner(
            page_tokens=PAGE_TOKENS,
            pages=size.pages,
            preset=preset_named(size.preset),
            places=size.max_sequences,
            chunk_tokens=size.prefill_chunk_tokens,
            max_length=size.max_model_length,
            vocabulary=VOCABULARY,
            eos_token_ids=frozenset({EOS}),
            host_pages=size.host_pages,
            protect_after_steps=64,
            max_adapters=size.adapter_slots,
            pages_of_rank=size.adapter_pages,
            max_pages_beside=MAX_BYTES_BESIDE // size.page_bytes,
            prefix_cache=size.prefix_cache,
            cheaper=self.costs.cheaper_park,
            beside=None if size.decode_slowdown is None else self.costs.prompt_tokens_beside,
            tpot_seconds=size.tpot_seconds,
        )
        self.info = info_of(size, self.planner.max_length)
        self._rows: dict[int, Answer] = {}
        self._loads: dict[int, tuple[float, float]] = {}
        """Loads under way: when each began, and when it ends."""
        self._leaps = Leaps(self.planner, self._times, self.costs, answers, gaps)
        self.computed = False
        """Whether the newest iteration computed something."""

    # -- the loop ----------------------------------------------------------------------------------------------------

    def idle(self) -> float | None:
        return None

    def step(self) -> StepOutput:
        """One iteration. Its outputs are only those that end a sequence: the answers note their tokens here."""
        plan = self.planner.plan()
        self.computed = plan is not None
        if plan is None:
            self.now += WAIT_SECONDS
            return StepOutput(self.planner.steps, *self.planner.take_outputs())
        result = self._compute(plan)
        self.planner.collect(result)
        self.costs.learn(plan, result)
        if self.planner.cap is not None:
            self.planner.cap.learn(plan, result, result.seconds + result.swap_seconds)
        decoded = self.planner.take_decoded()
        outputs, events = self.planner.take_outputs()
        if decoded is not None:
            token_of_each(map(self._answers.__getitem__, decoded.requests), self.now, self._gaps)
        for output in outputs:
            if output.tokens:
                self._answers[output.request].token(self.now, self._gaps)
        ends = [one for one in outputs if one.finish is not None or one.error is not None]
        return StepOutput(plan.number, ends, events)

    # -- leaps -------------------------------------------------------------------------------------------------------

    def foresee(self, start: float, quiet: Callable[[float], bool], *, most: int = MAX_LEAPT_ITERATIONS) -> list[float]:
        """See `Leaps.foresee`."""
        arrives = min((due for _, due in self._loads.values()), default=math.inf)
        return self._leaps.foresee(start, quiet, most, before=arrives)

    def leap(self, start: float, ends: list[float]) -> None:
        """See `Leaps.take`."""
        self._leaps.take(start, ends)
        self.now, self.computed = ends[-1], True

    # -- one iteration -----------------------------------------------------------------------------------------------

    def _compute(self, plan: StepPlan) -> StepResult:
        began = self.now
        rows = self._rows
        for row in plan.leaves:
            del rows[row]
        for join in plan.joins:
            rows[join.row] = self._answers[join.request]
        arrived = self._advance_loads(plan)
        sampled: list[int] = []
        context = attended = prefill = 0
        for row, start in zip(plan.decodes.rows, plan.decodes.starts, strict=True):
            context += start + 1
            answer = rows[row]
            sampled.append(EOS if start + 2 >= answer.end_length else answer.name)  # `token_after`, asked very often
        for step in plan.prefills:
            prefill += step.count
            attended += step.count * step.start + step.count * (step.count + 1) // 2
            if step.samples:
                sampled.append(rows[step.row].token_after(step.start + step.count + 1))
        swapped = sum(len(one.pages) for one in plan.copies if isinstance(one, Copy) and one.source is not one.target)
        swap_seconds = swapped * self._overheads.swapped_page
        seconds = 0.0
        if plan.count:
            work = Work(len(plan.decodes), context, prefill, attended, len(plan.adapters))
            seconds = self._times.seconds(plan.number, work)
        elif not arrived:
            self.now = max(self.now, began + WAIT_SECONDS)
        self.now += seconds + swap_seconds
        return StepResult(
            number=plan.number,
            sampled=sampled,
            model_calls=1,
            seconds=seconds,
            arrived=arrived,
            swapped_pages=swapped,
            swap_seconds=swap_seconds,
        )

    def _advance_loads(self, plan: StepPlan) -> tuple[LoadArrived, ...]:
        overheads = self._overheads
        for load in plan.loads:
            seconds = overheads.adapter_load + overheads.adapter_byte * load.layout.size
            self._loads[load.number] = self.now, self.now + seconds
        arrived = []
        for number, (began, due) in list(self._loads.items()):
            if number not in plan.loading:
                del self._loads[number]  # it was given up
                continue
            if plan.hurry and due <= self.now + HURRY_SECONDS:
                self.now = max(self.now, due)
            if due <= self.now:
                del self._loads[number]
                arrived.append(LoadArrived(number, self.now - began))
        return tuple(arrived)


def info_of(size: EngineSize, max_length: int) -> EngineInfo:
    return EngineInfo(
        pages=size.pages,
        page_tokens=PAGE_TOKENS,
        page_bytes=size.page_bytes,
        max_sequences=size.max_sequences,
        max_model_length=max_length,
        adapter_slots=size.adapter_slots,
        max_lora_rank=MAX_LORA_RANK,
        host_bytes=size.host_pages * size.page_bytes,
        architecture="",
        layers=0,
        vocabulary=VOCABULARY,
        dtype="",
        device="",
        eos_token_ids=(EOS,),
        target_modules={},
        adapter_rank_bytes=size.adapter_rank_bytes,
        adapter_rank_tile=size.adapter_rank_tile,
        by_forecast=preset_named(size.preset).admission == "forecast",
    )


def layout_of(rank: int, size: int) -> AdapterLayout:
    """An adapter without bytes."""
    return AdapterLayout("", FileStamp(size, 0, 0), rank, size, "")
