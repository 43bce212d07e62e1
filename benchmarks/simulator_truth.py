"""Measures how far simulations are from the live product: two runners with the bundled model, at about half load.

Two workloads alternate, Poisson arrivals and bursts. Before and after each run, a block of other requests brings step
times: the run is simulated with a profile of its two blocks alone, never of itself, for a busy machine may be another
one a minute later. What is outside of iterations is learned from requests that are alone. Both sides are measured where
the tokens reach the client, in this process.

The errors are medians over the runs: of throughput and the medians of the time to the first token and between tokens,
the largest of the three; and of the two p95.

It needs a machine on which nothing else runs.

    python -m benchmarks.simulator_truth [--rounds 5] [--seconds 30] [--load 0.5] [--json]
"""

import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.harness import Result, arguments, report
from motet_simulator.plan.cluster import Cluster, Setup
from motet_simulator.profiles.fit import fit
from motet_simulator.profiles.profile import Overheads, Profile, Work
from motet_simulator.profiles.step_traces import read
from motet_simulator.quantiles import quantile
from motet_simulator.workloads.request import WorkloadRequest
from testbed.local_stack import running_stack

RUNNERS, SEEDS = 2, 3
MODEL, VOCABULARY = "motet-demo", 1500
PROMPT, OUTPUT, LONGEST = 40.0, 60.0, 300
TARGET_P50, TARGET_P95 = 0.10, 0.20
ALONE = 20
"""Requests that are alone, from which the time outside of iterations is learned."""

SETTLE_SECONDS = 1.0


@dataclass(slots=True)
class Seen:
    """Seconds, and tokens a second."""

    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    throughput: float = 0.0

    def errors(self, other: "Seen") -> tuple[float, float]:
        """Of the medians and the throughput, and of the p95: how far the other one is off, the worst of each."""

        def off(theirs: float, ours: float) -> float:
            return abs(theirs - ours) / ours

        pairs = ((self.first_tokens, other.first_tokens), (self.gaps, other.gaps))
        middle = [off(quantile(theirs, 0.5), quantile(ours, 0.5)) for ours, theirs in pairs]
        tails = [off(quantile(theirs, 0.95), quantile(ours, 0.95)) for ours, theirs in pairs]
        return max(*middle, off(other.throughput, self.throughput)), max(tails)


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


class Live:
    """A client of the running product. `max_tokens` is the answer's length: the model does not end before."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._chance = random.Random(7)

    async def play(self, requests: Sequence[WorkloadRequest]) -> Seen:
        seen = Seen()
        began = perf_counter()
        await asyncio.gather(*(self._ask(one, began + one.at, seen) for one in requests))
        seen.throughput = sum(one.output_tokens for one in requests) / (perf_counter() - began)
        return seen

    async def _ask(self, request: WorkloadRequest, due: float, seen: Seen) -> None:
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": [self._chance.randrange(VOCABULARY) for _ in range(request.prompt_tokens)],
                "max_tokens": request.output_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        await asyncio.sleep(max(0.0, due - perf_counter()))
        asked = perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.lower().startswith(b"http/1.1 200"):
                raise RuntimeError(f"the server answered {head[:80]!r}")
            newest = 0.0
            while size := int(await reader.readuntil(b"\r\n"), 16):
                chunk = (await reader.readexactly(size + 2))[:size]
                now = perf_counter()
                for _ in range(chunk.count(b'"text"')):
                    if newest:
                        seen.gaps.append(now - newest)
                    else:
                        seen.first_tokens.append(now - asked)
                    newest = now
        finally:
            writer.close()


def simulated(profile: Profile, requests: Sequence[WorkloadRequest], seed: int) -> Seen:
    outcome = Cluster(Setup(profile=profile, runners=RUNNERS, seed=seed)).run(iter(requests))
    shares = [number / 1000 for number in range(1, 1000)]
    gaps = [outcome.gaps.quantile(share) for share in shares]
    return Seen(outcome.first_tokens, gaps, outcome.output_tokens / outcome.seconds)


class Traces:
    """The step traces of the runners, in parts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sizes(self) -> dict[Path, int]:
        return {file: file.stat().st_size for file in sorted(self._folder.glob("trace-*.jsonl"))}

    def profile(self, parts: Sequence[tuple[dict[Path, int], dict[Path, int]]], overheads: Overheads) -> Profile:
        """Of what was written between each two sizes."""
        files = []
        for file in self.sizes():
            text = file.read_bytes()
            of = json.loads(text[: text.index(b"\n")])
            lines = b"".join(text[before.get(file, 0) : after[file]] for before, after in parts).splitlines()
            kept = [json.loads(line) for line in lines]
            if kept:
                kept[0]["of"] = of["of"]
                part = file.with_name(f"part-{file.name}")
                part.write_text("".join(json.dumps(line) + "\n" for line in kept))
                files.append(part)
        return fit(*read(files), overheads)


