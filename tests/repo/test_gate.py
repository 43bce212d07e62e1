"""What `make test` says and runs."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, replace
from importlib.util import cache_from_source
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from testbed.tree import ROOT
from tools.gate import records
from tools.gate.cores import CoreTime
from tools.gate.lanes import UNCOMPILED
from tools.gate.plan import Lane, MachineFacts, RunRecord, announced, plan
from tools.gate.reruns import FileReruns, Ledger, counted, too_often
from tools.gate.summary import (
    CPU,
    closing_line,
    counts_of,
    cpu_of_tests,
    exit_status,
    failed_tests,
    may_run_again,
    seconds_of_files,
    seconds_of_tests,
    slowest,
)

# ------------------------------------------------------------------------------------------------------------ the plan


def plan_text(machine: MachineFacts, **how) -> str:
    return "\n".join(announced(plan(machine, **how), None))


def within(file: str, paths: Collection[str]) -> bool:
    return any(file == path or file.startswith(f"{path}/") for path in paths)


@pytest.mark.parametrize("kube", [True, False])
def test_together_the_lanes_run_every_file_and_none_of_them_twice(kube: bool) -> None:
    def runs(lane: Lane, file: str) -> bool:
        named = [word for word in lane.arguments if word.startswith("tests")]
        ignored = [word.removeprefix("--ignore=") for word in lane.arguments if word.startswith("--ignore=")]
        return within(file, named) and not within(file, ignored)

    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    lanes = plan(MachineFacts(), kube=kube).lanes
    in_lanes = {file: sum(runs(lane, file) for lane in lanes) for file in files}
    wanted = {file: 0 if file.startswith("tests/kube/") and not kube else 1 for file in files}
    assert in_lanes == wanted
    assert all(any(runs(lane, file) for file in files) for lane in lanes)


def test_what_is_missing_is_built_if_a_cluster_is_asked_for_or_named() -> None:
    lacking = MachineFacts(missing_tools=("etcd", "kubectl"))
    assert (plan(lacking).build, plan(MachineFacts()).build, plan(lacking, kube=False).build) == (True, False, False)
    assert all("not kube" in lane.arguments[1] for lane in plan(lacking, kube=False).lanes)
    for strict, comes in ((False, "are left out"), (True, "fail, because CI is set")):
        without_go = replace(lacking, go=False, root=False, strict=strict)
        assert not plan(without_go).build
        assert plan_text(without_go).count(comes) == 2


def test_test_arguments_narrow_all_lanes_and_a_path_is_one_lane() -> None:
    assert all(lane.arguments[2:4] == ("-k", "name") for lane in plan(MachineFacts(), asked=("-k", "name")).lanes)
    (lane,) = plan(MachineFacts(), asked=("tests/gateway",), paths=True).lanes
    assert lane.arguments == ("-m", "not soak", "tests/gateway")


def test_only_what_shares_an_installation_runs_in_the_order_of_its_files() -> None:
    in_order = [lane.name for lane in plan(MachineFacts()).lanes if "-p no:randomly" in " ".join(lane.arguments)]
    assert in_order == ["cluster", "releases"]


# --------------------------------------------------------------------------------------------------------- the closing


def test_a_closing_line_of_pytest_is_read() -> None:
    lines = {
        "=== 3 failed, 2898 passed in 1234.56s (0:20:34) ===": {"failed": 3, "passed": 2898},
        "1 passed in 0.12s": {"passed": 1},
        "== 4 deselected, 1 warning, 2 errors in 9.00s ==": {"deselected": 4, "warning": 1, "error": 2},
        "============ no tests ran in 0.01s ============": {},
    }
    assert {line: counts_of(line) for line in lines} == lines
    assert counts_of("tests/a/test_b.py ....   [100%]") is counts_of("the house passed in 3s") is None


def test_closing_lines_are_summed_into_one_that_reads_like_them() -> None:
    both = Counter(passed=2, error=1) + Counter(passed=3, skipped=1, error=1, warning=1)
    line = closing_line(both, 3723.4)
    assert line.strip("=") == " 5 passed, 1 skipped, 1 warning, 2 errors in 3723.40s (1:02:03) "
    assert counts_of(line) == both
    assert "no tests ran in 1.00s" in closing_line(Counter(), 1.0)


def test_cores_that_wait_for_a_disk_are_idle_and_guests_count_once() -> None:
    before, after = (f"cpu  {ticks}\ncpu0 9 9 9 9\n" for ticks in ("10 0 0 0 0 0 0 0 0 0", "60 10 5 10 10 0 5 0 50 0"))
    assert CoreTime.of(after).busy_since(CoreTime.of(before)) == pytest.approx(70 / 90)
    assert CoreTime.of(before).busy_since(CoreTime.of(before)) == 1


def test_the_status_is_that_of_one_run() -> None:
    lanes = {(0, 0): 0, (0, 1): 1, (5, 0): 0, (5, 5): 5, (5, 1): 1, (0, -9): -9, (1, 2): 2}
    assert {statuses: exit_status(statuses) for statuses in lanes} == lanes


REPORT = f"""<testsuites><testsuite>
<testcase file="tests/a.py" name="x" time="2.5"><properties><property name="{CPU}" value="1.5"/></properties></testcase>
<testcase file="tests/a.py" name="y" time="1"/>
<testcase file="tests/b.py" name="z" time="3"><failure/></testcase><testcase file="tests/b.py" name="passes"/>
<testcase file="tests/c.py" name="error"><error message="failed on setup"/></testcase>
<testcase file="tests/d.py" name="after"><error message="failed on teardown"/></testcase>
<testcase file="tests/e.py" name="skipped"><skipped/></testcase></testsuite></testsuites>"""


def test_a_report_says_what_tests_took_and_which_did_not_pass() -> None:
    report = ET.fromstring(REPORT)
    tests, cpu = seconds_of_tests(report), cpu_of_tests(report)
    assert {file: took for file, took in seconds_of_files(tests).items() if took} == {
        "tests/a.py": 3.5,
        "tests/b.py": 3,
    }
    assert cpu == {"tests/a.py::x": 1.5}
    assert list(slowest(tests, cpu, 2)) == [
        "    3.00s     0.00s of CPU tests/b.py::z",
        "    2.50s     1.50s of CPU tests/a.py::x",
    ]
    assert failed_tests(report) == ["tests/b.py::z", "tests/c.py::error"]


def test_failures_in_many_files_and_what_is_no_failed_test_do_not_run_again() -> None:
    failed = ["a.py::one", "a.py::two", "b.py::one"]
    assert may_run_again(failed, Counter(failed=2, error=1), 2)
    assert not may_run_again(failed, Counter(failed=3), 1)
    assert not may_run_again(failed, Counter(failed=3), 0), "nobody asked for a rerun"
    assert not may_run_again(failed, Counter(failed=3, error=1), 2), "a file that cannot be imported"
    assert not may_run_again([], Counter(error=1), 2)


# ------------------------------------------------------------------------------------------------------------- the run


TWO_LANES = """
import sys
from tools.gate import __main__, plan

