"""Which sequences compute what in the next iteration (OR-01, OR-06, PU-09; chunked prefill beside all decodes).

First-come, first-served: the earlier sequence takes a place and prefill tokens first, so of two sequences that could
run, the earlier never has fewer iterations (OR-07). `joining` says who starts in presets with another order.

A preset may put prompts first (SW-13). Decodes without room in the iteration are then paused: they keep their pages. A
sequence that was paused as often as the preset allows goes first and is never paused again (SW-14).

Suspects (sequences that an engine had when it died) are the exception: each is computed alone until it has shown that
it can be computed: so the next death shows which request kills engines. Every other iteration is for the others:
suspects slow their neighbours down by half at most.

Presets that cut prompts take fewer prompt tokens beside decodes than alone, so that no decode waits long for its next
token; `step_costs` knows how many. Tenants share them (`prompt_shares`), and first-come, first-served is
within a tenant. Places are taken by arrival: an answer occupies its place far longer than its prompt says. A request
whose answer another runner has begun comes before all prompts, without that limit: it came first, to the other runner,
and its reader waits for the next token, as readers of decodes do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from motet.domain import BASE, Digest, pages_for
from motet_runner.plan.joining import choose, passed_over
from motet_runner.plan.presets import UNBOUNDED, Preset
from motet_runner.plan.prompt_shares import PromptShares
from motet_runner.plan.sequence import Sequence

PromptTokensBeside = Callable[[int, int], int]
"""Gets the number of an iteration's decodes and of sequences in their prompt phase → how many prompt tokens the
iteration takes, at least one."""


@dataclass(slots=True)
class Work:
    """One sequence's rows: tokens [start, start + count) of it. `samples` if they include its newest token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class Iteration:
    decodes: list[Work] = field(default_factory=list)
    prefills: list[Work] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    """Decoding sequences that this iteration leaves out for prompts."""
    passed_over: list[Sequence] = field(default_factory=list)
    """Sequences that do not start although a later one does."""
    prompts: int = 0
    """How many sequences of one tenant wait for the prompt tokens beside its decodes. 0: none, or others come before
    them, or other tenants may be next."""

    @property
    def work(self) -> list[Work]:
        return self.decodes + self.prefills

    @property
    def prefill_tokens(self) -> int:
        return sum(work.count for work in self.prefills)

    @property
    def adapters(self) -> list[Digest]:
        return adapters_of([work.sequence for work in self.work])

    @property
    def suspect(self) -> Sequence | None:
        """The suspect that this iteration computes alone."""
        if len(self.decodes) + len(self.prefills) != 1:
            return None
        (work,) = self.work
        return work.sequence if work.sequence.suspect else None

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    def without(self, sequence: Sequence) -> "Iteration":
        return Iteration(
            [work for work in self.decodes if work.sequence is not sequence],
            [work for work in self.prefills if work.sequence is not sequence],
            [paused for paused in self.paused if paused is not sequence],
            self.passed_over,
        )

    def begin(self) -> None:
        """Update each sequence's counters, because this iteration is computed."""
        for work in self.work:
            work.sequence.started = True
            work.sequence.paused = False
        for sequence in self.paused:
            sequence.paused = True
            sequence.paused_times += 1
        for sequence in self.passed_over:
            sequence.passed_over += 1


def adapters_of(sequences: Iterable[Sequence]) -> list[Digest]:
    """In their order, and not in a set's, which is another one in each process: they are used in this order, and the
    adapter that was used first is evicted first."""
    return [one for one in dict.fromkeys([sequence.adapter for sequence in sequences]) if one != BASE]


def compose(
    runnable: Iterable[Sequence],
    preset: Preset,
    *,
    chunk_tokens: int,
    places: int,
    suspects_first: bool = True,
    free_pages: int | None = None,
    beside: PromptTokensBeside | None = None,
    cap: int = UNBOUNDED,
    late: bool = False,
    shares: PromptShares | None = None,
) -> Iteration:
    """Choose the rows of one iteration among runnable sequences, given in order of arrival.

    `places` bounds how many sequences have started and not finished (OR-08). No more start while `cap` have; it may
    fall below those that have, and they go on. A sequence at its promise is skipped, and only that one (S3-10). With
    `suspects_first` a suspect goes before all others, otherwise after them. `free_pages`: how many pages are free now;
    only presets that pause use it. `beside` bounds the prompt tokens of an iteration that also decodes, for presets
    that cut prompts; None: only `chunk_tokens` does. `late`: others have started and sit out this iteration. `shares`:
    what tenants have had, for the same presets.
    """
    started: list[Sequence] = []
    fresh: list[Sequence] = []
    for sequence in runnable:
        (started if sequence.started else fresh).append(sequence)
    free_places = 0 if preset.request_level and (started or late) else max(0, min(places, cap) - len(started))
    shares = (shares or PromptShares()) if preset.chunked else None
    joining = choose(fresh, preset, places=free_places)

    # Compared here, as each iteration asks for all of them: see `Sequence.at_promise` and `Sequence.suspect`.
    chosen = [one for one in (started + joining)[:places] if one.scheduled < one.promise * one.page_tokens]
    suspects = [one for one in chosen if one.new.engines_lost and one.suspect]
    others = [sequence for sequence in chosen if not sequence.suspect] if suspects else chosen
    if suspects and (suspects_first or not others):
        return _rows(suspects[:1], preset, chunk_tokens, beside, shares)
    if preset.pauses:
        return _prompts_first(others, preset, free_pages) or _prompts_first(others, preset, None)
    iteration = _rows(others, preset, chunk_tokens, beside, shares)
    if preset.order != "arrival":
        iteration.passed_over = passed_over(fresh, (work.sequence for work in iteration.prefills))
    return iteration


