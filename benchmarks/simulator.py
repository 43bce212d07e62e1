"""Measures how many requests a second the simulator of `motet plan` gets through on one core, with 16 runners.

The workload has Alpaca-like lengths (19 prompt tokens and 58 output tokens on average, lognormal), once for the base
model, once for 10,000 adapters by Zipf's law, and once with answers of 1,000 tokens. The profile is a small GPU's law
with residuals as on a busy machine. Only the CPU time of this process counts.
Beside it: the same with each iteration by itself instead of leaps.

Then it measures how long a plan takes for a published trace, if one is given: a conversation trace of an hour, with 200
adapters, in three simulations.

    python -m benchmarks.simulator [--requests 3000] [--trace FILE] [--json]
"""

import math
import os
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness import Result, arguments, report
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.search import Search, Survey
from motet_simulator.plan.sentence import sentence
from motet_simulator.plan.setup import Setup
from motet_simulator.plan.slo import Slo
from motet_simulator.profiles.profile import EngineSize, Profile, Residuals, StepLaw
from motet_simulator.workloads.complete import Completion, adapters_asked_for, workload
from motet_simulator.workloads.popularity import Law, names
from motet_simulator.workloads.punica import Made, make
from motet_simulator.workloads.request import WorkloadRequest

RUNNERS = 16
ADAPTERS = 10_000
LONG = 1000
TARGET, TARGET_ADAPTERS, TARGET_LONG, TARGET_PLAN_S = 1000, 500, 500, 120


def profile() -> Profile:
    """A middle of 8 ms, and one iteration in twenty that takes twice as long."""
    chance = random.Random(1)
    seen = tuple(math.exp(chance.gauss(0, 0.42)) for _ in range(5000))
    return Profile(
        machine="a law",
        model="a law",
        kernels="a law",
        engine=EngineSize(
            pages=4096,
            page_bytes=1 << 20,
            adapter_rank_bytes=1 << 20,
            adapter_rank_tile=8,
            max_sequences=64,
            max_model_length=16_384,
            adapter_slots=32,
            cached_adapters=256,
        ),
        law=StepLaw(
            fixed=0.006, decodes=((1, 0.0002), (64, 0.006)), context=4e-8, prefill=4e-5, attended=2e-9, adapters=3e-5
        ),
        residuals=Residuals(decoding=seen, prompts=seen),
    )


def requests_per_second(requests: list[WorkloadRequest], adapters: int, *, leaps: bool = True) -> float:
    setup = Setup(profile=profile(), runners=RUNNERS, lengths="answers", leaps=leaps)
    cluster = Cluster(setup, names(adapters))
    began = time.process_time()
    outcome = cluster.run(iter(requests))
    seconds = time.process_time() - began
    assert outcome.requests == len(requests)
    busy = sum(outcome.busy_seconds) / RUNNERS / outcome.seconds
    print(f"{len(requests)} requests in {outcome.seconds:.0f} simulated seconds, runners {100 * busy:.0f} % busy")
    return len(requests) / seconds


def measure(count: int) -> list[Result]:
    alpaca = list(make(Made(requests=count, rate=200.0, law=Law.ZIPF, adapters=0)))
    adapted = list(make(Made(requests=count // 2, rate=200.0, law=Law.ZIPF, adapters=ADAPTERS)))
    long = [replace(one, at=20 * one.at, output_tokens=LONG) for one in alpaca[: count // 4]]
    figures = [
        ("sim_requests_per_s", requests_per_second(alpaca, 0), TARGET),
        ("sim_requests_per_s_10000", requests_per_second(adapted, ADAPTERS), TARGET_ADAPTERS),
        ("sim_requests_per_s_long", requests_per_second(long, 0), TARGET_LONG),
    ]
    stepped = requests_per_second(long, 0, leaps=False)
    return [
        *(Result(name, value, "requests/s", f">= {target}", value >= target) for name, value, target in figures),
        Result("sim_requests_per_s_long_stepped", stepped, "requests/s"),
    ]


def plan(trace: Path) -> list[Result]:
    completion = Completion(adapters=200)
    slo = Slo(ttft=1.0, tpot=0.05)
    began = time.perf_counter()
    of = profile()
    survey = Survey.of(workload(trace, completion), of)
    search = Search(
        Setup(profile=of, runners=1),
        partial(workload, trace, completion),
        adapters_asked_for(trace, completion),
        slo,
        survey=survey,
        most_runners=64,
        processes=(os.cpu_count() or 1) + 1,  # as the command does
    )
    answered = search.fewest(range(3))
    seconds = time.perf_counter() - began
    print(f"{survey.requests} requests: {sentence(answered, slo)}")
    return [Result("plan_s", seconds, "s", f"<= {TARGET_PLAN_S} s", seconds <= TARGET_PLAN_S)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=3000, help="requests of the first workload")
    parser.add_argument("--trace", type=Path, help="a trace to plan for, such as Azure's of conversations")
    given = parser.parse_args()
    results = measure(given.requests)
    if given.trace is not None:
        results += plan(given.trace)
    report("simulator", results, as_json=given.json)


if __name__ == "__main__":
    main()
