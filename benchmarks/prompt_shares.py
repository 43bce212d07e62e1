"""Measures how long a tenant waits for first tokens while another floods the runners with long prompts, in virtual
time: simulated runners under the real scheduler and with the real plan of iterations. Step times come from a law.

Tenant `quiet` asks for a quarter of what the runners can do, with conversations' lengths (see `benchmarks.cluster`).
Tenant `flood` asks ten times for all, with prompts of 1,024 tokens and answers of 64: several of its prompts wait on
each runner.

`noisy_prompts_ttft` is the 95th percentile of the quiet tenant's first tokens over the same without a flood.
`noisy_prompts_ttft_by_arrival` is what it would be if prompts were computed by arrival.

    python -m benchmarks.prompt_shares [--seconds 300] [--runners 3] [--data FOLDER] [--json]
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import takewhile
from pathlib import Path

from benchmarks.cluster_loads import LONGEST, add_data_option, lengths
from benchmarks.harness import Result, arguments, percentile, report
from motet_runner.plan import Sequence
from motet_runner.plan.prompt_shares import PromptShares
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.setup import Setup
from motet_simulator.profiles.profile import EngineSize, Profile, StepLaw
from motet_simulator.workloads.request import WorkloadRequest

QUIET, FLOOD = "quiet", "flood"
SHARE, TARGET = 0.25, 1.15
FLOOD_PROMPT, FLOOD_ANSWER = 1024, 64
ENGINE = EngineSize(
    pages=60_000 // 16, page_bytes=4096, adapter_rank_bytes=4096, max_sequences=32, prefill_chunk_tokens=256
)
LAW = StepLaw(fixed=0.022, decodes=((1, 0.00025),), context=2e-7, prefill=6e-5)
PROFILE = Profile(machine="a law", model="a law", kernels="a law", engine=ENGINE, law=LAW)
SATURATING = 5.0
"""Requests a second for each runner that no runner keeps up with."""
BEGINNING_SECONDS = 20.0
"""Until the flood is everywhere. What is asked before does not count."""


class ByArrival(PromptShares):
    def in_turn(self, prompts: list[Sequence]) -> Iterable[Sequence]:
        return prompts


@dataclass(slots=True)
class Seen(Outcome):
    quiet: list[float] = field(default_factory=list)
    """The first tokens of that tenant."""

    def ended(self, answer: Answer, delivery_seconds: float) -> None:
        Outcome.ended(self, answer, delivery_seconds)
        if answer.asked.tenant == QUIET and answer.asked.at > BEGINNING_SECONDS:
            self.quiet.append(self.first_tokens[-1])

    @property
    def p95(self) -> float:
        return percentile(self.quiet, 0.95)


def quiet(rate: float, data: Path | None) -> Iterator[WorkloadRequest]:
    chance, at = random.Random(1), 0.0
    drawn = lengths(chance, data)
    while True:
        at += chance.expovariate(rate)
        prompt, output = drawn()
        yield WorkloadRequest(at=at, prompt_tokens=prompt, output_tokens=output, tenant=QUIET)


def flood(rate: float) -> Iterator[WorkloadRequest]:
    chance, at = random.Random(2), 0.0
    while True:
        at += chance.expovariate(rate)
        yield WorkloadRequest(at=at, prompt_tokens=FLOOD_PROMPT, output_tokens=FLOOD_ANSWER, tenant=FLOOD)


def played(asked: list[Iterator[WorkloadRequest]], *, runners: int, seconds: float, by_arrival: bool = False) -> Seen:
    cluster = Cluster(Setup(profile=PROFILE, runners=runners, max_tokens=LONGEST))
    cluster.outcome = seen = Seen(gaps=cluster.outcome.gaps)
    if by_arrival:
        for runner in cluster.runners.values():
            runner.engine.planner.next_iteration.shares = ByArrival()
    requests = takewhile(lambda one: one.at < seconds, merge(*asked, key=lambda one: one.at))
    cluster.run(requests, give_up=lambda: cluster.clock.now > seconds)
    return seen


def measure(runners: int, seconds: float, data: Path | None) -> list[Result]:
    full = played([quiet(SATURATING * runners, data)], runners=runners, seconds=seconds / 3)
    capacity = len(full.first_tokens) / full.seconds
    rate = SHARE * capacity
    alone = played([quiet(rate, data)], runners=runners, seconds=seconds)
    p95 = {}
    for by_arrival in (False, True):
        asked = [quiet(rate, data), flood(10 * capacity)]
        seen = played(asked, runners=runners, seconds=seconds, by_arrival=by_arrival)
        p95[by_arrival] = seen.p95
        done = len(seen.first_tokens) - len(seen.quiet)
        print(
            f"{'by arrival' if by_arrival else 'by shares'}: p95 {seen.p95:.3f} s of {len(seen.quiet)}, beside {done}"
        )
    print(f"alone: p95 {alone.p95:.3f} s of {len(alone.quiet)}; {capacity:.1f} such requests/s would be full load")
    ratio = p95[False] / alone.p95
    return [
        Result("noisy_prompts_ttft", ratio, "x", f"<= {TARGET}", ratio <= TARGET, counted=True),
        Result("noisy_prompts_ttft_by_arrival", p95[True] / alone.p95, "x", counted=True),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--runners", type=int, default=3)
    add_data_option(parser)
    options = parser.parse_args()
    report("prompt_shares", measure(options.runners, options.seconds, options.data), as_json=options.json)


if __name__ == "__main__":
    main()
