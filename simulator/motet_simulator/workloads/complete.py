"""Whole requests from rows that lack something: times from a rate, lengths from another file, adapters from a law."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from motet.errors import SetupError
from motet_simulator.lines import MAX_NUMBER, BadRow
from motet_simulator.workloads.popularity import MAX_ADAPTERS, Law, choices, names
from motet_simulator.workloads.request import WorkloadRequest
from motet_simulator.workloads.traces import TraceRow, read

MAX_LENGTHS = 1_000_000
"""Of a file that lengths are drawn from: they are kept in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What is taken from elsewhere. What a trace says itself wins, but for adapters and times that are asked for."""

    rate: float | None = None
    """Requests a second, at random and independent of each other. None: the trace's own times."""
    speed: float = 1.0
    """How many times as fast the trace's own times pass."""
    lengths: Path | None = None
    """A file with lengths, of which each request gets a random row's."""
    adapters: int | None = None
    """How many there are. None: those of the trace; 0: none."""
    law: Law = Law.ZIPF
    requests: int | None = None
    """The most that are taken. None: all."""
    seed: int = 0


def workload(file: Path, completion: Completion) -> Iterator[WorkloadRequest]:
    """The requests of a trace. Raises SetupError, where the trace lacks something that nobody gives."""
    rows = read(file)
    if completion.requests is not None:
        rows = islice(rows, completion.requests)
    return complete(file, rows, completion)


def complete(file: Path, rows: Iterable[TraceRow], completion: Completion) -> Iterator[WorkloadRequest]:
    times = _times(completion)
    lengths = _lengths(completion)
    adapters = choices(completion.law, completion.adapters, completion.seed) if completion.adapters else None
    for row in rows:
        at = times(row)
        if at is None:
            raise BadRow(file, row.line, "the trace has no times; give a rate (--rate)")
        if at > MAX_NUMBER:
            why = f"its time is {at:.3g} s; the last may be {MAX_NUMBER:g} s. Give a higher rate (--rate) or --speed"
            raise BadRow(file, row.line, why)
        prompt, output = row.prompt_tokens, row.output_tokens
        if prompt is None or output is None:
            if lengths is None:
                raise BadRow(file, row.line, "the trace has no lengths; name a file that has some (--lengths)")
            prompt, output = next(lengths)
        adapter = row.adapter or ""
        if completion.adapters is not None:
            adapter = next(adapters) if adapters is not None else ""
        yield WorkloadRequest(
            at=at,
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=row.max_tokens,
            tenant=row.tenant,
            adapter=adapter,
            request_class=row.request_class,
            blocks=row.blocks,
            block_tokens=row.block_tokens,
        )


def adapters_asked_for(file: Path, completion: Completion) -> list[str]:
    """The names of all adapters that a workload may ask for, once each."""
    if completion.adapters is not None:
        return names(completion.adapters)
    found: dict[str, None] = {}
    for row in islice(read(file), completion.requests):
        if row.adapter:
            found[row.adapter] = None
        if len(found) > MAX_ADAPTERS:
            why = f"a plan has at most {MAX_ADAPTERS:,} adapters. Take fewer requests (--requests) or --adapters"
            raise BadRow(file, row.line, why)
    return list(found)


def _times(completion: Completion) -> Callable[[TraceRow], float | None]:
    if completion.rate is None:
        return lambda row: None if row.at is None else row.at / completion.speed
    rate, chance, now = completion.rate, random.Random(f"times {completion.seed}"), 0.0

    def at(_: TraceRow) -> float:
        nonlocal now
        now += chance.expovariate(rate)
        return now

    return at


def _lengths(completion: Completion) -> Iterator[tuple[int, int]] | None:
    if completion.lengths is None:
        return None
    found = [
        (row.prompt_tokens, row.output_tokens)
        for row in islice(read(completion.lengths), MAX_LENGTHS)
        if row.prompt_tokens is not None and row.output_tokens is not None
    ]
    if not found:
        raise SetupError(f"{completion.lengths} has no lengths.")
    chance = random.Random(f"lengths {completion.seed}")
    return iter(lambda: found[chance.randrange(len(found))], None)