def _rows(
    sequences: Iterable[Sequence],
    preset: Preset,
    chunk_tokens: int,
    beside: PromptTokensBeside | None,
    shares: PromptShares | None,
) -> Iteration:
    iteration = Iteration()
    decodes = iteration.decodes
    prompts: list[Sequence] = []
    resuming: list[Sequence] = []
    for sequence in sequences:
        if sequence.decodes:
            decodes.append(Work(sequence, sequence.scheduled, 1, True))  # see `_decode`: most are these
        elif preset.chunked and sequence.resumes:
            resuming.append(sequence)
        else:
            prompts.append(sequence)
    if not prompts and not resuming:
        return iteration
    tokens_left = (chunk_tokens if preset.chunked else preset.prefill_tokens) or UNBOUNDED
    for sequence in resuming:
        count = min(sequence.to_schedule, sequence.room, tokens_left)
        if count:
            iteration.prefills.append(_prefill(sequence, count))
            tokens_left -= count
    by_turn: Iterable[Sequence] = prompts
    if shares is not None and prompts:
        by_turn = shares.in_turn(prompts)
        if beside is not None and iteration.decodes:
            tokens_left = min(tokens_left, beside(len(iteration.decodes), len(prompts)))
            iteration.prompts = len(prompts) if by_turn is prompts and not resuming else 0
    prefills_left = preset.prefills or UNBOUNDED
    for sequence in by_turn:
        if prefills_left == 0 or tokens_left == 0:
            break
        wanted = min(sequence.to_schedule, sequence.room)
        if preset.chunked:
            count = min(wanted, tokens_left)
        elif wanted <= tokens_left or not iteration.prefills:
            count = wanted
        else:
            break  # stop, not skip: a shorter prompt behind does not overtake (OR-06)
        iteration.prefills.append(_prefill(sequence, count))
        tokens_left = max(0, tokens_left - count)
        prefills_left -= 1
    return iteration


def _prompts_first(sequences: Iterable[Sequence], preset: Preset, free_pages: int | None) -> Iteration:
    """First the sequences that may not be paused again, then prompts by arrival, then paused decodes, then the others.

    Decodes count as tokens of the iteration, too. One prompt is always taken, however long it is (SW-11), if there are
    pages for it (SW-12).
    """
    iteration = Iteration()
    tokens_left = preset.prefill_tokens or UNBOUNDED
    pages_left = UNBOUNDED if free_pages is None else free_pages
    due: list[Sequence] = []
    prompts: list[Sequence] = []
    decodes: list[Sequence] = []
    for sequence in sequences:
        kind = prompts if not sequence.decodes else due if sequence.paused_times >= preset.pauses else decodes
        kind.append(sequence)
    decodes.sort(key=lambda sequence: not sequence.paused)

    for sequence in due:
        iteration.decodes.append(_decode(sequence))
        tokens_left -= 1
        pages_left -= _pages_to_take(sequence, 1)
    for sequence in prompts:
        count = min(sequence.to_schedule, sequence.room)
        pages = _pages_to_take(sequence, count)
        if pages > pages_left or (count > tokens_left and iteration.prefills):
            break  # stop, not skip: a shorter prompt behind does not overtake (OR-06)
        iteration.prefills.append(_prefill(sequence, count))
        tokens_left -= count
        pages_left -= pages
    for sequence in decodes:
        pages = _pages_to_take(sequence, 1)
        if tokens_left < 1 or pages > pages_left:
            iteration.paused.append(sequence)
            continue
        iteration.decodes.append(_decode(sequence))
        tokens_left -= 1
        pages_left -= pages
    return iteration


def _decode(sequence: Sequence) -> Work:
    return Work(sequence, sequence.scheduled, 1, samples=True)


def _prefill(sequence: Sequence, count: int) -> Work:
    return Work(sequence, sequence.scheduled, count, samples=count == sequence.to_schedule)


def _pages_to_take(sequence: Sequence, count: int) -> int:
    needed = pages_for(sequence.scheduled + count, sequence.page_tokens)
    return max(0, needed - sequence.left_pages - len(sequence.pages))
