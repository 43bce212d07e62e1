"""A series of iterations in which the same sequences decode: all that are runnable.

Most iterations are like the one before. To compose one, the planner checks every sequence: does it decode, does it
stand at its promise, does it need a page? A round computes the answers for as many iterations as they hold. The planner
itself checks before each iteration what a round cannot know: whether a sequence has come, gone or changed its state,
and whether there is something to copy or to load.

Sequences are not touched either: after a model call, they are no longer in the CPU's cache. A round counts its
iterations and keeps their tokens as columns. `write_back` updates its sequences; the planner calls it before anything
else reads them.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from functools import cached_property
from itertools import compress
from operator import is_

from motet.domain import Digest, RequestId
from motet_runner.interface import DecodedTokens
from motet_runner.plan.composer import Work
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_memory import SequenceMemory
from motet_runner.plan.step_plan import DecodeRows

_NO_LIMIT = 1 << 62

_Names = tuple[tuple[RequestId, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Requests, epochs, choices, and the output positions of the first tokens"""


class DecodeRound:
    def __init__(
        self,
        sequences: list[Sequence],
        adapters: dict[Digest, int],
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        window: int | None = None,
    ) -> None:
        """`sequences` were all scheduled in the previous iteration, each with its newest token. No suspect is among
        them: suspects are computed alone. `window`: how many tokens a token attends to, if all layers have such a
        window."""
        self.sequences = sequences
        self.adapters = adapters
        """Adapter → the first page of its run"""
        self.restarts = [sequence.restarts for sequence in sequences]
        self._rows = tuple(sequence.row for sequence in sequences if sequence.row is not None)
        self._page_tokens = sequences[0].page_tokens
        self._first_starts = starts = tuple(sequence.scheduled for sequence in sequences)
        self._left = min(map(_iterations_left, sequences))
        grows = [one.left_pages + len(one.pages) < one.promise for one in sequences]
        self._beginning = [[place for place in turn if grows[place]] for turn in self._by_turn(starts)]
        """Per iteration (modulo the page size), the sequences that begin a page which they do not have yet"""
        self._leaving = None
        """Per iteration (modulo the page size), the sequences whose window leaves a page"""
        if window is not None:
            windows = [sequence.to_keep(window) for sequence in sequences]
            self._leaving = self._by_turn(start - mine + 2 for start, mine in zip(starts, windows, strict=True))
        self._window = window or 0

        self._planned = 0
        self._collected = 0
        self._columns: list[Series[int]] = []
        """The tokens of collected iterations, until they are written to all sequences"""
        self._known_planned = [0] * len(sequences)
        self._known_columns = [0] * len(sequences)
        """How many iterations and columns were written to each sequence"""
        self._some_written = False
        """Whether some know more of them than others"""

        self._written_back = 0, 0
        """How many iterations were planned and how many columns there were at the last `write_back`"""
        self._plain: list[int] = []
        self._unannounced: list[int] = []
        """For each sequence: how many iterations are collected before it gets more than a token (unless the token is a
        stop token), and how many are planned before its promise is near its end."""
        self._plain_until = self._unannounced_until = 0
        """The least of each"""
        self._find_limits()
        self._eos_token_ids = eos_token_ids

    def _by_turn(self, numbers: Iterable[int]) -> list[list[int]]:
        """For each iteration modulo the page size: the indices of the numbers that are then multiples of it, if each
        grows by one per iteration."""
        size = self._page_tokens
        turns: list[list[int]] = [[] for _ in range(size)]
        for place, number in enumerate(numbers):
            turns[-number % size].append(place)
        return turns

    @cached_property
    def _stops(self) -> frozenset[int]:
        return frozenset().union(*(_stops_of(sequence, self._eos_token_ids) for sequence in self.sequences))

    @cached_property
    def _filling(self) -> list[list[int]]:
        """Per iteration (modulo the page size), the sequences that have filled a page when it is computed."""
        return self._by_turn(start + 1 for start in self._first_starts)

    @cached_property
    def _columns_of_names(self) -> _Names:
        sequences = self.sequences
        return (
            tuple(sequence.request for sequence in sequences),
            tuple(sequence.new.epoch for sequence in sequences),
            tuple(sequence.new.choice for sequence in sequences),
            tuple(
                start + 1 - sequence.prompt_tokens
                for start, sequence in zip(self._first_starts, sequences, strict=True)
            ),
        )

    @property
    def ended(self) -> bool:
        """True if one of the sequences may not be scheduled again."""
        return self._planned >= self._left

    def schedule(self, memory: SequenceMemory) -> DecodeRows | None:
        """The rows of the next iteration, with their pages taken; None if there are too few pages."""
        iteration = self._planned
        beginning = self._beginning[iteration % self._page_tokens]
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
            for place in self._leaving[iteration % self._page_tokens]:
                self._write_one_back(place)
                memory.release_left(self.sequences[place], self.sequences[place].to_keep(self._window))
        return DecodeRows(self._rows, self._first_starts, new_pages, iteration)

    def take(
        self,
        tokens: Series[int | None],
        memory: SequenceMemory,
        *,
        decoded: Callable[[DecodedTokens], None],
        sampled: Callable[[Sequence, int], None],
    ) -> bool:
        """Takes the result of the oldest launched iteration, which has only these tokens. A token that may end its
        sequence, or do more than extend it, goes to `sampled`, and all others to `decoded` before.

        → False, without any change, if a token is not finite.
        """
        iteration, finite = self._collected, _all_finite(tokens)
        if finite is None:
            return False
        apart: list[int] = []
        if (
            iteration >= self._plain_until
            or self._planned > self._unannounced_until
            or not self._stops.isdisjoint(finite)
        ):
            apart = self._apart(iteration, finite)
        for place in apart:
            self._write_one_back(place)
        self._columns.append(finite)
        self._collected += 1
        for place in apart:
            self._known_columns[place] = len(self._columns)
        names, others = self._columns_of_names, finite
        if apart:
            stay = [True] * len(finite)
            for place in apart:
                stay[place] = False
            requests, epochs, choices, first_indices = names
            names = (
                tuple(compress(requests, stay)),
                tuple(compress(epochs, stay)),
                tuple(compress(choices, stay)),
                tuple(compress(first_indices, stay)),
            )
            others = list(compress(finite, stay))
        if others:
            decoded(DecodedTokens(*names, iteration, others))
        self._extend(iteration, apart, memory, sampled)
        return True

    def _apart(self, iteration: int, tokens: Series[int]) -> list[int]:
        """Whose token may do more than extend its sequence."""
        planned, stops = self._planned, self._stops
        limits = zip(tokens, self._plain, self._unannounced, strict=True)
        return [
            place
            for place, (token, plain, unannounced) in enumerate(limits)
            if iteration >= plain or planned > unannounced or token in stops
        ]

    def _extend(
        self, iteration: int, apart: list[int], memory: SequenceMemory, sampled: Callable[[Sequence, int], None]
    ) -> None:
        """Adds the pages that are full now to the cache, and the tokens that do more to their sequences.

        In the order of the sequences, as without a round: pages that are given back are taken again in that order."""
        filling = self._filling[iteration % self._page_tokens]
        tokens = self._columns[-1]
        for place in sorted({*self._uncached(), *apart}) if apart else filling:
            sequence = self.sequences[place]
            if place in apart:
                sequence.pending -= 1
                sequence.computed = self._first_starts[place] + self._collected
                sampled(sequence, tokens[place])
                self._find_limits_of(place)
            elif sequence.chain is not None:
                self._write_one_back(place)
                memory.add_to_cache(sequence)
        if apart:
            self._find_least()

    def _uncached(self) -> list[int]:
        """Who has filled a page that is not in the cache: now, or before, while another one used an equal page that is
        cached. If that one leaves, those behind it can add theirs."""
        return [
            place
            for place, (sequence, first) in enumerate(zip(self.sequences, self._first_starts, strict=True))
            if sequence.chain is not None and (first + self._collected) // self._page_tokens > sequence.chain.cached
        ]

    def plain_iterations(self, memory: SequenceMemory) -> int:
        """How many of the next iterations have only tokens as results and evict nothing, as far as sequences and pages
        tell. To be called while no iteration is launched."""
        if self._leaving is not None:
            return 0  # iterations free pages, which `leap` does not do
        most = min(
            self._left - self._planned, self._plain_until - self._collected, self._unannounced_until - self._planned
        )
        free = memory.pages.free
        if most // self._page_tokens + 1 <= free // len(self.sequences):
            return max(0, most)
        for count in range(most):
            free -= self.pages_beginning(count)
            if free < 0:
                return count
        return max(0, most)

    def pages_beginning(self, count: int) -> int:
        """How many pages the iteration `count` iterations ahead takes."""
        return len(self._beginning[(self._planned + count) % self._page_tokens])

    def leap(self, count: int, tokens: Series[int], memory: SequenceMemory) -> None:
        """Takes `count` of the `plain_iterations` at once, each with these tokens as results."""
        planned = self._planned + count
        for sequence, first in zip(self.sequences, self._first_starts, strict=True):
            if first + planned > (sequence.left_pages + len(sequence.pages)) * sequence.page_tokens:
                memory.grow(sequence, first + planned)
                memory.rows.new_pages_of(sequence)
        self._planned = planned
        self._collected += count
        self._columns += [tokens] * count
        for place, sequence in enumerate(self.sequences):
            if sequence.chain is not None:
                self._write_one_back(place)
                memory.add_to_cache(sequence)

    def collected_otherwise(self) -> None:
        """To be called after `write_back`, when others have taken the oldest launched iteration's result."""
        self._collected += 1
        self._find_limits()

    def write_back(self) -> None:
        """Update the sequences."""
        if self._written_back == (self._planned, len(self._columns)):
            return
        if self._some_written:
            for place in range(len(self.sequences)):
                self._write_one_back(place)
            self._some_written = False
        else:
            self._write_all_back()
        self._columns.clear()
        self._known_planned = [self._planned] * len(self.sequences)
        self._known_columns = [0] * len(self.sequences)
        self._written_back = self._planned, 0

    def _write_all_back(self) -> None:
        """What `_write_one_back` does, for all that know equally much: a simulator leaps over many iterations."""
        columns, collected = self._columns, self._collected
        planned = self._planned - self._written_back[0]
        for sequence in self.sequences:
            sequence.scheduled += planned
            sequence.pending += planned - len(columns)
        if columns:
            of_each = zip(*columns, strict=True)
            for sequence, first, tokens in zip(self.sequences, self._first_starts, of_each, strict=True):
                sequence.tokens += tokens
                sequence.computed = first + collected

    def _find_limits(self) -> None:
        """All sequences must be up to date."""
        planned = self._planned
        self._plain = [planned + _plain_tokens(sequence) for sequence in self.sequences]
        self._unannounced = [planned + _iterations_until_near_promise(sequence) for sequence in self.sequences]
        self._find_least()

    def _find_limits_of(self, place: int) -> None:
        """This one must be up to date."""
        sequence = self.sequences[place]
        self._plain[place] = self._planned + _plain_tokens(sequence)
        self._unannounced[place] = self._planned + _iterations_until_near_promise(sequence)

    def _find_least(self) -> None:
        self._plain_until, self._unannounced_until = min(self._plain), min(self._unannounced)

    def _write_one_back(self, place: int) -> None:
        sequence, columns = self.sequences[place], self._columns
        self._some_written = True
        planned = self._planned - self._known_planned[place]
        known = self._known_columns[place]
        sequence.scheduled += planned
        sequence.pending += planned - (len(columns) - known)
        if known < len(columns):
            sequence.tokens += [column[place] for column in columns[known:]]
            sequence.computed = self._first_starts[place] + self._collected
        self._known_planned[place], self._known_columns[place] = self._planned, len(columns)


