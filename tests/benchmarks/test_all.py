"""`make bench`: every benchmark is run, and one that missed is not forgotten."""

import sys

import pytest

from benchmarks.__main__ import NOT_BENCHMARKS, run_all
from testbed.tree import ROOT

SAYS = "from benchmarks.harness import Result, report, skip; "
HOLDS = SAYS + "report('a', [Result('a', 1.0, 's', '<= 2', True)], as_json=False)"
MISSES = SAYS + "report('a', [Result('a', 3.0, 's', '<= 2', False)], as_json=False)"
SKIPS = SAYS + "skip('there is no GPU')"
BREAKS = "raise RuntimeError"


def outcome(capfd: pytest.CaptureFixture[str], **codes: str) -> tuple[int, list[str]]:
    status = run_all({name: [sys.executable, "-c", code] for name, code in codes.items()})
    said = capfd.readouterr().out.splitlines()
    return status, said[said.index("== all") + 1 :]


def test_every_benchmark_runs_after_one_misses_its_target_or_breaks(capfd: pytest.CaptureFixture[str]) -> None:
    status, said = outcome(capfd, one=MISSES, two=BREAKS, three=SKIPS, four=HOLDS)
    assert status == 1
    assert [line.split(maxsplit=1)[1] for line in said] == ["MISSED", "FAILED with status 1", "skipped", "holds"]
    assert [outcome(capfd, fine=HOLDS, this=code)[0] for code in (SKIPS, MISSES, BREAKS)] == [0, 1, 1]


def test_every_benchmark_says_what_it_measures_and_takes_json() -> None:
    sources = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    lacking = [name for name, source in sources.items() if "parser = arguments(__doc__)" not in source]
    assert sorted(lacking) == sorted(NOT_BENCHMARKS)
