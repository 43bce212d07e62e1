"""What a runner's step trace says of its iterations. The newest kernels count: earlier lines are of others."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.errors import SetupError
from motet_simulator.profiles.profile import EngineSize, Work
from motet_simulator.workloads.lines import BadRow, Row, json_object, numbered_lines

MAX_ITERATIONS = 1_000_000
"""The newest ones count."""

MAX_ITERATION_SECONDS = 60.0
"""Of an iteration. A longer one says that the machine slept."""


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

    def differences(self, other: "Timed") -> list[str]:
        pairs = (
            ("machine", self.machine, other.machine),
            ("model", self.model, other.model),
            ("kernels", self.kernels, other.kernels),
            ("engine", self.engine, other.engine),
        )
        return [f"the {name} {own!r} and not {their!r}" for name, own, their in pairs if own != their]


def read(files: Iterable[Path]) -> tuple[Timed, list[Iteration]]:
    """All traces must be of the same machine, model, kernels and engine. Raises SetupError."""
    timed: Timed | None = None
    first: Path | None = None
    iterations: list[Iteration] = []
    for file in files:
        of_file, found = _read_one(file)
        if timed is None:
            timed, first = of_file, file
        elif different := of_file.differences(timed):
            raise SetupError(f"{file} is of {different[0]}, which {first} is of. Make a profile of each.")
        iterations += found
    if timed is None:
        raise SetupError("Name a step trace: MOTET_STEP_TRACE=FILE makes a runner write one.")
    return timed, iterations[-MAX_ITERATIONS:]


def _read_one(file: Path) -> tuple[Timed, list[Iteration]]:
    timed: Timed | None = None
    iterations: list[Iteration] = []
    for number, line in numbered_lines(file):
        row = Row(file, number, json_object(file, number, line))
        if (of := row.get("of")) is not None:
            now = _timed(row, of)
            if now != timed:
                timed, iterations = now, []
        if timed is None:
            raise BadRow(file, number, "a step trace begins with what it is of; an earlier version wrote this one")
        if row.get("parks") or row.get("resumes"):
            continue  # copies of pages are in its time
        iteration = _iteration(row)
        if iteration.seconds > MAX_ITERATION_SECONDS or not iteration.work.decodes + iteration.work.prefill:
            continue
        iterations.append(iteration)
    if timed is None or not iterations:
        raise SetupError(f"{file} has no iterations.")
    return timed, iterations


def _iteration(row: Row) -> Iteration:
    """The time of its cycle, which has all between two iterations in it. After a pause there is no cycle."""
    cycle = row.get("cycle")
    seconds = row.seconds("ms" if cycle is None else "cycle") / 1000
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
        return Timed(
            machine=str(of["machine"]),
            model=str(of["model"]),
            kernels=str(of["kernels"]),
            engine=EngineSize(**of["engine"]),
        )
    except (TypeError, KeyError, ValueError) as error:
        raise row.bad(f"what it is of cannot be read ({error})") from None
