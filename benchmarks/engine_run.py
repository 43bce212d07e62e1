"""One engine of the product and the requests that a benchmark gives it: what they take together, and what of each step
is the model's."""

import argparse
import math
import random
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Measure
from benchmarks.model_time import ModelTime
from benchmarks.traffic import TRAFFIC, among
from motet.domain import BASE, PAGE_TOKENS, Digest, RequestId, pages_for
from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.engine import Engine
from motet_runner.execute.forward.program import SWITCHED_ON
from motet_runner.interface import AdapterLoaded, EngineConfig, NewSequence, Sampling

KINDS = ("identical", "skewed", "distinct")
"""The traffic of adapters that engines are compared with"""


def owners(kind: str, requests: int, adapters: Sequence[Digest]) -> list[Digest]:
    """The adapter of each request, or the base."""
    if kind == "base":
        return [BASE] * requests
    return [adapters[number] for number in among(len(adapters), TRAFFIC[kind](requests))]


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    output: int
    adapter: Digest = BASE
    at: float = 0.0
    """When it arrives: seconds after the first request"""


@dataclass(frozen=True, slots=True)
class Served:
    """What came of requests. Times are seconds after the beginning, one for each token."""

    seconds: float
    tokens: list[list[int]]
    times: list[list[float]]
    loads: int = 0
    """Of adapters"""


def random_prompt(tokens: random.Random, length: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(tokens.randrange(2, vocabulary) for _ in range(length))


def settle(engine: Engine) -> None:
    """Wait until it has its kernels."""
    while (wait := engine.idle()) is not None:
        time.sleep(wait)


@dataclass
class Run:
    """One engine, and the seconds of its steps and of the model in them."""

    engine: Engine
    given: argparse.Namespace
    of_model: list[float] = field(default_factory=list)
    of_steps: list[float] = field(default_factory=list)
    of_decodes: list[float] = field(default_factory=list)
    """The steps that began when all requests had a token, of the last that were served"""
    layouts: dict[Digest, AdapterLayout] = field(default_factory=dict)
    """Of adapters that the engine learns of with each request for them, as in the product: it loads none before"""
    _numbers: Iterator[int] = field(default_factory=count)

    def know(self, digest: Digest, folder: Path) -> None:
        """The engine serves the adapter in this folder under this digest."""
        self.engine.load_adapter(digest, certify(folder, self.engine.info).layout)

    def settle(self) -> None:
        settle(self.engine)

    def seconds(self, requests: int, adapters: Sequence[Digest] = ()) -> float:
        """What all requests take together, each with its adapter, or all with the base. Their prompts are new, so no
        prefix is cached."""
        given, tokens = self.given, random.Random(next(self._numbers))
        prompts = [random_prompt(tokens, given.prompt, given.vocabulary) for _ in range(requests)]
        asks = zip(prompts, adapters or [BASE] * requests, strict=True)
        return self.serve([Ask(prompt, given.output, adapter) for prompt, adapter in asks]).seconds

    def serve(self, asks: Sequence[Ask], *, at_once: float = math.inf) -> Served:
        """At most `at_once` at a time. Those that arrive at once are known to the engine before the time begins."""
        numbers: dict[RequestId, int] = {}
        served = Served(0.0, [[] for _ in asks], [[] for _ in asks])
        self.of_decodes = []
        waiting = sorted(range(len(asks)), key=lambda number: (asks[number].at, number), reverse=True)
        without_token = len(asks)
        ended = loads = 0

        def arrive(at: float) -> None:
            while waiting and asks[waiting[-1]].at <= at and len(numbers) - ended < at_once:
                number = waiting.pop()
                numbers[self._add(asks[number])] = number

        arrive(0)
        began = now = time.perf_counter()
        while waiting or self.engine.has_work():
            arrive(now - began)
            if not self.engine.has_work():
                time.sleep(max(0.0, asks[waiting[-1]].at - (now - began)))
                now = time.perf_counter()
                continue
            of_step = time.perf_counter()
            output = self.engine.step()
            now = time.perf_counter()
            self.of_steps.append(now - of_step)
            if not without_token:
                self.of_decodes.append(now - of_step)
            loads += sum(isinstance(event, AdapterLoaded) for event in output.events)
            for sequence in output.sequences:
                if sequence.error is not None:
                    raise sequence.error
                number = numbers[sequence.request]
                without_token -= not served.tokens[number]
                served.tokens[number] += sequence.tokens
                served.times[number] += [now - began] * len(sequence.tokens)
                ended += sequence.finish is not None
        return Served(now - began, served.tokens, served.times, loads)

    def _add(self, ask: Ask) -> RequestId:
        request = RequestId(str(next(self._numbers)))
        if (layout := self.layouts.get(ask.adapter)) is not None:
            self.engine.load_adapter(ask.adapter, layout)
        self.engine.add(
            NewSequence(
                request=request,
                epoch=1,
                prompt=ask.prompt,
                adapter=ask.adapter,
                promise=pages_for(len(ask.prompt) + ask.output, PAGE_TOKENS),
                sampling=Sampling(max_tokens=ask.output, ignore_eos=True),
            )
        )
        return request

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measures the model's part of each step."""
        loaded = self.engine.diagnostics.loaded
        fused = loaded.fused
        assert fused is not None
        time_of_model = ModelTime()
        time_of_model.watch(loaded)
        self.of_model, self.of_steps = time_of_model.calls, []
        try:
            yield
        finally:
            loaded.fused = fused


def seconds_of(run: Run, requests: int, adapters: Sequence[Digest] = ()) -> Measure:
    async def measure() -> float:
        return run.seconds(requests, adapters)

    return measure


def make_run(
    model: Path, given: argparse.Namespace, how: str, *, switched_on: Collection[str] = SWITCHED_ON, **settings: Any
) -> Run:
    """`how`: torch; fused, the compiled kernels; modules, torch's kernels and the modules of transformers, as they were
    loaded; or packed, these with packed linears. `switched_on`: what a recorded forward pass gains from"""
    compiled = how == "fused"
    config = {
        "model": model,
        "device": "cpu",
        "dtype": given.dtype,
        "kernels": "cpp" if compiled else "torch",
        "kernel_cache": given.cache,
        "kv_cache_mib": given.kv_mib,
        "max_resident_adapters": given.adapters,
        "threads": given.threads,
        "prefix_cache": False,
    }
    changed: dict[str, AbstractContextManager[Any]] = {
        "modules": patch("motet_runner.execute.kernels.packed_model.PackedModel.parts", lambda _: iter(())),
        "packed": patch.multiple(
            "motet_runner.execute.kernels.packed_model",
            of_a_fused_family=lambda _: False,
            fused_forward=lambda *_: None,
        ),
    }
    with changed.get(how, nullcontext()):
        engine = Engine(EngineConfig(**(config | settings)), switched_on=switched_on)
    if compiled and engine.diagnostics.loaded.fused is None:
        raise SystemExit("this model has no fused forward")
    return Run(engine, given)
