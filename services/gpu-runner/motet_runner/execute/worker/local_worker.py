"""The worker that computes in this process, with its own table of rows (OR-12)."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from motet.clock import Clock
from motet_kernels import LoraBackend
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.batch.flat_batch_builder import FlatBatchBuilder, WherePlaced
from motet_runner.execute.batch.next_decode import NextDecode
from motet_runner.execute.batch.row_table import UNKNOWN_TOKEN, MaskedRow, RowTable, masked_rows
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.sample import prompt_logprobs
from motet_runner.execute.sample.host_sampler import Sampler, Samples
from motet_runner.execute.sample.row_masks import RowMasks
from motet_runner.execute.worker.base_worker import BaseWorker, Flight
from motet_runner.mask_threads import MaskThreads
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import RowStep, StepPlan


class Cut(Protocol):
    """Cuts iterations into calls of the model, such as exact mode's `Tiles`. Calls that do not fit into memory are cut
    further."""

    def builder(
        self, table: RowTable, store: PagedStore, device: torch.device, placed: WherePlaced | None
    ) -> FlatBatchBuilder: ...

    def parts(self, plan: StepPlan) -> Iterator[StepPlan]:
        """The parts, in order"""

    def computing(self) -> AbstractContextManager[None]:
        """A context around all parts"""


class LocalWorker(BaseWorker):
    """Computes each iteration to its end, with its sampled tokens, before `launch` returns."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: PagedStore,
        tiers: PageTiers,
        *,
        clock: Clock,
        loads: AdapterLoads | None = None,
        cut: Cut | None = None,
    ) -> None:
        """`loads`: None if no plan ever has an adapter."""
        super().__init__(loaded, store, tiers, clock=clock, loads=loads)
        self.sampler = Sampler(frozenset(loaded.eos_token_ids))
        self._cut = cut
        if cut is not None:
            self.builder = cut.builder(self.table, store, loaded.device, self._placed)
        self._masks = RowMasks(self.sampler, MaskThreads())
        self._clock, self._launched_at = clock, 0.0
        self.again: NextDecode | None = None
        """Makes the next iteration from the last one; None: not possible."""

    def use(self, backend: LoraBackend[Any] | None, attention: Any) -> None:
        self._end_of_decoding()
        super().use(backend, attention)

    def launch(self, plan: StepPlan) -> None:
        self._launched_at = self._clock()
        if self.again is not None and self.again.is_followed_by(plan):
            self._next_decode(self.again, plan)
            return
        self._end_of_decoding()
        super().launch(plan)

    def _next_decode(self, again: NextDecode, plan: StepPlan) -> None:
        """Uses no torch operators if the model's call chooses the tokens: dispatching an operator takes time."""
        flight = Flight(plan.number, self._link.mark())
        batch = again.follow(plan)
        try:
            if again.chooses:
                logits, samples = self._next_logits(batch), Samples(again.chosen(), {})
            else:
                with torch.inference_mode():
                    logits = self._next_logits(batch)
                    samples = self.sampler.sample(logits, batch.sampled)
            if again.masked:
                with torch.inference_mode():
                    flight.late = self._hold(again.masked, logits, samples, missing=again.missing)
            flight.sampled = samples.tokens
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            again.take(flight.sampled)
            if flight.late:
                self._end_of_decoding(flight.late)
            self.in_parts.decodes.fitted(1)
            flight.model_calls, flight.attention_calls = 1, batch.calls
            self._launched(flight)
            return
        self._end_of_decoding()
        self.in_parts.did_not_fit(plan, flight)
        with torch.inference_mode():
            self.in_parts.compute(plan, flight)
        self._launched(flight)

    def _next_logits(self, batch: FlatBatch) -> torch.Tensor:
        logits = self.loaded.forward(batch)
        self._tap(batch, logits)
        return logits

    def _hold(
        self, rows: Sequence[MaskedRow], logits: torch.Tensor, samples: Samples, *, missing: int = 0
    ) -> list[int]:
        """Holds the tokens against the masks of their rows → the rows whose masks are late"""
        spent = self._clock() - self._launched_at
        return self._masks.hold(rows, logits, samples, missing=missing, spent=spent)

    def wait_for_masks(self, seconds: float) -> None:
        self._masks.threads.wait(seconds)

    def _end_of_decoding(self, late: Collection[int] = ()) -> None:
        """Writes the tokens to the rows, because a different iteration follows. `late`: rows without a new token"""
        if self.again is not None:
            self.again.write_back(late)
            self.again = None

    def _compute(self, plan: StepPlan, flight: Flight) -> None:
        if self._cut is None:
            super()._compute(plan, flight)
            return
        with self._cut.computing():
            for part in self._cut.parts(plan):
                failed = tuple(step for step in part.rows if step.row in flight.out_of_memory)
                if failed:  # the rest of a row whose earlier part failed
                    self.in_parts.leave_out(part.with_rows(failed), flight)
                rest = tuple(step for step in part.rows if step not in failed)
                if rest:
                    self.in_parts.compute(part.with_rows(rest), flight)

    def _no_token(self, step: RowStep, flight: Flight) -> None:
        flight.sampled.append(None)
        self.table[step.row].tokens.append(UNKNOWN_TOKEN)

    def _compute_rows(self, plan: StepPlan, flight: Flight) -> None:
        batch = self.builder.build(plan)
        logits = self._next_logits(batch)
        found = prompt_logprobs.scores_of(logits[len(batch.sampled) :], batch.scored)
        if batch.sampled:
            samples = self.sampler.sample(logits[: len(batch.sampled)], batch.sampled, batch.chosen)
            late = self._hold(masked_rows(batch.sampled), logits, samples)
            flight.late += late
            first = len(flight.sampled)
            if samples.logprobs:
                flight.logprobs |= {first + place: found for place, found in samples.logprobs.items()}
            flight.sampled += samples.tokens
            for row, token in zip(batch.sampled, samples.tokens, strict=True):
                if row.number in late:
                    continue
                row.tokens.append(UNKNOWN_TOKEN if token is None else token)
        for number, scores in found.items():
            flight.prompt_logprobs[number] = prompt_logprobs.joined(flight.prompt_logprobs.get(number), scores)
        flight.model_calls += 1
        flight.attention_calls += batch.calls
        flight.padding += batch.input_ids.numel() - batch.tokens
        if not flight.late and self._may_go_on(plan, batch) and self._attention is not None:
            self.again = NextDecode(plan, batch, self.table, self._attention)

    def _may_go_on(self, plan: StepPlan, batch: FlatBatch) -> bool:
        """True if a NextDecode may follow this iteration."""
        only_decodes = bool(plan.decodes) and not plan.prefills and batch.paged is not None
        return only_decodes and self.loaded.device.type == "cpu" and self.sampler.chose_largest
