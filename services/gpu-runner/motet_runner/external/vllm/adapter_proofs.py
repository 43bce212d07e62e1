"""Proves adapters by the log probabilities that vLLM gives: it shows no linear's own result.

*Acts*: the adapter moves the log probabilities of a short text. *Meant for this base*: the recorded answers have those
that were recorded. Whether each linear is right is seen only in these sums.

A part with each plan, of requests that are alone in vLLM: the plan's rows stop, and come again with the next plan.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path

from motet.domain import pages_for
from motet.errors import AdapterError, MotetError
from motet_runner.adapters.answers_reading import AnswersReading, Tokenizer
from motet_runner.adapters.proof import Proof, check_effect
from motet_runner.adapters.recorded_answers import RecordedAnswers
from motet_runner.external.vllm.driven import Ask, Driven, LostStep
from motet_runner.plan import ProofResult, ProofStep

TOKENS = 16
COMPANY = 48
"""The tokens of the text that is computed with the other one, to see by how much that moves it"""
SALT = "motet proof"
MAX_STEPS = 1000
"""vLLM's iterations for one part"""


@dataclass(slots=True)
class _Attempt:
    step: ProofStep
    reading: AnswersReading | None
    recorded: RecordedAnswers | None = None
    effect: tuple[float, float] | None = None
    """By how much the adapter, and other rows in the batch, move a log probability at most"""
    answers: list[list[float]] = field(default_factory=list)
    """The log probabilities of the tokens of each answer"""


class AdapterProofs:
    def __init__(self, driven: Driven, model: Path, kernels: str) -> None:
        """`model`: the folder of the base model's files"""
        self._driven = driven
        self._kernels = kernels
        self._stop_others: Callable[[], None] = lambda: None
        self._tokenizer = Tokenizer(model)
        self._attempt: _Attempt | None = None
        self._base: list[list[float]] = []
        """The log probabilities of the text without an adapter: alone, and with another text in the batch"""
        self._names = 0

    def advance(
        self, step: ProofStep, adapter: int, *, stop_others: Callable[[], None], wait_seconds: float
    ) -> ProofResult | None:
        """Do the next part. `stop_others`: it leaves no other request in vLLM. `wait_seconds`: how long to wait for
        answers that are being read"""
        self._stop_others = stop_others
        found: Proof | MotetError | None
        try:
            if self._attempt is None or self._attempt.step.number != step.number:
                self._attempt = _Attempt(step, self._reading_of(step) if step.order.recorded else None)
            found = self._next(self._attempt, adapter, wait_seconds)
        except MotetError as error:
            found = error
        if found is None:
            return None
        self._attempt = None
        return ProofResult(step.number, found)

    def _reading_of(self, step: ProofStep) -> AnswersReading:
        facts = self._driven.facts
        # vLLM gives the log probabilities of a text with one token more.
        with _blamed_on_the_answers():
            return AnswersReading(
                step.layout, self._tokenizer, vocabulary=facts.vocabulary, positions=facts.max_model_length - 1
            )

    def _next(self, attempt: _Attempt, adapter: int, wait_seconds: float) -> Proof | None:
        if attempt.step.order.linears and attempt.effect is None:
            attempt.effect = self._next_of_effect(adapter)
        elif attempt.reading is not None and attempt.recorded is None:
            with _blamed_on_the_answers():
                attempt.recorded = attempt.reading.take(wait_seconds)
        elif attempt.recorded is not None and len(attempt.answers) < len(attempt.recorded.answers):
            answer = attempt.recorded.answers[len(attempt.answers)]
            (logprobs,) = self._logprobs([*answer.prompt_ids, *answer.answer_ids], adapter=adapter)
            attempt.answers.append(logprobs[-len(answer.answer_ids) :])
        return self._result(attempt)

    def _next_of_effect(self, adapter: int) -> tuple[float, float] | None:
        """None: another part has to follow"""
        length = min(TOKENS, self._driven.facts.max_model_length - 1)
        tokens = self._text(length, stride=7, first=3)
        if len(self._base) < 2:
            company = [self._text(min(COMPANY, self._driven.facts.max_model_length - 1), stride=11, first=5)]
            self._base.append(self._logprobs(tokens, *(company if self._base else ()))[0])
            return None
        alone, beside = self._base
        (moved,) = self._logprobs(tokens, adapter=adapter)
        return _largest_difference(alone, moved), _largest_difference(alone, beside)

    def _result(self, attempt: _Attempt) -> Proof | None:
        """None: parts are missing"""
        order, recorded = attempt.step.order, attempt.recorded
        if order.linears:
            if attempt.effect is None:
                return None
            check_effect(*attempt.effect, self._kernels)
        if order.recorded and (recorded is None or len(attempt.answers) < len(recorded.answers)):
            return None
        moved, composition = attempt.effect or (0.0, 0.0)
        facts = self._driven.facts
        compared = None if recorded is None else recorded.compare(attempt.answers, facts.dtype, facts.quantization)
        return Proof(self._kernels, moved, composition, order.linears, compared)

    def _text(self, length: int, *, stride: int, first: int) -> list[int]:
        return [(first + stride * place) % self._driven.facts.vocabulary for place in range(length)]

    def _logprobs(self, *texts: list[int], adapter: int = 0) -> list[list[float]]:
        """Of each token of the texts but the first"""
        facts = self._driven.facts
        if sum(pages_for(len(text) + 1, facts.block_tokens) for text in texts) > facts.blocks:
            raise AdapterError("The memory for KV is too small to prove an adapter. Raise engine.kvCacheMiB.")
        options = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "prompt_logprobs": 0}
        self._stop_others()
        names = []
        for text in texts:
            self._names += 1
            names.append(f"proof {self._names}")
            self._driven.add(Ask(names[-1], tuple(text), options, adapter, SALT))
        found: dict[str, list[float]] = {}
        for _ in range(MAX_STEPS):
            found |= {one.name: list(one.prompt_logprobs) for one in self._driven.step()}
            if found.keys() == set(names):
                return [found[name] for name in names]
        raise LostStep("vLLM does not come to the end of a proof")


@contextmanager
def _blamed_on_the_answers() -> Iterator[None]:
    """A tenant writes them, and a tokenizer may do anything: that ends no engine."""
    try:
        yield
    except MotetError:
        raise
    except Exception as error:
        raise AdapterError(f"The recorded answers cannot be read: {type(error).__name__}: {error}.") from error


def _largest_difference(one: list[float], other: list[float]) -> float:
    """NaN if a difference is not a number, or has no end"""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(differences) if all(map(isfinite, differences)) else nan
