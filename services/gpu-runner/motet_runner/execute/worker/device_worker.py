"""The worker of an asynchronous device: `launch` hands an iteration over, `collect` waits for it (OR-12).

The plan has all that is needed to launch an iteration, so the worker never asks the device for a value. Until a token
has come to the host, the host's table has UNKNOWN_TOKEN in its place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from motet.clock import Clock
from motet.domain import BASE, PAGE_TOKENS, pages_for
from motet_kernels import LoraBackend, Segment
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.batch.row_table import UNKNOWN_TOKEN, TableRow
from motet_runner.execute.batch.scored_rows import ScoredRow
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.sample import prompt_logprobs
from motet_runner.execute.sample.device_sampler import DeviceSampler, Sampling
from motet_runner.execute.worker.base_worker import BaseWorker, Flight
from motet_runner.execute.worker.captured_graph import capture_for
from motet_runner.execute.worker.decode_graphs import CapturedGraph, DecodeGraphs, FixedAttention, FixedLora
from motet_runner.execute.worker.device_rows import NOBODY, DeviceRows, numbers_of
from motet_runner.execute.worker.launched_call import LaunchedCall
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.parcel import Parcel, Returning
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import RowJoin, RowStep, StepPlan

ROWS_OF_EACH = 2
"""Rows of the table for each row of the largest iteration. Parked sequences free their rows, so two usually suffice."""


def computes_by_itself(device: torch.device) -> bool:
    """True if a device computes while the host goes on"""
    return device.type == "cuda"


class DeviceWorker(BaseWorker):
    _measured = 2  # the first launch compiles kernels

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
        """`rows`: the most rows of an iteration; `longest`: the most tokens of a sequence"""
        super().__init__(loaded, store, tiers, clock=clock, loads=loads)
        self.sampler = DeviceSampler(self._link, frozenset(loaded.eos_token_ids), loaded.vocabulary)
        self.rows = DeviceRows(self._link, ROWS_OF_EACH * rows, pages_for(longest, PAGE_TOKENS))
        self._most, self._longest = rows, longest
        self._capture = capture_for(loaded.device)
        self.graphs: DecodeGraphs | None = None
        self._captures = 0

    @property
    def captures(self) -> int:
        """How many graphs were captured so far"""
        return self._captures + (0 if self.graphs is None else self.graphs.captures)

    def use(self, backend: LoraBackend[Any] | None, attention: Any) -> None:
        super().use(backend, attention)
        self._capture_graphs()

    def _capture_graphs(self) -> None:
        """Capture decodes, if attention and LoRA have batches with fixed addresses. Not with a rope that depends on
        sequences' lengths, because the host has the lengths."""
        self._captures, self.graphs = self.captures, None
        attention, backend = self._attention, self._backend
        if (
            isinstance(attention, FixedAttention)
            and (backend is None or isinstance(backend, FixedLora))
            and self.loaded.rope is None
        ):
            with torch.inference_mode():
                self.graphs = DecodeGraphs(
                    self.loaded,
                    self._store,
                    self.rows,
                    self._capture,
                    attention,
                    backend,
                    most=self._most,
                    longest=self._longest,
                )

    def _move_pages(self, moves: Mapping[int, int]) -> None:
        super()._move_pages(moves)
        self.rows.move_pages()

    def _leave(self, row: int) -> None:
        super()._leave(row)
        self.rows.leave(row)
        self.sampler.leave(row)

    def _join(self, join: RowJoin) -> None:
        super()._join(join)
        if self.rows.make_room(join.row + 1):
            self._capture_graphs()

    def _collect(self, flight: Flight) -> None:
        """The host reads what the device has computed since `launch`: tokens and log probabilities."""
        for read in flight.unread:
            read(flight)

    def _no_token(self, step: RowStep, flight: Flight) -> None:
        flight.unread.append(lambda flight: flight.sampled.append(None))
        self.table[step.row].tokens.append(UNKNOWN_TOKEN)

    def _compute_rows(self, plan: StepPlan, flight: Flight) -> None:
        """Compute all rows at once, with a graph if one is large enough."""
        graphs = None if plan.prefills else self.graphs
        scales = graphs is not None and self.loads is not None and self.loads.any_scales(plan.adapters)
        graph = None if graphs is None else graphs.graph_for(plan.count, scales=scales)
        if graphs is not None and graph is not None:
            self._replay(plan, flight, graphs, graph)
        else:
            self._compute_at_once(plan, flight)

    def _compute_at_once(self, plan: StepPlan, flight: Flight) -> None:
        batch, parcel = self.builder.build(plan), Parcel()
        rows = batch.sampled
        if waiting := self._on_the_device(batch):
            parcel["waiting"] = np.array(waiting, dtype=np.int64)
        sampling = None
        if rows:
            sampling = self.sampler.prepare(rows, parcel)
            parcel["rows"] = numbers_of(rows)
        sent = parcel.send(self._link)
        if waiting:
            places, numbers = sent["waiting"].unbind(1)
            batch.input_ids[0].index_copy_(0, places, self.rows.newest.index_select(0, numbers))
        logits = self.loaded.forward(batch)
        self._tap(batch, logits)
        results = self._scores(logits[len(rows) :], batch.scored)
        newest, counted = None, []
        if sampling is not None:
            samples = sampling.sample(logits[: len(rows)], sent, batch.chosen)
            results = [*samples.parts, *results]
            newest, counted = samples.newest(), sampling.counted(samples)
        call = self._call(rows, sampling, batch.scored, results)
        # Until here memory may run out, and the rows can be computed again. What follows allocates no memory.
        if sampling is not None and newest is not None:
            sampling.count(counted)
            self.rows.got(rows, sent["rows"], newest)
        call.note(flight)
        flight.attention_calls += batch.calls
        flight.padding += batch.input_ids.numel() - batch.tokens

    def _replay(self, plan: StepPlan, flight: Flight, graphs: DecodeGraphs, graph: CapturedGraph) -> None:
        """Like `_compute_at_once` for a decode-only iteration, from its graph."""
        numbers, starts, table = plan.decodes.rows, plan.decodes.starts, self.table
        rows, parcel = [table[number] for number in numbers], Parcel()
        count, size = len(rows), len(graph.rows)
        sampling = self.sampler.prepare(rows, parcel)
        self.rows.prepare(rows, starts, table, parcel)
        if graph.numbers != numbers:
            padding = np.full(size - count, NOBODY, dtype=np.int64)
            parcel["rows"] = np.concatenate((numbers_of(rows), padding))
        sent = parcel.send(self._link)
        self.rows.arrived(rows, starts, table, sent)
        if "rows" in sent:
            graph.fill(numbers, sent["rows"])
        adapters = (numbers, table.changes, tuple(plan.adapters.items()))
        graphs.fill_adapters(adapters, lambda: self._segments(plan, rows))
        self._store.clear(
            [
                int(table.pages[number, start // PAGE_TOKENS])
                for number, start in zip(numbers, starts, strict=True)
                if not start % PAGE_TOKENS
            ]
        )
        logits = graphs.replay(graph)
        try:
            if self.on_logits is not None:
                self.on_logits([row.request for row in rows], logits[:count].clone())
            samples = sampling.sample(logits[:count], sent, graph.chosen[:count])
            newest = None if sampling.greedy else samples.newest()
            counted = sampling.counted(samples)
            call = self._call(rows, sampling, (), samples.parts)
        except BaseException:  # such as out of memory: the rows are computed again, in parts
            graphs.undo(graph)
            raise
        # What follows allocates no memory.
        sampling.count(counted)
        self.rows.went_on(rows)
        if newest is not None:
            self.rows.got(rows, graph.rows[:count], newest)
        call.note(flight)
        flight.attention_calls += graph.calls
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
    ) -> LaunchedCall:
        """Begins to copy the results of a launched call of the model to the host."""
        returning = Returning(self._link, results) if results else None
        return LaunchedCall(rows, [len(row.tokens) for row in rows], sampling, scored, returning)

    def _on_the_device(self, batch: FlatBatch) -> list[tuple[int, int]]:
        """Inputs that the device has sampled: their places in the batch, and their rows. The batch gets these tokens on
        the device, even if the host already knows them."""
        line = batch.line
        lasts = np.bincount(line.sequence_of).cumsum() - 1
        held = self.rows.have(line.rows, line.positions[lasts].tolist())
        return [
            (place, row.number + 1) for place, row, there in zip(lasts.tolist(), line.rows, held, strict=True) if there
        ]

    def _scores(self, logits: torch.Tensor, scored: Sequence[ScoredRow]) -> list[torch.Tensor]:
        """The parts of each row's `prompt_logprobs.Scores`, concatenated"""
        found: list[torch.Tensor] = []
        first = 0
        for one in scored:
            tokens = self._link.upload(np.array(one.row.tokens[one.places.start : one.places.stop], dtype=np.int64))
            rows = logits[first : first + len(one.places)]
            found += prompt_logprobs.score(rows, tokens, prompt_logprobs.alternatives(one, logits.shape[1]))
            first += len(one.places)
        return found
