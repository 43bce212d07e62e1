"""Finds out what the next iterations of a simulated engine take, if the same sequences only go on, and leaps over them.

Either they only decode, or one prompt goes on beside the decodes, a chunk in each iteration, and its end is not
reached.
"""

from bisect import bisect_left
from collections.abc import Callable
from copy import copy
from itertools import accumulate

from motet.domain import RequestId, pages_for
from motet_runner.plan import Planner
from motet_runner.plan.chunk_round import ChunkRound
from motet_runner.plan.decode_round import DecodeRound
from motet_runner.plan.step_times import TimedStep
from motet_runner.step_costs import StepCosts
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.gaps import Gaps
from motet_simulator.profiles.profile import Work
from motet_simulator.profiles.step_times import StepTimes

MAX_LEAPT_ITERATIONS = 64
"""Iterations at once. Mostly a command comes before, and what was found out about the rest is in vain."""

_MOST_CHUNKS = 16
"""As many at once, each of which costs more to find out about."""

Quiet = Callable[[float], bool]


class Leaps:
    def __init__(
        self, planner: Planner, times: StepTimes, costs: StepCosts, answers: dict[RequestId, Answer], gaps: Gaps
    ) -> None:
        self._planner = planner
        self._times = times
        self._costs = costs
        self._answers = answers
        self._gaps = gaps
        self._round: DecodeRound | None = None
        self._of_round: list[Answer] = []
        self._seconds: list[float] = []
        """Of each iteration that was foreseen last."""
        self._chunks: list[int] = []
        """The prompt tokens of each; empty if they only decode."""

    def foresee(self, start: float, quiet: Quiet, most: int, *, before: float) -> list[float]:
        """When the next iterations end, which only go on, if no command comes; none if the next one may be another.

        `quiet`: whether nobody wants a report when this share of the pages is free. `before`: all of them begin then;
        an adapter arrives in the first one that does not.
        """
        if start >= before:
            return []
        chunks = None
        decoding = self._planner.plain_round()
        if decoding is None:
            chunks = self._planner.chunk_round()
            if chunks is None:
                return []
            decoding, most = chunks.decoding, min(most, _MOST_CHUNKS)
        memory = self._planner.memory
        most = min(decoding.plain_iterations(memory), most)
        answers = self._answers_of(decoding)
        most = min(most, min(answer.left for answer in answers) - 1)
        if most < 1 or not quiet(min(1.0, memory.free / max(1, memory.ledger.kv_pages))):
            return []
        context = sum(answer.length for answer in answers)
        if chunks is None:
            self._foresee_decodes(decoding, context, most, quiet)
        else:
            self._foresee_chunks(chunks, context, most, quiet)
        ends = list(accumulate(self._seconds, initial=start))[1:]
        return ends[: completed(ends, before) + 1]

    def take(self, start: float, ends: list[float]) -> None:
        """Take the first of the iterations that `foresee` has foreseen. They began at `start`."""
        answers, chunks = self._of_round, self._chunks
        self._planner.leap(len(ends), tuple(answer.name for answer in answers), chunks[: len(ends)])
        decodes, cap = len(answers), self._planner.cap
        context = sum(answer.length for answer in answers)
        if not chunks:
            self._costs.learn_decodes(decodes, self._seconds[: len(ends)])
        for place, (seconds, end) in enumerate(zip(self._seconds, ends, strict=False)):
            if chunks:
                self._costs.learn_chunk(decodes, chunks[place], seconds)
            if cap is not None:
                cap.learn_step(TimedStep(seconds, decodes, context + decodes * place, 0))
            self._gaps.add(end - start, decodes)
            start = end
        for answer in answers:
            answer.leapt(len(ends), start)

    def _foresee_decodes(self, decoding: DecodeRound, context: int, most: int, quiet: Quiet) -> None:
        memory, decodes = self._planner.memory, len(decoding.sequences)
        free, kv_pages = memory.free, max(1, memory.ledger.kv_pages)
        if not quiet(min(1.0, (free - (most // memory.page_tokens + 1) * decodes) / kv_pages)):
            for count in range(most):
                taken = decoding.pages_beginning(count)
                free -= taken
                if taken and not quiet(min(1.0, free / kv_pages)):
                    most = count
                    break
        work = Work(decodes=decodes, context=context, adapters=len(decoding.adapters))
        self._seconds, self._chunks = self._times.decoding(self._planner.steps + 1, most, work), []

    def _foresee_chunks(self, going: ChunkRound, context: int, most: int, quiet: Quiet) -> None:
        self._seconds, self._chunks = [], []
        memory, decoding, prompt = self._planner.memory, going.decoding, going.prompt
        decodes, adapters, step = len(decoding.sequences), len(decoding.adapters), self._planner.steps
        takeable, others = memory.pages.free, memory.free - memory.pages.free
        kv_pages = max(1, memory.ledger.kv_pages)
        at, left, pages = prompt.scheduled, prompt.to_schedule, len(prompt.pages)
        costs = copy(self._costs)  # it learns from each iteration before the next one
        for count in range(most):
            tokens = min(going.most_tokens, costs.prompt_tokens_beside(decodes, going.prompts))
            needed = pages_for(at + tokens, memory.page_tokens)
            takeable -= decoding.pages_beginning(count) + max(0, needed - pages)
            if tokens >= left or takeable < 0 or not quiet(min(1.0, (takeable + others) / kv_pages)):
                return
            attended = tokens * at + tokens * (tokens + 1) // 2
            work = Work(decodes, context + decodes * count, tokens, attended, adapters)
            seconds = self._times.seconds(step + count + 1, work)
            costs.learn_chunk(decodes, tokens, seconds)
            self._seconds.append(seconds)
            self._chunks.append(tokens)
            at, left, pages = at + tokens, left - tokens, max(pages, needed)

    def _answers_of(self, decoding: DecodeRound) -> list[Answer]:
        if self._round is not decoding:
            self._round = decoding
            self._of_round = [self._answers[sequence.request] for sequence in decoding.sequences]
        return self._of_round


def completed(ends: list[float], now: float) -> int:
    """How many of the iterations that end then have ended before `now`."""
    return bisect_left(ends, now)
