"""Measures whether the learned cap on the batch keeps the time of a token that a pool asks for (S3-18).

Virtual: a saturated runner in a simulated cluster, under the real scheduler, with step times from a law and no noise. A
pool with the target finds its cap; then pools without a target, but with as many places as the cap and one more, show
that the one keeps the target and the other does not.

Live: the bundled model in a real engine on this machine's CPU. Answers have Alpaca-like lengths, and as many wait as
the engine takes. The target is 0.1875 s, as fast as people read, or with `--places` (the default, as the bundled model
is much faster) the mean time of a token that this many sequences have here. Then the target alone bounds the batch.

A time per token is the mean of an answer without its first token. The figures are the median answer's, over the target:
`slo_use` counts answers that are asked for in the last two thirds of the time. `slo_gap_use` is the median of all times
between two tokens, over the target.

    python -m benchmarks.slo [--places 24] [--target SECONDS] [--seconds 60] [--virtual] [--json]
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import motet_cli
from benchmarks.harness import Result, arguments, measuring_other_load, report
from motet.domain import PAGE_TOKENS, RequestId, pages_for
from motet_runner.interface import EngineConfig, NewSequence, Sampling
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.setup import Setup
from motet_simulator.profiles.profile import EngineSize, Profile, StepLaw
from motet_simulator.workloads.request import WorkloadRequest

READER = 0.1875
"""Seconds: four words a second, and three words for four tokens."""
LEAST, MOST = 0.85, 1.05
PROMPT, OUTPUT, LONGEST = 19.3, 58.45, 400
REQUESTS, RATE = 400, 20.0
LAW = StepLaw(fixed=0.02, decodes=((1, 0.006), (64, 0.384)), context=2e-5, prefill=1e-3)
WAITING = 8
"""Sequences that wait beside those that may run, so that a place is never empty."""


# -- virtual -----------------------------------------------------------------------------------------------------------


def profile(**size: float) -> Profile:
    engine = EngineSize(pages=8192, page_bytes=4096, adapter_rank_bytes=4096)
    return Profile(machine="a law", model="a law", kernels="a law", engine=replace(engine, **size), law=LAW)  # type: ignore[arg-type]


def saturated() -> Iterator[WorkloadRequest]:
    chance = random.Random(1)
    for number in range(REQUESTS):
        prompt, output = drawn(chance)
        yield WorkloadRequest(at=number / RATE, prompt_tokens=prompt, output_tokens=output, tenant="t")


def drawn(chance: random.Random) -> tuple[int, int]:
    prompt = 1 + min(LONGEST, int(chance.expovariate(1 / PROMPT)))
    return prompt, 2 + min(LONGEST, int(chance.expovariate(1 / OUTPUT)))


def simulated(**size: float) -> tuple[float, int]:
    """The median time per token, and the median cap: while the runner is full, without the beginning."""
    cluster = Cluster(Setup(profile=profile(**size), runners=1, max_tokens=2 * LONGEST))
    (runner,) = cluster.runners.values()
    caps: list[int] = []

    def look() -> bool:
        """Now and then"""
        cap = runner.engine.planner.cap
        if cap is not None and any(len(queue) for queue in cluster.scheduler.queues.values()):
            caps.append(cap.sequences)
        return False

    per_token = cluster.run(saturated(), give_up=look).per_token
    return median(per_token[REQUESTS // 4 : -REQUESTS // 8]), int(median(caps[len(caps) // 4 :])) if caps else 0


def measure_virtual() -> list[Result]:
    found, cap = simulated(tpot_seconds=READER)
    at_cap, one_more = (simulated(max_sequences=places)[0] for places in (cap, cap + 1))
    print(f"virtual: the cap is {cap} sequences")
    return [
        Result("slo_use_virtual", found / READER, "x", f"{LEAST} to 1", LEAST <= found / READER <= 1),
        Result("slo_at_cap_virtual", at_cap / READER, "x", "<= 1", at_cap <= READER, counted=True),
        Result("slo_one_more_virtual", one_more / READER, "x", "> 1", one_more > READER, counted=True),
    ]


# -- live --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    counts: bool
    """It was asked for after the cap had settled."""
    times: list[float] = field(default_factory=list)

    @property
    def per_token(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


class Saturated:
    """A real engine in which more sequences wait than may run."""

    def __init__(self, places: int, target: float | None) -> None:
        from motet_runner.engine import Engine  # not above: the virtual part needs no torch

        model = Path(motet_cli.__file__).parent / "bundled" / "model"
        self.engine = Engine(
            EngineConfig(
                model=model,
                device="cpu",
                kv_cache_mib=512,
                max_concurrent_sequences=places,
                decode_slowdown=2.0,
                tpot_seconds=target,
            )
        )
        self.ended: list[Answer] = []
        self._answers: dict[RequestId, Answer] = {}
        self._chance = random.Random(1)
        self._number = 0
        self._places = places
        self._settled = False

    @property
    def cap(self) -> int:
        cap = self.engine.report().batch_cap
        return cap.sequences if cap is not None else 0

    def run(self, seconds: float, *, settle: float = 0.0) -> None:
        """`settle`: answers that are asked for in the first seconds do not count."""
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            self._settled = passed >= settle
            limit = self._limit()
            while len(self._answers) < limit + WAITING:
                self._ask()
            for output in self.engine.step().sequences:
                answer = self._answers[output.request]
                answer.times += [time.perf_counter()] * len(output.tokens)
                if output.finish is not None:
                    self.ended.append(self._answers.pop(output.request))

    def _limit(self) -> int:
        cap = self.engine.planner.cap
        return self._places if cap is None else cap.sequences

    def _ask(self) -> None:
        self._number += 1
        prompt, output = drawn(self._chance)
        name = RequestId(f"r{self._number}")
        self._answers[name] = Answer(counts=self._settled)
        self.engine.add(
            NewSequence(
                request=name,
                epoch=1,
                prompt=tuple(self._chance.randrange(4, 1500) for _ in range(prompt)),
                promise=pages_for(prompt + output, PAGE_TOKENS),
                sampling=Sampling(max_tokens=output, ignore_eos=True),
            )
        )


def measure_live(places: int, target: float | None, seconds: float) -> list[Result]:
    if target is None:
        alone = Saturated(places, None)
        alone.run(seconds / 2, settle=seconds / 6)
        target = median(one.per_token for one in alone.ended if one.counts)
        print(f"live: with {places} places a token takes {1000 * target:.2f} ms; this is the target")
    with measuring_other_load() as other:
        live = Saturated(max(64, 4 * places), target)
        live.run(seconds, settle=seconds / 3)
    under_cap = [one for one in live.ended if one.counts]
    gaps = [later - earlier for one in under_cap for earlier, later in pairwise(one.times)]
    use = median(one.per_token for one in under_cap) / target
    cap = live.engine.report().batch_cap
    print(f"live: {len(under_cap)} answers under a cap; at last {cap}; other processes {other.share:.0%} of the CPU")
    settings = {"target_ms": round(1000 * target, 2), "places": places}
    return [
        Result("slo_use", use, "x", f"{LEAST} to {MOST}", LEAST <= use <= MOST, settings=settings),
        Result("slo_gap_use", median(gaps) / target, "x", settings=settings),
        Result("slo_cap", live.cap, "sequences", settings=settings),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--places", type=int, default=24, help="live: how many sequences the target is measured with")
    parser.add_argument("--target", type=float, help="live: a target in seconds instead")
    parser.add_argument("--seconds", type=float, default=60.0, help="live: for how long")
    parser.add_argument("--virtual", action="store_true", help="the virtual part alone")
    given = parser.parse_args()
    results = measure_virtual()
    if not given.virtual:
        results += measure_live(given.places, given.target, given.seconds)
    report("slo", results, as_json=given.json)


if __name__ == "__main__":
    main()
