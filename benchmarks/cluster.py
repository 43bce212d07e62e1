"""Compares how production places requests on 16 GPUs with other ways, in virtual time: the real scheduler, supervisor
and plans of runners, and step times from a law (`benchmarks.cluster_loads`).

The others serve this benchmark alone (`benchmarks.placements`): the shortest queue (JSQ: pending prompt tokens and
sequences), random, the fullest runner whatever adapters it has, and batches of one adapter.

`hours`: the load rises evenly to 22 requests a second, half of what the cluster can do, and falls again. How many hours
GPUs are busy with the shortest queue, over production's; and production's p99 of times between tokens, and of times to
the first one, over those with the shortest queue. `random`: the hours with random placement, in a third of the time.
`full_load`: the peak is 44; the tokens of the middle third over those with the shortest queue.
`consolidation`: 30 requests a second for 80 seconds, then one, with answers of up to 4,096 tokens: the hours if an
autoscaler may remove runners, so that requests move together (PU-18), over those if it may not; and the longest pause
of an answer that moves. `consolidation_hours_cpus`: the same with 8 runners on CPUs and less load. In `full_load` it
may, too. `cold_loads`: as `random`, with 1,000 adapters by Zipf's law, of which each GPU has 64; requests whose adapter
has to be loaded, over those with the fullest runner, and the hours.
`fcfs`: 1,000 requests wait for one GPU, with Punica's workloads (PU-25); throughput until none waits, or for 20
minutes, over that of batches from consecutive requests for one adapter. `clustered`: the same over batches of one
adapter, whose requests pass those for others.

Lengths are ShareGPT's, if `--data` or TEST_DATA names a folder with lengths/sharegpt.csv.gz; else a lognormal law's.

    python -m benchmarks.cluster [--minutes 30] [--only CASE …] [--data FOLDER] [--json]
"""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.cluster_loads import (
    LASTS,
    LONGEST_OF_BURST,
    add_data_option,
    asked,
    burst,
    lengths,
    profile,
    profile_of_cpus,
    triangle,
)
from benchmarks.harness import Result, arguments, percentile, report
from benchmarks.placements import (
    Fullest,
    Production,
    Random,
    SameAdapter,
    SameAdapterFcfs,
    ShortestQueue,
    simulate,
)
from motet_scheduler.policy.values import SchedulerConfig
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.setup import Setup
from motet_simulator.workloads.popularity import Law, adapters_of, choices, names
from motet_simulator.workloads.request import WorkloadRequest

GPUS, HALF, FULL = 16, 22.0, 44.0
CPUS = 8
ADAPTERS = 1000
WAITING = 1000
"""Requests, of which all come at once."""
MOST_SECONDS = 1200.0
"""For which they are served: batches of one request would take hours."""
TARGETS_FCFS = {Law.DISTINCT: 15.0, Law.UNIFORM: 15.0, Law.SKEWED: 15.0, Law.IDENTICAL: 0.95}
TARGETS_CLUSTERED = {Law.UNIFORM: 2.2, Law.SKEWED: 1.4}


@dataclass(frozen=True, slots=True)
class Measured:
    """One simulation."""

    outcome: Outcome
    hours: float
    """In which GPUs were busy."""
    cold: int
    in_middle: int
    """Tokens of the middle third."""

    @classmethod
    def of(
        cls,
        requests: list[WorkloadRequest],
        placement: Production,
        seconds: float,
        adapters: int = 0,
        **how: Any,
    ) -> "Measured":
        """`how`: of the setup."""
        told: list[tuple[float, int]] = []

        def look(cluster: Cluster) -> bool:
            told.append((cluster.clock.now, delivered(cluster)))
            return False

        usual: dict[str, Any] = {"profile": profile(), "runners": GPUS}
        setup = Setup(**usual | how)
        outcome = simulate(setup, requests, placement, names(adapters), look=look)
        assert not outcome.refusals, f"requests were refused: {outcome.refusals}"
        middle = [tokens for at, tokens in told if seconds / 3 <= at <= seconds * 2 / 3]
        return cls(outcome, sum(outcome.busy_seconds) / 3600, placement.cold, middle[-1] - middle[0] if middle else 0)

    @property
    def first_token(self) -> float:
        return percentile(self.outcome.first_tokens, 0.99)

    def __str__(self) -> str:
        gap, count = self.outcome.gaps.quantile(0.99), self.outcome.requests
        p99 = f"p99 of times between tokens {1e3 * gap:.1f} ms, to the first {self.first_token:.3f} s"
        return (
            f"{count} requests, {self.hours:.3f} busy hours, {p99}, {self.cold} cold loads, "
            f"{len(self.outcome.gaps.of_moves)} moves"
        )


def delivered(cluster: Cluster) -> int:
    """Tokens of all answers."""
    return cluster.outcome.output_tokens + sum(answer.delivered for answer in cluster.answers.values())


def load(
    peak: float, seconds: float, data: Path | None, adapters: Iterator[str] | None = None
) -> list[WorkloadRequest]:
    chance = random.Random(1)
    return asked(triangle(peak, seconds, lengths(chance, data), chance), adapters)


def compared(
    name: str, requests: list[WorkloadRequest], other: Production, seconds: float, adapters: int = 0, **how: Any
) -> tuple[Measured, Measured]:
    """Production, whose setup has `how` beside, and the other."""
    both = (
        Measured.of(requests, Production(), seconds, adapters, **how),
        Measured.of(requests, other, seconds, adapters),
    )
    for of, measured in zip(("production", type(other).__name__), both, strict=True):
        print(f"{name}: {of}: {measured}", flush=True)
    return both[0], both[1]


