"""Proves an adapter where it lies in the engine's memory, before it serves.

*Right*: for four fixed rows, each linear gives what kernels' reference gives for the tensors that were checked, within
the rounding of the engine's type. *Acts*: the adapter moves the logits of a short text. *Meant for
this base*: see `answers_proof`.

The engine's thread does a few linears with each plan, or one forward pass of four rows. A thread of its own reads the
tensors and computes what is expected. The back end is another one of the kind that serves: it reads the same memory,
but no iteration's batch.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from motet_kernels import LoraBackend, PlacedAdapter, RunLayout, Segment
from motet_runner.adapters.answers_reading import AnswersReading, Tokenizer
from motet_runner.adapters.expected_results import ROWS, Expected, ExpectedResults
from motet_runner.adapters.host_load import BaseLinearOf
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import Proof, ProofOrder, check_effect, unproved
from motet_runner.adapters.recorded_answers import RecordedAnswer
from motet_runner.execute.adapters.add_lora import AddLora
from motet_runner.execute.adapters.lora_linears import LoraLinears
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.forward.added_lora import added
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.one_thread import one_thread
from motet_runner.execute.forward.trial import MakeAttention, Trial, text
from motet_runner.execute.proof.answers_proof import AnswersProof

LINEARS_AT_ONCE = 8
"""With this number of linears, a plan has done its part of a proof while sequences run"""

ALLOWED = 3.0
"""The allowed error of a row, as a multiple of what rounding explains: the root of the mean square of its results. With
rank 1, or if one direction is much larger than the others, one number moves all results of a row alike: the product
with A, whose rounding is drawn anew with each of thousands of rows. Of 48,000 such rows in bfloat16, the worst was off
by 1.7."""
ALLOWED_OF_INTEGERS = 2.0
"""The same for adapters in 8-bit integers: their rounding alone hides errors of a few percent."""
OF_ONE = 4.0
"""The same for one result, beside the error that is allowed for its row"""

TOKENS = 4
COMPANY = 12
"""The tokens of the text that is computed with the other one, to see by how much that moves it"""


MAX_BYTES_FOR_ONE_THREAD = 512 << 20
"""Of the base model's weights"""


class _Compared(NamedTuple):
    linears: tuple[str, ...]
    wrong: torch.Tensor
    """[linears] bool"""
    off: torch.Tensor
    """[linears] the largest error as a multiple of what rounding explains"""


class Serving(Protocol):
    """The kernels that serve, as a proof sees them"""

    @property
    def name(self) -> str: ...

    @property
    def add_lora(self) -> AddLora: ...

    @property
    def attention(self) -> MakeAttention: ...


