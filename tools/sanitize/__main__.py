"""`python -m tools.sanitize` runs the tests of the kernels and an engine with sanitizers, in about three minutes.

With `--kernels` only the former. With `--soak` for longer: with each set of instructions that this CPU has, and more
tests of engines; then each planted defect must be found.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from motet_kernels.cpp.compiler import CompilerError, InstructionSet, NotNow, cpu_flags, find_compiler, instruction_sets
from tools.sanitize import builds
from tools.sanitize.builds import ADDRESS, THREAD, Build, CannotBuild
from tools.sanitize.planted import Defect, defects_of

OF_KERNELS = [
    f"tests/kernels/test_cpp_{name}.py"
    for name in ("add_lora", "attention", "largest", "linear", "memory", "parallel", "program")
]
OF_ENGINES = [
    f"tests/runner/test_{name}.py"
    for name in (
        "adapter_memory",
        "next_decode",
        "engine_matches_peft",
        "fused",
        "isolation",
        "shared_prefixes",
        "windows",
    )
]
"""In a soak"""
NOT_TIMED = "not keep_nobody_waiting"
"""Sanitizers take time of their own."""
PYTEST = ("pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "not soak and not gpu", "--timeout=900",
          "-W", "ignore:Module already imported so cannot be rewritten")  # fmt: skip
RANDOM_WORK = ("tests.runner.engine_soak", "--kernels=cpp", "--larger=3", "--overcommit=3", "--plan-ahead=1")
SECONDS_OF_RANDOM_WORK, IN_A_SOAK = 4, 300
FEW_SHAPES = 8
"""Requests that are computed alone, too"""
STEP_SECONDS = 1500.0
MOST_LINES = 60
REPORT = re.compile(r"ERROR: |WARNING: ThreadSanitizer|runtime error: ")


class Failed(Exception):
    """What a step has said"""


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def environment(compiler: str) -> Mapping[str, str]:
    """Of Python with the sanitized library. Its own memory and torch's are the sanitizer's, too."""
    preloaded = [str(builds.runtime(compiler, name)) for name in ("libasan.so", "libstdc++.so.6")]
    return {
        "LD_PRELOAD": ":".join(preloaded),
        # Tests let `new` fail, and `malloc` return nothing: what they preload for that gives memory by `malloc`.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:verify_asan_link_order=0:alloc_dealloc_mismatch=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PATH": f"{builds.stand_in(compiler).parent}:{os.environ['PATH']}",
        "MOTET_RUNNER_KERNELS": "cpp",
    }


def step(what: str, command: Sequence[str], **variables: str) -> str:
    """The last line that it prints."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=builds.ROOT,
            env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=STEP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{what} took more than {STEP_SECONDS:.0f} s") from error
    lines = done.stdout.splitlines()
    if done.returncode:
        raise Failed(f"{what} failed (status {done.returncode}):\n" + "\n".join(most_telling(lines)))
    last = lines[-1] if lines else "nothing to report"
    say(f"{what}: {last} ({time.monotonic() - began:.0f} s)")
    return last


def most_telling(lines: Sequence[str]) -> Sequence[str]:
    """From the first report on, or the end"""
    first = next((number for number, line in enumerate(lines) if REPORT.search(line)), None)
    return lines[-MOST_LINES:] if first is None else lines[first : first + MOST_LINES]


def in_python(compiler: str, calls: Path, only: str, *, soak: bool, engine: bool) -> None:
    variables = {**environment(compiler), "MOTET_RECORD_CALLS": str(calls), "MOTET_INSTRUCTIONS": only}
    under = [sys.executable, "-m", "tools.sanitize.under"]
    step("wrong calls", [*under, "tools.sanitize.wrong_calls"], **variables)
    step("kernels", [*under, *PYTEST, "-k", NOT_TIMED, *OF_KERNELS], **variables)
    if soak:
        step("engines", [*under, *PYTEST, *OF_ENGINES], **variables)
    if not engine:
        return
    seconds = IN_A_SOAK if soak else SECONDS_OF_RANDOM_WORK
    shapes = [] if soak else [f"--shapes={FEW_SHAPES}"]
    work = step("random work", [*under, *RANDOM_WORK, f"--seconds={seconds}", *shapes], **variables)
    if json.loads(work)["wrong"]:
        raise Failed("random work: a stream is not the one that its request gets alone")


def in_programs(build: Build, folder: Path, calls: Sequence[Path]) -> None:
    """What needs no Python: recorded calls once more, and what threads promise."""
    name = build.sanitizer[0].partition("=")[2]
    program = folder / "program"
    build.replay(program)
    step(f"recorded calls, {name}", [str(program), *map(str, calls)])
    build.parallel_checks(program)
    step(f"threads, {name}", [str(program)])


def found(
    defects: Sequence[Defect], compiler: str, instructions: InstructionSet, folder: Path, calls: Sequence[Path]
) -> int:
    """How many of the planted defects are."""
    count = 0
    for number, defect in enumerate(defects):
        sources = defect.plant(folder / f"planted-{number}")
        report = first_report(
            [Build(compiler, one, instructions.options, sources) for one in (ADDRESS, THREAD)], folder, calls
        )
        say(f"planted: {defect.what}: {report or 'NOT FOUND'}")
        count += report is not None
    return count


def first_report(defective: Sequence[Build], folder: Path, calls: Sequence[Path]) -> str | None:
    for build in defective:
        try:
            in_programs(build, folder, calls)
        except Failed as error:
            if lines := [line for line in str(error).splitlines() if REPORT.search(line)]:
                return lines[0].strip()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=__doc__)
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--kernels", action="store_true", help="without the random work of an engine")
    how_long.add_argument("--soak", action="store_true", help="for longer, and with planted defects")
    chosen = parser.parse_args()
    soak: bool = chosen.soak
    try:
        compiler = str(find_compiler())
        for name in builds.RUNTIMES:
            builds.runtime(compiler, name)
        best, *others = instruction_sets(cpu_flags())
        builds.remove_unused()
        with tempfile.TemporaryDirectory(prefix="motet-sanitize-") as name:
            folder, recorded = Path(name), Path(name) / "calls"
            recorded.mkdir()
            in_python(compiler, recorded, "" if soak else best.name, soak=soak, engine=not chosen.kernels)
            calls = sorted(recorded.iterdir())
            for instructions in [best, *others] if soak else [best]:
                say(f"with {instructions.name}:")
                for sanitizer in (ADDRESS, THREAD):
                    in_programs(Build(compiler, sanitizer, instructions.options), folder, calls)
            if soak:
                defects = defects_of(best.name)
                count = found(defects, compiler, best, folder, calls)
                say(f"sanitizer_found: {count} of {len(defects)}")
                return 0 if count == len(defects) else 1
    except (CannotBuild, CompilerError, NotNow, Failed) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
