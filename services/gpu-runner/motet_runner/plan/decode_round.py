"""Decoding that goes on: all sequences that could run decode, in one iteration after the other.

Most iterations are like the one before. To compose one, the planner looks at every sequence: does it decode, does it
stand at its promise, does it need a page? A round knows the answers for as many iterations as they hold. What it cannot
know, the planner asks before each of them: whether a sequence has come, gone or changed its state, and whether there is
something to copy or to load.
"""

from operator import is_

from motet.domain import PAGE_TOKENS, Digest
from motet_runner.plan.composer import Work
from motet_runner.plan.sequence import Sequence


class DecodeRound:
    def __init__(self, sequences: list[Sequence], adapters: dict[Digest, int]) -> None:
        """`sequences` were all scheduled in the iteration before, each with its newest token."""
        self.sequences = sequences
        self.adapters = adapters
        """Where the runs of their adapters begin: the first page of each"""
        self.rows = tuple(sequence.row for sequence in sequences if sequence.row is not None)
        self.restarts = [sequence.restarts for sequence in sequences]
        self._left = min(map(_iterations_left, sequences))
        self._iterations = 0
        self._beginning: list[list[Sequence]] = [[] for _ in range(PAGE_TOKENS)]
        """Which of them begin a page in an iteration, by its number, which begins anew after so many"""
        for sequence in sequences:
            self._beginning[-sequence.scheduled % PAGE_TOKENS].append(sequence)

    @property
    def ended(self) -> bool:
        """Whether one of them may not be scheduled once more."""
        return self._iterations >= self._left

    @property
    def beginning_a_page(self) -> list[Sequence]:
        """Those that need another page for the next iteration, in their order."""
        return self._beginning[self._iterations % PAGE_TOKENS]

    def schedule(self) -> tuple[int, ...]:
        """The next iteration is planned → the tokens of each sequence before its newest one."""
        self._iterations += 1
        starts = []
        for sequence in self.sequences:
            starts.append(sequence.scheduled)
            sequence.scheduled += 1
            sequence.pending += 1
        return tuple(starts)


def may_go_on(decodes: list[Work], runnable: list[Sequence]) -> bool:
    """Whether an iteration of these decodes has all sequences that could run, in their order."""
    return len(decodes) == len(runnable) and all(map(is_, (work.sequence for work in decodes), runnable))


def _iterations_left(sequence: Sequence) -> int:
    """How often its newest token may be scheduled from now on: see `Sequence.may_be_scheduled`."""
    left = min(sequence.room, sequence.new.sampling.max_tokens - sequence.output_tokens - sequence.pending)
    if sequence.restarts_after is None:
        return left
    return min(left, sequence.restarts_after - sequence.length + 1)
