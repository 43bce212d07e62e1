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
from motet_runner.execute.decode_again import DecodeAgain
from motet_runner.execute.flat_batch import FlatBatch, FlatBatchBuilder, SequenceAttention
from motet_runner.execute.in_parts import InParts
from motet_runner.execute.model import LoadedModel
from motet_runner.execute.row_table import UNKNOWN_TOKEN, RowTable
from motet_runner.execute.sampler import Sampler
from motet_runner.execute.tiles import TileBuilder, one_thread, tiles
from motet_runner.execute.trial import probe_row
from motet_runner.interface import Logprobs
from motet_runner.memory.host_pages import SwapTime
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import RowStep, StepPlan, StepResult
from motet_runner.plan.prompt_scores import PromptScores

LogitsTap = Callable[[list[RequestId], torch.Tensor], None]
"""Gets the requests that are sampled now, and their logits before any penalty: [requests, vocabulary]."""

WARM_UP_TOKENS = 128


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
        self._attention: SequenceAttention | None = None
        self._builder: FlatBatchBuilder | TileBuilder
        if exact:
            self._builder = TileBuilder(self._table, store, loaded.device, placed=placed)
        else:
            self._builder = FlatBatchBuilder(self._table, store, loaded.device, placed=placed, window=loaded.window)
        self._in_parts = InParts(
            self._table, loaded.vocabulary, loaded.device, compute=self._compute_at_once, no_token=self._no_token
        )
        self._results: deque[StepResult] = deque()
        self._again: DecodeAgain | None = None
        """The newest iteration, if others like it may follow"""

    def use(self, backend: LoraBackend[Any] | None, attention: SequenceAttention | None) -> None:
        """Compute with these from the next iteration on. `attention`: None for torch's."""
        self._end_of_decoding()
        self._attention = attention
        self._builder.use(backend, attention)

    def launch(self, plan: StepPlan) -> None:
        if self._again is not None and self._again.is_followed_by(plan):
            self._results.append(self._decode_again(self._again, plan))
            return
        self._end_of_decoding()
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

    def _decode_again(self, again: DecodeAgain, plan: StepPlan) -> StepResult:
        """Without torch's operators, if the model's call chooses the tokens: each of them looks for its kernel anew."""
        began = self._clock()
        batch = again.follow(plan)
        try:
            if again.chooses:
                self._next_logits(batch)
                tokens = again.chosen()
            else:
                with torch.inference_mode():
                    tokens = self._sampler.sample(self._next_logits(batch), batch.sampled).tokens
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            again.take(tokens)
            self._in_parts.decodes.fitted(1)
            seconds = self._clock() - began
            return StepResult(
                number=plan.number, sampled=tokens, seconds=seconds, model_calls=1, attention_calls=batch.calls
            )
        self._end_of_decoding()
        parts = _Parts()
        self._in_parts.did_not_fit(plan, parts)
        with torch.inference_mode():
            self._in_parts.compute(plan, parts)
        return self._result_of(plan, parts, LoadResults(), SwapTime(), self._clock() - began)

    def _next_logits(self, batch: FlatBatch) -> torch.Tensor:
        logits = self._loaded.forward(batch)
        if self.on_logits is not None:
            self.on_logits([row.request for row in batch.sampled], logits)
        return logits

    def _end_of_decoding(self) -> None:
        """Rows have their tokens, and the next iteration is another one."""
        if self._again is not None:
            self._again.write_back()
            self._again = None

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
                self._in_parts.compute(plan, parts)
            self._in_parts.ended(parts)
        return self._result_of(plan, parts, loaded, swapped, self._clock() - began)

    @staticmethod
    def _result_of(plan: StepPlan, parts: _Parts, loaded: LoadResults, swapped: SwapTime, seconds: float) -> StepResult:
        return StepResult(
            number=plan.number,
            sampled=parts.sampled,
            logprobs=parts.logprobs,
            prompt_logprobs=parts.prompt_logprobs,
            out_of_memory=tuple(parts.out_of_memory),
            seconds=seconds,
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
                    self._in_parts.leave_out(replace(tile, prefills=failed), parts)
                rest = tuple(step for step in tile.rows if step not in failed)
                if rest:
                    self._in_parts.compute(replace(tile, prefills=rest), parts)

    def _no_token(self, step: RowStep, parts: _Parts) -> None:
        parts.sampled.append(None)
        self._table[step.row].tokens.append(UNKNOWN_TOKEN)

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
                row.tokens.append(UNKNOWN_TOKEN if token is None else token)
        for number, scores in found.items():
            parts.prompt_logprobs[number] = prompt_logprobs.joined(parts.prompt_logprobs.get(number), scores)
        parts.model_calls += 1
        parts.attention_calls += batch.calls
        parts.padding += batch.input_ids.numel() - batch.tokens
        if self._may_go_on(plan, batch) and self._attention is not None:
            self._again = DecodeAgain(plan, batch, self._table, self._attention)

    def _may_go_on(self, plan: StepPlan, batch: FlatBatch) -> bool:
        """Whether iterations like this one may follow without a look at its rows."""
        only_decodes = bool(plan.decodes) and not plan.prefills and batch.paged is not None
        return only_decodes and self._loaded.device.type == "cpu" and self._sampler.chose_largest
