"""One engine of the product and the requests that a benchmark gives it: what they take together, and what of each step
is the model's."""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from benchmarks.harness import Measure
from motet.domain import BASE, Digest, RequestId, pages_for
from motet_runner.engine import Engine
from motet_runner.execute.flat_batch import FlatBatch
from motet_runner.interface import EngineConfig, NewSequence, Sampling

Owners = Callable[[int], Digest]
"""The adapter of each request"""


def traffic(adapters: list[Digest]) -> dict[str, Owners]:
    return {
        "identical": lambda _: adapters[0],
        "skewed": lambda number: adapters[min(len(adapters) - 1, 8 // (1 + number))],
        "distinct": lambda number: adapters[number % len(adapters)],
    }


class Run:
    """One engine, and the seconds of its steps and of the model in them."""

    def __init__(self, engine: Engine, given: argparse.Namespace) -> None:
        self.engine = engine
        self._given = given
        self._numbers = count()
        self.of_model: list[float] = []
        self.of_steps: list[float] = []

    def seconds(self, requests: int, owner: Owners = lambda _: BASE) -> float:
        """What so many requests take together. Their prompts are new, so that no prefix is cached."""
        given, tokens = self._given, random.Random(next(self._numbers))
        for number in range(requests):
            prompt = tuple(tokens.randrange(2, given.vocabulary) for _ in range(given.prompt))
            self.engine.add(
                NewSequence(
                    request=RequestId(f"{next(self._numbers)}-{number}"),
                    epoch=1,
                    prompt=prompt,
                    adapter=owner(number),
                    promise=pages_for(given.prompt + given.output),
                    sampling=Sampling(max_tokens=given.output, ignore_eos=True),
                )
            )
        began = time.perf_counter()
        while self.engine.has_work():
            of_step = time.perf_counter()
            self.engine.step()
            self.of_steps.append(time.perf_counter() - of_step)
        return time.perf_counter() - began

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measures the model's part of each step."""
        loaded = self.engine._loaded
        fused = loaded.fused
        assert fused is not None
        self.of_model, self.of_steps = [], []

        def timed(batch: FlatBatch) -> torch.Tensor:
            began = time.perf_counter()
            logits = fused(batch)
            self.of_model.append(time.perf_counter() - began)
            return logits

        loaded.fused = timed  # type: ignore[assignment] # it is only called
        try:
            yield
        finally:
            loaded.fused = fused


def seconds_of(run: Run, requests: int, owner: Owners = lambda _: BASE) -> Measure:
    async def measure() -> float:
        return run.seconds(requests, owner)

    return measure


def make_run(model: Path, given: argparse.Namespace, how: str) -> Run:
    engine = Engine(
        EngineConfig(
            model=model,
            device="cpu",
            dtype=given.dtype,
            kernels="torch" if how == "torch" else "cpp",
            kernel_cache=given.cache,
            kv_cache_mib=given.kv_mib,
            max_resident_adapters=given.adapters,
            threads=given.threads,
            prefix_cache=False,
        )
    )
    if how == "modules":
        engine._loaded.fused = None
    elif how == "fused" and engine._loaded.fused is None:
        raise SystemExit("this model has no fused forward")
    return Run(engine, given)
