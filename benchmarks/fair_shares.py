"""Measures how fairly tenants share runners, in virtual time: simulated runners under the real scheduler and the real
supervisor, with conversations' lengths (see `benchmarks.cluster`) and step times from a law.

`share_error`: tenants with weights 1, 2 and 5 always have requests waiting. It is the largest difference between a
tenant's part of all that was computed, in the cost of tokens, and its weight's part. A token costs what it takes by the
law, which the product has to measure. What is computed while its costs still change does not count. `noisy_ttft`:
tenant `quiet` asks for a quarter of what the runners can do, and `flood` for ten times all of it. It is the 95th
percentile of the quiet tenant's first tokens over the one without the flood, and `noisy_ttft_without_headroom` the same
if runners kept no place. `headroom_cost` is what both compute with headroom over what they compute without.

    python -m benchmarks.fair_shares [--minutes 30] [--seconds 600] [--runners 3] [--data FOLDER] [--json]
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import takewhile
from pathlib import Path

from benchmarks.cluster_loads import LONGEST, add_data_option, lengths
from benchmarks.harness import Result, arguments, percentile, report
from motet_scheduler.policy.values import SchedulerConfig
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.setup import Setup
from motet_simulator.profiles.profile import EngineSize, Profile, StepLaw
from motet_simulator.workloads.request import WorkloadRequest

PLACES, SHARE, FLOOD_TIMES = 32, 0.25, 10
WEIGHTS = {"one": 1, "two": 2, "five": 5}
TARGET_TTFT, TARGET_SHARE, TARGET_COST = 1.15, 2.0, 0.97
PROFILE = Profile(
    machine="a law",
    model="a law",
    kernels="a law",
    engine=EngineSize(
        pages=60_000 // 16, page_bytes=4096, adapter_rank_bytes=4096, max_sequences=PLACES, prefill_chunk_tokens=256
    ),
    law=StepLaw(fixed=0.022, decodes=((1, 0.00025),), context=2e-7, prefill=6e-5),
)
ANSWER_COST = (PROFILE.law.fixed / PLACES + PROFILE.law.decodes[0][1]) / PROFILE.law.prefill
"""Of a token of an answer, if one of a prompt costs 1."""

QUIET, FLOOD = "quiet", "flood"
BEFORE_SECONDS = 60.0
"""Until the runners are full, and answers have ended from whose lengths others are estimated."""

COSTS_CHANGE_SECONDS = 300.0
"""From 2 to `ANSWER_COST`, by a tenth in ten seconds (`token_costs.py`), and what was placed until then has ended."""

MAX_WAITING = 1_000_000
"""Nobody is refused."""


@dataclass(slots=True)
class OfTenants(Outcome):
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    before: float = BEFORE_SECONDS
    cost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    answers: int = 0

    def ended(self, answer: Answer, delivery_seconds: float) -> None:
        Outcome.ended(self, answer, delivery_seconds)
        if answer.asked.at > self.before:
            self.first[answer.asked.tenant].append(self.first_tokens[-1])
        if answer.last_at > self.before:
            self.answers += 1
            self.cost[answer.asked.tenant] += answer.asked.prompt_tokens + ANSWER_COST * answer.delivered


def asked(tenant: str, rate: float, data: Path | None) -> Iterator[WorkloadRequest]:
    chance, at = random.Random(tenant), 0.0
    drawn = lengths(chance, data)
    while True:
        at += chance.expovariate(rate)
        prompt, output = drawn()
        yield WorkloadRequest(at=at, prompt_tokens=prompt, output_tokens=output, tenant=tenant)


def played(
    runners: int,
    seconds: float,
    *asking: Iterator[WorkloadRequest],
    headroom: bool = True,
    weights: dict[str, int] | None = None,
    before: float = BEFORE_SECONDS,
) -> OfTenants:
    config = SchedulerConfig(queue_limit=MAX_WAITING)
    if not headroom:
        config = replace(config, headroom_one_in=0)
    cluster = Cluster(Setup(profile=PROFILE, runners=runners, max_tokens=LONGEST, scheduler=config))
    cluster.outcome = outcome = OfTenants(gaps=cluster.outcome.gaps, before=before)
    cluster.scheduler.state.weights.state(
        replace(pool, weights=tuple((weights or {}).items())) for pool in cluster.saved.pools
    )
    requests = takewhile(lambda one: one.at < seconds, merge(*asking, key=lambda one: one.at))
    cluster.run(requests, give_up=lambda: cluster.clock.now > seconds)
    return outcome


def capacity_of(runners: int, seconds: float, data: Path | None) -> float:
    """Requests a second."""
    full = played(runners, seconds, asked(QUIET, 8.0 * runners, data))
    return full.answers / (full.seconds - BEFORE_SECONDS)


def measure_shares(runners: int, seconds: float, capacity: float, data: Path | None = None) -> list[Result]:
    flood = [asked(tenant, 2 * capacity, data) for tenant in WEIGHTS]
    cost = played(runners, seconds, *flood, weights=WEIGHTS, before=COSTS_CHANGE_SECONDS).cost
    parts = {one: cost[one] / sum(cost.values()) for one in WEIGHTS}
    errors = [100 * abs(parts[one] * sum(WEIGHTS.values()) / weight - 1) for one, weight in WEIGHTS.items()]
    print(f"shares: { ({one: round(part, 4) for one, part in parts.items()}) }")
    found = max(errors)
    settings = {"minutes": seconds / 60, "runners": runners}
    return [
        Result(
            "share_error", found, "%", f"<= {TARGET_SHARE} %", found <= TARGET_SHARE, counted=True, settings=settings
        )
    ]


def measure_noise(runners: int, seconds: float, capacity: float, data: Path | None = None) -> list[Result]:
    quiet, flood = SHARE * capacity, FLOOD_TIMES * capacity
    alone = percentile(played(runners, seconds, asked(QUIET, quiet, data)).first[QUIET], 0.95)
    found, done = {}, {}
    for headroom in (True, False):
        both = played(runners, seconds, asked(QUIET, quiet, data), asked(FLOOD, flood, data), headroom=headroom)
        found[headroom], done[headroom] = percentile(both.first[QUIET], 0.95) / alone, sum(both.cost.values())
    cost = done[True] / done[False]
    settings = {"seconds": seconds, "runners": runners}
    target, least = f"<= {TARGET_TTFT}", f">= {TARGET_COST}"
    return [
        Result("noisy_ttft", found[True], "x", target, found[True] <= TARGET_TTFT, counted=True, settings=settings),
        Result("noisy_ttft_without_headroom", found[False], "x", counted=True, settings=settings),
        Result("headroom_cost", cost, "x", least, cost >= TARGET_COST, counted=True, settings=settings),
    ]


def measure(minutes: float, seconds: float, runners: int, data: Path | None) -> list[Result]:
    capacity = capacity_of(runners, seconds / 2, data)
    return measure_noise(runners, seconds, capacity, data) + measure_shares(runners, 60 * minutes, capacity, data)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="virtual time with weights")
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual time beside the flood")
    parser.add_argument("--runners", type=int, default=3)
    add_data_option(parser)
    given = parser.parse_args()
    results = measure(given.minutes, given.seconds, given.runners, given.data)
    report("fair_shares", results, as_json=given.json)


if __name__ == "__main__":
    main()
