"""Measures how long streams pause when a runner is killed, freezes, or is cut off from the gateway.

All processes run, as `motet up --runners 2` starts them, with the bundled model and its adapters. Sixteen streams are
under way when the runner that has them gets SIGKILL, or SIGSTOP, or when nothing goes any more between it and the
gateway, while both live and reach the others. The figure is the longest time without a token of any
stream, in the worst of the trials. With `_net` the time does not count in which its next runner computed it again: that
depends on its length and on the machine, the rest on Motet. For the stream that paused longest it also prints how the
gateway's log divides its pause, and for each process the CPU time that it took meanwhile.

Nothing else may need the cores: what is measured is how two engines, or one and the start of another, share them.

    python -m benchmarks.pauses [--faults killed frozen cut] [--trials 5] [--streams 16] [--at 150] [--threads N]
                                [--json]
"""

import asyncio
import json
import random
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.harness import Result, arguments, percentile, report
from benchmarks.served import HERE, named
from testbed.local_stack import BUNDLED, LocalStack, running_stack
from testbed.stack_links import StackLinks

SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
CUT = "cut"
MOST_SECONDS = {"killed": 2.0, "frozen": 4.0, CUT: 4.0}
MOST_NET_SECONDS = {"killed": 1.5, "frozen": 3.5, CUT: 3.5}
END_OF_TEXT = json.loads((BUNDLED / "model" / "config.json").read_text())["eos_token_id"]
MODELS = ["motet-demo", *sorted(path.name for path in (BUNDLED / "adapters").iterdir())]
MORE = 20
"""A pause is over when each stream has got this number of tokens more."""
PATIENCE_SECONDS = 60.0
SETTLE_SECONDS = 3.0
PROMPT_WORDS = 40
WORDS = ("lighthouse", "keeper", "storm", "lamp", "harbour", "boat", "night", "wind", "stairs", "island")