@dataclass(slots=True)
class Prover:
    """What all proofs of an engine share."""

    loaded: LoadedModel
    linears: LoraLinears
    memory: torch.Tensor
    """[bytes] with all adapters"""
    serving: Callable[[], Serving]
    model: Path
    """The folder of the base model's files"""
    _kernels: str = ""
    _backend: LoraBackend[Any] | None = None
    _weight_bytes: int | None = None
    _text: FlatBatch | None = None
    """The fixed text on a page of its own, without other texts. Each proof adds its adapter."""
    _alone: torch.Tensor | None = None
    _composition: torch.Tensor | None = None
    _tokenizer: Tokenizer | None = None

    def begin(
        self, order: ProofOrder, layout: AdapterLayout, run_layout: RunLayout, base: BaseLinearOf | None
    ) -> "AdapterProof":
        answers = None
        if order.recorded:
            self._tokenizer = self._tokenizer or Tokenizer(self.model)
            model = self.loaded
            reading = AnswersReading(
                layout, self._tokenizer, vocabulary=model.vocabulary, positions=model.max_positions
            )
            answers = AnswersProof(reading, self._answer_logits)
        # Last: its thread waits until somebody takes its results or gives them up.
        expected = ExpectedResults(layout, run_layout, self.loaded.dtype, base) if order.linears else None
        return AdapterProof(self, expected, answers, self.kernels)

    @property
    def kernels(self) -> str:
        return self.serving().name

    def backend(self) -> LoraBackend[Any]:
        """Of the kind that serves"""
        kernels = self.serving()
        if self._backend is None or self._kernels != kernels.name:
            groups, dtype = self.linears.groups, self.loaded.dtype
            self._backend, self._kernels = kernels.add_lora.make(groups, self.memory, dtype, 0), kernels.name
            self.weights_changed()
        return self._backend

    def weights_changed(self) -> None:
        """The base model's weights are packed now, or its kernels have other settings: its logits may differ in their
        last digits."""
        self._text = self._alone = self._composition = None

    def prepare(self) -> bool:
        """Compute the next of the base model's logits. True if all are there."""
        self.backend()  # if other kernels serve, these logits are theirs
        if self._text is None or self._alone is None:
            self._text = self._batch_of([self._tokens()])
            self._alone = self.logits(self._text)
            self._text.begun = []  # its page is clear now, and the same tokens are written to it again
        elif self._composition is None:
            company = text(COMPANY, stride=11, first=5, vocabulary=self.loaded.vocabulary)
            beside = self.logits(self._batch_of([self._tokens(), company]))
            self._composition = (beside - self._alone).abs().max()
        else:
            return True
        return False

    def effect_of(self, adapter: PlacedAdapter) -> tuple[torch.Tensor, torch.Tensor]:
        """By how much the adapter, and other rows in the batch, move a logit at most. Only after `prepare`."""
        assert self._text is not None
        assert self._alone is not None
        assert self._composition is not None
        self._text.lora = self.backend().make_batch([Segment(0, TOKENS, adapter)])
        return (self.logits(self._text) - self._alone).abs().max(), self._composition

    def _answer_logits(self, adapter: PlacedAdapter, answer: RecordedAnswer) -> torch.Tensor:
        tokens = [*answer.prompt_ids, *answer.answer_ids[:-1]]
        backend = self.backend()
        modules = replace(self.loaded, fused=None)
        trial = Trial(modules, [tokens], backend=backend, adapters={0: adapter})
        batch = trial.batch({0: len(tokens)})
        batch.keep = batch.keep[-len(answer.answer_ids) :]
        batch.choices = None
        with added(modules, backend, batch):
            return modules.forward(batch)

    def _is_small(self) -> bool:
        """One thread takes a few hundredths of a second for a short text."""
        if self._weight_bytes is None:
            self._weight_bytes = sum(one.nbytes for one in self.loaded.model.parameters())
        return self._weight_bytes <= MAX_BYTES_FOR_ONE_THREAD

    def _tokens(self) -> list[int]:
        return text(TOKENS, stride=7, first=3, vocabulary=self.loaded.vocabulary)

    def _model(self) -> LoadedModel:
        """On a CPU as requests are computed, which takes a tenth of the time of the model's modules"""
        return self.loaded if self.loaded.device.type == "cpu" else replace(self.loaded, fused=None)

    def _batch_of(self, texts: list[list[int]]) -> FlatBatch:
        model = self._model()
        attention = None if model.fused is None else self.serving().attention
        return Trial(model, texts, attention=attention).batch({number: len(one) for number, one in enumerate(texts)})

    def logits(self, batch: FlatBatch) -> torch.Tensor:
        """[TOKENS, vocabulary] of the first text in fp32"""
        model = self._model()
        # Always with as many threads: torch's sums depend on their number.
        with added(model, self.backend(), batch), one_thread() if self._is_small() else nullcontext():
            every = model.forward(batch)
        place = 0
        for row in batch.line.rows:
            if row.number == 0:
                break
            place += len(row.tokens)
        return every[place : place + TOKENS].float()


