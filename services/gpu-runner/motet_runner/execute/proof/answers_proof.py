"""Compares an adapter's recorded answers with what the engine computes, where the adapter lies in its memory.

A thread reads the answers, and has the base model's tokenizer make tokens of their prompts. Then each answer is one
forward pass over prompt and answer, by the model's modules, with the adapter.
"""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import torch

from motet.errors import AdapterError, AdapterFetchFailed
from motet_kernels import PlacedAdapter
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.recorded_answers import Comparison, RecordedAnswer, RecordedAnswers, read_recorded_answers
from motet_runner.base_tokenizer import tokenizer_of
from motet_runner.execute.forward.modules import LoadedModel

log = structlog.get_logger(__name__)

LogitsOf = Callable[[PlacedAdapter, RecordedAnswer], torch.Tensor]
"""→ [tokens of the answer, vocabulary]: those from which each token of the answer was chosen"""


class Tokenizer:
    """The base model's, read once by the first thread that needs it. If transformers cannot read it, prompts are not
    checked: an adapter is not to blame."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._read: list[Any] = []

    def check(self, recorded: RecordedAnswers) -> None:
        """Raises AdapterIncompatible if it makes other tokens of a prompt."""
        with self._lock:
            if not self._read:
                try:
                    self._read.append(tokenizer_of(self._model))
                except Exception as error:
                    log.warning("tokenizer_not_read", model=str(self._model), error=f"{type(error).__name__}: {error}")
                    self._read.append(None)
            recorded.check_prompts(self._read[0])


class AnswersProof:
    def __init__(self, layout: AdapterLayout, tokenizer: Tokenizer, base: LoadedModel, logits: LogitsOf) -> None:
        self._folder = Path(layout.file).parent
        self._tokenizer = tokenizer
        self._vocabulary, self._positions = base.vocabulary, base.max_positions
        self._logits = logits
        self._found: queue.Queue[RecordedAnswers | BaseException] = queue.Queue(1)
        self._recorded: RecordedAnswers | None = None
        self._logprobs: list[torch.Tensor] = []
        threading.Thread(target=self._run, name="recorded-answers", daemon=True).start()

    def advance(self, placed: PlacedAdapter, *, wait_seconds: float) -> bool:
        """Do the next part, if there is one yet. → True if there was one"""
        if self._recorded is None:
            try:
                found = self._found.get(timeout=wait_seconds) if wait_seconds else self._found.get_nowait()
            except queue.Empty:
                return False
            if isinstance(found, BaseException):
                raise found
            self._recorded = found
            return True
        answer = self._recorded.answers[len(self._logprobs)]
        logits = self._logits(placed, answer)
        tokens = torch.tensor([answer.answer_ids], device=logits.device).T
        self._logprobs.append(logits.float().log_softmax(-1).gather(1, tokens)[:, 0])
        return True

    @property
    def launched(self) -> bool:
        return self._recorded is not None and len(self._logprobs) == len(self._recorded.answers)

    def result(self, dtype: str) -> Comparison:
        assert self._recorded is not None
        return self._recorded.compare([one.tolist() for one in self._logprobs], dtype)

    def _run(self) -> None:
        try:
            recorded = read_recorded_answers(self._folder)
            if recorded is None:
                raise AdapterFetchFailed("The adapter's recorded answers have gone from the runner's disk.")
            recorded.check_vocabulary(self._vocabulary)
            recorded.check_positions(self._positions)
            self._tokenizer.check(recorded)
            self._found.put(recorded)
        except (AdapterError, OSError, MemoryError, RuntimeError) as error:
            self._found.put(error)
        except BaseException as error:  # a tokenizer may do anything, and one in Rust may panic
            self._found.put(
                AdapterError(f"The base model's tokenizer could not read a prompt: {type(error).__name__}.")
            )
