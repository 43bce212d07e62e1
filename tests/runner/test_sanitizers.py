"""The kernels and an engine with sanitizers (`make sanitize`), and the defects that these must find."""

import subprocess
import sys
from pathlib import Path

import pytest

from motet_kernels.cpp.compiler import cpu_flags, instruction_sets
from testbed.compiled_kernels import needs_a_compiler
from testbed.machine import lacking
from testbed.tree import ROOT
from tools.sanitize.__main__ import PYTEST, environment, step
from tools.sanitize.builds import RUNTIMES, THREAD, Build, CannotBuild, runtime
from tools.sanitize.planted import DEFECTS, Defect, defects_of

SOME = (
    "tests/kernels/test_cpp_add_lora.py::test_threads_share_the_work_and_change_no_bit",
    "tests/kernels/test_cpp_largest.py",
    "tests/kernels/test_cpp_attention.py::test_new_keys_and_values_lie_in_the_pages_and_nothing_else_has_changed",
    "tests/kernels/test_cpp_program.py::test_linears_of_the_same_numbers_and_a_chain",
)


@pytest.fixture
def compiler() -> str:
    compiler = str(needs_a_compiler())
    try:
        for name in RUNTIMES:
            runtime(compiler, name)
    except CannotBuild as error:
        lacking(str(error))
    return compiler


@pytest.mark.timeout(1200)
def test_sanitizers_have_nothing_to_report_of_some_of_the_kernels(compiler: str, tmp_path: Path) -> None:
    """The soak below tries all kernels so, and the random work of an engine."""
    best = instruction_sets(cpu_flags())[0]
    command = [sys.executable, "-m", "tools.sanitize.under", *PYTEST, *SOME]
    step("kernels", command, **environment(compiler), MOTET_INSTRUCTIONS=best.name)
    program = tmp_path / "threads"
    Build(compiler, THREAD, best.options).parallel_checks(program)
    step("threads", [str(program)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_sanitizers_find_what_is_planted_and_nothing_else(compiler: str) -> None:
    count = len(defects_of(instruction_sets(cpu_flags())[0].name))
    command = [sys.executable, "-m", "tools.sanitize", "--soak"]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-8000:]
    assert f"sanitizer_found: {count} of {count}" in ran.stdout


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.what)
def test_each_planted_defect_changes_the_sources(defect: Defect, tmp_path: Path) -> None:
    """A text that it replaces has its place in them."""
    defect.plant(tmp_path / "sources")
