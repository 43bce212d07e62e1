"""An engine without a model: it uses the real engine's plan, and a function computes the next token.

`motet_runner.plan` decides what it accepts, promises, parks, releases and loads, as in the real engine. Its adapters
have no bytes. Both engines pass the tests in `tests/contract/test_engines.py`.

The next token depends only on prompt, seed and index. So a request that is moved or parked continues with the same
tokens, and a test knows the answer beforehand.
"""

import random
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from motet.domain import BASE, PAGE_TOKENS, Digest
from motet.errors import Declined, MotetError
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.interface import (
    EngineInfo,
    EngineReport,
    Logprobs,
    NewSequence,
    StepOutput,
)
from motet_runner.plan import (
    HostAdapters,
    LoadArrived,
    LoadedContents,
    LoadFailed,
    Planner,
    RowJoin,
    RowStep,
    StepPlan,
    StepResult,
    preset_named,
)
from motet_runner.plan.host_adapters import BLOCK_BYTES
from motet_runner.plan.page_ledger import PageLedger
from motet_runner.plan.prompt_scores import PromptScores, places_to_score
from motet_runner.planned_engine import PlannedEngine
from motet_runner.step_costs import StepCosts

VOCABULARY = 1000
EOS = VOCABULARY
"""The engine never generates it, so every answer has its full length."""

PAGE_BYTES = 4096
MAX_RANK = 64
"""Of adapters. All ranks take the same pages."""


def fail() -> None:
    """An engine in a thread dies by this exception."""
    raise RuntimeError("this prompt ends the engine")


def token_at(prompt: tuple[int, ...], seed: int, index: int, adapter: str = BASE) -> int:
    """`adapter`: what is in its file, after the base model of the engine if that has a name."""
    return zlib.crc32(f"{index}{adapter}".encode(), _begun(prompt, seed)) % VOCABULARY


@lru_cache(maxsize=1024)
def _begun(prompt: tuple[int, ...], seed: int) -> int:
    """What is the same for each token of an answer."""
    return zlib.crc32(f"{prompt}{seed}".encode())


def logprob_at(prompt: tuple[int, ...], place: int, adapter: Digest = BASE) -> float:
    """Of a prompt's token."""
    return -(zlib.crc32(f"{prompt[: place + 1]}{adapter}".encode()) % 80) / 8


def tokens_of(prompt: tuple[int, ...], seed: int, count: int, adapter: str = BASE) -> list[int]:
    """The whole answer that a request must get, also when it was moved."""
    return [token_at(prompt, seed, index, adapter) for index in range(count)]


@dataclass
class FakeEngine(PlannedEngine):
    """An `interface.Engine`. It declines a random share of requests, `decline_rate`; `seed` determines which.

    It calls `dies` when it computes a prompt that holds the token `deadly`.
    """

    pages: int = 256
    page_tokens: int = PAGE_TOKENS
    max_sequences: int = 64
    max_model_length: int = 2048
    adapter_slots: int = 8
    step_seconds: float = 0.0
    reported_step_seconds: float = 0.0
    """If something else makes its steps last."""
    adapter_pages: int = 1
    """The pages that each adapter takes."""
    load_steps: int = 1
    """How many iterations it takes to load an adapter."""
    host_pages: int = 64
    host_adapters: int = 0
    """How many adapters the host's memory keeps for their next load."""
    protect_after_steps: int = 1 << 30
    """The real engine waits for its supervisor for fewer steps. In a test the machine is slow and steps are short."""
    plan_ahead: int = 0
    decline_rate: float = 0.0
    seed: int = 0
    base: str = ""
    """Other base models answer with other tokens."""
    reads: Callable[[AdapterLayout], str] | None = None
    """Reads an adapter's file when it is loaded; the adapter's tokens depend on that. Raises MotetError. None: they
    depend on its digest."""
    deadly: int | None = None
    dies: Callable[[], object] = fail
    preset: str = "paged-chunk"
    target_modules: dict[str, tuple[int, int]] = field(
        default_factory=lambda: {"model.layers.0.self_attn.q_proj": (16, 16), "model.layers.0.mlp.up_proj": (16, 32)}
    )

    def __post_init__(self) -> None:
        self.planner = Planner(
            page_tokens=self.page_tokens,
            pages=self.pages,
            preset=preset_named(self.preset),
            places=self.max_sequences,
            chunk_tokens=512,
            max_length=self.max_model_length,
            vocabulary=VOCABULARY,
            eos_token_ids=frozenset({EOS}),
            host_pages=self.host_pages,
            protect_after_steps=self.protect_after_steps,
            max_adapters=self.adapter_slots,
            pages_of_rank=lambda _: self.adapter_pages,
            host_adapters=HostAdapters(self.host_adapters * BLOCK_BYTES, adapters=self.host_adapters),
            bytes_of_rank=lambda _: BLOCK_BYTES,
        )
        self.costs = StepCosts(prefill_seconds_per_token=1e-5, swap_seconds_per_page=1e-5)
        self._worker = _FakeWorker(self)
        self.info = EngineInfo(
            pages=self.pages,
            page_tokens=self.page_tokens,
            page_bytes=PAGE_BYTES,
            max_sequences=self.max_sequences,
            max_model_length=self.planner.max_length,
            adapter_slots=self.adapter_slots,
            max_lora_rank=MAX_RANK,
            host_bytes=self.host_pages * PAGE_BYTES,
            architecture="FakeForCausalLM",
            layers=1,
            vocabulary=VOCABULARY,
            dtype="float32",
            device="cpu",
            eos_token_ids=(EOS,),
            target_modules=self.target_modules,
            adapter_rank_bytes=self.adapter_pages * PAGE_BYTES // MAX_RANK,
            adapter_rank_tile=MAX_RANK,
            by_forecast=preset_named(self.preset).admission == "forecast",
        )
        self._random = random.Random(self.seed)

    @property
    def ledger(self) -> PageLedger:
        return self.planner.memory.ledger

    # --------------------------------------------------------------------------------------------------------- commands

    def add(self, sequence: NewSequence) -> None:
        if self._random.random() < self.decline_rate:
            raise Declined("not in the mood")
        super().add(sequence)

    # ------------------------------------------------------------------------------------------------------------ steps

    def step(self) -> StepOutput:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        while len(self._worker.launched) <= self.plan_ahead:
            plan = self.planner.plan()
            if plan is None:
                break
            self._worker.launch(plan)
        if self._worker.launched:
            self.planner.collect(self._worker.collect())
        return StepOutput(self.planner.steps, *self.planner.take_outputs())

    def idle(self) -> float | None:
        return None

    # ----------------------------------------------------------------------------------------------------------- report

    def report(self) -> EngineReport:
        return replace(super().report(), step_seconds=self.step_seconds or self.reported_step_seconds)


