"""Measures the host's share of an iteration: its wall time less that of the model call, which has attention and LoRA.

32 sequences decode on a random Llama of 30 M parameters (width 512, 8 layers, 8,192 tokens), on one thread, with the
kernels of torch. Each figure is the median of the shares of single steps. It is measured twice, alternately, so the
spread of the ratio is noise. `host_share_32_sampled` is the same with temperature, top-p and a seed, against greedy.

With `--profile`, it prints the functions in which the host spent its time, too. It does not use a GPU.

    python -m benchmarks.host [--steps 20] [--pairs 6] [--profile] [--scratch FOLDER] [--json]
"""

import argparse
import asyncio
import cProfile
import pstats
import time
from itertools import count
from pathlib import Path

from benchmarks.harness import Measure, Result, alternate, arguments, percentile, report
from benchmarks.model_time import ModelTime
from benchmarks.random_llama import SCRATCH, LlamaShape, random_llama
from motet.domain import PAGE_TOKENS, RequestId, pages_for
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, NewSequence, Sampling

ROWS = 32
PROMPT = 64
WARM_UP = 3
PREFILL = 12
"""More tokens than the first sequence decodes until the last prompt is computed."""
LIMIT = 0.10

SHAPE = LlamaShape(
    vocabulary=8192, width=512, feed_forward=1088, layers=8, heads=8, kv_heads=8, dtype="float32", shard_mib=64
)


class Decoding:
    """An engine in which 32 sequences decode."""

    def __init__(self, model: Path, steps: int, profile: cProfile.Profile | None = None) -> None:
        self._steps = steps
        self._tokens = PROMPT + PREFILL + WARM_UP + steps
        self._profile = profile
        self._numbers = count()
        # A page is half a MiB.
        kv_mib = ROWS * pages_for(self._tokens, PAGE_TOKENS)
        self._engine = Engine(EngineConfig(model=model, device="cpu", kv_cache_mib=kv_mib, threads=1))
        self._model = ModelTime(profile)
        self._model.watch(self._engine.diagnostics.loaded)

    def share(self, **sampling: float) -> float:
        """The host's share of a step, the median of some steps."""
        names = [RequestId(f"r{next(self._numbers)}") for _ in range(ROWS)]
        for row, name in enumerate(names):
            self._engine.add(
                NewSequence(
                    request=name,
                    epoch=1,
                    prompt=tuple(2 + (7 * i + 131 * row) % (SHAPE.vocabulary - 2) for i in range(PROMPT)),
                    promise=pages_for(self._tokens, PAGE_TOKENS),
                    sampling=Sampling(max_tokens=self._tokens - PROMPT, ignore_eos=True, **sampling),  # type: ignore[arg-type]
                    seed=row,
                )
            )
        while self._engine.report().pending_prefill_tokens:
            self._engine.step()
        for _ in range(WARM_UP):
            self._engine.step()
        shares = [self._share_of_a_step() for _ in range(self._steps)]
        for name in names:
            self._engine.cancel(name)
        self._engine.step()
        return percentile(shares, 0.5)

    def _share_of_a_step(self) -> float:
        self._model.calls.clear()
        if self._profile is not None:
            self._profile.enable()
        began = time.perf_counter()
        output = self._engine.step()
        seconds = time.perf_counter() - began
        if self._profile is not None:
            self._profile.disable()
        assert len(output.sequences) == ROWS
        return 1 - sum(self._model.calls) / seconds


async def measure(given: argparse.Namespace) -> list[Result]:
    decoding = Decoding(random_llama(SHAPE, given.scratch), given.steps)

    def of(**sampling: float) -> Measure:
        async def share() -> float:
            return decoding.share(**sampling)

        return share

    again = await alternate(of(), of(), pairs=given.pairs)
    sampled = await alternate(of(temperature=0.8, top_p=0.9), of(), pairs=given.pairs)
    print(f"greedy against the same again: {again}")
    print(f"sampled against greedy: {sampled}")
    share = percentile(again.a, 0.5)
    return [
        Result("host_share_32", share, "", f"<= {LIMIT}", share <= LIMIT, "the same again", again),
        Result("host_share_32_sampled", percentile(sampled.a, 0.5), "", baseline="greedy", pairs=sampled),
    ]


def profile(given: argparse.Namespace) -> None:
    profiler = cProfile.Profile()
    profiler.disable()
    decoding = Decoding(random_llama(SHAPE, given.scratch), given.steps, profiler)
    profiler.clear()
    decoding.share()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(15).sort_stats("cumulative").print_stats(30)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps per figure")
    parser.add_argument("--pairs", type=int, default=6, help="quiet pairs to measure")
    parser.add_argument("--profile", action="store_true", help="also print where the host's time goes")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where the model is kept")
    given = parser.parse_args()
    if given.profile:
        profile(given)
    report("host", asyncio.run(measure(given)), as_json=given.json)


if __name__ == "__main__":
    main()
