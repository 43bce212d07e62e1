"""Measures how many small faults in the policies their tests find (`make mutate`).

    python -m tools.mutate [--seed N] [--mutants 75] [--packages motet_scheduler.policy …] [--jobs 2] [--json]

First the tests of each package run once, and the lines that each test reaches are recorded. Then mutants are drawn by
the printed seed. For each, the tests that reach its line run in a process of their own, the quickest first, until one
fails; all of them for a line that runs when its module is imported. A mutant that no test fails for survives, and is
printed. One that makes the tests wait is found, too.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, arguments, report
from tools.mutate.mutants import Mutant, mutants_of
from tools.mutate.plugin import FOLDER, MODULE, RECORD, SOURCE

ROOT = Path(__file__).resolve().parents[2]
LEAST, LEAST_IN_A_PACKAGE = 0.85, 0.75
PATIENCE = 5.0
"""A mutant is found when its tests take longer than START_SECONDS plus this multiple of their time without it."""
START_SECONDS = 30.0
FOUND = frozenset({1, 2, None})
"""What pytest ends with when a test fails, or a file of tests cannot be imported; None: it took too long"""
NOT_COLLECTED = 4
"""What pytest ends with when a named test is nowhere, also because its file cannot be imported."""


@dataclass(frozen=True, slots=True)
class Package:
    folder: Path
    tests: tuple[str, ...]


PACKAGES = {
    "motet_scheduler.policy": Package(ROOT / "services/scheduler/motet_scheduler/policy", ("tests/scheduler",)),
    "motet_supervisor.policy": Package(ROOT / "services/supervisor/motet_supervisor/policy", ("tests/supervisor",)),
    "motet_runner.plan": Package(ROOT / "services/gpu-runner/motet_runner/plan", ("tests/runner/plan",)),
    "motet_operator.reconcile": Package(
        ROOT / "operator/motet_operator/reconcile", ("tests/operator", "--ignore=tests/operator/cluster")
    ),
}


@dataclass(frozen=True, slots=True)
class Drawn:
    path: Path
    module: str
    mutant: Mutant
    tests: Sequence[str]
    """That may notice it, the quickest first"""
    seconds: float
    """What they take without it"""

    def __str__(self) -> str:
        before, after = (" ".join(said.split()) for said in (self.mutant.before, self.mutant.after))
        return f"{self.path.relative_to(ROOT)}:{self.mutant.line}: {self.mutant.kind}: {before} -> {after}"


def pytest(tests: Sequence[str], variables: Mapping[str, str], timeout: float | None = None) -> int | None:
    """The status; None: it took longer."""
    # The same examples for each mutant, from no database of examples that have failed before.
    options = ("-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not soak")
    command = [sys.executable, "-m", "pytest", "-p", "tools.mutate.plugin", *options, *tests]
    try:
        return subprocess.run(
            command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, check=False, timeout=timeout
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def recorded(package: Package) -> dict[str, Any]:
    """The tests that pass, with their seconds and the lines that they reach."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "tests.json"
        status = pytest(package.tests, {RECORD: str(into), FOLDER: str(package.folder)})
        if status != 0:
            sys.exit(f"the tests {' '.join(package.tests)} end with status {status} without any mutant")
        found: dict[str, Any] = json.loads(into.read_text(encoding="utf-8"))
        return found


def drawn(name: str, package: Package, tests: Mapping[str, Any], chance: random.Random, count: int) -> list[Drawn]:
    """Also of lines that no test reaches: nobody finds those."""
    every = list(_all_of(name, package, tests))
    reached = [one for one in every if one.tests]
    print(f"{name}: {len(every)} mutants, {len(reached)} of them in lines that tests reach", flush=True)
    return chance.sample(every, min(count, len(every)))


def _all_of(name: str, package: Package, tests: Mapping[str, Any]) -> Iterator[Drawn]:
    for path in sorted(package.folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        inside = path.relative_to(package.folder).with_suffix("").parts
        module = ".".join([name, *(part for part in inside if part != "__init__")])
        for mutant in mutants_of(source):
            reach = {
                test: one["seconds"]
                for test, one in tests.items()
                if mutant.at_import or mutant.line in one["lines"].get(str(path), ())
            }
            yield Drawn(path, module, mutant, sorted(reach, key=reach.__getitem__), sum(reach.values()))


def is_found(one: Drawn) -> bool:
    if not one.tests:
        return False
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as changed:
        changed.write(one.mutant.source)
        changed.flush()
        timeout = START_SECONDS + PATIENCE * one.seconds
        status = pytest(one.tests, {MODULE: one.module, SOURCE: changed.name}, timeout)
    if status == NOT_COLLECTED and pytest([*one.tests, "--collect-only"], {}) == 0:
        return True
    if status not in FOUND | {0}:
        sys.exit(f"the tests of {one} end with status {status}")
    return status in FOUND


def measure(given: argparse.Namespace) -> list[Result]:
    chance = random.Random(given.seed)
    shares, found_of_all, all_of_them = {}, 0, 0
    for name in given.packages:
        of_package = drawn(name, PACKAGES[name], recorded(PACKAGES[name]), chance, given.mutants)
        with ThreadPoolExecutor(given.jobs) as pool:
            found = list(pool.map(is_found, of_package))
        for one, was_found in zip(of_package, found, strict=True):
            if not was_found:
                print(f"  survives: {one}", flush=True)
        shares[name] = sum(found) / len(found)
        found_of_all, all_of_them = found_of_all + sum(found), all_of_them + len(found)
        print(f"{name}: {sum(found)} of {len(found)} found", flush=True)
    share, worst = found_of_all / all_of_them, min(shares.values())
    return [
        Result("mutants_killed", share, "", f">= {LEAST:g}", share >= LEAST, counted=True),
        Result(
            "mutants_killed_worst", worst, "", f">= {LEAST_IN_A_PACKAGE:g}", worst >= LEAST_IN_A_PACKAGE, counted=True
        ),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the draw; default: another one each time")
    parser.add_argument("--mutants", type=int, default=75, help="of each package")
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants that are tried together")
    given = parser.parse_args()
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {given.seed}", flush=True)
    report("mutate", measure(given), as_json=given.json)


if __name__ == "__main__":
    main()