class SlowEngines:
    """Makes slow engines. Their answers last until the test calls `hurry`, also on a busy machine.

    engines = SlowEngines()
    await system.runner("r0", engines)
    ...  # what must happen before the answer has ended
    engines.hurry()
    """

    def __init__(self, step_seconds: float = 0.2, **how: Any) -> None:
        self.made: list[FakeEngine] = []
        self._how = {"step_seconds": step_seconds, **how}

    def __call__(self) -> FakeEngine:
        self.made.append(FakeEngine(**self._how))
        return self.made[-1]

    def hurry(self, step_seconds: float = 0.0) -> None:
        """Make all engines fast: those that exist, and those made later."""
        self._how["step_seconds"] = step_seconds
        for engine in self.made:
            engine.step_seconds = step_seconds


_CONTENTS = LoadedContents(frozenset(), scales=False, from_slab=False)


class _FakeWorker:
    """Knows of sequences only what plans say, as every worker."""

    def __init__(self, engine: FakeEngine) -> None:
        self.launched: deque[StepResult] = deque()
        self._engine = engine
        self._rows: dict[int, tuple[RowJoin, int]] = {}
        """Each row, and how many tokens it has."""
        self._steps_left: dict[int, int] = {}
        """Of each load."""
        self._read: dict[Digest, str] = {}
        """What was in the files of the adapters that were loaded."""

    def launch(self, plan: StepPlan) -> None:
        for row in plan.leaves:
            del self._rows[row]
        for join in plan.joins:
            self._rows[join.row] = join, len(join.tokens)
        failed = []
        for load in plan.loads:
            try:
                self._read[load.digest] = load.digest if self._engine.reads is None else self._engine.reads(load.layout)
            except MotetError as error:
                failed.append(LoadFailed(load.number, error))
            else:
                self._steps_left[load.number] = self._engine.load_steps
        left = [number for number in self._steps_left if number not in plan.loading]
        left += [one.number for one in failed]
        under_way = {number: left - 1 for number, left in self._steps_left.items() if number in plan.loading}
        arrived = [number for number, left in under_way.items() if left <= 0]
        self._steps_left = {number: left for number, left in under_way.items() if left > 0}
        sampled = [self._compute(step) for step in plan.rows]
        self.launched.append(
            StepResult(
                number=plan.number,
                sampled=tuple(token for token in sampled if token is not None),
                prompt_logprobs={step.row: scores for step in plan.prefills if (scores := self._score(step))},
                arrived=tuple(LoadArrived(number, self._engine.step_seconds, contents=_CONTENTS) for number in arrived),
                left=tuple(left),
                failed=tuple(failed),
            )
        )

    def collect(self) -> StepResult:
        return self.launched.popleft()

    def _score(self, step: RowStep) -> PromptScores | None:
        row, _ = self._rows[step.row]
        if row.to_score is None:
            return None
        places = places_to_score(step.start, step.count, first=row.to_score, prompt_tokens=row.prompt_tokens)
        logprobs = [Logprobs(logprob_at(row.tokens, place, row.adapter), self._best(row, place)) for place in places]
        return PromptScores(places.start, logprobs) if places else None

    @staticmethod
    def _best(row: RowJoin, place: int) -> tuple[tuple[int, float], ...]:
        alternatives = row.sampling.prompt_logprobs or 0
        logprob = logprob_at(row.tokens, place, row.adapter)
        return tuple(((row.tokens[place] + one) % VOCABULARY, logprob - one) for one in range(alternatives))

    def _compute(self, step: RowStep) -> int | None:
        row, tokens = self._rows[step.row]
        prompt = row.tokens[: row.prompt_tokens]
        if self._engine.deadly in prompt:
            self._engine.dies()
        if not step.samples:
            return None
        self._rows[step.row] = row, tokens + 1
        adapter = self._read[row.adapter] if row.adapter != BASE else BASE
        return token_at(prompt, row.seed, tokens - row.prompt_tokens, self._engine.base + adapter)