@dataclass
class Stream:
    model: str
    prompt: str
    key: str = ""
    """Empty: the gateway asks for none."""
    request: str = ""
    arrivals: list[float] = field(default_factory=list)

    async def run(self, port: int, tokens: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"model": self.model, "prompt": self.prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        # Without the token that ends texts, which has no text, every token comes in an event of its own.
        content = json.dumps(body | {"logit_bias": {END_OF_TEXT: -100}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {self.key}\r\n" if self.key else ""
        writer.write(f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
        try:
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"the gateway answered {status!r} and {await reader.read()!r}")
            while (header := (await reader.readline()).decode().strip()) != "":
                if header.startswith("x-motet-request:"):
                    self.request = header.partition(":")[2].strip()
            async for line in reader:
                if line.startswith(b'data: {"error"'):
                    raise RuntimeError(f"a stream ended with {line!r}")
                if line.startswith(b"data: {"):
                    self.arrivals.append(time.monotonic())
        finally:
            writer.close()

    def longest_pause(self, since: float) -> float:
        """Of the pauses that were not over at this moment."""
        return max((b - a for a, b in pairwise(self.arrivals) if b >= since), default=0.0)


@dataclass
class Trial:
    victim: int | None
    """The process that is replaced."""
    pause: float
    net: float
    """The longest without what was computed again."""
    slowest: str
    """The request that paused longest."""
    resumed: list[dict[str, float]]
    """The lines of the gateway's log about requests that were resumed."""
    cpu: dict[str, float]
    """Seconds of CPU of each process until all streams went on."""
    seconds: float
    others: float
    """The share of the cores that processes outside took."""

    def describe(self) -> str:
        others = f"{self.others:.0%} of the cores went to other processes"
        lines = [f"longest pause {self.pause:.2f} s, net {self.net:.2f} s; {others}"]
        by_request = {str(line["request"]): line for line in self.resumed}
        if (line := by_request.get(self.slowest)) is not None:
            parts = (f"{name.removesuffix('_seconds')} {line[name]:.2f}" for name in line if name.endswith("_seconds"))
            lines.append(f"  its parts, in seconds: {', '.join(parts)}; {line['tokens']} tokens computed again")
        busiest = sorted(self.cpu.items(), key=lambda one: -one[1])
        used = (f"{name} {seconds / self.seconds:.0%}" for name, seconds in busiest if seconds > 0.02 * self.seconds)
        lines.append(f"  of a core, until all went on: {', '.join(used)}")
        return "\n".join(lines)


class Cpu:
    """The CPU time of the processes of a stack, also of those that start."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._before = self._seconds()
        self._busy = _busy_seconds()
        self._began = time.monotonic()

    def since(self) -> tuple[dict[str, float], float]:
        """Seconds of each process, and the share of all cores that processes outside took."""
        used = {name: now - self._before.get(name, 0.0) for name, now in self._seconds().items()}
        wall = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        return used, max(0.0, (_busy_seconds() - self._busy - sum(used.values())) / wall)

    def _seconds(self) -> dict[str, float]:
        names = {int(one["pid"]): str(one["name"]) for one in self._stack.status()["services"] if one["pid"]}
        found = {}
        for label, process in named(self._stack.processes()).items():
            try:
                times = process.cpu_times()
                parent = names.get(process.ppid())
            except psutil.NoSuchProcess:
                continue
            name = names.get(process.pid) or (f"child of {parent}" if parent else label)
            found[f"{name} {process.pid}" if label != HERE else HERE] = times.user + times.system
        return found


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


async def trial(
    stack: LocalStack, strike: Callable[[str], int | None], given: Namespace, drawn: random.Random
) -> Trial:
    """`strike` the runner of this name. → its process, if it is replaced."""
    streams = [
        Stream(MODELS[number % len(MODELS)], " ".join(drawn.choices(WORDS, k=PROMPT_WORDS)))
        for number in range(given.streams)
    ]
    async with asyncio.TaskGroup() as on:
        tasks = [on.create_task(stream.run(stack.port, given.tokens)) for stream in streams]
        await _until(lambda: all(len(stream.arrivals) >= given.at for stream in streams))
        name, _ = await asyncio.to_thread(stack.busiest_runner)
        log = len(stack.log("gateway"))
        cpu = Cpu(stack)
        struck = time.monotonic()
        victim = strike(name)
        await asyncio.sleep(0.1)  # what was under way arrives
        had = [len(stream.arrivals) for stream in streams]
        await _until(lambda: all(len(one.arrivals) >= before + MORE for one, before in zip(streams, had, strict=True)))
        seconds = time.monotonic() - struck
        used, others = cpu.since()
        for task in tasks:
            task.cancel()
    lines = [json.loads(line) for line in stack.log("gateway")[log:].splitlines() if "request_resumed" in line]
    slowest = max(streams, key=lambda stream: stream.longest_pause(struck))
    again = {str(line["request"]): float(line["recompute_seconds"]) for line in lines}
    net = max(stream.longest_pause(struck) - again.get(stream.request, 0.0) for stream in streams)
    return Trial(victim, slowest.longest_pause(struck), net, slowest.request, lines, used, seconds, others)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the streams fill lists
            await asyncio.sleep(0.005)


def restored(stack: LocalStack, gone: int | None = None) -> None:
    """Wait until both runners serve, the process `gone` is replaced, and the new one has chosen its kernels."""

    def serve() -> bool:
        services = stack.status()["services"]
        return all(one["ready"] and one["pid"] != gone for one in services)

    stack.until(serve)
    time.sleep(SETTLE_SECONDS)


@contextmanager
def faults(stack: LocalStack, fault: str) -> Iterator[tuple[Callable[[str], int | None], Callable[[], None]]]:
    """What strikes a runner, and what ends it."""
    if fault != CUT:
        yield lambda name: stack.kill(name, SIGNALS[fault]), lambda: None
        return
    with StackLinks().between(stack) as links:
        restored(stack)
        yield links.cut, links.mend


def measure(stack: LocalStack, fault: str, given: Namespace) -> list[Result]:
    drawn = random.Random(0)
    pauses, net = [], []
    with faults(stack, fault) as (strike, mend):
        for number in range(given.trials):
            found = asyncio.run(trial(stack, strike, given, drawn))
            mend()
            restored(stack, found.victim)
            print(f"{fault} {number}: {found.describe()}", flush=True)
            pauses.append(found.pause)
            net.append(found.net)
    limit, net_limit = MOST_SECONDS[fault], MOST_NET_SECONDS[fault]
    worst, worst_net = max(pauses), max(net)
    return [
        Result(f"pause_{fault}_s", worst, "s", f"≤ {limit:g} in each trial", worst <= limit),
        Result(f"pause_{fault}_median_s", percentile(pauses, 0.5), "s"),
        Result(f"pause_{fault}_net_s", worst_net, "s", f"≤ {net_limit:g} in each trial", worst_net <= net_limit),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--faults", nargs="+", choices=list(MOST_SECONDS), default=list(MOST_SECONDS))
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--at", type=int, default=150, help="tokens that each stream has when the runner is lost")
    parser.add_argument("--tokens", type=int, default=1500, help="the most tokens of a stream")
    parser.add_argument("--threads", type=int, help="of each engine; unset: as the product chooses")
    given = parser.parse_args()
    env = {}
    if given.threads is not None:
        env["MOTET_RUNNER_THREADS"] = str(given.threads)
    with (
        tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as folder,
        running_stack(Path(folder), runners=2, env=env) as stack,
    ):
        restored(stack)
        results = [one for fault in given.faults for one in measure(stack, fault, given)]
    report("pauses", results, as_json=given.json)


if __name__ == "__main__":
    main()
