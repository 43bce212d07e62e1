"""The kernels and an engine with sanitizers (`make sanitize`), and the defects that these must find."""

import subprocess
import sys
from pathlib import Path

import pytest

from motet_kernels.cpp.compiler import cpu_flags, instruction_sets
from testbed.compiled_kernels import needs_a_compiler
from testbed.machine import lacking
from testbed.tree import ROOT
from tools.sanitize.builds import RUNTIMES, CannotBuild, runtime
from tools.sanitize.planted import DEFECTS, Defect, defects_of


def sanitize(*options: str) -> str:
    compiler = str(needs_a_compiler())
    try:
        for name in RUNTIMES:
            runtime(compiler, name)
    except CannotBuild as error:
        lacking(str(error))
    command = [sys.executable, "-m", "tools.sanitize", *options]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-8000:]
    return ran.stdout


@pytest.mark.timeout(1200)
def test_sanitizers_have_nothing_to_report_of_the_kernels() -> None:
    """The soak below adds the random work of an engine, whose start takes long with sanitizers."""
    sanitize("--kernels")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_sanitizers_find_what_is_planted_and_nothing_else() -> None:
    count = len(defects_of(instruction_sets(cpu_flags())[0].name))
    assert f"sanitizer_found: {count} of {count}" in sanitize("--soak")


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.what)
def test_each_planted_defect_changes_the_sources(defect: Defect, tmp_path: Path) -> None:
    """A text that it replaces has its place in them."""
    defect.plant(tmp_path / "sources")
