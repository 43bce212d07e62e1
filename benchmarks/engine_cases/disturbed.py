"""The engine beside something else: a long prompt, or another process that never rests."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import psutil

from benchmarks.engine_cases.bench import Bench, at_least, at_most
from benchmarks.engine_run import Ask, Run, random_prompt
from benchmarks.harness import Measure, alternate, percentile

BUSY_THROUGHPUT, BUSY_P99 = 0.4, 6.0
GAP = 2.5
DECODES, DECODED = 16, 512
"""The sequences beside which the long prompt arrives, and the tokens of each: enough that the steps with a piece of the
prompt are fewer than half, also with the limit, which makes them many."""


async def busy(bench: Bench) -> None:
    """The other process wants a core for itself."""
    if "fused" not in bench.kernels:
        return
    given, run = bench.given, bench.run("fused")
    requests = max(given.requests)
    p50_when_quiet: list[float] = []
    p99_beside: list[float] = []
    with another_process() as other:

        async def quiet_seconds() -> float:
            seconds = run.seconds(requests)
            p50_when_quiet.append(percentile(run.of_decodes, 0.5))
            return seconds

        async def busy_seconds() -> float:
            other.send_signal(signal.SIGCONT)
            try:
                seconds = run.seconds(requests)
            finally:
                other.send_signal(signal.SIGSTOP)
            p99_beside.append(percentile(run.of_decodes, 0.99))
            return seconds

        await quiet_seconds()
        p50_when_quiet.clear()
        pairs = await alternate(quiet_seconds, busy_seconds, pairs=given.pairs, own=[other])
    of_steps = pairs.beside(p99_beside, p50_when_quiet)
    print(f"{requests} requests, quiet against beside a busy process: {pairs}; p99 against quiet p50: {of_steps}")
    bench.results += [
        at_least("busy_throughput", pairs, "quiet", BUSY_THROUGHPUT),
        at_most("busy_p99", of_steps, "p50 when quiet", BUSY_P99),
    ]


@dataclass
class Gaps:
    """One of each is added by each time the requests are served."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)


async def prefill(bench: Bench) -> None:
    """A long prompt arrives while others decode: with the limit of the product, and without one. A gap is the time
    between two tokens of one of the others."""
    if "fused" not in bench.kernels:
        return
    given, tokens = bench.given, random.Random(0)

    def prompt(length: int) -> tuple[int, ...]:
        return random_prompt(tokens, length, given.vocabulary)

    limited, unlimited = (bench.new_run("fused", decode_slowdown=limit) for limit in (given.slowdown, None))
    others = [Ask(prompt(given.prompt), DECODED) for _ in range(DECODES)]
    # It arrives when a fifth of the tokens is there.
    late = Ask(prompt(given.long_prompt), 1, at=limited.serve(others).times[0][DECODED // 5])
    with_limit, without = Gaps(), Gaps()

    def first_token(run: Run, gaps: Gaps) -> Measure:
        async def measure() -> float:
            served = run.serve([*others, late])
            # Not the gaps while the others' own prompts are computed.
            began = max(times[0] for times in served.times[:DECODES])
            found = [b - a for times in served.times[:DECODES] for a, b in pairwise(times) if a >= began]
            gaps.p50.append(percentile(found, 0.5))
            gaps.p99.append(percentile(found, 0.99))
            gaps.longest.append(max(found))
            return served.times[DECODES][0] - late.at

        return measure

    pairs = await alternate(first_token(unlimited, without), first_token(limited, with_limit), pairs=given.pairs)
    of_gaps, of_longest = (
        pairs.beside(with_limit.p99, with_limit.p50),
        pairs.beside(without.longest, with_limit.longest),
    )
    bench.results.append(at_most("gap_beside_prefill", of_gaps, "p50 of the same gaps", GAP))
    bench.add_pairs("longest_gap_gained", of_longest, "without the limit")
    bench.add_pairs("first_token_kept", pairs, "without the limit")


@contextmanager
def another_process() -> Iterator[psutil.Process]:
    """It is stopped until it is wanted."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    child.send_signal(signal.SIGSTOP)
    try:
        yield psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()
