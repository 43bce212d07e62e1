"""What a runner's step trace says of its iterations. The newest kernels count: earlier lines are of others."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from motet.errors import SetupError
from motet_simulator.lines import BadRow, Row, json_object, numbered_lines
from motet_simulator.profiles.bounds import ENGINE, check_fields
from motet_simulator.profiles.limits import MAX_ITERATION_SECONDS
from motet_simulator.profiles.profile import EngineSize, Work

MAX_ITERATIONS = 1_000_000
"""The newest ones count."""


@dataclass(frozen=True, slots=True)
class Iteration:
    work: Work
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Of what the times are."""

    machine: str
    model: str
    kernels: str
    engine: EngineSize

    def difference(self, other: Self) -> tuple[str, object, object] | None:
        """The first thing that differs, and both values. The number of pages may: a machine's free memory differs from
        start to start."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in ("machine", "model", "kernels")]
        pairs += [
            (f"engine's {one.name}", getattr(self.engine, one.name), getattr(other.engine, one.name))
            for one in fields(EngineSize)
            if one.name not in ("pages", "host_pages")
        ]
        return next((pair for pair in pairs if pair[1] != pair[2]), None)

    def smaller(self, other: Self) -> Self:
        pages, host_pages = (
            min(getattr(self.engine, name), getattr(other.engine, name)) for name in ("pages", "host_pages")
        )
        return replace(self, engine=replace(self.engine, pages=pages, host_pages=host_pages))


def read(files: Iterable[Path]) -> tuple[Timed, list[Iteration]]:
    """All traces must be of the same machine, model, kernels and engine. Raises SetupError."""
    timed: Timed | None = None
    first: Path | None = None
    iterations: deque[Iteration] = deque(maxlen=MAX_ITERATIONS)
    for file in files:
        of_file, found = _read_one(file)
        if timed is None:
            timed, first = of_file, file
        elif different := of_file.difference(timed):
            name, own, their = different
            raise SetupError(f"{file} is of the {name} {own!r}, and {first} of {their!r}. Make a profile of each.")
        timed = timed.smaller(of_file)
        iterations += found
    if timed is None:
        raise SetupError("Name a step trace: MOTET_STEP_TRACE=FILE makes a runner write one.")
    return timed, list(iterations)


def _read_one(file: Path) -> tuple[Timed, deque[Iteration]]:
    timed: Timed | None = None
    iterations: deque[Iteration] = deque(maxlen=MAX_ITERATIONS)
    for row in _whole_rows(file):
        if (of := row.get("of")) is not None:
            now = _timed(row, of)
            if timed is None or now.difference(timed):
                timed = now
                iterations.clear()
            timed = timed.smaller(now)
        if timed is None:
            raise row.bad("a step trace begins with what it is of; an earlier version wrote this one")
        if row.get("parks") or row.get("resumes"):
            continue  # copies of pages are in its time
        iteration = _iteration(row)
        if iteration.seconds > MAX_ITERATION_SECONDS or not iteration.work.decodes + iteration.work.prefill:
            continue
        iterations.append(iteration)
    if timed is None or not iterations:
        raise SetupError(f"{file} has no iterations.")
    return timed, iterations


def _whole_rows(file: Path) -> Iterator[Row]:
    """A runner that writes, or was killed while it did, leaves a part of a line: the last one of the file, or the last
    one before the next runner's first."""
    part: BadRow | None = None
    line = ""
    for number, line in numbered_lines(file, bounded=False):
        try:
            row = Row(file, number, json_object(file, number, line))
        except BadRow as error:
            if part is not None:
                raise part from None
            part = error
            continue
        if part is not None and row.get("of") is None:
            raise part
        part = None
        yield row
    if part is not None and line.endswith("\n"):
        raise part


def _iteration(row: Row) -> Iteration:
    """The time of its cycle, which has all between two iterations in it. After a pause there is no cycle."""
    cycle = row.get("cycle")
    seconds = row.number("ms" if cycle is None else "cycle") / 1000
    work = Work(
        decodes=row.tokens("decode", least=0),
        context=row.count("context"),
        prefill=row.tokens("prefill", least=0),
        attended=row.count("attended"),
        adapters=row.tokens("adapters", least=0),
    )
    return Iteration(work, max(seconds, 1e-6))


def _timed(row: Row, of: Any) -> Timed:
    try:
        engine = EngineSize(**of["engine"])
        check_fields("engine.", engine, ENGINE)
        return Timed(machine=str(of["machine"]), model=str(of["model"]), kernels=str(of["kernels"]), engine=engine)
    except (TypeError, KeyError, ValueError) as error:
        raise row.bad(f"what it is of cannot be read ({error})") from None