def may_go_on(decodes: list[Work], runnable: list[Sequence]) -> bool:
    """True if these decodes are all runnable sequences, in their order."""
    return len(decodes) == len(runnable) and all(map(is_, (work.sequence for work in decodes), runnable))


def _all_finite(tokens: Series[int | None]) -> list[int] | None:
    finite = [token for token in tokens if token is not None]
    return finite if len(finite) == len(tokens) else None


def _iterations_left(sequence: Sequence) -> int:
    """How often the newest token may be scheduled from now on: see `Sequence.may_be_scheduled`."""
    left = min(sequence.room, sequence.new.sampling.max_tokens - sequence.output_tokens - sequence.pending)
    if sequence.restarts_after is None:
        return left
    return min(left, sequence.restarts_after - sequence.length + 1)


def _plain_tokens(sequence: Sequence) -> int:
    """How many more iterations neither end the sequence nor change its keys."""
    length = sequence.scheduled + 1
    plain = sequence.prompt_tokens + sequence.new.sampling.max_tokens - length - 1
    if sequence.restarts_after is not None:
        plain = min(plain, sequence.restarts_after - length)
    return plain


def _iterations_until_near_promise(sequence: Sequence) -> int:
    """How many iterations may be planned before its promise's end is announced: see `Sequence.nears_promise`."""
    if sequence.announced or sequence.promise >= sequence.most_pages:
        return _NO_LIMIT
    return (sequence.promise - 1) * sequence.page_tokens - sequence.scheduled - 1


def _stops_of(sequence: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    sampling = sequence.new.sampling
    return sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_token_ids
