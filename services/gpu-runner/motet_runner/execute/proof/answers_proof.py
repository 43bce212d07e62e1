"""Compares an adapter's recorded answers with what the engine computes, where the adapter lies in its memory.

Each answer is one forward pass over prompt and answer, by the model's modules, with the adapter.
"""

from collections.abc import Callable

import torch

from motet_kernels import PlacedAdapter
from motet_runner.adapters.answers_reading import AnswersReading
from motet_runner.adapters.recorded_answers import Comparison, RecordedAnswer, RecordedAnswers

LogitsOf = Callable[[PlacedAdapter, RecordedAnswer], torch.Tensor]
"""→ [tokens of the answer, vocabulary]: those from which each token of the answer was chosen"""


class AnswersProof:
    def __init__(self, reading: AnswersReading, logits: LogitsOf) -> None:
        self._reading = reading
        self._logits = logits
        self._recorded: RecordedAnswers | None = None
        self._logprobs: list[torch.Tensor] = []

    def advance(self, placed: PlacedAdapter, *, wait_seconds: float) -> bool:
        """Do the next part, if there is one yet. → True if there was one"""
        if self._recorded is None:
            self._recorded = self._reading.take(wait_seconds)
            return self._recorded is not None
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
