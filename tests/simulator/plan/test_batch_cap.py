"""In a simulated cluster, the cap keeps the time of a token, and one more sequence breaks it (S3-18)."""

import random
from collections.abc import Iterator
from statistics import median

from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.setup import Setup
from motet_simulator.profiles.profile import StepLaw
from motet_simulator.workloads.request import WorkloadRequest
from tests.simulator.setups import profile

LAW = StepLaw(fixed=0.02, decodes=((1, 0.008), (64, 0.512)), context=2e-5, prefill=1e-3)
TARGET = 0.1875


def saturated(count: int) -> Iterator[WorkloadRequest]:
    """More requests than the runner can answer."""
    chance = random.Random(1)
    for number in range(count):
        output = 1 + min(200, int(chance.expovariate(1 / 60)))
        yield WorkloadRequest(at=number / 20, prompt_tokens=chance.randrange(1, 40), output_tokens=output, tenant="t")


def simulated(**size) -> tuple[float, Cluster]:
    """The median time of a token, once the runner is full and has found its cap."""
    cluster = Cluster(Setup(profile=profile(noise=0, law=LAW, pages=4096, **size), runners=1, max_tokens=256))
    outcome = cluster.run(saturated(300))
    assert not outcome.refusals
    return median(outcome.per_token[60:-40]), cluster


def test_the_cap_keeps_the_target_and_one_more_breaks_it() -> None:
    at_cap, cluster = simulated(tpot_seconds=TARGET)
    runner = next(iter(cluster.runners.values()))
    assert runner.engine.planner.cap is not None
    cap = runner.engine.planner.cap.sequences
    assert 0.85 * TARGET <= at_cap <= TARGET
    assert simulated(max_sequences=cap)[0] <= TARGET
    assert simulated(max_sequences=cap + 1)[0] > TARGET
    assert next(iter(cluster.scheduler.runners.values())).max_sequences == cap
