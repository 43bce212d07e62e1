"""The fewest runners that keep a promise, found for each seed by simulating ever more of them."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.setup import Setup
from motet_simulator.plan.slo import Slo
from motet_simulator.profiles.profile import Profile
from motet_simulator.workloads.request import WorkloadRequest

Workload = Callable[[], Iterator[WorkloadRequest]]
"""Gives the same requests each time."""


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
class Trial:
    """One simulated workload."""

    runners: int
    seed: int
    outcome: Outcome
    complete: bool
    """False: it was ended as soon as the promise could not be kept any more, since more runners may keep it."""

    @property
    def idle_runners(self) -> int:
        return sum(seconds == 0 for seconds in self.outcome.busy_seconds)


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
    ) -> None:
        self._setup = setup
        self._workload = workload
        self._adapters = tuple(adapters)
        self._slo = slo
        self._survey = survey
        self._most = most_runners
        self._progress = progress
        self._trials: dict[tuple[int, int], Trial] = {}

    def fewest(self, seeds: Iterable[int]) -> Answered:
        found: dict[int, int | None] = {}
        guess = min(self._survey.least_runners, self._most)
        for seed in seeds:
            found[seed] = self._fewest(seed, guess)
            guess = found[seed] or max(runners for runners, _ in self._trials)
        return Answered(found, self._trials, max(runners for runners, _ in self._trials))

    def exactly(self, runners: int, seeds: Iterable[int]) -> Answered:
        """What this number of runners makes of it."""
        fewest: dict[int, int | None] = {}
        for seed in seeds:
            trial = self._try(runners, seed, whole=True)
            fewest[seed] = None if self._slo.misses(trial.outcome) else runners
        return Answered(fewest, self._trials, runners)

    def _fewest(self, seed: int, guess: int) -> int | None:
        """Twice as many each time until they suffice, then halfway between. Down from a guess, if that suffices."""
        too_few, enough = 0, guess
        while not self._suffice(enough, seed):
            too_few = enough
            if enough >= self._most or self._trials[enough, seed].idle_runners:
                return None
            enough = min(self._most, enough * 2)
        while enough - too_few > 1:
            middle = enough - 1 if too_few < guess <= enough else (too_few + enough) // 2
            if self._suffice(middle, seed):
                enough = middle
            else:
                too_few = middle
        return enough

    def _suffice(self, runners: int, seed: int) -> bool:
        trial = self._try(runners, seed)
        return trial.complete and not self._slo.misses(trial.outcome)

    def _try(self, runners: int, seed: int, *, whole: bool = False) -> Trial:
        known = self._trials.get((runners, seed))
        if known is not None and (known.complete or not whole):
            return known
        self._progress(runners, seed)
        cluster = Cluster(replace(self._setup, runners=runners, seed=seed), self._adapters)
        allowed = self._survey.requests - math.ceil(self._slo.share * self._survey.requests)
        missed = _Missed(self._slo)

        def in_vain() -> bool:
            """Where more runners would not help, the answer says by how much the promise is missed."""
            more_may_help = runners < self._most and all(runner.busy_seconds for runner in cluster.runners.values())
            return not whole and more_may_help and missed.count(cluster) > allowed

        outcome = cluster.run(self._workload(), give_up=in_vain)
        trial = Trial(runners, seed, outcome, complete=not cluster.gave_up)
        self._trials[runners, seed] = trial
        return trial


class _Missed:
    """Counts the requests of one simulation that have missed a promise for certain. It looks at each answer once after
    its end."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._late = _Above(slo.ttft)
        self._slow = _Above(slo.tpot)

    def count(self, cluster: Cluster) -> int:
        """Of the promise that most have missed."""
        outcome, now, ttft = cluster.outcome, cluster.clock.now, self._slo.ttft
        late, slow = self._late.of(outcome.first_tokens), self._slow.of(outcome.per_token)
        if ttft is not None:
            late += sum(now - answer.asked.at > ttft for answer in cluster.answers.values() if answer.first_at < 0)
        return outcome.refusals.total() + max(late, slow)


class _Above:
    """How many of the times in a list that only grows are above a limit."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._seen = 0
        self._above = 0

    def of(self, times: list[float]) -> int:
        if self._limit is not None:
            new = times[self._seen :]
            self._seen += len(new)
            self._above += sum(seconds > self._limit for seconds in new)
        return self._above
