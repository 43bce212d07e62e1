"""The worker of a device that computes by itself: `launch` hands an iteration over, `collect` waits for it (OR-12).

It does what `LocalWorker` does, with the same tokens. What it must know to launch an iteration is in the plan: it
never asks the device for a value. A row of the host's table has a placeholder for each token that is on its way.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from motet.clock import Clock
from motet.domain import BASE, PAGE_TOKENS, pages_for
from motet_kernels import LoraBackend, Segment
from motet_runner.execute import prompt_logprobs
from motet_runner.execute.adapter_loads import AdapterLoads, LoadResults
from motet_runner.execute.device.decode_graphs import DecodeGraphs, FixedAttention, FixedLora
from motet_runner.execute.device.link import Link, link_to
from motet_runner.execute.device.parcel import Parcel, Returning
from motet_runner.execute.device.recording import recorder_for
from motet_runner.execute.device.rows import NOBODY, DeviceRows, numbers_of
from motet_runner.execute.device.sampler import NOT_FINITE, DeviceSampler, Sampling
from motet_runner.execute.flat_batch import FlatBatch, FlatBatchBuilder
from motet_runner.execute.in_parts import InParts
from motet_runner.execute.model import LoadedModel
from motet_runner.execute.prompt_logprobs import ScoredRow
from motet_runner.execute.row_table import RowTable, TableRow
from motet_runner.execute.trial import probe_row
from motet_runner.execute.worker import WARM_UP_TOKENS, LogitsTap
from motet_runner.interface import Logprobs
from motet_runner.memory.host_pages import SwapTime
from motet_runner.memory.marks import Mark
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import RowStep, StepPlan, StepResult
from motet_runner.plan.prompt_scores import PromptScores

ROWS_OF_EACH = 2
"""Rows of the table for each sequence that an iteration may have: parked ones give theirs back, so that is plenty."""

_ON_ITS_WAY = 0
"""In the place of a token that the host does not know yet, and of one that will never be"""


def computes_by_itself(device: torch.device) -> bool:
    """Whether a device goes on while the host does something else"""
    return device.type == "cuda"


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the model whose results are on their way."""

    rows: Sequence[TableRow]
    places: Sequence[int]
    """Of the sampled tokens in their sequences"""
    sampling: Sampling | None
    scored: Sequence[ScoredRow]
    results: Returning | None
    """None: of no row anything is wanted."""


@dataclass(slots=True)
class _Flight:
    """An iteration that was launched."""

    number: int
    began: Mark
    loaded: LoadResults
    swapped: SwapTime
    ended: Mark | None = None
    parts: list[_Call | int] = field(default_factory=list)
    """In the order of the plan: calls, and how many sampling rows got none"""
    out_of_memory: set[int] = field(default_factory=set)
    model_calls: int = 0
    retries: int = 0
    attention_calls: int = 0
    padding: int = 0