def figure(
    name: str, value: float, settings: dict[str, Any], *, least: float = -inf, most: float = inf, unit: str = "x"
) -> Result:
    target = f">= {least:g}" if least > -inf else f"<= {most:g}" if most < inf else ""
    holds = least <= value <= most if target else None
    return Result(name, value, unit, target, holds, counted=True, settings=settings)


# -- the cases ---------------------------------------------------------------------------------------------------------


def hours(given: Namespace) -> list[Result]:
    seconds, settings = 60 * given.minutes, {"minutes": given.minutes}
    ours, other = compared("hours", load(HALF, seconds, given.data), ShortestQueue(), seconds)
    gap = ours.outcome.gaps.quantile(0.99) / other.outcome.gaps.quantile(0.99)
    return [
        figure("busy_hours_ratio", other.hours / ours.hours, settings, least=3.1),
        figure("gap_p99_ratio", gap, settings, most=1.4),
        figure("ttft_p99_ratio", ours.first_token / other.first_token, settings, most=2.0),
    ]


def at_random(given: Namespace) -> list[Result]:
    seconds = 60 * given.minutes / 3
    ours, other = compared("random", load(HALF, seconds, given.data), Random(), seconds)
    return [figure("busy_hours_ratio_random", other.hours / ours.hours, {"minutes": given.minutes / 3})]


def full_load(given: Namespace) -> list[Result]:
    seconds = 60 * given.minutes
    ours, other = compared("full load", load(FULL, seconds, given.data), ShortestQueue(), seconds, shrinks=True)
    value = ours.in_middle / other.in_middle
    return [figure("full_load_throughput", value, {"minutes": given.minutes}, least=0.98)]


def consolidation(given: Namespace) -> list[Result]:
    requests = asked(burst(random.Random(1), given.data))
    ours, other = (
        Measured.of(requests, Production(), LASTS, max_tokens=LONGEST_OF_BURST, shrinks=shrinks)
        for shrinks in (True, False)
    )
    print(f"consolidation: {ours}; without: {other}", flush=True)
    settings = {"seconds": LASTS}
    pause = max(ours.outcome.gaps.of_moves, default=0.0)
    return [
        figure("consolidation_hours", ours.hours / other.hours, settings, most=0.8),
        figure("consolidation_pause_s", pause, settings, most=1.2, unit="s"),
        on_cpus(given.data),
    ]


def on_cpus(data: Path | None, rate: float = 4.0) -> Result:
    requests = asked(burst(random.Random(1), data, rate, 0.15))
    ours, other = (
        Measured.of(
            requests,
            Production(),
            LASTS,
            profile=profile_of_cpus(),
            runners=CPUS,
            max_tokens=LONGEST_OF_BURST,
            shrinks=shrinks,
        )
        for shrinks in (True, False)
    )
    print(f"consolidation on CPUs: {ours}; without: {other}", flush=True)
    return figure("consolidation_hours_cpus", ours.hours / other.hours, {"seconds": LASTS}, most=0.95)


def cold_loads(given: Namespace) -> list[Result]:
    seconds, settings = 60 * given.minutes / 3, {"minutes": given.minutes / 3}
    requests = load(HALF, seconds, given.data, choices(Law.ZIPF, ADAPTERS, 1))
    ours, other = compared("cold loads", requests, Fullest(), seconds, ADAPTERS)
    return [
        figure("cold_loads", ours.cold / other.cold, settings, most=0.8),
        figure("cold_loads_hours", ours.hours / other.hours, settings, most=1.03),
    ]


def fcfs(given: Namespace) -> list[Result]:
    return [
        figure(
            f"vs_fcfs_{law}",
            throughput(law, Production(), given) / throughput(law, SameAdapterFcfs(), given),
            {"requests": given.requests},
            least=least,
        )
        for law, least in TARGETS_FCFS.items()
    ]


def clustered(given: Namespace) -> list[Result]:
    return [
        figure(
            f"vs_clustered_{law}",
            throughput(law, Production(), given) / throughput(law, SameAdapter(), given, reorders=True),
            {"requests": given.requests},
            least=least,
        )
        for law, least in TARGETS_CLUSTERED.items()
    ]


def throughput(law: Law, placement: Production, given: Namespace, *, reorders: bool = False) -> float:
    """Tokens a second of one GPU, while requests wait."""
    chance, adapters = random.Random(1), adapters_of(law, given.requests)
    drawn = lengths(chance, given.data)
    requests = asked(((0.0, *drawn()) for _ in range(given.requests)), choices(law, adapters, 1), reorders=reorders)
    found = 0.0

    def look(cluster: Cluster) -> bool:
        nonlocal found
        found = delivered(cluster) / cluster.clock.now
        return cluster.clock.now >= MOST_SECONDS or not cluster.scheduler.queued()

    config = SchedulerConfig(max_passed_over=given.requests) if reorders else SchedulerConfig()
    simulate(Setup(profile=profile(), runners=1, scheduler=config), requests, placement, names(adapters), look=look)
    print(f"{type(placement).__name__}, {law}: {found:.0f} tokens/s", flush=True)
    return found


CASES: dict[str, Callable[[Namespace], list[Result]]] = {
    "hours": hours,
    "random": at_random,
    "full_load": full_load,
    "consolidation": consolidation,
    "cold_loads": cold_loads,
    "fcfs": fcfs,
    "clustered": clustered,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="virtual time of a load that rises and falls")
    parser.add_argument("--requests", type=int, default=WAITING, help="requests that wait for one GPU")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), help="these cases")
    add_data_option(parser)
    given = parser.parse_args()
    report("cluster", [result for name in given.only for result in CASES[name](given)], as_json=given.json)


if __name__ == "__main__":
    main()
