"""One simulated workload of a search, which ends as soon as the promise cannot be kept any more."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.setup import Setup
from motet_simulator.plan.slo import Slo
from motet_simulator.workloads.request import WorkloadRequest

Workload = Callable[[], Iterator[WorkloadRequest]]
"""Gives the same requests each time."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of each simulation. A process of its own can be given it if its workload can be pickled."""

    setup: Setup
    workload: Workload
    adapters: tuple[str, ...]
    slo: Slo
    requests: int
    most_runners: int

    def simulate(self, runners: int, seed: int, *, whole: bool) -> Trial:
        cluster = Cluster(replace(self.setup, runners=runners, seed=seed), self.adapters)
        allowed = self.requests - math.ceil(self.slo.share * self.requests)
        missed = _Missed(self.slo)

        def in_vain() -> bool:
            """Where more runners would not help, the answer says by how much the promise is missed."""
            more_may_help = runners < self.most_runners and all(one.busy_seconds for one in cluster.runners.values())
            return not whole and more_may_help and missed.count(cluster) > allowed

        outcome = cluster.run(self.workload(), give_up=in_vain)
        return Trial(runners, seed, outcome, complete=not cluster.gave_up)


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
