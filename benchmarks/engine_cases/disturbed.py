"""The engine beside something else: a long prompt, or another process that never rests."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import psutil

from benchmarks.engine_cases.bench import Bench, at_least, at_most
from benchmarks.engine_run import Ask, random_prompt
from benchmarks.harness import Result, alternate, percentile

BUSY_THROUGHPUT, BUSY_P99 = 0.4, 6.0
GAP = 2.5
DECODES, DECODED = 16, 512
"""The sequences beside which the long prompt arrives, and their tokens: so many that the steps with a piece of it are
fewer than half, also with the limit, which makes them many."""


async def busy(bench: Bench) -> None:
    """The other process wants a core for itself."""
    if "fused" not in bench.kernels:
        return
    given, run = bench.given, bench.run("fused")
    requests = max(given.requests)
    quiet_steps: list[float] = []
    busy_steps: list[float] = []
    with another_process() as other:

        async def quiet_seconds() -> float:
            seconds = run.seconds(requests)
            quiet_steps.extend(run.of_decodes)
            return seconds

        async def busy_seconds() -> float:
            other.send_signal(signal.SIGCONT)
            try:
                seconds = run.seconds(requests)
            finally:
                other.send_signal(signal.SIGSTOP)
            busy_steps.extend(run.of_decodes)
            return seconds

        await quiet_seconds()
        quiet_steps.clear()
        pairs = await alternate(quiet_seconds, busy_seconds, pairs=given.pairs, own=[other])
    print(f"{requests} requests, quiet against beside a busy process: {pairs}")
    quiet, disturbed = percentile(quiet_steps, 0.5), percentile(busy_steps, 0.99)
    print(f"  a step: p50 {quiet * 1e3:.2f} ms when quiet; p99 {disturbed * 1e3:.2f} ms beside it")
    bench.results += [
        at_least("busy_throughput", pairs, "quiet", BUSY_THROUGHPUT),
        at_most("busy_p99", disturbed / quiet, BUSY_P99),
    ]


async def prefill(bench: Bench) -> None:
    """A long prompt arrives while others decode, once with the limit of the product and once without one. A gap is the
    time between two tokens of one of the others."""
    if "fused" not in bench.kernels:
        return
    given, tokens = bench.given, random.Random(0)

    def prompt(length: int) -> tuple[int, ...]:
        return random_prompt(tokens, length, given.vocabulary)

    for slowdown in (given.slowdown, None):
        run = bench.new_run("fused", decode_slowdown=slowdown)
        others = [Ask(prompt(given.prompt), DECODED) for _ in range(DECODES)]
        # It arrives when a fifth of the tokens is there.
        alone = run.serve(others)
        late = Ask(prompt(given.long_prompt), 1, at=alone.times[0][DECODED // 5])
        gaps: list[float] = []
        longest: list[float] = []
        firsts: list[float] = []
        for _ in range(given.pairs):
            served = run.serve([*others, late])
            # Not the gaps while the others' own prompts are computed.
            began = max(times[0] for times in served.times[:DECODES])
            of_run = [b - a for times in served.times[:DECODES] for a, b in pairwise(times) if a >= began]
            gaps += of_run
            longest.append(max(of_run))
            firsts.append(served.times[DECODES][0] - late.at)
        p50, p99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
        limit = "no limit" if slowdown is None else f"limit {slowdown:g}"
        print(f"  {limit}: gaps p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms", flush=True)
        suffix = "" if slowdown is not None else "_without_limit"
        bench.results.append(
            Result("gap_beside_prefill_without_limit", p99 / p50, "x")
            if slowdown is None
            else at_most("gap_beside_prefill", p99 / p50, GAP)
        )
        bench.add(f"longest_gap_beside_prefill{suffix}", percentile(longest, 0.5) / p50, "x")
        bench.add(f"first_token_beside_decodes{suffix}", percentile(firsts, 0.5) * 1e3, "ms")


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
