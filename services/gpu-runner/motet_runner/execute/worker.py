"""The worker that computes in this process, with its own table of rows (OR-12)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from motet.clock import Clock
from motet.domain import RequestId, pages_for
from motet_kernels import LoraBackend
from motet_runner.execute import prompt_logprobs
from motet_runner.execute.adapter_loads import AdapterLoads, LoadResults
from motet_runner.execute.flat_batch import FlatBatchBuilder, SequenceAttention
from motet_runner.execute.halves import halves
from motet_runner.execute.model import LoadedModel, probe_row
from motet_runner.execute.row_table import RowTable
from motet_runner.execute.sampler import Sampler
from motet_runner.execute.tiles import TileBuilder, one_thread, tiles
from motet_runner.interface import Logprobs
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import RowStep, SizeLimit, StepPlan, StepResult
from motet_runner.plan.presets import UNBOUNDED
from motet_runner.plan.prompt_scores import PromptScores

LogitsTap = Callable[[list[RequestId], torch.Tensor], None]
"""Gets the requests that are sampled now, and their logits before any penalty: [requests, vocabulary]."""

WARM_UP_TOKENS = 128

_UNKNOWN = 0
"""The token of a row that has got none. The plan ends that row; until it does, any token will do."""


@dataclass(slots=True)
class _Parts:
    """What the parts of one iteration have brought together."""

    sampled: list[int | None] = field(default_factory=list)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptScores] = field(default_factory=dict)
    out_of_memory: set[int] = field(default_factory=set)
    model_calls: int = 0
    retries: int = 0
    attention_calls: int = 0
    padding: int = 0


class LocalWorker:
    """Computes each iteration to its end, with its sampled tokens, before `launch` returns."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: PagedStore,
        tiers: PageTiers,
        *,
        clock: Clock,
        loads: AdapterLoads | None = None,
        exact: bool = False,
    ) -> None:
        """`loads`: None if no plan ever has an adapter. `exact`: compute in exact mode (`tiles.py`)."""
        self._loaded = loaded
        self._loads = loads
        self._store = store
        self._tiers = tiers
        self._clock = clock
        self.on_logits: LogitsTap | None = None
        """Is called in each iteration that samples."""
        self._sampler = Sampler(frozenset(loaded.eos_token_ids))
        self._table = RowTable(pinned=loaded.device.type == "cuda")
        placed = None if loads is None else loads.placed
        self._exact = exact
        self._builder: FlatBatchBuilder | TileBuilder
        if exact:
            self._builder = TileBuilder(self._table, store, loaded.device, placed=placed)
        else:
            self._builder = FlatBatchBuilder(self._table, store, loaded.device, placed=placed, window=loaded.window)
        self._decodes = SizeLimit(UNBOUNDED)
        """How many decodes are computed at once."""
        self._results: deque[StepResult] = deque()

    def use(self, backend: LoraBackend[Any] | None, attention: SequenceAttention | None) -> None:
        """Compute with these from the next iteration on. `attention`: None for torch's."""
        self._builder.use(backend, attention)

    def launch(self, plan: StepPlan) -> None:
        loads = self._loads
        with torch.inference_mode():
            if loads is not None:
                loads.forget(plan.gone)
            for copy in plan.copies:
                self._tiers.carry_out(copy)
            for moves in plan.moves:
                self._table.move_pages(moves)
            for row in plan.leaves:
                self._table.leave(row)
            for join in plan.joins:
                self._table.join(join)
            loaded = LoadResults() if loads is None else loads.advance(plan.loads, plan.loading, hurry=plan.hurry)
            self._results.append(self._compute(plan, loaded))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def measure(self, max_length: int) -> tuple[float, float]:
        """Seconds to prefill a token and to copy a page, on pages that nobody uses yet."""
        tokens = min(WARM_UP_TOKENS, max_length)
        pages = tuple(range(pages_for(tokens)))
        with torch.inference_mode():
            began = self._clock()
            self._store.copy_in([0], self._store.copy_out([0]))
            page = self._clock() - began
        self.launch(
            StepPlan(
                number=0,
                joins=(probe_row(0, [0] * tokens),),
                prefills=(RowStep(0, 0, tokens, samples=True, new_pages=pages),),
            )
        )
        self._table.leave(0)
        return self.collect().seconds / tokens, page

    def _compute(self, plan: StepPlan, loaded: LoadResults) -> StepResult:
        swapped = self._tiers.take_swap_time()
        began = self._clock()
        parts = _Parts()
        if plan.count:
            for row, new_pages in plan.decodes.new_pages.items():
                self._table.extend(row, new_pages)
            for step in plan.prefills:
                if step.new_pages:
                    self._table.append_pages(step)
            if self._exact:
                self._compute_tiles(plan, parts)
            else:
                self._compute_parts(plan, parts)
            if not parts.retries:
                self._decodes.fitted(parts.model_calls)
        return StepResult(
            number=plan.number,
            sampled=parts.sampled,
            logprobs=parts.logprobs,
            prompt_logprobs=parts.prompt_logprobs,
            out_of_memory=tuple(parts.out_of_memory),
            seconds=self._clock() - began,
            arrived=loaded.arrived,
            failed=loaded.failed,
            swapped_pages=swapped.pages,
            swap_seconds=swapped.seconds,
            model_calls=parts.model_calls,
            retries=parts.retries,
            attention_calls=parts.attention_calls,
            padding=parts.padding,
        )

    def _compute_tiles(self, plan: StepPlan, parts: _Parts) -> None:
        with one_thread():
            for tile in tiles(plan):
                failed = tuple(step for step in tile.rows if step.row in parts.out_of_memory)
                if failed:  # the rest of a row, which comes first
                    self._leave_out(replace(tile, prefills=failed), parts)
                rest = tuple(step for step in tile.rows if step not in failed)
                if rest:
                    self._compute_parts(replace(tile, prefills=rest), parts)

    def _compute_parts(self, plan: StepPlan, parts: _Parts) -> None:
        """Compute the rows at once or, when memory does not suffice for all of them, one half after the other."""
        logits_fit = prompt_logprobs.fits(plan, self._table, self._loaded.vocabulary)
        if logits_fit and plan.count <= self._decodes.size and self._fits(plan, parts):
            return
        first, second = halves(plan)
        if first is None or second is None:
            self._leave_out(plan, parts)
            return
        self._compute_parts(first, parts)
        if any(step.row in parts.out_of_memory for step in second.rows):  # the rest of the only row
            self._leave_out(second, parts)
        else:
            self._compute_parts(second, parts)

    def _leave_out(self, plan: StepPlan, parts: _Parts) -> None:
        for step in plan.rows:
            parts.out_of_memory.add(step.row)
            if step.samples:
                parts.sampled.append(None)
                self._table[step.row].tokens.append(_UNKNOWN)

    def _fits(self, plan: StepPlan, parts: _Parts) -> bool:
        """Compute the rows at once, if memory suffices for them."""
        try:
            self._compute_at_once(plan, parts)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            return True
        # Only here are the tensors of the attempt gone: the exception held them.
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        parts.retries += 1
        # After an iteration with prompts, the plan makes their chunks smaller.
        if all(step.count == 1 for step in plan.rows):
            self._decodes.did_not_fit(plan.count)
        return False

    def _compute_at_once(self, plan: StepPlan, parts: _Parts) -> None:
        batch = self._builder.build(plan)
        logits = self._loaded.forward(batch)
        if batch.sampled and self.on_logits is not None:
            self.on_logits([row.request for row in batch.sampled], logits[: len(batch.sampled)])
        found = prompt_logprobs.scores_of(logits[len(batch.sampled) :], batch.scored)
        if batch.sampled:
            samples = self._sampler.sample(logits[: len(batch.sampled)], batch.sampled, chosen=batch.chosen)
            first = len(parts.sampled)
            if samples.logprobs:
                parts.logprobs |= {first + place: found for place, found in samples.logprobs.items()}
            parts.sampled += samples.tokens
            for row, token in zip(batch.sampled, samples.tokens, strict=True):
                row.tokens.append(_UNKNOWN if token is None else token)
        for number, scores in found.items():
            parts.prompt_logprobs[number] = prompt_logprobs.joined(parts.prompt_logprobs.get(number), scores)
        parts.model_calls += 1
        parts.attention_calls += batch.calls
        parts.padding += batch.input_ids.numel() - batch.tokens
