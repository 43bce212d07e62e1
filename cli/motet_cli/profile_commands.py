"""`motet profile`: what a runner's iterations cost, from its step trace."""

from collections.abc import Sequence
from pathlib import Path

from motet_cli.printer import Printer
from motet_simulator.profiles.fit import fit
from motet_simulator.profiles.identity import this_machine
from motet_simulator.profiles.profile import EngineSize, Profile, Work
from motet_simulator.profiles.step_traces import read
from motet_simulator.profiles.tables import from_law, from_splitwise
from motet_simulator.quantiles import quantile


def from_step_traces(traces: Sequence[Path], to: Path) -> int:
    timed, iterations = read(traces)
    return _write(fit(timed, iterations), to)


def describe(profile: Profile, file: Path) -> None:
    printer = Printer(width_of_a_pipe=200)
    learned = f", {profile.steps} iterations" if profile.steps else ""
    printer.line(f"{file}: {profile.model} with {profile.kernels} on {profile.machine}{learned}.")
    law, most = profile.law, profile.engine.max_sequences
    works = [(f"{count} that decode", Work(decodes=count)) for count in (1, 8, most) if count <= most]
    works += [("a prompt of 256 tokens", Work(prefill=256, attended=256 * 257 // 2))]
    rows = [(name, f"{1000 * law.seconds(work):.3g} ms") for name, work in works]
    printer.table(("an iteration with", "takes"), rows)
    for name, seen in (("only decode", profile.residuals.decoding), ("have prompt tokens", profile.residuals.prompts)):
        if seen:
            factors = ", ".join(f"p{level * 100:g} {quantile(seen, level):.2f}" for level in (0.05, 0.5, 0.95, 0.99))
            printer.line(f"Of the {len(seen)} that {name}: measured over the law {factors}.")


def from_table(table: Path, to: Path, *, model: str, hardware: str, parallel: int, engine: EngineSize) -> int:
    return _write(from_splitwise(table, engine, model=model, hardware=hardware, parallel=parallel), to)


def from_costs(costs: str, to: Path, *, machine: str, model: str, engine: EngineSize) -> int:
    return _write(from_law(costs, engine, machine=machine or this_machine(), model=model), to)


def show(file: Path) -> int:
    describe(Profile.read(file), file)
    return 0


def _write(profile: Profile, to: Path) -> int:
    profile.write(to)
    describe(profile, to)
    return 0
