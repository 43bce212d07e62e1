"""Decoding that goes on: all sequences that could run decode, in one iteration after the other.

Most iterations are like the one before. To compose one, the planner looks at every sequence: does it decode, does it
stand at its promise, does it need a page? A round knows the answers for as many iterations as they hold. What it cannot
know, the planner asks before each of them: whether a sequence has come, gone or changed its state, and whether there is
something to copy or to load.

Nor are the sequences touched: after a model call, each of them has to come from memory again. A round counts its
iterations and keeps their tokens as columns. `write_back` brings its sequences up to date; the planner calls it before
anybody else may look at them.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Series
from operator import is_

from motet.domain import PAGE_TOKENS, Digest
from motet_runner.interface import DecodedTokens
from motet_runner.plan.composer import Work
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_memory import SequenceMemory
from motet_runner.plan.step_plan import DecodeRows

_NO_LIMIT = 1 << 62


class DecodeRound:
    def __init__(
        self,
        sequences: list[Sequence],
        adapters: dict[Digest, int],
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        window: int | None = None,
    ) -> None:
        """`sequences` were all scheduled in the iteration before, each with its newest token. None of them is a
        suspect: those are computed alone. `window`: how many tokens a token attends to, if all layers have such a
        window."""
        self.sequences = sequences
        self.adapters = adapters
        """Where the runs of their adapters begin: the first page of each"""
        self.restarts = [sequence.restarts for sequence in sequences]
        self._rows = tuple(sequence.row for sequence in sequences if sequence.row is not None)
        self._first_starts = starts = tuple(sequence.scheduled for sequence in sequences)
        self._left = min(map(_iterations_left, sequences))
        self._beginning = _by_turn(starts)
        """Who begins a page in an iteration"""
        self._leaving = None if window is None else _by_turn(start - window + 2 for start in starts)
        """Whose window leaves a page in an iteration"""
        self._window = window or 0

        self._planned = 0
        self._collected = 0
        self._columns: list[Series[int]] = []
        """The tokens of collected iterations, until all sequences have them"""
        self._known_planned = [0] * len(sequences)
        self._known_columns = [0] * len(sequences)
        """How many iterations and columns each sequence knows"""

        self._written_back = 0, 0
        """How many iterations were planned and how many columns there were when all sequences knew"""
        self._plain_until = self._unannounced_until = 0
        self._find_limits()
        self._stops = frozenset[int]().union(*(_stops_of(sequence, eos_token_ids) for sequence in sequences))
        self._filling = _by_turn(start + 1 for start in starts)
        """Who has filled a page once an iteration is computed. Who could not add one to the cache then can do so only
        after somebody has left, and that ends the round."""
        self._names = (
            tuple(sequence.request for sequence in sequences),
            tuple(sequence.new.epoch for sequence in sequences),
            tuple(sequence.new.choice for sequence in sequences),
        )
        self._first_indices = tuple(sequence.scheduled + 1 - sequence.prompt_tokens for sequence in sequences)

    @property
    def ended(self) -> bool:
        """Whether one of them may not be scheduled once more."""
        return self._planned >= self._left

    def schedule(self, memory: SequenceMemory) -> DecodeRows | None:
        """The rows of the next iteration, with their pages taken; None if there are not as many."""
        iteration = self._planned
        beginning = self._beginning[iteration % PAGE_TOKENS]
        if len(beginning) > memory.pages.free:
            return None
        new_pages: dict[int, tuple[int, ...]] = {}
        for place in beginning:
            sequence, row = self.sequences[place], self._rows[place]
            memory.grow(sequence, self._first_starts[place] + iteration + 1)
            pages = memory.rows.new_pages_of(sequence)
            if pages:
                new_pages[row] = pages
        self._planned += 1
        if self._leaving is not None:
            for place in self._leaving[iteration % PAGE_TOKENS]:
                self._write_one_back(place)
                memory.release_left(self.sequences[place], self._window)
        return DecodeRows(self._rows, self._first_starts, new_pages, iteration)

    def take(self, tokens: Series[int | None], memory: SequenceMemory) -> DecodedTokens | None:
        """The oldest iteration under way has brought these tokens, and nothing else.

        → None, and nothing has happened, if they may mean more to some sequence than another token.
        """
        iteration = self._collected
        if iteration >= self._plain_until or self._planned > self._unannounced_until:
            return None
        finite = _all_finite(tokens)
        if finite is None or not self._stops.isdisjoint(finite):
            return None
        self._columns.append(finite)
        self._collected += 1
        self._add_to_cache(iteration, memory)
        return DecodedTokens(*self._names, self._first_indices, iteration, finite)

    def plain_iterations(self, memory: SequenceMemory) -> int:
        """How many iterations come, as far as sequences and pages tell, that bring nothing but tokens and evict
        nothing. None may be under way."""
        if self._leaving is not None:
            return 0  # pages come free between them, which `leap` does not follow
        most = min(
            self._left - self._planned, self._plain_until - self._collected, self._unannounced_until - self._planned
        )
        free = memory.pages.free
        if most // PAGE_TOKENS + 1 <= free // len(self.sequences):
            return max(0, most)
        for count in range(most):
            free -= self.pages_beginning(count)
            if free < 0:
                return count
        return max(0, most)

    def pages_beginning(self, count: int) -> int:
        """How many pages the iteration takes that comes after `count` more."""
        return len(self._beginning[(self._planned + count) % PAGE_TOKENS])

    def leap(self, count: int, tokens: Series[int], memory: SequenceMemory) -> None:
        """`count` of the `plain_iterations` at once, of which each has brought these tokens."""
        for sequence, first in zip(self.sequences, self._first_starts, strict=True):
            memory.grow(sequence, first + self._planned + count)
            memory.rows.new_pages_of(sequence)
        self._planned += count
        self._collected += count
        self._columns += [tokens] * count
        for place, sequence in enumerate(self.sequences):
            if sequence.chain is not None:
                self._write_one_back(place)
                memory.add_to_cache(sequence)

    def collected_otherwise(self) -> None:
        """Somebody else has taken in the oldest iteration under way, after `write_back`."""
        self._collected += 1
        self._find_limits()

    def write_back(self) -> None:
        """Tell the sequences what has happened."""
        if self._written_back == (self._planned, len(self._columns)):
            return
        for place in range(len(self.sequences)):
            self._write_one_back(place)
        self._columns.clear()
        self._known_columns = [0] * len(self.sequences)
        self._written_back = self._planned, 0

    def _find_limits(self) -> None:
        """Until when iterations bring their sequences nothing but tokens, if none is a stop token, counted when they
        are collected; and until when no promise's end is near, counted when they are planned. All sequences know what
        has happened."""
        self._plain_until = self._planned + min(map(_plain_tokens, self.sequences))
        self._unannounced_until = self._planned + min(map(_iterations_until_near_promise, self.sequences))

    def _write_one_back(self, place: int) -> None:
        sequence, columns = self.sequences[place], self._columns
        planned = self._planned - self._known_planned[place]
        known = self._known_columns[place]
        sequence.scheduled += planned
        sequence.pending += planned - (len(columns) - known)
        if known < len(columns):
            sequence.tokens += [column[place] for column in columns[known:]]
            sequence.computed = self._first_starts[place] + self._collected
        self._known_planned[place], self._known_columns[place] = self._planned, len(columns)

    def _add_to_cache(self, iteration: int, memory: SequenceMemory) -> None:
        """The pages that are full now"""
        for place in self._filling[iteration % PAGE_TOKENS]:
            if self.sequences[place].chain is not None:
                self._write_one_back(place)
                memory.add_to_cache(self.sequences[place])


def may_go_on(decodes: list[Work], runnable: list[Sequence]) -> bool:
    """Whether an iteration of these decodes has all sequences that could run, in their order."""
    return len(decodes) == len(runnable) and all(map(is_, (work.sequence for work in decodes), runnable))


def _by_turn(numbers: Iterable[int]) -> list[list[int]]:
    """For each iteration, which begin anew after PAGE_TOKENS: the places of the numbers that are multiples of that by
    then, if each grows by one an iteration."""
    turns: list[list[int]] = [[] for _ in range(PAGE_TOKENS)]
    for place, number in enumerate(numbers):
        turns[-number % PAGE_TOKENS].append(place)
    return turns


def _all_finite(tokens: Series[int | None]) -> list[int] | None:
    finite = [token for token in tokens if token is not None]
    return finite if len(finite) == len(tokens) else None


def _iterations_left(sequence: Sequence) -> int:
    """How often its newest token may be scheduled from now on: see `Sequence.may_be_scheduled`."""
    left = min(sequence.room, sequence.new.sampling.max_tokens - sequence.output_tokens - sequence.pending)
    if sequence.restarts_after is None:
        return left
    return min(left, sequence.restarts_after - sequence.length + 1)


def _plain_tokens(sequence: Sequence) -> int:
    """How many more iterations neither end it nor change its keys."""
    length = sequence.scheduled + 1
    plain = sequence.prompt_tokens + sequence.new.sampling.max_tokens - length - 1
    if sequence.restarts_after is not None:
        plain = min(plain, sequence.restarts_after - length)
    return plain


def _iterations_until_near_promise(sequence: Sequence) -> int:
    """How many may be planned before its promise's end is announced: see `Sequence.nears_promise`."""
    if sequence.announced or sequence.promise >= sequence.most_pages:
        return _NO_LIMIT
    return (sequence.promise - 1) * PAGE_TOKENS - sequence.scheduled - 1


def _stops_of(sequence: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    sampling = sequence.new.sampling
    return sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_token_ids