class AdapterProof:
    def __init__(
        self, prover: Prover, expected: ExpectedResults | None, answers: AnswersProof | None, kernels: str
    ) -> None:
        """`expected`: None if linears and effect are not to be proved; `answers`: None if there are none to compare."""
        self._prover = prover
        self._expected = expected
        self._answers = answers
        self._kernels = kernels
        self._compared: list[_Compared] = []
        self._done = 0
        """How many linears are compared"""
        self._effect: tuple[torch.Tensor, torch.Tensor] | None = None
        self.parts = 0
        """How many parts are done"""

    def give_up(self) -> None:
        if self._expected is not None:
            self._expected.give_up()

    def advance(self, placed: PlacedAdapter, *, wait_seconds: float) -> bool:
        """Do the next part: some linears, or one forward pass. `wait_seconds`: no sequence would have to wait, so go on
        for about as long; 0 if one would. → True if all is launched: `result` reads it once the device has computed
        it."""
        prover, expected = self._prover, self._expected
        if expected is not None:
            expected.let_thread_compute(computes=not wait_seconds)
        if expected is not None and self._effect is None:
            # Before the linears: meanwhile the thread reads what is expected of them.
            self.parts += 1
            if prover.prepare():
                self._effect = prover.effect_of(placed)
        elif expected is not None and self._done < expected.linears:
            with one_thread() if wait_seconds else nullcontext():
                self._next_linears(expected, placed, wait_seconds)
        elif self._answers is not None:
            self.parts += self._answers.advance(placed, wait_seconds=wait_seconds)
        proved = expected is None or (self._effect is not None and self._done == expected.linears)
        return proved and (self._answers is None or self._answers.launched)

    def _next_linears(self, results: ExpectedResults, placed: PlacedAdapter, wait_seconds: float) -> None:
        backend = self._prover.backend()
        batch = None
        ends = time.monotonic() + wait_seconds
        most = self._done + (results.linears if wait_seconds else LINEARS_AT_ONCE)
        while self._done < min(most, results.linears):
            expected = results.take(max(0.0, ends - time.monotonic()))
            if expected is None:
                break
            batch = batch or backend.make_batch([Segment(0, ROWS, placed)])
            self._compared.append(self._compare(expected, backend, batch))
            self._done += len(expected.linears)
            self.parts += 1
            if wait_seconds and time.monotonic() >= ends:
                break

    def result(self) -> Proof:
        """Raises AdapterUnproved."""
        moved = composition = 0.0
        if self._effect is not None:
            self._check_linears()
            moved, composition = map(float, self._effect)
            check_effect(moved, composition, self._kernels)
        dtype = str(self._prover.loaded.dtype).removeprefix("torch.")
        recorded = None if self._answers is None else self._answers.result(dtype)
        return Proof(self._kernels, moved, composition, self._effect is not None, recorded)

    def _check_linears(self) -> None:
        wrong = torch.cat([one.wrong for one in self._compared]).tolist() if self._compared else []
        linears = [(one, number) for one in self._compared for number in range(len(one.linears))]
        for (compared, number), is_wrong in zip(linears, wrong, strict=True):
            if is_wrong:
                linear, off = compared.linears[number], float(compared.off[number])
                raise unproved(
                    f"what the engine computes for {linear} is wrong: it is off by {off:.2g} times what "
                    f"rounding explains. The kernels are {self._kernels}. Please report this, and restart the runner.",
                    reason="ProofFailed",
                )

    def _compare(self, expected: Expected, backend: LoraBackend[Any], batch: Any) -> _Compared:
        device = self._prover.memory.device
        y, rows = expected.own.to(device, copy=True), expected.rows.to(device)
        for of_linear, linear in zip(y.unbind(), expected.linears, strict=True):
            backend.add_lora(of_linear, rows, linear, batch)
        error = y.double().sub_(expected.result.to(device)).abs_()
        allowed = ALLOWED_OF_INTEGERS if expected.in_integers else ALLOWED
        explained, of_row = expected.explained.to(device), allowed * expected.of_row.to(device)
        length = torch.linalg.vector_norm(error, dim=2, keepdim=True)
        right = (length <= math.sqrt(error.shape[2]) * of_row).all((1, 2))
        right &= (error <= torch.add(of_row, explained, alpha=OF_ONE)).all((1, 2))
        off = (error.amax((1, 2)) / explained.amax((1, 2))).nan_to_num(torch.inf)
        return _Compared(expected.linears, ~right, off)
