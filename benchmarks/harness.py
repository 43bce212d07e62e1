"""How all benchmarks measure and print their results.

One process compares two things and alternates between them, A B B A: if the machine becomes slower, both are affected
alike. The result is the median of the ratios of all pairs, with its spread. The harness also measures the CPU time that
other processes take while a pair runs. It discards a disturbed pair and measures again. On a machine that is never
quiet, it keeps the least disturbed pairs, and the report says so.

With `--json` the last line printed is one object: {"benchmark", "commit", "machine", "results": [{"name", "value",
"unit", "target", "holds"}]}. A result that was measured in pairs also has "against" {"baseline", "ratio", "spread",
"pairs", "discarded", "disturbed"}; "same" says whether both sides gave the same, and "settings" what its name does not.

A benchmark ends with status 3 when a result misses its target, and with 77 when this machine lacks what it needs.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil

ROOT = Path(__file__).resolve().parent.parent

QUIET_SHARE = 0.10
"""The share of the time of all cores that other processes may take in a pair. Background daemons take less; a build or
a second benchmark takes more."""

MISSED, SKIPPED = 3, 77
"""Exit statuses. 1 is that of a traceback; 77 is automake's status for a skipped test."""


@dataclass(slots=True)
class OtherLoad:
    """The share of the time of all cores that processes outside of the measurement took."""

    share: float = 0.0


@contextmanager
def measuring_other_load(own: Iterable[psutil.Process] = ()) -> Iterator[OtherLoad]:
    """Computes the share when the block ends. Not counted are this process, the processes `own`, and children of both
    that are waited for within the block: what they had taken before it is not counted either, so it hides as much."""
    processes = {psutil.Process(), *own}
    foreign = OtherLoad()
    busy, ours, began = _busy_seconds(), seconds_of(processes), time.perf_counter()
    try:
        yield foreign
    finally:
        wall = (time.perf_counter() - began) * (psutil.cpu_count() or 1)
        others = (_busy_seconds() - busy) - (seconds_of(processes) - ours)
        foreign.share = max(0.0, others / wall) if wall else 0.0


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of all its threads."""
    if sys.platform != "linux":
        times = process.cpu_times()
        return float(times.user + times.system)
    # The id of the CPU clock of a process, as in clock_getcpuclockid(3). It counts nanoseconds; /proc counts ticks.
    return time.clock_gettime((~process.pid << 3) | 2)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    # User time already includes guests. Time that other virtual machines take disturbs as much as other processes.
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def seconds_of(processes: Collection[psutil.Process]) -> float:
    return sum(cpu_seconds(one) + _of_ended_children(one) for one in processes if one.is_running())


def _of_ended_children(process: psutil.Process) -> float:
    if process.pid == os.getpid():
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime
    times = process.cpu_times()  # 0 on macOS, which does not tell that of others
    return float(times.children_user + times.children_system)


@dataclass(slots=True)
class Pairs:
    """The figures of both sides, A and B, one of each per pair."""

    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    discarded: int = 0
    disturbed: bool = False
    kept: list[int] = field(default_factory=list)
    """Which of the pairs that were tried these are, if they are of `alternate`"""

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.a, self.b, strict=True)]

    @property
    def differences(self) -> list[float]:
        return [a - b for a, b in zip(self.a, self.b, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def difference(self) -> float:
        return statistics.median(self.differences)

    @property
    def spread(self) -> tuple[float, float]:
        """The tenth and ninetieth percentile of the ratios."""
        return percentile(self.ratios, 0.1), percentile(self.ratios, 0.9)

    def beside(self, a: Sequence[float], b: Sequence[float]) -> "Pairs":
        """Another figure of the same pairs: they were disturbed as much. Both sides have one of each pair that was
        tried."""
        return replace(self, a=[a[number] for number in self.kept], b=[b[number] for number in self.kept])

    def __str__(self) -> str:
        low, high = self.spread
        quiet = f"other processes at most {max(self.foreign):.0%} of the CPU, {self.discarded} pairs discarded"
        loud = " (the machine was never quiet: these are the least disturbed pairs)" if self.disturbed else ""
        return f"ratio {self.ratio:.3f} [{low:.3f} … {high:.3f}] over {len(self.a)} pairs, {quiet}{loud}"


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `target` is its target as text; `holds` is None if it has none. `baseline` names the other side of
    its pairs."""

    name: str
    value: float
    unit: str
    target: str = ""
    holds: bool | None = None
    baseline: str = ""
    pairs: Pairs | None = None
    counted: bool = False
    """It was counted, and no clock was read for it: it is the same on every machine."""
    same: bool | None = None
    """Whether both sides gave the same: otherwise they were not compared at the same work. None: nobody looked."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What its name does not say: with others it is another figure of the same name."""

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "target": self.target,
            "holds": self.holds,
        }
        if self.same is not None:
            row["same"] = self.same
        if self.settings:
            row["settings"] = dict(self.settings)
        if self.counted:
            return row | {"counted": True}
        if self.pairs is None:
            return row
        against = {
            "baseline": self.baseline,
            "ratio": self.pairs.ratio,
            "spread": self.pairs.spread,
            "pairs": len(self.pairs.a),
            "discarded": self.pairs.discarded,
            "disturbed": self.pairs.disturbed,
        }
        return row | {"against": against}


