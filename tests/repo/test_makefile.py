"""Which words of the Makefile install what: `make up` no more than running needs, and no word anything twice."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from testbed.tree import ROOT

PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin; for name in python motet ruff lint-imports; do cp "$0" .venv/bin/$name; done ;;
  "--version") echo "Python 3.11.7" ;;
  *find_spec*) test -e .venv/torch ;;
  *install*torch\\>=*) touch .venv/torch ;;
  *"import auditwheel, ziglang") test -e .venv/wheels ;;
  *install*"[wheels]") touch .venv/wheels ;;
esac
"""
"""Whatever the Makefile calls: it notes how, and does as little as keeps the Makefile going."""
TORCH, RUNNING, ALL = "torch", ".[local]", ".[dev]"


class Checkout:
    """A folder with the Makefile, and programs that only note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python, self.calls = folder, folder / "elsewhere" / "python3", ""
        self.python.parent.mkdir()
        self.python.write_text(PROGRAM)
        self.python.chmod(0o755)
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy2(ROOT / name, folder / name)

    def make(self, *words: str) -> list[str]:
        """What it installs: distributions, or the product with an extra."""
        calls = self.folder / "calls"
        calls.write_text("")
        # A `make` that runs this test hands on its own options and the variables of its command line.
        of_make = re.compile(r"MAKE|MFLAGS$|KUBE$|.*_ARGS$")
        outside = {name: value for name, value in os.environ.items() if not of_make.match(name)}
        command = ["make", "--no-print-directory", f"PYTHON={self.python}", *words]
        environment = outside | {"CALLS": str(calls)}
        self.said = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, check=True).stdout
        self.calls = calls.read_text()
        return re.findall(r"^python -m pip install .* (torch|\.\[\w+\])(?:>=\S+)?$", self.calls, re.MULTILINE)


def test_up_installs_what_running_needs_and_test_adds_the_rest(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.make("up") == [TORCH, RUNNING]
    assert checkout.calls.endswith("\nmotet up\n")
    assert b"pytest" not in checkout.said
    assert checkout.make("test") == [ALL]
    assert checkout.calls.endswith("\npython -m tools.gate --\n")
    assert b"torch " not in checkout.said
    for word in ("up", "status", "venv", "test", "lint", "generate"):
        assert checkout.make(word) == []
        assert b"Downloading" not in checkout.said


def test_long_tests_have_what_builds_wheels(tmp_path: Path) -> None:
    """Without it, one of them would be skipped, and nobody would see that."""
    checkout = Checkout(tmp_path)
    assert checkout.make("soak") == [TORCH, ALL, ".[wheels]"]
    assert checkout.calls.endswith("\npython -m pytest -m soak --timeout 7200\n")
    assert checkout.make("soak") == []


def test_the_fast_gate_leaves_out_long_tests(tmp_path: Path) -> None:
    """Also where a folder of fast tests has a long one."""
    checkout = Checkout(tmp_path)
    checkout.make("--dry-run", "check")
    assert b'python -m pytest -q -m "not soak" ' in checkout.said
