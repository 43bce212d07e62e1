"""Workloads as the papers make them: requests at random times, lengths by a lognormal law or from a file, adapters by
one of Punica's laws (PU-25)."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from motet_simulator.lines import MAX_TOKENS
from motet_simulator.workloads.complete import Completion, complete
from motet_simulator.workloads.popularity import Law, adapters_of
from motet_simulator.workloads.request import WorkloadRequest
from motet_simulator.workloads.traces import TraceRow

SPREAD = 1.0
"""Of the logarithm of a length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    requests: int
    rate: float
    """Requests a second."""
    law: Law
    adapters: int | None = None
    """None: as many as Punica's workload of this number of requests has."""
    prompt: float = 19.3
    """Mean tokens of a prompt. The default is the mean of Alpaca's instructions (S3)."""
    output: float = 58.45
    most_output: int = 2048
    lengths: Path | None = None
    """A file of lengths, instead of the means."""
    seed: int = 0


def make(made: Made) -> Iterator[WorkloadRequest]:
    adapters = adapters_of(made.law, made.requests) if made.adapters is None else made.adapters
    completion = Completion(rate=made.rate, lengths=made.lengths, adapters=adapters, law=made.law, seed=made.seed)
    return complete(made.lengths or Path("workload"), _rows(made), completion)


def _rows(made: Made) -> Iterator[TraceRow]:
    chance = random.Random(f"lengths {made.seed}")
    for number in range(1, made.requests + 1):
        if made.lengths is not None:
            yield TraceRow(line=number)
            continue
        prompt = _lognormal(chance, made.prompt)
        yield TraceRow(
            line=number, prompt_tokens=prompt, output_tokens=min(made.most_output, _lognormal(chance, made.output))
        )


def _lognormal(chance: random.Random, mean: float) -> int:
    return max(1, min(MAX_TOKENS, round(chance.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))
