"""Measures how long a tenant waits for first tokens while another floods the runners with long prompts, in virtual
time: simulated runners under the real scheduler and with the real plan of iterations. Step times come from a law.

Tenant `quiet` asks for a quarter of what the runners can do, with lengths as in conversations. Tenant `flood` keeps as
many prompts of 1,024 tokens on the runners as they take and `--free` places leave: a pool's `concurrency` bounds it, so
that the quiet tenant finds a place at once. `noisy_prompts_ttft` is the 95th percentile of the quiet tenant's first
tokens over the one without the flood, and `noisy_prompts_ttft_by_arrival` the same if prompts were computed by arrival.

    python -m benchmarks.prompt_shares [--seconds 600] [--runners 3] [--free 10] [--json]
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import takewhile

from benchmarks.harness import Result, arguments, percentile, report
from benchmarks.virtual_plan import Request, lognormal_workload
from motet_runner.plan import Sequence
from motet_runner.plan.prompt_shares import PromptShares
from motet_scheduler.policy.values import Limits
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.setup import Setup
from motet_simulator.profiles.profile import EngineSize, Profile, StepLaw
from motet_simulator.workloads.request import WorkloadRequest

PLACES, LONGEST, SHARE, TARGET = 32, 1024, 0.25, 1.15
LAW = StepLaw(fixed=0.022, decodes=((1, 0.00025),), context=2e-7, prefill=6e-5)
PROFILE = Profile(
    machine="a law",
    model="a law",
    kernels="a law",
    engine=EngineSize(
        pages=60_000 // 16, page_bytes=4096, adapter_rank_bytes=4096, max_sequences=PLACES, prefill_chunk_tokens=256
    ),
    law=LAW,
)
LENGTHS = [
    Request(min(one.prompt, LONGEST), min(one.output, LONGEST))
    for one in lognormal_workload("sharegpt", 2 * LONGEST, (161.31, 337.99), (1.3, 1.0), 10_000).requests
]
QUIET, FLOOD = "quiet", "flood"
BEFORE_SECONDS = 60.0
"""Until the flood is everywhere."""


class ByArrival(PromptShares):
    def in_turn(self, prompts: list[Sequence]) -> Iterable[Sequence]:
        return prompts


@dataclass(slots=True)
class FirstTokens(Outcome):
    of_tenants: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def ended(self, answer: Answer, delivery_seconds: float) -> None:
        Outcome.ended(self, answer, delivery_seconds)
        if answer.asked.at > BEFORE_SECONDS:
            self.of_tenants[answer.asked.tenant].append(self.first_tokens[-1])


def asked(tenant: str, rate: float, *, prompt: int | None = None) -> Iterator[WorkloadRequest]:
    chance, at = random.Random(tenant), 0.0
    while True:
        at += chance.expovariate(rate)
        one = chance.choice(LENGTHS)
        yield WorkloadRequest(
            at=at, prompt_tokens=prompt or one.prompt, output_tokens=64 if prompt else one.output, tenant=tenant
        )


def played(runners: int, seconds: float, *asking: Iterator[WorkloadRequest], flood: int = 0, shares: bool = True) -> FirstTokens:
    """`flood`: how many requests of that tenant may run; 0: any number."""
    cluster = Cluster(Setup(profile=PROFILE, runners=runners, max_tokens=LONGEST))
    cluster.outcome = outcome = FirstTokens(gaps=cluster.outcome.gaps)
    if flood:
        grants = ((FLOOD, Limits(concurrency=flood)),)
        pools = [replace(pool, limits=grants) for pool in cluster.saved.pools]
        cluster.scheduler.state.quotas.state(pools, (), 0.0)
    for runner in cluster.runners.values() if not shares else ():
        runner.engine.planner.next_iteration.shares = ByArrival()
    requests = takewhile(lambda one: one.at < seconds, merge(*asking, key=lambda one: one.at))
    cluster.run(requests, give_up=lambda: cluster.clock.now > seconds)
    return outcome


def measure(runners: int, seconds: float, free: int) -> list[Result]:
    full = played(runners, seconds / 2, asked(QUIET, 8.0 * runners))
    capacity = len(full.first_tokens) / full.seconds
    rate = SHARE * capacity
    alone = played(runners, seconds, asked(QUIET, rate)).of_tenants[QUIET]
    found = {}
    for shares in (True, False):
        seen = played(
            runners,
            seconds,
            asked(QUIET, rate),
            asked(FLOOD, 10 * capacity, prompt=LONGEST),
            flood=(PLACES - free) * runners,
            shares=shares,
        ).of_tenants
        found[shares] = seen[QUIET]
        print(f"shares={shares}: {len(seen[QUIET])} of quiet, {len(seen[FLOOD])} of flood; quiet p50 {percentile(seen[QUIET], 0.5):.3f} p95 {percentile(seen[QUIET], 0.95):.3f}")
    print(f"capacity {capacity:.2f}/s; alone {len(alone)} p50 {percentile(alone, 0.5):.3f} p95 {percentile(alone, 0.95):.3f}")
    base = percentile(alone, 0.95)
    ratio, by_arrival = (percentile(found[shares], 0.95) / base for shares in (True, False))
    return [
        Result("noisy_prompts_ttft", ratio, "x", f"<= {TARGET}", ratio <= TARGET, counted=True),
        Result("noisy_prompts_ttft_by_arrival", by_arrival, "x", counted=True),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--runners", type=int, default=3)
    parser.add_argument("--free", type=int, default=10)
    options = parser.parse_args()
    report("prompt_shares", measure(options.runners, options.seconds, options.free), as_json=options.json)


if __name__ == "__main__":
    main()