T = TypeVar("T")
Measure = Callable[[], Awaitable[float]]

Do = Callable[[], object]


def microseconds(do: Do, calls: int) -> Measure:
    """The mean time of `calls` calls, one after the other."""

    async def measure() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            do()
        return (time.perf_counter() - began) / calls * 1e6

    return measure


async def alternate(
    a: Callable[[], Awaitable[T]],
    b: Callable[[], Awaitable[T]],
    *,
    pairs: int = 10,
    attempts: int | None = None,
    own: Sequence[psutil.Process] = (),
    quiet_share: float = QUIET_SHARE,
    turns: int = 1,
    of_turns: Callable[[Sequence[T]], float] = statistics.median,  # type: ignore[assignment] # then T is float
) -> Pairs:
    """Measure A B, B A, A B … until there are enough quiet pairs, at most `attempts` pairs (default:
    three times as many). A pair with several `turns` has the median of each side, or `of_turns`. Use them
    when a side takes milliseconds: if a core is slow for half a second, that would otherwise affect one side of a pair
    only."""
    tried: list[tuple[float, float, float]] = []
    quiet = 0
    max_attempts = attempts or 3 * pairs
    while quiet < pairs and len(tried) < max_attempts:
        firsts, seconds = list[T](), list[T]()
        with measuring_other_load(own) as foreign:
            for turn in range(turns):
                if (len(tried) + turn) % 2:
                    seconds.append(await b())
                    firsts.append(await a())
                else:
                    firsts.append(await a())
                    seconds.append(await b())
        tried.append((foreign.share, of_turns(firsts), of_turns(seconds)))
        quiet += foreign.share <= quiet_share
    disturbed = quiet < pairs
    of_quietness = sorted(range(len(tried)), key=lambda number: tried[number][0])
    kept = of_quietness[:pairs] if disturbed else [n for n, pair in enumerate(tried) if pair[0] <= quiet_share]
    return Pairs(
        [tried[number][1] for number in kept],
        [tried[number][2] for number in kept],
        [tried[number][0] for number in kept],
        discarded=len(tried) - len(kept),
        disturbed=disturbed,
        kept=kept,
    )


def percentile(values: Sequence[float], q: float) -> float:
    """The percentile by the nearest-rank method."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object, in the last line")
    return parser


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "load": round(psutil.getloadavg()[0], 2),
    }


def commit(folder: Path = ROOT) -> str:
    """Of the tree that is measured, with a plus if files have changed since; empty if the tree is not git's."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # there is no git
        return ""
    return said.stdout.strip()


def _processor() -> str:
    """Its name does not say which one it is: others of that name have other instructions and caches."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    of = {what.strip(): value.strip() for what, _, value in (line.partition(":") for line in lines)}
    numbers = [f"{what.removeprefix('cpu ')} {of[what]}" for what in ("cpu family", "model", "stepping") if what in of]
    name = of.get("model name", platform.processor())
    return f"{name} ({', '.join(numbers)})" if numbers else name


def report(benchmark: str, results: Sequence[Result], *, as_json: bool) -> None:
    """Print the results as a table, and as JSON in the last line if `as_json`. Ends the process if a result misses its
    target."""
    width = max(len(result.name) for result in results)
    for result in results:
        verdict = {True: "holds", False: "MISSED", None: ""}[result.holds]
        print(f"{result.name:<{width}}  {result.value:>12.4g} {result.unit:<8} {result.target:<24} {verdict}".rstrip())
    if as_json:
        rows = [result.as_json() for result in results]
        print(json.dumps({"benchmark": benchmark, "commit": commit(), "machine": machine(), "results": rows}))
    if any(result.holds is False for result in results):
        sys.exit(MISSED)


def skip(why: str) -> NoReturn:
    """End the process, because this machine lacks something that the benchmark needs."""
    print(f"skipped: {why}")
    sys.exit(SKIPPED)
