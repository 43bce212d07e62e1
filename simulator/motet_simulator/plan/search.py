"""The fewest runners that keep a promise, found for each seed by simulating ever more of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from motet_simulator.plan.ahead import Ahead
from motet_simulator.plan.setup import Setup
from motet_simulator.plan.slo import Slo
from motet_simulator.plan.trial import Question, Trial, Workload
from motet_simulator.profiles.profile import Profile
from motet_simulator.workloads.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class Survey:
    """What can be said of a workload before any simulation."""

    requests: int
    least_runners: int
    """About the fewest that could compute it at all, if their batches were always full."""

    @classmethod
    def of(cls, requests: Iterable[WorkloadRequest], profile: Profile) -> "Survey":
        law, places = profile.law, profile.engine.max_sequences
        of_a_token = (law.fixed + law.seconds_of_decodes(places)) / places
        count, last, seconds = 0, 0.0, 0.0
        for count, request in enumerate(requests, 1):  # noqa: B007 - counts them
            prompt, output, last = request.prompt_tokens, request.output_tokens, request.at
            seconds += output * (of_a_token + law.context * (prompt + output / 2))
            if not request.blocks:  # which others may have computed
                seconds += law.prefill * prompt + law.attended * prompt * (prompt + 1) / 2
        return cls(count, max(1, int(min(_CAUTION * seconds / last, _MOST))) if last else 1)


_CAUTION = 0.9
"""A search may begin with too few runners, but not with far too many."""

_MOST = 1e9
"""Of a workload whose requests all come in one moment."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What a search has found."""

    fewest: dict[int, int | None]
    """Seed → the fewest runners that suffice, or None if no number that was tried does."""
    trials: dict[tuple[int, int], Trial]
    """(Runners, seed) → what was seen there."""
    most_tried: int

    def complete_trials(self, runners: int) -> list[Trial]:
        return [trial for (number, _), trial in self.trials.items() if number == runners and trial.complete]


class Search:
    def __init__(
        self,
        setup: Setup,
        workload: Workload,
        adapters: Iterable[str],
        slo: Slo,
        *,
        survey: Survey,
        most_runners: int,
        progress: Callable[[int, int], None] = lambda *_: None,
        processes: int = 1,
    ) -> None:
        """`processes`: how many simulations may run at a time. It changes only how long a search takes."""
        self._question = Question(
            setup=setup,
            workload=workload,
            adapters=tuple(adapters),
            slo=slo,
            requests=survey.requests,
            most_runners=most_runners,
        )
        self._processes = processes
        self._survey = survey
        self._most = most_runners
        self._progress = progress
        self._trials: dict[tuple[int, int], Trial] = {}

    def fewest(self, seeds: Iterable[int]) -> Answered:
        found: dict[int, int | None] = {}
        guess = min(self._survey.least_runners, self._most)
        with self._simulating(whole=False):
            for seed, later in _with_later(seeds):
                found[seed] = self._fewest(seed, guess, later)
                guess = found[seed] or max(runners for runners, _ in self._trials)
        return Answered(found, self._trials, max(runners for runners, _ in self._trials))

    def exactly(self, runners: int, seeds: Iterable[int]) -> Answered:
        """What this number of runners makes of it."""
        fewest: dict[int, int | None] = {}
        with self._simulating(whole=True):
            for seed, later in _with_later(seeds):
                trial = self._try(runners, seed, then=[(runners, one) for one in later], whole=True)
                fewest[seed] = None if self._question.slo.misses(trial.outcome) else runners
        return Answered(fewest, self._trials, runners)

    @contextmanager
    def _simulating(self, *, whole: bool) -> Iterator[None]:
        with closing(Ahead(self._question, whole=whole, processes=self._processes)) as self._ahead:
            yield

    def _fewest(self, seed: int, guess: int, later: Sequence[int]) -> int | None:
        """Twice as many each time until they suffice, then halfway between. Down from a guess, if that suffices."""
        too_few, enough = 0, guess
        rising = [] if self._trials else [min(self._most, guess * times) for times in _OFTEN_NEEDED]
        while not self._suffice(enough, seed, later, rising):
            too_few = enough
            if enough >= self._most or self._trials[enough, seed].idle_runners:
                return None
            enough = min(self._most, enough * 2)
        while enough - too_few > 1:
            middle = enough - 1 if too_few < guess <= enough else (too_few + enough) // 2
            if self._suffice(middle, seed, later):
                enough = middle
            else:
                too_few = middle
        return enough

    def _suffice(self, runners: int, seed: int, later: Sequence[int], rising: Sequence[int] = ()) -> bool:
        """`rising`: of what may be tried next with this seed."""
        more = [(number, seed) for number in rising if number > runners]
        trial = self._try(runners, seed, then=[*more, *((runners, one) for one in later)])
        return trial.complete and not self._question.slo.misses(trial.outcome)

    def _try(self, runners: int, seed: int, *, then: Iterable[tuple[int, int]], whole: bool = False) -> Trial:
        known = self._trials.get((runners, seed))
        if known is not None and (known.complete or not whole):
            return known
        self._progress(runners, seed)
        trial = self._trials[runners, seed] = self._ahead.simulate(runners, seed, then=then)
        return trial


_OFTEN_NEEDED = 2, 4
"""Times the first guess, which is low: they are simulated beside it."""


def _with_later(seeds: Iterable[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Each seed, and those after it: what one needs, they are expected to need."""
    given = tuple(seeds)
    return ((seed, given[number:]) for number, seed in enumerate(given, 1))
