"""A rule that ruff may break is broken somewhere: an exception that nothing needs is taken away."""

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from testbed.tree import ROOT, pyproject

LINT = pyproject()["tool"]["ruff"]["lint"]


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str]]:
    """Rule and path of all that ruff finds of these rules, but what a line of code excuses."""
    rules = {*LINT["ignore"], *(rule for rules in LINT["per-file-ignores"].values() for rule in rules)}
    options = ["--select", ",".join(sorted(rules)), "--config", "lint.per-file-ignores={}"]
    said = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--exit-zero", "--output-format", "json", *options, "."],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [(one["code"] or "", Path(one["filename"]).relative_to(ROOT).as_posix()) for one in json.loads(said)]


def test_every_rule_that_is_off_is_broken_somewhere(found: list[tuple[str, str]]) -> None:
    rules = {rule for rule, _ in found}
    assert [off for off in LINT["ignore"] if not any(rule.startswith(off) for rule in rules)] == []


def test_every_rule_that_is_off_for_files_is_broken_in_them(found: list[tuple[str, str]]) -> None:
    needless = [
        (files, off)
        for files, rules in LINT["per-file-ignores"].items()
        for off in rules
        if not any(rule.startswith(off) and fnmatch(path, files) for rule, path in found)
    ]
    assert needless == []


def test_no_file_may_use_what_another_keeps_private_without_saying_so_where_it_does() -> None:
    """A line excuses itself. A rule that is off for files would hide the next such line."""
    off = [*LINT["ignore"], *(rule for rules in LINT["per-file-ignores"].values() for rule in rules)]
    assert LINT["select"] == ["ALL"]
    assert [rule for rule in off if rule == "ALL" or rule.startswith("SLF")] == []
