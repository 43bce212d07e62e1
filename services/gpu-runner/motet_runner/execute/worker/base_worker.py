"""The common part of both workers: they arrange pages, rows and adapters as the plan says, compute the plan's rows (in
parts if memory requires that), and report. Each worker decides when the host reads tokens."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from motet.clock import Clock
from motet.domain import PAGE_TOKENS, RequestId, pages_for
from motet_kernels import LoraBackend
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads, LoadResults
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.batch.flat_batch_builder import FlatBatchBuilder
from motet_runner.execute.batch.memory_parts import InParts
from motet_runner.execute.batch.row_table import RowTable
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.trial import probe_row
from motet_runner.interface import Logprobs
from motet_runner.memory.host_pages import SwapTime
from motet_runner.memory.link import Link, link_to
from motet_runner.memory.marks import Mark
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import RowJoin, RowStep, StepPlan, StepResult
from motet_runner.plan.prompt_scores import PromptScores

LogitsTap = Callable[[list[RequestId], torch.Tensor], None]
"""Gets the requests that are sampled now, and their logits before penalties: [requests, vocabulary]."""

WARM_UP_TOKENS = 128


@dataclass(slots=True)
class Flight:
    """An iteration that was launched, and the combined results of its parts"""

    number: int
    began: Mark
    loaded: LoadResults = field(default_factory=LoadResults)
    swapped: SwapTime = field(default_factory=SwapTime)
    ended: Mark | None = None
    unread: list[Callable[["Flight"], None]] = field(default_factory=list)
    """Functions that read results being copied to the host, in the order of the plan"""
    sampled: list[int | None] = field(default_factory=list)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptScores] = field(default_factory=dict)
    out_of_memory: set[int] = field(default_factory=set)
    late: list[int] = field(default_factory=list)
    model_calls: int = 0
    retries: int = 0
    attention_calls: int = 0
    padding: int = 0


class BaseWorker(ABC):
    _measured = 1
    """The launches that `measure` makes; only the last launch is measured"""

    def __init__(
        self,
        loaded: LoadedModel,
        store: PagedStore,
        tiers: PageTiers,
        *,
        clock: Clock,
        loads: AdapterLoads | None = None,
    ) -> None:
        """`loads`: None if no plan ever has an adapter."""
        self.loaded = loaded
        self.loads = loads
        self._store = store
        self.tiers = tiers
        self._link: Link = link_to(loaded.device, clock)
        self.on_logits: LogitsTap | None = None
        """Called in each iteration that samples. The function may wait for the device."""
        self.table = RowTable()
        self._placed = None if loads is None else loads.placed
        self.builder = FlatBatchBuilder(self.table, store, loaded.device, placed=self._placed, window=loaded.window)
        self._backend: LoraBackend[Any] | None = None
        self._attention: Any = None
        self.in_parts = InParts(
            self.table, loaded.vocabulary, loaded.device, compute=self._compute_rows, no_token=self._no_token
        )
        self._flights: deque[Flight] = deque()

    def use(self, backend: LoraBackend[Any] | None, attention: Any) -> None:
        """Compute with this back end and attention from the next iteration on. `attention`: None for torch's."""
        self.builder.use(backend, attention)
        self._backend, self._attention = backend, attention

    def launch(self, plan: StepPlan) -> None:
        with torch.inference_mode():
            loaded = self._arrange(plan)
            flight = Flight(plan.number, self._link.mark(), loaded, self.tiers.take_swap_time())
            if plan.count:
                for row, new_pages in plan.decodes.new_pages.items():
                    self.table.extend(row, new_pages)
                for step in plan.prefills:
                    if step.new_pages:
                        self.table.extend(step.row, step.new_pages)
                self._compute(plan, flight)
                self.in_parts.ended(flight)
        self._launched(flight)

    def collect(self) -> StepResult:
        flight = self._flights.popleft()
        assert flight.ended is not None
        flight.ended.wait()
        self._collect(flight)
        seconds = flight.ended.seconds_since(flight.began)
        if self.loads is not None and flight.model_calls:
            self.loads.pace.iterated(seconds)
        return StepResult(
            number=flight.number,
            sampled=flight.sampled,
            logprobs=flight.logprobs,
            prompt_logprobs=flight.prompt_logprobs,
            out_of_memory=tuple(flight.out_of_memory),
            late=tuple(flight.late),
            seconds=seconds,
            arrived=flight.loaded.arrived,
            failed=flight.loaded.failed,
            silent=flight.loaded.silent,
            left=flight.loaded.left,
            proved=flight.loaded.proved,
            swapped_pages=flight.swapped.pages,
            swap_seconds=flight.swapped.seconds,
            model_calls=flight.model_calls,
            retries=flight.retries,
            attention_calls=flight.attention_calls,
            padding=flight.padding,
        )

    def wait_for_masks(self, seconds: float) -> None:  # noqa: B027 no mask is late where none is made
        """Wait for a mask that is late, at most for this time."""

    def measure(self, max_length: int) -> tuple[float, float]:
        """Seconds to prefill a token and to copy a page, on pages that are not in use yet."""
        tokens = min(WARM_UP_TOKENS, max_length)
        with torch.inference_mode():
            self._link.mark().wait()
            began = self._link.mark()
            self._store.copy_in([0], self._store.copy_out([0]))
            ended = self._link.mark()
            ended.wait()
        prefill = StepPlan(
            number=0,
            joins=(probe_row(0, [0] * tokens),),
            prefills=(RowStep(0, 0, tokens, samples=True, new_pages=tuple(range(pages_for(tokens, PAGE_TOKENS)))),),
        )
        seconds = 0.0
        for _ in range(self._measured):
            self.launch(prefill)
            self._leave(0)
            seconds = self.collect().seconds
        return seconds / tokens, ended.seconds_since(began)

    def _arrange(self, plan: StepPlan) -> LoadResults:
        """Carries out what the plan orders before its rows are computed."""
        loads = self.loads
        if loads is not None:
            loads.forget(plan.gone)
            if plan.copies:
                loads.before_copies()
        for copy in plan.copies:
            self.tiers.carry_out(copy)
        for moves in plan.moves:
            self._move_pages(moves)
        for row in plan.leaves:
            self._leave(row)
        for join in plan.joins:
            self._join(join)
        if loads is None:
            return LoadResults()
        return loads.advance(plan.loads, plan.loading, plan.proof, hurry=plan.hurry)

    def _move_pages(self, moves: Mapping[int, int]) -> None:
        self.table.move_pages(moves)

    def _leave(self, row: int) -> None:
        self.table.leave(row)

    def _join(self, join: RowJoin) -> None:
        self.table.join(join)

    def _compute(self, plan: StepPlan, flight: Flight) -> None:
        self.in_parts.compute(plan, flight)

    def _launched(self, flight: Flight) -> None:
        flight.ended = self._link.mark()
        self._flights.append(flight)

    def _collect(self, flight: Flight) -> None:  # noqa: B027 nothing is left where `launch` computes to the end
        """The iteration is computed: the host now reads results that it does not have yet."""

    def _tap(self, batch: FlatBatch, logits: torch.Tensor) -> None:
        if batch.sampled and self.on_logits is not None:
            self.on_logits([row.request for row in batch.sampled], logits[: len(batch.sampled)])

    @abstractmethod
    def _compute_rows(self, plan: StepPlan, flight: Flight) -> None:
        """Compute all rows at once. If memory runs out, it must be possible to compute the same rows again."""

    @abstractmethod
    def _no_token(self, step: RowStep, flight: Flight) -> None:
        """Called for a row that should be sampled but does not fit into memory."""
