"""Who computes what in the next iteration (OR-01, OR-06, PU-09; chunked prefill beside all decodes).

First-come, first-served: whoever came earlier takes a place and prefill tokens first, so of two sequences that could
run, the earlier never has fewer iterations (OR-07).

Suspects, in whose company an engine has died, are the exception: each is computed alone until it has shown that it can
be computed, so that the next death tells the request that kills engines from its neighbours. Every other iteration is
for everybody else: suspects slow their neighbours down by half at most.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from motet_runner.plan.presets import Preset
from motet_runner.plan.sequence import Sequence


@dataclass(slots=True)
class Work:
    """One sequence's rows: tokens [start, start + count) of it. `samples` when they end at its newest token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class Iteration:
    decodes: list[Work] = field(default_factory=list)
    prefills: list[Work] = field(default_factory=list)

    @property
    def work(self) -> list[Work]:
        return self.decodes + self.prefills

    @property
    def prefill_tokens(self) -> int:
        return sum(work.count for work in self.prefills)

    @property
    def suspect(self) -> Sequence | None:
        """The sequence that this iteration computes alone because of what may happen."""
        work = self.work
        return work[0].sequence if len(work) == 1 and work[0].sequence.suspect else None

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    def without(self, sequence: Sequence) -> "Iteration":
        return Iteration(
            [work for work in self.decodes if work.sequence is not sequence],
            [work for work in self.prefills if work.sequence is not sequence],
        )


def compose(
    runnable: Iterable[Sequence], preset: Preset, *, chunk_tokens: int, places: int, suspects_first: bool = True
) -> Iteration:
    """Choose the rows of one iteration among sequences that could run, given in order of arrival.

    `places` bounds how many sequences have started and not finished (OR-08). A sequence at its promise is skipped,
    and only that one (S3-10). With `suspects_first` a suspect goes before the others, otherwise after them.
    """
    started: list[Sequence] = []
    fresh: list[Sequence] = []
    for sequence in runnable:
        (started if sequence.started else fresh).append(sequence)
    joining = max(0, places - len(started))
    if preset.request_level and started:
        joining = 0
    if preset.order == "largest first":
        fresh.sort(key=lambda sequence: -sequence.promise)

    chosen = [sequence for sequence in (started + fresh[:joining])[:places] if not sequence.at_promise]
    suspects = [sequence for sequence in chosen if sequence.suspect]
    others = [sequence for sequence in chosen if not sequence.suspect]
    if suspects and (suspects_first or not others):
        return _rows(suspects[:1], preset, chunk_tokens)
    return _rows(others, preset, chunk_tokens)


def _rows(sequences: Iterable[Sequence], preset: Preset, chunk_tokens: int) -> Iteration:
    iteration = Iteration()
    tokens_left = (chunk_tokens if preset.chunked else preset.prefill_tokens) or _UNBOUNDED
    prefills_left = preset.prefills or _UNBOUNDED
    for sequence in sequences:
        if sequence.decodes:
            iteration.decodes.append(Work(sequence, sequence.computed, 1, samples=True))
            continue
        wanted = min(sequence.to_compute, sequence.room)
        if prefills_left == 0 or tokens_left == 0:
            continue
        if preset.chunked:
            count = min(wanted, tokens_left)
        elif wanted <= tokens_left or not iteration.prefills:
            count = wanted
        else:
            tokens_left = 0  # stop, not skip: a shorter prompt behind does not overtake (OR-06)
            continue
        iteration.prefills.append(Work(sequence, sequence.computed, count, samples=count == sequence.to_compute))
        tokens_left = max(0, tokens_left - count)
        prefills_left -= 1
    return iteration


_UNBOUNDED = 1 << 60