plan.LANES = {"rest": ("tests",), "stack": ("tests/stack",)}
sys.exit(__main__.main())
"""
"""The real program, with as many lanes as a small tree needs."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", TWO_LANES, *arguments]


def environment(folder: Path) -> dict[str, str]:
    # No plugin is asked for there, and each takes its time to start.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", UNCOMPILED: "1"}
    return os.environ | plugins | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}


def run_gate(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    how = {"cwd": folder, "env": environment(folder), "timeout": 120}
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, **how)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("stack", "images", "kube", "unit"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(f"def test_{name}():\n    pass\n")
    markers = "".join(f"    {name}: x\n" for name in ("soak", "kube"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = -p no:randomly\nmarkers =\n{markers}")
    return tmp_path


USES_CPU = """
import subprocess, sys
def test_stack():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"])
"""


def test_two_lanes_end_in_one_line_and_their_times_are_kept(tree: Path) -> None:
    """A process that a test waits for counts for the test's CPU time."""
    (tree / "tests" / "stack" / "test_stack.py").write_text(USES_CPU)
    first = run_gate(tree, "--no-kube", "--slowest", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    lines = first.stdout.splitlines()
    assert counts_of(lines[-1]) == Counter(passed=3)
    assert sum(counts_of(line) is not None for line in lines) == 1, "only one line closes it"
    assert any(line.startswith("   stack | tests/stack/test_stack.py") for line in lines)
    assert any(line.startswith("    rest | tests/unit/test_unit.py") for line in lines)
    assert "test_kube" not in first.stdout
    assert sum(line.startswith("The machine's cores were busy for ") for line in lines) == 1
    assert list(tree.glob("tests/unit/__pycache__/*.pyc")), "the next process need not compile it"
    kept = json.loads((tree / "cache" / "motet" / "tests.json").read_text())["rest+stack"]
    assert 0.3 <= kept["cpu_files"]["tests/stack/test_stack.py"] < kept["cpu_lanes"]["stack"]


def test_modules_are_compiled_before_the_first_lane_begins(tree: Path) -> None:
    """Processes that the tests start may not be able to write it down."""
    module, broken = (tree / "cli" / "package" / f"{name}.py" for name in ("module", "broken"))
    module.parent.mkdir(parents=True)
    module.touch()
    broken.write_text("of two minds")
    looks = f"from pathlib import Path\ndef test_stack():\n    assert Path({cache_from_source(module)!r}).exists()\n"
    (tree / "tests" / "stack" / "test_stack.py").write_text(looks)
    ran = run_gate(tree, "--no-kube")
    assert ran.returncode == 0, ran.stdout + ran.stderr


FAILS_ONCE = """
import os, pytest
from pathlib import Path

def is_first(file):
    seen = Path(os.environ["XDG_CACHE_HOME"]) / f"seen {Path(file).name}"
    first = not seen.exists()
    seen.parent.mkdir(exist_ok=True)
    seen.touch()
    return first

class Contract:
    def test_stack(self):
        assert not is_first(__file__)
"""
RUNS_A_CONTRACT = """
from contract import Contract

class TestIt(Contract):
    pass
"""
CANNOT_BE_SET_UP_ONCE = f"""{FAILS_ONCE}
@pytest.fixture
def it():
    assert not is_first(__file__)

@pytest.mark.parametrize("one", ["a b", "c/d"])
def test_stack(it, one):
    pass
"""


@pytest.fixture
def fails_once(tree: Path) -> str:
    (tree / "tests" / "stack" / "contract.py").write_text(FAILS_ONCE)
    (tree / "tests" / "stack" / "test_stack.py").write_text(RUNS_A_CONTRACT)
    return "tests/stack/test_stack.py::TestIt::test_stack"


def test_a_test_that_fails_only_beside_others_is_run_again_counted_and_named(tree: Path, fails_once: str) -> None:
    """A test that a class inherits is of the file that runs it."""
    (tree / "tests" / "unit" / "test_unit.py").write_text(CANNOT_BE_SET_UP_ONCE)
    ran = run_gate(tree, "--no-kube", "--rerun", "3")
    assert ran.returncode == 0, ran.stdout
    *_, one, two, last = ran.stdout.splitlines()
    assert {line.partition(" - ")[0] for line in (one, two)} == {
        f"RERUN {fails_once}",
        "RERUN tests/unit/test_unit.py::test_stack[a b]",
    }
    assert counts_of(last) == Counter(passed=4, rerun=2)
    assert "assert not is_first(__file__)" in ran.stdout, "what it said the first time is there to read"
    files = json.loads((tree / "cache" / "motet" / "tests.json").read_text())["rest+stack"]["files"]
    assert files.keys() == {f"tests/{name}/test_{name}.py" for name in ("stack", "images", "unit")}


@pytest.mark.parametrize(
    ("content", "failed"),
    [
        ("def test_stack():\n    assert 1 == 2\n", {"passed": 2, "failed": 1}),
        ("import os\n\ndef test_stack():\n    os._exit(0)\n", {"passed": 2, "error": 1}),
    ],
    ids=["fails alone, too", "a lane that dies"],
)
def test_what_is_no_failure_of_a_busy_machine_fails_the_run(tree: Path, content: str, failed: dict[str, int]) -> None:
    (tree / "tests" / "stack" / "test_stack.py").write_text(content)
    ran = run_gate(tree, "--no-kube", "--rerun", "3")
    assert ran.returncode != 0
    *_, named, last = ran.stdout.splitlines()
    assert named.startswith(("FAILED tests/stack/test_stack.py::", "ERROR tests/stack/", "ERROR lane stack"))
    assert counts_of(last) == Counter(failed)
    assert ("once more" in ran.stdout) == ("failed" in failed)


def test_a_test_that_needs_its_rerun_again_and_again_fails_by_name(tree: Path, fails_once: str) -> None:
    file = fails_once.partition("::")[0]
    content = hashlib.sha256(RUNS_A_CONTRACT.encode()).hexdigest()[:16]
    kept = {content: FileReruns(7, {fails_once: (3, 7)}), "another": FileReruns(1, {fails_once: (1,)})}
    ledger = tree / "cache" / "motet" / "reruns.json"
    ledger.parent.mkdir(parents=True)
    ledger.write_text(json.dumps({file: {content: asdict(one) for content, one in kept.items()}}))
    ran = run_gate(tree, "--no-kube", "--rerun", "3")
    assert ran.returncode == 1, ran.stdout
    *_, at_first, named, last = ran.stdout.splitlines()
    assert at_first.startswith(f"RERUN {fails_once}")
    assert named == f"FAILED {fails_once} - it needed a rerun in 3 of the last 20 runs of its file"
    assert counts_of(last) == Counter(passed=2, failed=1)
    after = json.loads(ledger.read_text())[file]
    assert {content: one["needed"][fails_once] for content, one in after.items()} == {
        content: [3, 7, 8],
        "another": [1],
    }


NAME = "tests/a.py::test"
NOW = {"tests/a.py": "content", "tests/b.py": "b"}


def after(runs: str, ledger: Ledger | None = None) -> Ledger:
    """`x` for each run in which the test needed a rerun, and `o` for one of another checkout"""
    for run in runs:
        contents = NOW | {"tests/a.py": "another"} if run == "o" else NOW
        ledger = counted(ledger or {}, contents, [NAME] if run == "x" else [])
    return ledger or {}


def test_three_reruns_in_twenty_runs_are_too_many() -> None:
    fails = ("xxx", "x..x......x", f"xx{17 * '.'}x", "xoxox", f"xx{19 * 'o'}x")
    passes = ("xx", f"xx{18 * '.'}x", f"xx{20 * 'o'}x")
    found = [runs for runs in (*fails, *passes) if too_often(after(runs), NOW, [NAME])]
    assert found == [*fails]
    assert too_often(after("xxx"), NOW, []) == [], "a test that passed at once has not failed"


def test_a_changed_file_has_needed_no_rerun_and_its_former_content_is_kept_for_a_while() -> None:
    mended = {"tests/a.py": "mended"}
    changed = counted(after("xx"), mended, [NAME])
    assert changed == {
        "tests/a.py": {"content": FileReruns(2, {NAME: (1, 2)}, 1), "mended": FileReruns(1, {NAME: (1,)})}
    }
    assert too_often(counted(after("xxx"), mended, [NAME]), mended, [NAME]) == []
    assert after("." * 9) == after("x" + "." * 20) == after("x" + "o" * 20) == {}


def test_the_build_server_ends_with_the_one_line_and_its_status(tmp_path: Path) -> None:
    """Whatever make says after it. The tests of `make check` are among those of `make test`, and run once."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    lines = ["   rest | === 2 passed in 9.00s ===", "=== 1 failed, 3 passed in 12.00s ===", "make: *** [test] Error 1"]
    make.write_text(
        f'#!/bin/sh\necho "make $*"\ntest "$1" != test || {{ printf \'%s\\n\' {shlex.join(lines)}; exit 2; }}\n'
    )
    make.chmod(0o755)
    path = {"PATH": f"{make.parent}:{os.environ['PATH']}"}
    command = [tmp_path / ".ci" / "run", "--all"]
    ran = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    said = ran.stdout.splitlines()
    assert [line for line in said if line.startswith("make ")] == [
        "make lint",
        "make test GATE_ARGS=--slowest 20 --rerun 3",
    ]
    assert said[-1] == lines[1]


@pytest.mark.parametrize("kept", [None, "{broken", "[]", "3"])
def test_a_damaged_record_of_runs_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str | None
) -> None:
    file = tmp_path / "kept" / "tests.json"
    if kept is not None:
        file.parent.mkdir()
        file.write_text(kept)
    monkeypatch.setattr(records, "FILE", file)
    assert records.read("rest") is None
    for seconds in (1.0, 2.0):
        records.write("rest", RunRecord(seconds))
        assert records.read("rest") == RunRecord(seconds)


SLEEPS = """
import pathlib, time

def test_it():
    here = pathlib.Path(__file__).parent
    try:
        (here / "began").touch()
        time.sleep(60)
    finally:
        (here / "ended").touch()
"""


def test_a_signal_to_the_gate_interrupts_every_lane(tree: Path) -> None:
    """A test that is stopped in this way still ends what it has started."""
    folders = [tree / "tests" / name for name in ("stack", "unit")]
    for folder in folders:
        (folder / f"test_{folder.name}.py").write_text(SLEEPS)
    with subprocess.Popen(command("--no-kube"), cwd=tree, env=environment(tree), stdout=subprocess.PIPE) as ran:
        while not all((folder / "began").exists() for folder in folders):
            assert ran.poll() is None
            time.sleep(0.01)
        ran.terminate()
        out, _ = ran.communicate(timeout=60)
    assert all((folder / "ended").exists() for folder in folders)
    assert ran.returncode == 2
    assert counts_of(out.decode().splitlines()[-1]) is not None
