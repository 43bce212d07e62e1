"""Which words of the Makefile install what: `make up` no more than running needs, and no word anything twice."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repo.tree import ROOT

PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin; for name in python motet ruff lint-imports; do cp "$0" .venv/bin/$name; done ;;
  "--version") echo "Python 3.11.7" ;;
  *find_spec*) test -e .venv/torch ;;
  *install*torch\\>=*) touch .venv/torch ;;
esac
"""
"""Whatever the Makefile calls: it notes how, and does as little as keeps the Makefile going."""
RUN_WORDS = ["up", "status"]
OTHER_WORDS = ["venv", "test", "lint", "generate"]
TORCH, RUNNING, ALL = "torch", ".[local]", ".[dev]"


class Checkout:
    """A folder with the Makefile, and programs that only note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "elsewhere" / "python3"
        self.calls = folder / "calls"
        self.python.parent.mkdir()
        self.python.write_text(PROGRAM)
        self.python.chmod(0o755)
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy2(ROOT / name, folder / name)

    def make(self, *words: str) -> str:
        """What it says."""
        self.calls.write_text("")
        # A `make` that runs this test hands on its own options and the variables of its command line.
        of_make = lambda name: name.startswith("MAKE") or name.endswith("_ARGS") or name in ("MFLAGS", "KUBE")  # noqa: E731
        outside = {name: value for name, value in os.environ.items() if not of_make(name)}
        done = subprocess.run(
            ["make", "--no-print-directory", f"PYTHON={self.python}", *words],
            cwd=self.folder,
            env=outside | {"CALLS": str(self.calls)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def installed(self) -> list[str]:
        """By the last `make`: distributions, or the product with an extra."""
        return re.findall(
            r"^python -m pip install .* (torch|\.\[\w+\])(?:>=\S+)?$", self.calls.read_text(), re.MULTILINE
        )

    @property
    def called(self) -> list[str]:
        """By the last `make`, of what is in .venv, beside what installs."""
        calls = self.calls.read_text().splitlines()
        return [call for call in calls if not re.match(r"python3 |python (-c|-m pip)", call)]

    def change(self, file: str) -> None:
        """As an edit or a pull does: newer than everything else."""
        newest = max(path.stat().st_mtime for path in self.folder.rglob("*"))
        os.utime(self.folder / file, (newest + 1, newest + 1))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_up_installs_what_running_needs_and_test_adds_the_rest(checkout: Checkout) -> None:
    said = checkout.make("up")
    assert checkout.installed == [TORCH, RUNNING]
    assert checkout.called == ["motet up"]
    assert ("torch " in said, "the product " in said, "pytest" in said) == (True, True, False)
    said = checkout.make("test")
    assert checkout.installed == [ALL]
    assert checkout.called == ["python -m tools.gate --"]
    assert ("torch " in said, "the product " in said, "pytest" in said) == (False, False, True)
    assert "Downloading" not in checkout.make("up")
    assert checkout.installed == []


@pytest.mark.parametrize("word", [*RUN_WORDS, *OTHER_WORDS])
def test_a_target_installs_what_it_needs_once(checkout: Checkout, word: str) -> None:
    checkout.make(word)
    assert checkout.installed == [TORCH, RUNNING if word in RUN_WORDS else ALL]
    checkout.make(word)
    assert checkout.installed == []
    assert checkout.called or word == "venv"


@pytest.mark.parametrize(
    ("first", "file", "again"), [("up", "pyproject.toml", RUNNING), ("venv", "constraints.txt", ALL)]
)
def test_after_a_change_of_versions_up_renews_what_was_there(
    checkout: Checkout, first: str, again: str, file: str
) -> None:
    checkout.make(first)
    checkout.change(file)
    checkout.make("up")
    assert checkout.installed == [again]


def test_torch_may_come_from_an_index_of_its_own(checkout: Checkout) -> None:
    index = "https://example.com/cpu"
    assert f"From {index}." in checkout.make("up", f"TORCH_INDEX={index}")
    of_torch, of_the_rest = re.findall(r"^python -m pip install (.*)$", checkout.calls.read_text(), re.MULTILINE)
    assert f"--index-url {index} torch>=" in of_torch
    assert "--index-url" not in of_the_rest
