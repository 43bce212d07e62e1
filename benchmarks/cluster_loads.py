"""What simulated clusters of benchmarks are: a law for the time of a step, and requests with real lengths."""

import argparse
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from motet_simulator.profiles.profile import EngineSize, Profile, StepLaw
from motet_simulator.workloads.request import WorkloadRequest
from motet_simulator.workloads.traces import read

LONGEST = 1024
"""Tokens, to which prompts and answers are cut."""

BURST, LASTS, LONGEST_OF_BURST = 80.0, 400.0, 4096

LENGTHS = "lengths/sharegpt.csv.gz"
"""In a folder of data. Each row has the tokens of a prompt and of its answer."""

PROMPT_LOG, OUTPUT_LOG = (4.02, 1.72), (5.35, 1.14)
"""Mean and deviation of the logarithms of these lengths, for those who have no data."""

BATCH, KV_TOKENS, CHUNK = 32, 60_000, 256


def profile(slots: int = 64) -> Profile:
    """A step takes 22 ms, 0.25 ms for each sequence, 0.2 µs for each token in memory that it attends to, and 0.06 ms
    for each token of a prompt. Adapters of rank 16 have 80 MiB; a token of keys and values has 512 KiB."""
    return Profile(
        machine="a law",
        model="a law",
        kernels="a law",
        engine=EngineSize(
            pages=KV_TOKENS // 16,
            page_bytes=8 << 20,
            adapter_rank_bytes=5 << 20,
            max_sequences=BATCH,
            max_model_length=8192,
            adapter_slots=slots,
            cached_adapters=1024,
            prefill_chunk_tokens=CHUNK,
        ),
        law=StepLaw(fixed=0.022, decodes=((1, 0.00025), (BATCH, BATCH * 0.00025)), context=2e-7, prefill=6e-5),
    )


def profile_of_cpus() -> Profile:
    """A step takes 20 ms and 5 ms for each sequence, and a token of a prompt ten times as long as on a GPU. The pool
    has an SLO of 100 ms a token: by what it saves, fewer sequences would run at once."""
    of_gpu = profile()
    return replace(
        of_gpu,
        engine=replace(of_gpu.engine, tpot_seconds=0.1),
        law=StepLaw(fixed=0.02, decodes=((1, 0.005), (BATCH, BATCH * 0.005)), context=2e-7, prefill=6e-4),
    )


def add_data_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=os.environ.get("TEST_DATA"), help=f"a folder with {LENGTHS}")


Lengths = Callable[[], tuple[int, int]]
"""Draws the tokens of a prompt and of its answer."""


def lengths(chance: random.Random, data: Path | None) -> Lengths:
    rows = _rows(data / LENGTHS) if data is not None and (data / LENGTHS).is_file() else ()
    if rows:
        return lambda: rows[chance.randrange(len(rows))]
    return lambda: (_cut(chance.lognormvariate(*PROMPT_LOG)), _cut(chance.lognormvariate(*OUTPUT_LOG)))


@lru_cache(maxsize=1)
def _rows(file: Path) -> Sequence[tuple[int, int]]:
    return [(_cut(row.prompt_tokens or 1), _cut(row.output_tokens or 1)) for row in read(file)]


def _cut(tokens: float, longest: int = LONGEST) -> int:
    return max(1, min(longest, round(tokens)))


def triangle(peak: float, seconds: float, drawn: Lengths, chance: random.Random) -> Iterator[tuple[float, int, int]]:
    """Times and lengths of requests whose rate rises evenly from 0 to `peak` a second, and falls again."""
    at = 0.0
    while (at := at + chance.expovariate(peak)) < seconds:
        if chance.random() < 1 - abs(2 * at / seconds - 1):
            yield at, *drawn()


def burst(
    chance: random.Random, data: Path | None, rate: float = 30.0, later: float = 1.0
) -> Iterator[tuple[float, int, int]]:
    """`rate` requests a second for 80 seconds, then `later` until 400: what is left of the burst is spread over all
    runners. Few answers are very long: lognormal, with a median of 250, to 4,096 tokens."""
    drawn, at = lengths(chance, data), 0.0
    while (at := at + chance.expovariate(rate if at < BURST else later)) < LASTS:
        yield at, drawn()[0], _cut(chance.lognormvariate(math.log(250), 1.2), LONGEST_OF_BURST)


def asked(
    times: Iterable[tuple[float, int, int]], adapters: Iterator[str] | None = None, *, reorders: bool = False
) -> list[WorkloadRequest]:
    """As requests of one tenant, in whose order they are served; or of a tenant for each adapter, which may pass each
    other."""
    requests = []
    for at, prompt, output in times:
        adapter = next(adapters) if adapters is not None else ""
        tenant = f"of-{adapter}" if reorders else "tenant"
        requests.append(
            WorkloadRequest(at=at, prompt_tokens=prompt, output_tokens=output, tenant=tenant, adapter=adapter)
        )
    return requests
