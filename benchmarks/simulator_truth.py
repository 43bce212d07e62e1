"""Measures how far simulations are from the live product: two runners with the bundled model, at about half load.

Two workloads alternate, Poisson arrivals and bursts. Each run is cut into parts, and before and after each part a block
of other requests brings step times: a part is simulated with a profile of its two blocks alone, never of itself, for a
machine may be another one half a minute later. What is outside of iterations is learned from all blocks of the run: it
is what their first tokens took longer than in a simulation without it. (Requests that are alone take longer: they wake
each process.) Both sides are measured where the dispatcher hands tokens on: this process has a gateway's dispatcher of
its own, without HTTP. Both know the length of each answer. Tokens that come in one message count as equally far apart:
short iterations may share a message.

Throughput, the medians of the time to the first token and between tokens, and their p95 are compared: simulated over
live, run by run, and the median of a workload's runs. `sim_error_p50` is the farthest from 1 of throughput and the two
medians, of both workloads; `sim_error_p95` of the two p95. The same of a usual single run, which has the machine's own
changes in it, stands beside them.

Then ten promises are drawn from the runs, each at least 20 % below or above what 19 of 20 requests got live: the plan
for these runners should say of each whether it is kept.

It needs a machine on which nothing else runs.

    python -m benchmarks.simulator_truth [--rounds 5] [--seconds 30] [--load 0.5] [--json]
"""

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.harness import Result, arguments, report
from motet.api.v1 import common_pb2, runner_pb2
from motet.clock import monotonic
from motet.domain import BASE, Digest
from motet.errors import MotetError
from motet.prefix_hints import prefix_salt, prompt_hints
from motet.transport.over_grpc import GrpcNetwork
from motet_gateway.catalog import CurrentCatalog
from motet_gateway.dispatcher import Dispatcher
from motet_gateway.generation import EndReason
from motet_gateway.held_requests import HeldRequests
from motet_gateway.live_choice import GenerationRequest
from motet_gateway.metrics import Metrics
from motet_operator.local.state_directory import StateDirectory
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.search import Search, Survey
from motet_simulator.plan.setup import Setup
from motet_simulator.plan.slo import Slo
from motet_simulator.profiles.fit import fit
from motet_simulator.profiles.profile import Overheads, Profile, Work
from motet_simulator.profiles.step_traces import read
from motet_simulator.quantiles import quantile
from motet_simulator.workloads.request import WorkloadRequest
from testbed.local_stack import running_stack

RUNNERS, SEEDS = 2, 3
TENANT, VOCABULARY = "default", 1500
PROMPT, OUTPUT, LONGEST = 40.0, 60.0, 300
TARGET_P50, TARGET_P95 = 0.10, 0.20
PROMISES, TARGET_AGREES = 10, 9
NEAREST, FARTHEST = 1.2, 2.0
"""How many times as long or as short as the measured time a promise is."""

SETTLE_SECONDS = 1.0
PIECES = 5
"""Parts of a run."""


THROUGHPUT, FIRST_TOKEN, GAP, FIRST_TOKEN_P95, GAP_P95 = (
    "throughput",
    "first token",
    "gap",
    "first token p95",
    "gap p95",
)
MIDDLE, TAILS = (THROUGHPUT, FIRST_TOKEN, GAP), (FIRST_TOKEN_P95, GAP_P95)


@dataclass(slots=True)
class Seen:
    """Seconds, and tokens a second."""

    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    """The mean gap of each answer."""
    throughput: float = 0.0

    @classmethod
    def together(cls, parts: Sequence["Seen"]) -> "Seen":
        """What was seen in parts of equal length."""
        return cls(
            [seconds for part in parts for seconds in part.first_tokens],
            [seconds for part in parts for seconds in part.gaps],
            [seconds for part in parts for seconds in part.per_token],
            sum(part.throughput for part in parts) / len(parts),
        )

    def off(self, other: "Seen") -> dict[str, float]:
        """How far the other one is off: below 0 if it is less."""
        middle, tail = 0.5, 0.95
        pairs = {
            THROUGHPUT: (self.throughput, other.throughput),
            FIRST_TOKEN: (quantile(self.first_tokens, middle), quantile(other.first_tokens, middle)),
            GAP: (quantile(self.gaps, middle), quantile(other.gaps, middle)),
            FIRST_TOKEN_P95: (quantile(self.first_tokens, tail), quantile(other.first_tokens, tail)),
            GAP_P95: (quantile(self.gaps, tail), quantile(other.gaps, tail)),
        }
        return {name: (theirs - ours) / ours for name, (ours, theirs) in pairs.items()}


