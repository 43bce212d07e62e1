"""No test is skipped in silence where the whole suite is meant to run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.tree import ROOT

THE_PLACE = Path("testbed/machine.py")
WORDS = re.compile(r"pytest\.skip\(|importorskip\(|skipif|mark\.skip|mark\.xfail|pytest\.xfail|SkipTest|unittest\.skip")
OUT_OF_REACH = {
    "tests/kube/conftest.py": 1,  # a node beside a control plane that is not ours
    "tests/predictor/test_model.py": 1,  # data that we may use and not publish
}

ON_A_GPU = {
    "tests/gpu/test_decode_graphs.py": 1,  # what CUDA says of a step that waits
    "tests/runner/test_copy_stream.py": 1,  # adapters, on a stream of their own
    "tests/gpu/test_lora.py": 2,  # a graph is captured; uploads that wait for the device
    "tests/runner/test_worker.py": 1,  # copies on a stream of their own
}
"""Parameters and tests that are marked `gpu`"""

SUITE = """
import pytest
from testbed.machine import lacking

def test_asks(): lacking("a mountain")

@pytest.mark.needs(lambda: None, "a lake")
def test_is_marked(): raise AssertionError

@pytest.mark.needs(lambda: "found", "air")
def test_has_what_it_needs(): pass
"""


def sources() -> dict[Path, str]:
    found = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    return {path: text for path, text in found.items() if path not in (THE_PLACE, Path("tests/repo/test_skips.py"))}


def test_tests_are_skipped_in_one_place_only() -> None:
    assert {str(path): found for path, text in sources().items() if (found := WORDS.findall(text))} == {}


def test_tests_that_need_a_gpu_are_listed() -> None:
    found = {str(path): text.count("mark.gpu") for path, text in sources().items() if "mark.gpu" in text}
    assert found == ON_A_GPU


def test_tests_that_no_setup_can_run_are_listed() -> None:
    found = {str(path): text.count("out_of_reach(") for path, text in sources().items() if "out_of_reach(" in text}
    assert found == OUT_OF_REACH


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 passed, 2 skipped"), ("true", "1 failed, 1 passed, 1 error")])
def test_with_ci_set_a_missing_requirement_fails(tmp_path: Path, ci: str, outcome: str) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "testbed.machine", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "--config-file=/dev/null", str(suite)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome in done.stdout, done.stdout + done.stderr
    assert ("a mountain" in done.stdout) == ("a lake" in done.stdout)