class DeviceWorker:
    def __init__(
        self,
        loaded: LoadedModel,
        store: PagedStore,
        tiers: PageTiers,
        *,
        clock: Clock,
        loads: AdapterLoads | None = None,
        rows: int,
        longest: int,
    ) -> None:
        """`loads`: None if no plan ever has an adapter. `rows` of an iteration at most, of sequences of at most
        `longest` tokens"""
        self._loaded = loaded
        self._loads = loads
        self._store = store
        self._tiers = tiers
        self._clock = clock
        self._link: Link = link_to(loaded.device, clock)
        self.on_logits: LogitsTap | None = None
        """Is called in each iteration that samples. It may wait for the device."""
        self._sampler = DeviceSampler(self._link, frozenset(loaded.eos_token_ids), loaded.vocabulary)
        self._rows = DeviceRows(self._link, ROWS_OF_EACH * rows, pages_for(longest))
        self._most, self._longest = rows, longest
        self._recorder = recorder_for(loaded.device)
        self._graphs: DecodeGraphs | None = None
        self.recordings = 0
        """Of decodes, so far"""
        self._table = RowTable()
        placed = None if loads is None else loads.placed
        self._builder = FlatBatchBuilder(self._table, store, loaded.device, placed=placed, window=loaded.window)
        self._attention: Any = None
        self._backend: LoraBackend[Any] | None = None
        self._placed = placed
        self._in_parts = InParts(
            self._table, loaded.vocabulary, loaded.device, compute=self._compute_rows, no_token=self._no_token
        )
        self._flights: deque[_Flight] = deque()

    def use(self, backend: LoraBackend[Any] | None, attention: Any) -> None:
        """Compute with these from the next iteration on. `attention`: None for torch's."""
        self._builder.use(backend, attention)
        self._attention, self._backend = attention, backend
        self._record()

    def launch(self, plan: StepPlan) -> None:
        loads = self._loads
        with torch.inference_mode():
            if loads is not None:
                loads.forget(plan.gone)
                if plan.copies:
                    loads.before_copies()
            for copy in plan.copies:
                self._tiers.carry_out(copy)
            for moves in plan.moves:
                self._table.move_pages(moves)
                self._rows.move_pages()
            for row in plan.leaves:
                self._leave(row)
            for join in plan.joins:
                self._table.join(join)
                if self._rows.make_room(join.row + 1):
                    self._record()
            loaded = LoadResults() if loads is None else loads.advance(plan.loads, plan.loading, hurry=plan.hurry)
            flight = _Flight(plan.number, self._link.mark(), loaded, self._tiers.take_swap_time())
            if plan.count:
                self._compute(plan, flight)
            flight.ended = self._link.mark()
            self._flights.append(flight)

    def collect(self) -> StepResult:
        flight = self._flights.popleft()
        assert flight.ended is not None
        flight.ended.wait()
        sampled: list[int | None] = []
        logprobs: dict[int, Logprobs] = {}
        scores: dict[int, PromptScores] = {}
        for part in flight.parts:
            if isinstance(part, _Call):
                _read(part, sampled, logprobs, scores)
            else:
                sampled += [None] * part
        return StepResult(
            number=flight.number,
            sampled=sampled,
            logprobs=logprobs,
            prompt_logprobs=scores,
            out_of_memory=tuple(flight.out_of_memory),
            seconds=flight.ended.seconds_since(flight.began),
            arrived=flight.loaded.arrived,
            failed=flight.loaded.failed,
            swapped_pages=flight.swapped.pages,
            swap_seconds=flight.swapped.seconds,
            model_calls=flight.model_calls,
            retries=flight.retries,
            attention_calls=flight.attention_calls,
            padding=flight.padding,
        )

    def measure(self, max_length: int) -> tuple[float, float]:
        """Seconds to prefill a token and to copy a page, on pages that nobody uses yet."""
        tokens = min(WARM_UP_TOKENS, max_length)
        pages = tuple(range(pages_for(tokens)))
        with torch.inference_mode():
            self._link.mark().wait()
            began = self._link.mark()
            self._store.copy_in([0], self._store.copy_out([0]))
            ended = self._link.mark()
            ended.wait()
        prefill = StepPlan(
            number=0,
            joins=(probe_row(0, [0] * tokens),),
            prefills=(RowStep(0, 0, tokens, samples=True, new_pages=pages),),
        )
        for _ in range(2):  # the first time, kernels are compiled
            self.launch(prefill)
            self._leave(0)
            seconds = self.collect().seconds
        return seconds / tokens, ended.seconds_since(began)

    def _record(self) -> None:
        """Record decodes, where attention and LoRA have batches that stay where they are. A rope that depends on the
        lengths of sequences asks the host for them."""
        self._graphs = None
        attention, backend = self._attention, self._backend
        if (
            isinstance(attention, FixedAttention)
            and (backend is None or isinstance(backend, FixedLora))
            and self._loaded.rope is None
        ):
            with torch.inference_mode():
                self._graphs = DecodeGraphs(
                    self._loaded,
                    self._store,
                    self._rows,
                    self._recorder,
                    attention,
                    backend,
                    most=self._most,
                    longest=self._longest,
                )
            self.recordings += self._graphs.recordings

    def _leave(self, row: int) -> None:
        self._table.leave(row)
        self._rows.leave(row)
        self._sampler.leave(row)

    def _compute(self, plan: StepPlan, flight: _Flight) -> None:
        for row, new_pages in plan.decodes.new_pages.items():
            self._table.extend(row, new_pages)
        for step in plan.prefills:
            if step.new_pages:
                self._table.append_pages(step)
        self._in_parts.compute(plan, flight)
        self._in_parts.ended(flight)

    def _no_token(self, step: RowStep, flight: _Flight) -> None:
        flight.parts.append(1)
        self._table[step.row].tokens.append(_ON_ITS_WAY)

    def _compute_rows(self, plan: StepPlan, flight: _Flight) -> None:
        """At once, from a recording if there is one for them"""
        size = None if self._graphs is None or plan.prefills else self._graphs.size_for(plan.count)
        if self._graphs is not None and size is not None:
            self._replay(plan, flight, self._graphs, size)
        else:
            self._compute_at_once(plan, flight)

    def _compute_at_once(self, plan: StepPlan, flight: _Flight) -> None:
        batch, parcel = self._builder.build(plan), Parcel()
        rows = batch.sampled
        if waiting := self._on_the_device(batch):
            parcel.add("waiting", np.array(waiting, dtype=np.int64))
        sampling = None
        if rows:
            sampling = self._sampler.prepare(rows, parcel)
            parcel.add("rows", numbers_of(rows))
        sent = parcel.send(self._link)
        if waiting:
            places, numbers = sent["waiting"].unbind(1)
            batch.input_ids[0].index_copy_(0, places, self._rows.newest.index_select(0, numbers))
        logits = self._loaded.forward(batch)
        if rows and self.on_logits is not None:
            self.on_logits([row.request for row in rows], logits[: len(rows)])
        results = self._scores(logits[len(rows) :], batch.scored)
        newest, counted = None, []
        if sampling is not None:
            samples = sampling.sample(logits[: len(rows)], sent, batch.chosen)
            results = [*samples.parts, *results]
            newest, counted = samples.newest(), sampling.counted(samples)
        call = self._call(rows, sampling, batch.scored, results)
        # Until here nothing that stays was changed, because memory may run out. What follows takes none.
        if sampling is not None and newest is not None:
            sampling.count(counted)
            self._rows.got(rows, sent["rows"], newest)
        _note(flight, call)
        flight.attention_calls += batch.calls
        flight.padding += batch.input_ids.numel() - batch.tokens

    def _replay(self, plan: StepPlan, flight: _Flight, graphs: DecodeGraphs, size: int) -> None:
        """The same for an iteration in which each row has one new token, from its recording."""
        numbers, starts, table = plan.decodes.rows, plan.decodes.starts, self._table
        rows, parcel = [table[number] for number in numbers], Parcel()
        sampling = self._sampler.prepare(rows, parcel)
        self._rows.prepare(rows, starts, table, parcel)
        if not graphs.is_filled(size, numbers):
            padding = np.full(size - len(rows), NOBODY, dtype=np.int64)
            parcel.add("rows", np.concatenate((numbers_of(rows), padding)))
        sent = parcel.send(self._link)
        self._rows.arrived(rows, starts, table, sent)
        if "rows" in sent:
            graphs.fill_rows(size, numbers, sent["rows"])
        adapters = (numbers, table.changes, tuple(plan.adapters.items()))
        graphs.fill_adapters(adapters, lambda: self._segments(plan, rows))
        self._store.clear(
            [
                int(table.pages[number, start // PAGE_TOKENS])
                for number, start in zip(numbers, starts, strict=True)
                if not start % PAGE_TOKENS
            ]
        )
        logits, chosen, calls = graphs.replay(size)
        count = len(rows)
        try:
            if self.on_logits is not None:
                self.on_logits([row.request for row in rows], logits[:count].clone())
            samples = sampling.sample(logits[:count], sent, chosen[:count])
            newest = None if sampling.greedy else samples.newest()
            counted = sampling.counted(samples)
            call = self._call(rows, sampling, (), samples.parts)
        except BaseException:  # out of memory, say: the rows are computed again, in parts
            graphs.undo(size)
            raise
        # What follows takes no memory.
        sampling.count(counted)
        self._rows.went_on(rows)
        if newest is not None:
            self._rows.got(rows, graphs.rows_of(size)[:count], newest)
        _note(flight, call)
        flight.attention_calls += calls
        flight.padding += size - count

    def _segments(self, plan: StepPlan, rows: Sequence[TableRow]) -> list[Segment]:
        if self._placed is None:
            return []
        placed = {digest: self._placed(digest, page) for digest, page in plan.adapters.items()}
        return [Segment(at, at + 1, placed[row.adapter]) for at, row in enumerate(rows) if row.adapter != BASE]

    def _call(
        self,
        rows: Sequence[TableRow],
        sampling: Sampling | None,
        scored: Sequence[ScoredRow],
        results: Sequence[torch.Tensor],
    ) -> _Call:
        """A call of the model has been launched, and its results are on their way to the host."""
        returning = Returning(self._link, results) if results else None
        return _Call(rows, [len(row.tokens) for row in rows], sampling, scored, returning)

    def _on_the_device(self, batch: FlatBatch) -> list[tuple[int, int]]:
        """Inputs that the device has sampled: their places in the line, and their rows of the table. It takes them from
        there, whether the host knows them by now or not."""
        line = batch.line
        lasts = np.bincount(line.sequence_of).cumsum() - 1
        held = self._rows.have(line.rows, line.positions[lasts].tolist())
        return [
            (place, row.number + 1) for place, row, there in zip(lasts.tolist(), line.rows, held, strict=True) if there
        ]

    def _scores(self, logits: torch.Tensor, scored: Sequence[ScoredRow]) -> list[torch.Tensor]:
        """The parts of `prompt_logprobs.Scores` of each row, one after the other"""
        found: list[torch.Tensor] = []
        first = 0
        for one in scored:
            tokens = self._link.upload(np.array(one.row.tokens[one.places.start : one.places.stop], dtype=np.int64))
            rows = logits[first : first + len(one.places)]
            found += prompt_logprobs.score(rows, tokens, prompt_logprobs.alternatives(one, logits.shape[1]))
            first += len(one.places)
        return found


def _note(flight: _Flight, call: _Call) -> None:
    flight.parts.append(call)
    for row in call.rows:
        row.tokens.append(_ON_ITS_WAY)
    flight.model_calls += 1


def _read(
    call: _Call, sampled: list[int | None], logprobs: dict[int, Logprobs], scores: dict[int, PromptScores]
) -> None:
    """Take in what a call has brought, now that it is on the host."""
    if call.results is None:
        return
    tensors = call.results.read()
    first = len(sampled)
    if call.sampling is not None:
        tokens = tensors.pop(0).tolist()
        for row, place, token in zip(call.rows, call.places, tokens, strict=True):
            row.tokens[place] = max(token, _ON_ITS_WAY)
        sampled += [None if token == NOT_FINITE else token for token in tokens]
        if call.sampling.asks:
            found = call.sampling.logprobs(tensors[:3])
            del tensors[:3]
            logprobs |= {first + place: logprob for place, logprob in found.items()}
    width = len(prompt_logprobs.Scores._fields)
    for at, one in enumerate(call.scored):
        parts = prompt_logprobs.Scores(*tensors[at * width : (at + 1) * width])
        read = prompt_logprobs.read_scores(one.places.start, parts)
        scores[one.row.number] = prompt_logprobs.joined(scores.get(one.row.number), read)
