"""Profiles and workloads of the simulator's tests."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from motet_simulator.profiles.profile import EngineSize, Overheads, Profile, Residuals, StepLaw
from motet_simulator.workloads.request import WorkloadRequest

SIZE = EngineSize(pages=256, page_bytes=4096, host_pages=32, adapter_rank_bytes=2048, adapter_rank_tile=8)
LAW = StepLaw(
    fixed=0.01, decodes=((1, 0.001), (8, 0.004), (64, 0.02)), context=1e-6, prefill=1e-4, attended=1e-8, adapters=1e-4
)


def profile(*, noise: float = 0.3, seed: int = 1, law: StepLaw = LAW, **size: Any) -> Profile:
    chance = random.Random(seed)
    seen = tuple(math.exp(chance.gauss(0, noise)) for _ in range(500)) if noise else ()
    return Profile(
        machine="a machine",
        model="a model",
        kernels="some kernels",
        engine=replace(SIZE, **size),
        law=law,
        residuals=Residuals(decoding=seen, prompts=seen[:100]),
        overheads=Overheads(),
    )


def workload(
    seed: int,
    count: int,
    *,
    rate: float,
    adapters: int = 0,
    blocks: int = 0,
    prompt: float = 30,
    output: float = 60,
    max_tokens: int = 0,
) -> Iterator[WorkloadRequest]:
    chance = random.Random(seed)
    at = 0.0
    for _ in range(count):
        at += chance.expovariate(rate)
        named = tuple(chance.choices(range(blocks), k=chance.randrange(3))) if blocks else ()
        yield WorkloadRequest(
            at=at,
            prompt_tokens=len(named) * 32 + 1 + min(1000, int(chance.expovariate(1 / prompt))),
            output_tokens=1 + min(300, int(chance.expovariate(1 / output))),
            max_tokens=max_tokens,
            tenant=f"t{chance.randrange(3)}",
            adapter=f"a{int(adapters * chance.random() ** 3)}" if adapters and chance.random() < 0.8 else "",
            request_class=chance.choice(["interactive", "standard", "batch"]),
            blocks=named,
            block_tokens=32,
        )