def drawn(chance: random.Random, count: int, rate: float, *, bursts: bool) -> list[WorkloadRequest]:
    """`bursts`: eight at once, an eighth as often."""
    requests: list[WorkloadRequest] = []
    at = 0.0
    while len(requests) < count:
        at += chance.expovariate(rate / 8 if bursts else rate)
        requests += [
            WorkloadRequest(
                at=at,
                prompt_tokens=1 + min(LONGEST, int(chance.expovariate(1 / PROMPT))),
                output_tokens=2 + min(LONGEST, int(chance.expovariate(1 / OUTPUT))),
                max_tokens=2 + LONGEST,
            )
            for _ in range(8 if bursts else 1)
        ]
    return [replace(one, max_tokens=one.output_tokens) for one in requests[:count]]


class Asked:
    """One request, which notes when its tokens come."""

    def __init__(self, seen: Seen) -> None:
        self.ended: asyncio.Future[EndReason | MotetError] = asyncio.get_running_loop().create_future()
        self._seen = seen
        self._asked = perf_counter()
        self._first = self._newest = 0.0
        self._tokens = 0

    def placed(self) -> None: ...

    def waiting(self, for_what: str) -> None: ...

    def score(self, logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None: ...

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:  # noqa: ARG002
        if not tokens:
            return
        now = perf_counter()
        if self._tokens:
            self._seen.gaps += [(now - self._newest) / len(tokens)] * len(tokens)
        else:
            self._first = now
            self._seen.first_tokens.append(now - self._asked)
        self._newest = now
        self._tokens += len(tokens)

    def end(self, how: EndReason | MotetError) -> None:
        if self._tokens > 1:
            self._seen.per_token.append((self._newest - self._first) / (self._tokens - 1))
        self.ended.set_result(how)


class Live:
    """A client of the running product. `max_tokens` is the answer's length: the model does not end before."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._chance = random.Random(7)
        self._asked = 0

    async def play(self, requests: Sequence[WorkloadRequest]) -> Seen:
        seen = Seen()
        began = perf_counter()
        await asyncio.gather(*(self._ask(one, began + one.at, seen) for one in requests))
        seen.throughput = sum(one.output_tokens for one in requests) / (perf_counter() - began)
        return seen

    async def _ask(self, request: WorkloadRequest, due: float, seen: Seen) -> None:
        group = self._dispatcher.catalog.current.groups[0]
        base = Digest(group.base_digest)
        length = request.output_tokens
        prompt = [self._chance.randrange(VOCABULARY) for _ in range(request.prompt_tokens)]
        self._asked += 1
        order = GenerationRequest(
            request=f"truth-{self._asked}",
            tenant=TENANT,
            group=group.group,
            adapter="",
            adapter_digest=BASE,
            base_digest=base,
            request_class=common_pb2.REQUEST_CLASS_STANDARD,
            prompt_ids=prompt,
            choice=0,
            sampling=runner_pb2.Sampling(max_tokens=length, ignore_eos=True),
            seed=self._asked,
            estimate=common_pb2.Estimate(q50=length, q80=length, q90=length, q95=length, rank=length, source="exact"),
            deadline_seconds=60.0,
            prefix_hints=prompt_hints(prefix_salt(base, BASE, TENANT), prompt),
        )
        await asyncio.sleep(max(0.0, due - perf_counter()))
        asked = Asked(seen)
        self._dispatcher.start(order, asked)
        how = await asked.ended
        if isinstance(how, MotetError):
            raise how


@asynccontextmanager
async def dispatcher_beside(data: Path) -> AsyncIterator[Dispatcher]:
    """Another gateway's dispatcher, for the stack in this state directory."""
    dispatcher = Dispatcher(
        "truth",
        StateDirectory.of(data).address("scheduler"),
        CurrentCatalog(),
        Metrics(CollectorRegistry(), clock=monotonic),
        network=GrpcNetwork(),
        connect_seconds=10.0,
        held=HeldRequests(lambda: None, monotonic),
        clock=monotonic,
    )
    running = asyncio.create_task(dispatcher.run())
    try:
        while not dispatcher.catalog.known:  # noqa: ASYNC110 - nobody says when
            await asyncio.sleep(0.05)
        yield dispatcher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def simulated(profile: Profile, requests: Sequence[WorkloadRequest], seed: int) -> Seen:
    outcome = Cluster(Setup(profile=profile, runners=RUNNERS, seed=seed, lengths="exact")).run(iter(requests))
    shares = [number / 1000 for number in range(1, 1000)]
    gaps = [outcome.gaps.quantile(share) for share in shares]
    return Seen(outcome.first_tokens, gaps, outcome.per_token, outcome.output_tokens / outcome.seconds)


@dataclass(frozen=True, slots=True)
class Block:
    requests: Sequence[WorkloadRequest]
    seen: Seen
    part: "Part"

    def outside_of_iterations(self, profile: Profile) -> float:
        """What the usual first token took longer than by this profile."""
        without = simulated(profile, self.requests, seed=0)
        return quantile(self.seen.first_tokens, 0.5) - quantile(without.first_tokens, 0.5)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a run."""

    requests: Sequence[WorkloadRequest]
    seen: Seen
    profile: Profile
    """Of the blocks before and after it."""


@dataclass(frozen=True, slots=True)
class Run:
    pieces: Sequence[Piece]
    requests: Sequence[WorkloadRequest]
    """Of all pieces, one after the other."""
    seen: Seen
    profile: Profile
    """Of all its blocks."""

    def simulated(self, seed: int) -> Seen:
        return Seen.together([simulated(piece.profile, piece.requests, seed) for piece in self.pieces])

    def plan_agrees(self, slo: Slo) -> bool:
        """Whether the plan says of this promise what was seen live."""
        live = Outcome(first_tokens=self.seen.first_tokens, per_token=self.seen.per_token)
        search = Search(
            Setup(profile=self.profile, runners=RUNNERS, lengths="exact"),
            lambda: iter(self.requests),
            (),
            slo,
            survey=Survey(len(self.requests), RUNNERS),
            most_runners=RUNNERS,
        )
        planned = None not in search.exactly(RUNNERS, range(SEEDS)).fewest.values()
        kept = not slo.misses(live)
        print(f"{slo.limits()}: {'kept' if kept else 'missed'} live, the plan says {'kept' if planned else 'missed'}")
        return planned is kept


def promise_near(run: Run, number: int, chance: random.Random) -> Slo:
    """Of the two times in turn, and of each in turn one that is kept and one that is missed."""
    times = run.seen.per_token if number % 2 else run.seen.first_tokens
    factor = chance.uniform(NEAREST, FARTHEST)
    limit = quantile(times, 0.95) * (factor if number // 2 % 2 else 1 / factor)
    return Slo(tpot=limit) if number % 2 else Slo(ttft=limit)


Part = tuple[dict[Path, int], dict[Path, int]]
"""The sizes of the step traces before and after."""


class Traces:
    """The step traces of the runners, in parts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sizes(self) -> dict[Path, int]:
        return {file: file.stat().st_size for file in sorted(self._folder.glob("trace-*.jsonl"))}

    def lines(self, file: Path, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """What was written between each two sizes."""
        text = file.read_bytes()
        return [
            json.loads(line)
            for before, after in parts
            for line in text[before.get(file, 0) : after.get(file, 0)].splitlines()
        ]

    def profile(self, parts: Sequence[Part], overheads: Overheads) -> Profile:
        files = []
        for file in self.sizes():
            with file.open("rb") as opened:
                of = json.loads(opened.readline())
            kept = self.lines(file, parts)
            if kept:
                kept[0]["of"] = of["of"]
                part = file.with_name(f"part-{file.name}")
                part.write_text("".join(json.dumps(line) + "\n" for line in kept))
                files.append(part)
        return fit(*read(files), overheads)


async def runs_of(data: Path, folder: Path, rounds: int, seconds: float, load: float) -> list[Run]:
    chance, traces = random.Random(3), Traces(folder)
    played: list[tuple[Sequence[WorkloadRequest], Seen]] = []
    async with dispatcher_beside(data) as dispatcher:
        live = Live(dispatcher)
        rate = 4.0
        for _ in range(3):  # also until the runners have chosen their kernels
            before = traces.sizes()
            await live.play(drawn(chance, int(10 * rate), rate, bursts=False))
            profile = traces.profile([(before, traces.sizes())], Overheads())
            rate = load * RUNNERS / seconds_of_a_request(profile)
        print(f"{rate:.1f} requests a second")

        async def block() -> Block:
            before = traces.sizes()
            requests = drawn(chance, int(seconds / PIECES / 2 * rate), rate, bursts=chance.random() < 0.5)
            seen = await live.play(requests)
            await asyncio.sleep(SETTLE_SECONDS)
            return Block(requests, seen, (before, traces.sizes()))

        blocks = [await block()]
        for _ in range(rounds):
            for bursts in (False, True):
                for _ in range(PIECES):
                    requests = drawn(chance, int(seconds / PIECES * rate), rate, bursts=bursts)
                    played.append((requests, await live.play(requests)))
                    await asyncio.sleep(SETTLE_SECONDS)
                    blocks.append(await block())
    return [  # now, as simulations take time
        run_of(traces, played[at : at + PIECES], blocks[at : at + PIECES + 1]) for at in range(0, len(played), PIECES)
    ]


def run_of(traces: Traces, played: Sequence[tuple[Sequence[WorkloadRequest], Seen]], blocks: Sequence[Block]) -> Run:
    usual = replace(Overheads(), arrival=0.0)
    without = traces.profile([block.part for block in blocks], usual)
    arrival = max(0.0, sum(block.outside_of_iterations(without) for block in blocks) / len(blocks))
    print(f"outside of iterations {1000 * (arrival + usual.submit + usual.delivery):.1f} ms")
    overheads = replace(usual, arrival=arrival)
    pieces = [
        Piece(requests, seen, traces.profile([block.part for block in around], overheads))
        for (requests, seen), around in zip(played, pairwise(blocks), strict=True)
    ]
    return Run(
        pieces,
        one_after_the_other([piece.requests for piece in pieces]),
        Seen.together([piece.seen for piece in pieces]),
        replace(without, overheads=overheads),
    )


def one_after_the_other(parts: Sequence[Sequence[WorkloadRequest]]) -> list[WorkloadRequest]:
    """Each part begins when the last request of the part before has come, and a moment later."""
    requests: list[WorkloadRequest] = []
    for part in parts:
        begins = requests[-1].at + SETTLE_SECONDS if requests else 0.0
        requests += [replace(one, at=begins + one.at) for one in part]
    return requests


def errors(runs: Sequence[Run]) -> list[Result]:
    """The runs alternate: Poisson arrivals, bursts."""
    off: list[dict[str, float]] = []
    for number, run in enumerate(runs):
        tries = [run.seen.off(run.simulated(seed)) for seed in range(SEEDS)]
        off.append({name: median(one[name] for one in tries) for name in MIDDLE + TAILS})
        each = ", ".join(f"{name} {value:+.0%}" for name, value in off[-1].items())
        print(f"run {number + 1}, {'bursts' if number % 2 else 'poisson'}, simulated against live: {each}")
    chance = random.Random(5)
    promises = [(run, promise_near(run, n, chance)) for n in range(PROMISES) for run in [runs[n // 4 % len(runs)]]]
    agrees = sum(run.plan_agrees(slo) for run, slo in promises)
    results = []
    for name, names, target in (("sim_error_p50", MIDDLE, TARGET_P50), ("sim_error_p95", TAILS, TARGET_P95)):
        farthest = max(abs(median(one[of] for one in off[kind::2])) for kind in (0, 1) for of in names)
        usual = max(median(max(abs(one[of]) for of in names) for one in off[kind::2]) for kind in (0, 1))
        results += [
            Result(name, farthest, "", f"<= {target}", farthest <= target),
            Result(f"{name}_single_run", usual, ""),
        ]
    return [*results, Result("plan_agrees", agrees, f"of {PROMISES}", f">= {TARGET_AGREES}", agrees >= TARGET_AGREES)]


def seconds_of_a_request(profile: Profile) -> float:
    """Of a runner that decodes eight at a time."""
    together = 8
    iteration = profile.law.seconds(Work(decodes=together, context=int(together * (PROMPT + OUTPUT / 2))))
    return OUTPUT * iteration / together + profile.law.prefill * PROMPT


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each workload")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a run, without its blocks")
    parser.add_argument("--load", type=float, default=0.5, help="of what the runners could do")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as name:
        folder = Path(name)
        env = {"MOTET_STEP_TRACE": str(folder / "trace-{instance}.jsonl"), "MOTET_RUNNER_KERNELS": "torch"}
        with running_stack(folder, runners=RUNNERS, env=env) as stack:
            runs = asyncio.run(runs_of(stack.data, folder, given.rounds, given.seconds, given.load))
    report("simulator_truth", errors(runs), as_json=given.json)


if __name__ == "__main__":
    main()
