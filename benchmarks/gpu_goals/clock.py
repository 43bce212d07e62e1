"""How long ways of computing the same thing take on a GPU, measured alternately; and a rehearsal of that.

Each way becomes one CUDA graph of all its calls, as a decode step is one. A round replays every way once, in an order
that is reversed in the next one. The ratio of two ways is the median of their ratios in all rounds.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from benchmarks.harness import Do, Pairs, percentile

MIN_ROUNDS, MAX_ROUNDS = 7, 200
FLUSHED = 4
"""Bytes that are read before each replay, for each byte of the L2 cache: then it holds nothing of any way."""
WARM_UP = 50
"""Rounds on the host's clock that are not kept"""

AHEAD_CYCLES = 400_000
"""How long the GPU is kept busy at least before a way begins, so that its launch is not measured: some 0.2 ms."""
AHEAD = 3
"""How many times as long as the host takes to launch it"""
CYCLES_A_SECOND = 2e9
"""Of a fast GPU"""


@dataclass(frozen=True, slots=True)
class Way:
    step: Do
    """One operation; each call takes the next set of weights, so that none finds them in a cache."""
    repeat: int = 1
    """How many operations are measured together: as many as there are sets"""


@dataclass(slots=True)
class Times:
    """What each way took in every round, in microseconds an operation; and why others were not measured."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def median(self, way: str) -> float:
        return statistics.median(self.samples[way])

    def spread(self, way: str) -> tuple[float, float]:
        return percentile(self.samples[way], 0.1), percentile(self.samples[way], 0.9)

    def pairs(self, way: str, other: str) -> Pairs:
        return Pairs(self.samples[way], self.samples[other])


class Clock(Protocol):
    def compare(self, ways: Mapping[str, Way], *, seconds: float = 1.0) -> Times:
        """Measure them for about so long. The first one must work; another that fails is left out."""

    def host(self, ways: Mapping[str, Do], *, before: Do, rounds: int) -> Times:
        """Microseconds from a call to the end of its work, on the host's clock. `before` runs before each of them, and
        is not measured."""

    def graph(self, do: Do) -> Do:
        """What replays a graph of this call."""


class CudaClock:
    def compare(self, ways: Mapping[str, Way], *, seconds: float = 1.0) -> Times:
        times = Times()
        flush = _flushing()
        replays = {name: _Replay(do, flush) for name, do in _working(ways, times, _captured).items()}
        _round(replays, ways, Times())
        once = sum(_round(replays, ways, Times())) / 1e6
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / once)))
        for number in range(rounds):
            _round(dict(reversed(replays.items())) if number % 2 else replays, ways, times)
        return times

    def host(self, ways: Mapping[str, Do], *, before: Do, rounds: int) -> Times:
        times = Times()
        for number in range(rounds + WARM_UP):
            order = list(ways.items())[:: -1 if number % 2 else 1]
            for name, do in order:
                before()
                torch.cuda.synchronize()
                began = time.perf_counter()
                do()
                torch.cuda.synchronize()
                if number >= WARM_UP:
                    times.samples.setdefault(name, []).append((time.perf_counter() - began) * 1e6)
        return times

    @staticmethod
    def graph(do: Do) -> Do:
        return _captured(Way(do))


class Rehearsal:
    """Runs every way once and measures nothing: all samples are 1."""

    def compare(self, ways: Mapping[str, Way], *, seconds: float = 1.0) -> Times:  # noqa: ARG002
        times = Times()
        for name in _working(ways, times, _called):
            times.samples[name] = [1.0]
        return times

    def host(self, ways: Mapping[str, Do], *, before: Do, rounds: int) -> Times:  # noqa: ARG002
        for do in ways.values():
            before()
            do()
        return Times({name: [1.0] for name in ways})

    @staticmethod
    def graph(do: Do) -> Do:
        do()
        return do


class _Replay:
    def __init__(self, do: Do, flush: Do) -> None:
        self._do = do
        self._flush = flush
        self._ahead = AHEAD_CYCLES

    def timed(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Its begin and end on the device. A graph of thousands of launches takes the host a while."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush()
        torch.cuda._sleep(self._ahead)  # noqa: SLF001 - it has no public name
        begin.record()
        began = time.perf_counter()
        self._do()
        launched = time.perf_counter() - began
        end.record()
        torch.cuda.synchronize()  # so that the next launch does not wait for this one in a full queue
        self._ahead = max(self._ahead, int(AHEAD * launched * CYCLES_A_SECOND))
        return begin, end


def _flushing() -> Do:
    """Reads so much that the L2 cache holds nothing of what was read before."""
    words = FLUSHED * int(torch.cuda.get_device_properties().L2_cache_size) // 4
    read = torch.zeros(words, dtype=torch.int32, device="cuda")
    return read.max


def _round(replays: Mapping[str, _Replay], ways: Mapping[str, Way], times: Times) -> list[float]:
    """Replay each once. Returns their microseconds."""
    events = {name: replay.timed() for name, replay in replays.items()}
    took = {name: begin.elapsed_time(end) * 1e3 for name, (begin, end) in events.items()}
    for name, microseconds in took.items():
        times.samples.setdefault(name, []).append(microseconds / ways[name].repeat)
    return list(took.values())


def _working(ways: Mapping[str, Way], times: Times, prepare: Callable[[Way], Do]) -> dict[str, Do]:
    """Those that can be prepared. All but the first one may fail."""
    prepared = {}
    for number, (name, way) in enumerate(ways.items()):
        try:
            prepared[name] = prepare(way)
        except Exception as error:
            if number == 0:
                raise
            times.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return prepared


def _captured(way: Way) -> Do:
    """A graph of all its operations"""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(way.repeat):
            way.step()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(way.repeat):
            way.step()
    return graph.replay


def _called(way: Way) -> Do:
    for _ in range(way.repeat):
        way.step()
    return way.step
