"""The engine against what people write with transformers and PEFT: `generate` on a batch.

Both get the same prompts, and `generate` its best of 1 thread or all, in bfloat16 or float32. Before they are measured,
their greedy answers are compared. In bfloat16, answers part where two tokens are almost equally likely. So the rule is:
at the first token that differs, the logits of both tokens in float32 lie at most NEAR of the largest logit apart. What
follows is another text, and is not compared.
"""

import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engine_cases.bench import SUFFIXES, Bench, Leasts, least_of
from benchmarks.engine_cases.setup import dora_adapters
from benchmarks.engine_cases.transformers_child import Batch, Choice, How, TransformersChild, transformers_child
from benchmarks.engine_run import Ask, Run, owners, random_prompt
from benchmarks.harness import Measure, alternate, percentile
from motet.domain import BASE

NEAR = 0.03
HF_BASE: dict[str, Leasts] = {"fused": (4.0, 2.8), "torch": (1.6, 1.6)}
PEFT_DISTINCT: dict[str, Leasts] = {"fused": (8.0, 6.0), "torch": (4.0, 4.0)}
PEFT_DORA: dict[str, Leasts] = {"fused": (50.0, 50.0), "torch": (1.0, 1.0)}
RAGGED = 3.0


class Transformers:
    """`generate` as its users would set it up."""

    def __init__(self, bench: Bench, child: TransformersChild) -> None:
        self._bench = bench
        self.child = child
        self._best: dict[tuple[int, bool], How] = {}

    def best(self, requests: int, *, with_adapters: bool) -> How:
        """Its fastest setting for this number of requests."""
        key = requests, with_adapters
        if key not in self._best:
            asks = self.asks(requests, with_adapters=with_adapters)
            found: dict[How, float] = {}
            for dtype, threads in itertools.product(("bfloat16", "float32"), sorted({1, _cores()})):
                how = How(dtype, threads)
                self.child.generate(how, Batch([ask.prompt for ask in asks], 2, self._adapters(asks)))
                found[how] = min(self.seconds(how, asks) for _ in range(2))
            self._best[key] = min(found, key=found.__getitem__)
            all_of_them = ", ".join(f"{how}: {seconds:.2f} s" for how, seconds in found.items())
            name = "PEFT" if with_adapters else "generate"
            print(f"{requests} requests, {name}: {all_of_them}", flush=True)
        return self._best[key]

    def asks(self, requests: int, *, with_adapters: bool) -> list[Ask]:
        """Each with another adapter, as long as there are more."""
        given, tokens, adapters = self._bench.given, random.Random(requests), self._bench.adapters
        prompts = [random_prompt(tokens, given.prompt, given.vocabulary) for _ in range(requests)]
        of_requests = owners("distinct" if with_adapters else "base", requests, adapters)
        return [Ask(prompt, given.output, adapter) for prompt, adapter in zip(prompts, of_requests, strict=True)]

    def seconds(self, how: How, asks: Sequence[Ask]) -> float:
        return self._generate(how, asks)[0]

    def serve_in_batches(self, how: How, asks: Sequence[Ask], size: int) -> float:
        """Static batches in the order of arrival. A batch begins when it is full, or when nobody else will arrive."""
        began = time.perf_counter()
        for first in range(0, len(asks), size):
            batch = asks[first : first + size]
            time.sleep(max(0.0, batch[-1].at - (time.perf_counter() - began)))
            self._generate(how, batch)
        return time.perf_counter() - began

    def check_same(self, ours: Run, how: How, asks: Sequence[Ask]) -> None:
        """By the rule of this module. Ends the benchmark otherwise."""
        served, (_, theirs) = ours.serve(asks), self._generate(how, asks)
        equal, farthest = 0, 0.0
        for ask, mine, other in zip(asks, served.tokens, theirs, strict=True):
            same = next((n for n, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(mine))
            equal += same
            if same < len(mine):
                adapter = None if ask.adapter == BASE else self._bench.adapters.index(ask.adapter)
                choice = Choice((*ask.prompt, *mine[:same]), (mine[same], other[same]), adapter)
                farthest = max(farthest, self.child.distance(choice))
        share = equal / sum(len(mine) for mine in served.tokens)
        print(f"  {share:.0%} of the tokens before the answers part; there the logits differ by at most {farthest:.2%}")
        if farthest > NEAR:
            raise SystemExit(f"the answers differ: two tokens lie {farthest:.2%} of the largest logit apart")

    def _generate(self, how: How, asks: Sequence[Ask]) -> tuple[float, list[list[int]]]:
        output = max(ask.output for ask in asks)
        return self.child.generate(how, Batch([ask.prompt for ask in asks], output, self._adapters(asks)))

    def _adapters(self, asks: Sequence[Ask]) -> list[int] | None:
        adapters = self._bench.adapters
        return None if asks[0].adapter == BASE else [adapters.index(ask.adapter) for ask in asks]


async def hf_base(bench: Bench) -> None:
    await _batches(bench, "hf_base", HF_BASE, with_adapters=False)


async def peft_distinct(bench: Bench) -> None:
    await _batches(bench, "peft_distinct", PEFT_DISTINCT, with_adapters=True)


async def peft_dora(bench: Bench) -> None:
    """Adapters with DoRA, which PEFT computes one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        folders = dora_adapters(bench, Path(folder))
        scaling = Bench(bench.given, bench.model, folders, bench.kernels, bench.results)
        await _batches(scaling, "dora_vs_peft", PEFT_DORA, with_adapters=True)


async def _batches(bench: Bench, name: str, leasts: dict[str, Leasts], *, with_adapters: bool) -> None:
    given = bench.given
    with _transformers(bench) as theirs:
        for requests in given.requests:
            how = theirs.best(requests, with_adapters=with_adapters)
            asks = theirs.asks(requests, with_adapters=with_adapters)
            for kernels in bench.kernels:
                run = bench.run(kernels)
                theirs.check_same(run, how, asks)
                a, b = _measure(lambda: theirs.seconds(how, asks)), _measure(lambda: run.serve(asks).seconds)  # noqa: B023
                pairs = await alternate(a, b, pairs=given.pairs, own=[theirs.child.process])
                bench.add_pairs(
                    f"{name}_{requests}{SUFFIXES[kernels]}",
                    pairs,
                    "PEFT" if with_adapters else "generate",
                    least_of(leasts[kernels], requests),
                )
            tokens = requests * given.output / percentile(pairs.a, 0.5)
            bench.add(f"{name}_theirs_{requests}", tokens, "tok/s")


async def ragged(bench: Bench) -> None:
    """Requests of many lengths arrive one after the other. `generate` has its best size of a static batch; our own
    engine is also asked for batches that nobody joins."""
    if "fused" not in bench.kernels:
        return
    given, run = bench.given, bench.run("fused")
    asks = ragged_asks(given.ragged, given.lengths, given.arrivals, given.vocabulary)
    with _transformers(bench) as theirs:
        how = theirs.best(max(given.requests), with_adapters=False)
        sizes = sorted({min(size, len(asks)) for size in given.static_batches})
        tried = {size: theirs.serve_in_batches(how, asks, size) for size in sizes}
        size = min(tried, key=tried.__getitem__)
        print("generate by the size of a batch: " + ", ".join(f"{n}: {tried[n]:.1f} s" for n in tried), flush=True)
        a = _measure(lambda: theirs.serve_in_batches(how, asks, size))
        b = _measure(lambda: run.serve(asks).seconds)
        pairs = await alternate(a, b, pairs=given.ragged_pairs, own=[theirs.child.process])
    bench.add_pairs("ragged_vs_hf", pairs, f"generate in batches of {size}", RAGGED)
    whole = bench.new_run("fused", preset="request-level")
    pairs = await alternate(_measure(lambda: whole.serve(asks).seconds), b, pairs=given.ragged_pairs)
    bench.add_pairs("ragged_vs_request_level", pairs, "our own batches that nobody joins")


def ragged_asks(requests: int, lengths: tuple[int, int], a_second: float, vocabulary: int) -> list[Ask]:
    """Lengths of prompts and answers between both, all equally likely, and arrivals at random."""
    drawn = random.Random(0)
    asks, at = [], 0.0
    for _ in range(requests):
        prompt = random_prompt(drawn, drawn.randint(*lengths), vocabulary)
        asks.append(Ask(prompt, drawn.randint(*lengths), at=at))
        at += drawn.expovariate(a_second)
    return asks


@contextmanager
def _transformers(bench: Bench) -> Iterator[Transformers]:
    with transformers_child(bench.model, bench.folders) as child:
        yield Transformers(bench, child)


def _measure(seconds: Callable[[], float]) -> Measure:
    async def measure() -> float:
        return seconds()

    return measure


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