async def measure(port: int, folder: Path, rounds: int, seconds: float, load: float) -> list[Result]:
    live, traces, chance = Live(port), Traces(folder), random.Random(3)
    rate = 4.0
    for _ in range(3):  # also until the runners have chosen their kernels
        before = traces.sizes()
        await live.play(drawn(chance, int(10 * rate), rate, bursts=False))
        profile = traces.profile([(before, traces.sizes())], Overheads())
        rate = load * RUNNERS / seconds_of_a_request(profile)
    overheads = await outside_of_iterations(live, profile)
    print(f"{rate:.1f} requests a second; outside of iterations {1000 * overheads.arrival:.1f} ms")

    async def block() -> tuple[dict[Path, int], dict[Path, int]]:
        before = traces.sizes()
        await live.play(drawn(chance, int(seconds / 2 * rate), rate, bursts=chance.random() < 0.5))
        await asyncio.sleep(SETTLE_SECONDS)
        return before, traces.sizes()

    middle: dict[bool, list[float]] = {False: [], True: []}
    tails: dict[bool, list[float]] = {False: [], True: []}
    newest = await block()
    for number in range(rounds):
        for bursts in (False, True):
            requests = drawn(chance, int(seconds * rate), rate, bursts=bursts)
            seen = await live.play(requests)
            await asyncio.sleep(SETTLE_SECONDS)
            older, newest = newest, await block()
            profile = traces.profile([older, newest], overheads)
            runs = [seen.errors(simulated(profile, requests, seed)) for seed in range(SEEDS)]
            middle[bursts].append(median(run[0] for run in runs))
            tails[bursts].append(median(run[1] for run in runs))
            print(
                f"round {number + 1}, {'bursts' if bursts else 'poisson'}: "
                f"off by {middle[bursts][-1]:.0%} in the middle, {tails[bursts][-1]:.0%} at p95"
            )
    p50 = max(map(median, middle.values()))
    p95 = max(map(median, tails.values()))
    return [
        Result("sim_error_p50", p50, "", f"<= {TARGET_P50}", p50 <= TARGET_P50),
        Result("sim_error_p95", p95, "", f"<= {TARGET_P95}", p95 <= TARGET_P95),
    ]


def seconds_of_a_request(profile: Profile) -> float:
    """Of a runner that decodes eight at a time."""
    together = 8
    iteration = profile.law.seconds(Work(decodes=together, context=int(together * (PROMPT + OUTPUT / 2))))
    return OUTPUT * iteration / together + profile.law.prefill * PROMPT


async def outside_of_iterations(live: Live, profile: Profile) -> Overheads:
    """From requests that are alone: what is left of the time to the first token."""
    left = []
    for _ in range(ALONE):
        request = WorkloadRequest(at=0.0, prompt_tokens=32, output_tokens=2, max_tokens=2)
        seen = await live.play([request])
        left.append(seen.first_tokens[0] - profile.law.seconds(Work(prefill=32, attended=32 * 33 // 2)))
    usual = Overheads()
    return replace(usual, arrival=max(0.0, median(left) - usual.submit - usual.delivery))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each workload")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a run; a block takes half as long")
    parser.add_argument("--load", type=float, default=0.5, help="of what the runners could do")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as name:
        folder = Path(name)
        env = {"MOTET_STEP_TRACE": str(folder / "trace-{instance}.jsonl"), "MOTET_RUNNER_KERNELS": "torch"}
        with running_stack(folder, runners=RUNNERS, env=env) as stack:
            results = asyncio.run(measure(stack.port, folder, given.rounds, given.seconds, given.load))
    report("simulator_truth", results, as_json=given.json)


if __name__ == "__main__":
    main()
