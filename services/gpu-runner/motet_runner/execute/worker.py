"""The worker that computes in this process, with its own table of rows (OR-12)."""

from collections import deque
from collections.abc import Callable

import torch

from motet.clock import Clock
from motet.domain import RequestId, pages_for
from motet_runner.execute.flat_batch import FlatBatchBuilder
from motet_runner.execute.model import LoadedModel, probe_row
from motet_runner.execute.row_table import RowTable
from motet_runner.execute.sampler import sample
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import RowStep, StepPlan, StepResult

LogitsTap = Callable[[list[RequestId], torch.Tensor], None]
"""Gets the requests that are sampled now, and their logits before any penalty: [requests, vocabulary]."""

WARM_UP_TOKENS = 128


class LocalWorker:
    def __init__(
        self,
        loaded: LoadedModel,
        store: PagedStore,
        tiers: PageTiers,
        *,
        clock: Clock,
    ) -> None:
        self._loaded = loaded
        self._store = store
        self._tiers = tiers
        self._clock = clock
        self.on_logits: LogitsTap | None = None
        """Is called in each iteration that samples."""
        self._eos = frozenset(loaded.eos_token_ids)
        self._table = RowTable(pinned=loaded.device.type == "cuda")
        self._builder = FlatBatchBuilder(self._table, store, loaded.device)
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        with torch.inference_mode():
            began = self._clock()
            for copy in plan.copies:
                self._tiers.carry_out(copy)
            copied = self._clock()
            for row in plan.leaves:
                self._table.leave(row)
            for join in plan.joins:
                self._table.join(join)
            self._results.append(self._compute(plan, copy_seconds=copied - began))

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

    def _compute(self, plan: StepPlan, *, copy_seconds: float) -> StepResult:
        if not plan.rows:
            return StepResult(number=plan.number, copy_seconds=copy_seconds)
        began = self._clock()
        for step in plan.rows:
            if step.new_pages:
                self._table.append_pages(step)
        batch = self._builder.build(plan)
        logits = self._loaded.forward(batch)
        if batch.sampled and self.on_logits is not None:
            self.on_logits([row.request for row in batch.sampled], logits)
        sampled = sample(logits, batch.sampled, self._eos) if batch.sampled else []
        for row, token in zip(batch.sampled, sampled, strict=True):
            # The plan ends a row without a token. Until it does, any token will do.
            row.tokens.append(token.token if token is not None else 0)
        return StepResult(
            number=plan.number,
            sampled=tuple(sampled),
            seconds=self._clock() - began,
            copy_seconds=copy_seconds,
            attention_calls=batch.calls,
            padding=batch.input_ids.numel() - batch.tokens,
        )
