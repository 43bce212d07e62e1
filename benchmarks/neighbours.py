"""Measures what neighbours do to a tenant, and to runners, live: all processes run, as `motet up` starts them.

`noisy_ttft_live`: tenant `quiet` asks for a quarter of what the runners can do; tenant `flood` for half of it, and then
ten times as many requests at once as have places. It is the 95th percentile of the quiet tenant's first tokens with the
flood over the one without, by the medians of pairs that alternate. `false_moves`: eight busy processes take the cores
of a stack with streams. It counts the runners that were taken for lost and the requests that left theirs, in ten
minutes. None should.

    python -m benchmarks.neighbours [--figures noisy false] [--seconds 60] [--pairs 3] [--minutes 10] [--json]
"""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Result, arguments, percentile, report
from benchmarks.pauses import MODELS, PROMPT_WORDS, WORDS, Stream
from testbed.local_stack import LocalStack, copy_of_bundled, running_stack

PLACES, TOKENS = 32, 64
"""Of each runner, and of each answer. With fewer places a runner keeps none for a tenant that was given less."""
QUIET, FLOOD = "quiet", "flood"
OFFERED, WITHIN, FLOOD_TIMES = 0.25, 0.5, 10
SETTLE_SECONDS = 10.0
BUSY_PROCESSES = 8
MOST_TTFT = 1.5
FALSE_MOVES = {"supervisor": "runner_unhealthy", "gateway": "request_lost", "scheduler": "request_moved"}
"""What each service logs of a runner that it takes for lost, or of a request that leaves its runner."""


class Tenants:
    """Who asks, with which key."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._drawn = random.Random(0)
        self.keys = {name: stack.motet("key", "create", "--tenant", name).stdout.strip() for name in (QUIET, FLOOD)}

    async def ask(self, tenant: str) -> float:
        """Seconds until its first token."""
        prompt = " ".join(self._drawn.choices(WORDS, k=PROMPT_WORDS))
        stream = Stream(MODELS[0], prompt, key=self.keys[tenant])
        began = time.monotonic()
        await stream.run(self._stack.port, TOKENS)
        return stream.arrivals[0] - began

    async def keep(self, tenant: str, at_once: int, seconds: float) -> int:
        """Have `at_once` under way all the time. Returns how many were answered."""
        end, answered = time.monotonic() + seconds, 0

        async def one_after_the_other() -> None:
            nonlocal answered
            while time.monotonic() < end:
                await self.ask(tenant)
                answered += 1

        async with asyncio.TaskGroup() as on:
            for _ in range(at_once):
                on.create_task(one_after_the_other())
        return answered

    async def offer(self, tenant: str, rate: float, seconds: float) -> list[float]:
        """As many a second, whether others are answered or not. Returns the seconds until each first token."""
        tasks, end = [], time.monotonic() + seconds
        async with asyncio.TaskGroup() as on:
            while time.monotonic() < end:
                await asyncio.sleep(self._drawn.expovariate(rate))
                tasks.append(on.create_task(self.ask(tenant)))
        return [task.result() for task in tasks]

    async def quiet_beside(self, rate: float, seconds: float, at_once: int) -> float:
        """The 95th percentile of the quiet tenant. `at_once`: of the flood; 0: it stays within its share."""
        async with asyncio.TaskGroup() as on:
            whole = SETTLE_SECONDS + seconds
            beside = self.keep(FLOOD, at_once, whole) if at_once else self.offer(FLOOD, WITHIN * rate, whole)
            on.create_task(beside)
            await asyncio.sleep(SETTLE_SECONDS)
            found = on.create_task(self.offer(QUIET, OFFERED * rate, seconds))
        return percentile(found.result(), 0.95)


async def noisy(stack: LocalStack, given: Namespace) -> list[Result]:
    tenants, places = Tenants(stack), PLACES * given.runners
    await asyncio.sleep(SETTLE_SECONDS)  # until gateways know the keys, and engines have chosen their kernels
    await tenants.keep(FLOOD, places, SETTLE_SECONDS)
    rate = await tenants.keep(FLOOD, 2 * places, given.seconds / 2) / (given.seconds / 2)
    found: dict[int, list[float]] = {0: [], FLOOD_TIMES * places: []}
    for pair in range(given.pairs):
        for at_once in (list(found), list(reversed(found)))[pair % 2]:
            found[at_once].append(await tenants.quiet_beside(rate, given.seconds, at_once))
    within, flooded = found.values()
    shown = "; ".join(f"{one:.3f} and {other:.3f} s" for one, other in zip(within, flooded, strict=True))
    print(f"{rate:.1f} requests a second; first tokens without and with the flood in {shown}", flush=True)
    times = statistics.median(flooded) / statistics.median(within)
    return [Result("noisy_ttft_live", times, "x", f"≤ {MOST_TTFT:g}", times <= MOST_TTFT)]


@contextmanager
def busy_processes() -> Iterator[None]:
    """Each in a session of its own, so that the kernel gives each as much time as a service."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(BUSY_PROCESSES)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def false_moves(stack: LocalStack, given: Namespace) -> list[Result]:
    tenants = Tenants(stack)
    await asyncio.sleep(SETTLE_SECONDS)
    with busy_processes():
        answered = await tenants.keep(QUIET, PLACES * given.runners, 60 * given.minutes)
    print(f"{answered} requests were answered beside {BUSY_PROCESSES} busy processes", flush=True)
    logged = {name: [json.loads(line).get("event") for line in stack.log(name).splitlines()] for name in FALSE_MOVES}
    found = sum(logged[name].count(event) for name, event in FALSE_MOVES.items())
    return [Result("false_moves", found, "", "= 0", found == 0)]


FIGURES = {"noisy": noisy, "false": false_moves}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--figures", nargs="+", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each side of noisy_ttft_live")
    parser.add_argument("--pairs", type=int, default=3, help="of the sides of noisy_ttft_live")
    parser.add_argument("--minutes", type=float, default=10.0, help="of false_moves")
    parser.add_argument("--runners", type=int, default=3)
    given = parser.parse_args()
    results = []
    for name in given.figures:
        with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as folder:
            engine = json.dumps({"maxConcurrentSequences": PLACES})
            manifests = copy_of_bundled(Path(folder) / "manifests", engine=engine)
            with running_stack(Path(folder), manifests=manifests, runners=given.runners) as stack:
                results += asyncio.run(FIGURES[name](stack, given))
    report("neighbours", results, as_json=given.json)


if __name__ == "__main__":
    main()
