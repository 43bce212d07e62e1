"""Drives one engine with random work for a while, and prints what happened as JSON.

Arrivals, cancels, parks, resumes, shared prefixes, `n` choices, adapters that load and go, with less memory than all of
it needs. Each finished stream is compared with its replay: the same request alone on an engine without any of this.

    python -m tests.runner.engine_soak --seconds 600
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from motet.domain import BASE, PAGE_TOKENS, Digest, ParkMethod, RequestId, pages_for
from motet.errors import MotetError
from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, Finish, NewSequence, Sampling, State
from testbed.compiled_kernels import CACHE
from tests.runner.judged_once import started
from tests.runner.random_models import EIGHT, save_adapter, save_base
from tests.support.chosen_worker import NAMES, WORKER, chosen_worker

ADAPTERS = 5
SHAPES = 60
"""Requests of which copies arrive. Each is computed alone, first."""
NEAR_TIE = 1e-4
"""Where the two best logits of the replay are as near as this, another batch may choose the other one."""

KV_MIB = 1
OVERCOMMIT = 1.5
DRAIN_STEPS = 20_000
"""Iterations in which all must end once nothing new arrives."""

WARM_UP_SHARE = 0.2
"""Memory is first measured after this share of the time."""


@dataclass
class Replay:
    """What a request gets when it is alone."""

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """By how much the best logit is above the second best."""


@dataclass
class Soak:
    seconds: float
    seed: int
    folder: Path
    plan_ahead: int = 0
    kv_mib: int = KV_MIB
    overcommit: float = OVERCOMMIT
    larger: int = 1
    """By how much the ranks of all adapters are larger"""
    kernels: str = "torch"
    shapes: int = SHAPES
    iterations: int = 0
    """In which something arrives or is disturbed; 0: those of `seconds`"""
    happened: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    """The errors with which requests ended"""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.base = save_base("llama", self.folder / "base")
        self.adapters = {
            Digest(f"sha256:{i}"): save_adapter(self.base, "llama", spec, self.folder / f"adapter{i}", seed=i)
            for i, spec in enumerate(replace(one, rank=one.rank * self.larger) for one in EIGHT[:ADAPTERS])
        }
        info = self.make().info
        self.layouts: dict[Digest, AdapterLayout] = {
            digest: certify(folder, info).layout for digest, folder in self.adapters.items()
        }
        self.requests = [self._shape(number) for number in range(self.shapes)]

    @property
    def _of_kernels(self) -> dict[str, Any]:
        return {"kernels": self.kernels, "kernel_cache": CACHE if self.kernels == "cpp" else None}

    def make(self) -> Engine:
        """With less memory than the work needs."""
        return started(
            EngineConfig(
                model=self.base,
                plan_ahead=self.plan_ahead,
                **self._of_kernels,
                kv_cache_mib=self.kv_mib,
                host_kv_mib=self.kv_mib,
                max_resident_adapters=3,
                prefill_chunk_tokens=48,
            )
        )

    def _shape(self, number: int) -> NewSequence:
        """A request of which copies arrive. Every three share the beginning of their prompts, and two an adapter."""
        family = random.Random(number // 3)
        own = random.Random(number)
        shared = [family.randrange(2, 500) for _ in range(family.randrange(0, 100))]
        prompt = (*shared, *(own.randrange(2, 500) for _ in range(own.randrange(1, 60))))
        adapter = (own if number % 3 == 2 else family).choice([BASE, BASE, *self.adapters])
        drawn = {"temperature": 0.8, "top_k": 40} if number % 4 == 0 else {}
        sampling = Sampling(max_tokens=own.randrange(1, 80), ignore_eos=own.random() < 0.8, **drawn)  # type: ignore[arg-type]
        return NewSequence(
            request=RequestId(f"shape{number}"),
            epoch=1,
            prompt=prompt,
            adapter=adapter,
            promise=pages_for(len(prompt) + sampling.max_tokens, PAGE_TOKENS),
            sampling=sampling,
            seed=number,
            prefix_salt=f"{adapter} tenant {number // 3 % 2}".encode(),
        )

    def replay_alone(self) -> list[Replay]:
        replays = [Replay() for _ in self.requests]
        gaps: list[float] = []

        def tap(_: list[RequestId], logits: torch.Tensor) -> None:
            best = logits[0].topk(2).values
            gaps.append(float(best[0] - best[1]))

        config = EngineConfig(model=self.base, kv_cache_mib=8, max_resident_adapters=ADAPTERS, **self._of_kernels)
        engine = started(config, on_logits=tap)
        for digest, layout in self.layouts.items():
            engine.load_adapter(digest, layout)
        for shape, replay in zip(self.requests, replays, strict=True):
            gaps.clear()
            engine.add(replace(shape, prefix_salt=b""))
            while engine.has_work():
                for output in engine.step().sequences:
                    replay.tokens += output.tokens
            replay.gaps = list(gaps)
        return replays

    def run(self) -> dict[str, object]:
        replays = self.replay_alone()
        engine = self.make()
        engine.set_supervised(True)
        engine.set_overcommit(self.overcommit)
        process = psutil.Process()
        ends = time.monotonic() + self.seconds
        warm = ends - (1 - WARM_UP_SHARE) * self.seconds
        first_rss = 0
        live: dict[RequestId, tuple[int, list[int]]] = {}
        wrong: list[str] = []
        steps = number = drained = 0
        while True:
            running = steps < self.iterations if self.iterations else time.monotonic() < ends
            if not running and not live:
                break
            if running:
                number = self._disturb(engine, live, number)
            else:
                drained += 1
                assert drained < DRAIN_STEPS, f"these never end: {engine.report().sequences}"
                for digest, layout in self.layouts.items():
                    engine.load_adapter(digest, layout)
            for entry in engine.report().sequences if self.random.random() < 0.3 or not running else []:
                if entry.state is State.PARKED:
                    self.happened["resumed"] += engine.resume(entry.request, 1, entry.promise)
            for output in engine.step().sequences:
                shape, tokens = live[output.request]
                assert output.index == len(tokens), f"{output.request}: index {output.index} after {len(tokens)} tokens"
                tokens += output.tokens
                if output.finish is None:
                    continue
                del live[output.request]
                self.happened[str(output.finish)] += 1
                if output.error is not None:
                    self.failures[str(output.error)] += 1
                if output.finish is not Finish.FAILED and not _equal(tokens, replays[shape]):
                    wrong.append(f"{output.request} of shape {shape}: {tokens} and alone {replays[shape].tokens}")
            engine.check()
            steps += 1
            if not first_rss and time.monotonic() >= warm:
                first_rss = process.memory_info().rss
        report = engine.report()
        last_rss = process.memory_info().rss
        return {
            "seconds": self.seconds,
            "steps": steps,
            "requests": number,
            "happened": dict(self.happened),
            "failures": dict(self.failures),
            "wrong": wrong,
            "pages_not_free": engine.info.pages - report.pages_free,
            "rss_growth_mib": round((last_rss - first_rss) / 2**20, 1),
        }

    def _disturb(self, engine: Engine, live: dict[RequestId, tuple[int, list[int]]], number: int) -> int:
        chance = self.random.random
        if chance() < 0.3 and len(live) < 40:
            shape = self.random.randrange(self.shapes)
            first = RequestId(f"r{number}")
            for choice in range(self.random.choice([1, 1, 1, 3])):
                request = RequestId(f"r{number}")
                new = replace(self.requests[shape], request=request, parent=first if choice else None)
                # Some promises are too short: they are extended or parked on the way.
                new = replace(new, promise=max(1, self.random.randint(new.promise // 2, new.promise)))
                number += 1
                try:
                    engine.add(new)
                except MotetError:
                    self.happened["declined"] += 1
                    continue
                live[request] = shape, []
        if live and chance() < 0.01:
            request = self.random.choice(list(live))
            assert engine.cancel(request, 1)
            del live[request]
            self.happened["cancelled"] += 1
        if live and chance() < 0.03:
            entry = self.random.choice(engine.report().sequences)
            method = self.random.choice(list(ParkMethod))
            self.happened["parked"] += engine.park(entry.request, 1, entry.promise, entry.promise + 1, method)
        if chance() < 0.05:
            digest = self.random.choice(list(self.layouts))
            engine.load_adapter(digest, self.layouts[digest])
            self.happened["loads"] += 1
        if chance() < 0.02:
            digest = self.random.choice(list(self.layouts))
            if not any(entry.adapter == digest for entry in engine.report().sequences):
                engine.drop_adapter(digest)
                self.happened["drops"] += 1
        for entry in engine.report().sequences if chance() < 0.1 else []:
            if entry.state is State.LOADING:
                engine.load_adapter(entry.adapter, self.layouts[entry.adapter])
        return number


def _equal(tokens: list[int], replay: Replay) -> bool:
    """Up to the first position where the replay itself was near to a tie."""
    for token, expected, gap in zip(tokens, replay.tokens, replay.gaps, strict=False):
        if token != expected:
            return gap < NEAR_TIE
    return len(tokens) == len(replay.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan-ahead", type=int, default=0)
    parser.add_argument("--kv-mib", type=int, default=KV_MIB)
    parser.add_argument("--overcommit", type=float, default=OVERCOMMIT)
    parser.add_argument("--larger", type=int, default=1, help="by how much the ranks of all adapters are larger")
    parser.add_argument("--shapes", type=int, default=SHAPES, help="of how many requests copies arrive")
    parser.add_argument("--kernels", choices=["torch", "cpp"], default="torch")
    parser.add_argument("--worker", choices=NAMES, default=WORKER)
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder, chosen_worker(options.pop("worker")):
        print(json.dumps(Soak(folder=Path(folder), **options).run()))


if __name__ == "__main__":
    main()
