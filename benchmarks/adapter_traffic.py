"""Traffic over more adapters than the device holds, in one engine: see `benchmarks.adapters`."""

import argparse
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.engine_cases.bench import at_least, at_most
from benchmarks.engine_run import Ask, Run, Served, random_prompt
from benchmarks.harness import Measure, Result, alternate, percentile
from benchmarks.many_adapters import ManyAdapters
from benchmarks.random_llama import LlamaShape
from motet.domain import BASE, Digest
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig
from motet_runner.settings import KERNEL_CACHE

MIB = 1 << 20
LEAST_OF_RESIDENT = {"zipf_2000": (1.5, 0.95), "uniform_2000": (0.0, 0.88)}
"""The exponent of Zipf's law, and the least share"""
MOST_OF_WARM, MOST_GAP = 1.2, 1.15
AT_ONCE, NEIGHBOURS = 32, 8
TURNS = 10
"""In which a pair's first tokens are measured: the speed of a machine that others share changes within a second."""
KV_MIB = 256
RECENT = 16
"""This number of adapters are asked for where they are to be on the device."""
LOADS_A_SECOND = 10


class Traffic:
    """An engine with places for some adapters, and requests for all of them."""

    def __init__(self, model: Path, adapters: ManyAdapters, slots: int, given: argparse.Namespace) -> None:
        config = EngineConfig(
            model=model,
            device="cpu",
            kv_cache_mib=KV_MIB + slots * adapters.largest // MIB,
            max_resident_adapters=slots,
            kernel_cache=KERNEL_CACHE.expanduser(),
            prefix_cache=False,
        )
        engine = Engine(config)
        self._run = Run(engine, given)
        self._given = given
        self._drawn = random.Random(0)
        self.digests = adapters.digests
        self._run.seconds(1)
        self._run.settle()
        self._run.layouts = dict(zip(self.digests, adapters.layouts(engine), strict=True))
        self._next = itertools.cycle(self.digests)
        self._load(self.cold(min(RECENT, slots)))

    def ask(self, adapter: Digest, *, output: int = 0, at: float = 0.0) -> Ask:
        given = self._given
        return Ask(random_prompt(self._drawn, given.prompt, given.vocabulary), output or given.output, adapter, at)

    def cold(self, count: int) -> list[Digest]:
        """Adapters that are not on the device."""
        here = {*self._here()}
        found = list(itertools.islice((one for one in self._next if one not in here), count))
        self._read(found)
        return found

    def warm(self, count: int) -> list[Digest]:
        """The adapters on the device that were used last, in turn"""
        return list(itertools.islice(itertools.cycle(self._here()[-RECENT:]), count))

    def _here(self) -> list[Digest]:
        return [one.digest for one in self._run.engine.report().adapters if one.on_device]

    def _read(self, adapters: Iterable[Digest]) -> None:
        """So that their files are in the page cache: the kernel may have freed what nobody has read for a while."""
        for layout in map(self._run.layouts.__getitem__, {*adapters}):
            for file in (layout.file, layout.file.with_name(layout.slab)):
                file.read_bytes()

    def load_all(self) -> None:
        self._load(self.digests)

    def _load(self, adapters: Sequence[Digest]) -> None:
        self._run.serve([self.ask(one, output=1) for one in adapters], at_once=AT_ONCE)

    def serve(self, numbers: Sequence[int]) -> tuple[list[Ask], Served]:
        self._read(self.digests[number] for number in numbers)
        asks = [self.ask(self.digests[number]) for number in numbers]
        return asks, self._run.serve(asks, at_once=AT_ONCE)

    def seconds(self, drawn: Iterator[Sequence[int]]) -> Measure:
        """Of requests whose adapters have the drawn numbers"""

        async def measure() -> float:
            return self.serve(next(drawn))[1].seconds

        return measure

    def first_tokens(self, count: int, *, cold: bool) -> Callable[[], Awaitable[list[float]]]:
        """The seconds until the first token. One request after the other."""

        async def measure() -> list[float]:
            adapters = self.cold(count) if cold else self.warm(count)
            served = [self._run.serve([self.ask(one, output=1)]) for one in adapters]
            self.check_loads(served, count * cold)
            return [of.times[0][0] for of in served]

        return measure

    def gaps(self, seconds: float, *, cold: bool) -> Measure:
        """The 99th percentile of the seconds between two tokens of neighbours, while other requests arrive."""

        async def measure() -> float:
            given, count = self._given, max(1, int(seconds * LOADS_A_SECOND))
            asks = [self.ask(BASE, output=given.neighbour_tokens) for _ in range(NEIGHBOURS)]
            for number, one in enumerate(self.cold(count) if cold else self.warm(count)):
                asks.append(self.ask(one, output=1, at=(number + 1) / LOADS_A_SECOND))
            served = self._run.serve(asks)
            self.check_loads([served], count * cold)
            return percentile([b - a for of in served.times[:NEIGHBOURS] for a, b in pairwise(of)], 0.99)

        return measure

    def check_loads(self, served: Sequence[Served], expected: int) -> None:
        found = sum(of.loads for of in served)
        if found != expected:
            raise RuntimeError(f"{found} adapters were loaded, and not {expected}")


def p95_of_all(turns: Sequence[Sequence[float]]) -> float:
    return percentile([seconds for turn in turns for seconds in turn], 0.95)


def draws(adapters: int, exponent: float, count: int) -> Iterator[list[int]]:
    weights = [rank**-exponent for rank in range(1, adapters + 1)]
    for seed in itertools.count():
        yield random.Random(seed).choices(range(adapters), weights, k=count)


async def measure_traffic(shape: LlamaShape, model: Path, scratch: Path, given: argparse.Namespace) -> list[Result]:
    adapters = ManyAdapters(shape, scratch, given.adapters)
    few = Traffic(model, adapters, given.slots, given)
    count = max(1, min(given.first_tokens // TURNS, given.adapters - given.slots))
    first = [few.first_tokens(count, cold=cold) for cold in (True, False)]
    gaps = [few.gaps(given.seconds, cold=cold) for cold in (True, False)]
    of_one_engine = {
        "cold_ttft": (await alternate(*first, pairs=given.pairs, turns=TURNS, of_turns=p95_of_all), MOST_OF_WARM),
        "gap_loading": (await alternate(*gaps, pairs=given.pairs), MOST_GAP),
    }
    results = []
    for name, (pairs, most) in of_one_engine.items():
        print(f"{name}: {1e3 * min(pairs.a):.2f} and {1e3 * min(pairs.b):.2f} ms: {pairs}", flush=True)
        results.append(at_most(name, pairs, "adapters on the device", most))
    resident = Traffic(model, adapters, given.adapters, given)
    resident.load_all()
    for name, (exponent, least) in LEAST_OF_RESIDENT.items():
        drawn = (draws(given.adapters, exponent, given.churn) for _ in range(2))
        sides = [of.seconds(numbers) for of, numbers in zip((resident, few), drawn, strict=True)]
        for side in sides:
            await side()
        pairs = await alternate(*sides, pairs=given.pairs)
        print(f"{name}: {_of_request(pairs.a, given)} and {_of_request(pairs.b, given)}: {pairs}", flush=True)
        results.append(at_least(name, pairs, "all adapters on the device", least))
    return results


def _of_request(seconds: Sequence[float], given: argparse.Namespace) -> str:
    return f"{1e3 * min(seconds) / given.churn:.2f} ms a request"
