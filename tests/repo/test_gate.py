"""What `make test` says and runs."""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.repo.tree import ROOT
from tools.gate import change, records, reruns
from tools.gate.__main__ import record_reruns, untouched
from tools.gate.lanes import LaneResult
from tools.gate.plan import Lane, MachineFacts, RunRecord, announced, plan
from tools.gate.reruns import FileReruns, Ledger, counted, too_often
from tools.gate.summary import (
    NOTHING_RAN,
    closing_line,
    counts_of,
    exit_status,
    files_not_passed,
    may_run_again,
    seconds_of_files,
    seconds_of_tests,
    slowest,
)
from tools.gate.test_selection import FAMILIES, Change, verdicts

# ------------------------------------------------------------------------------------------------------------ the plan


NOTHING_CHANGED = verdicts({family.name: Change((), "since 1a2b") for family in FAMILIES})


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


def test_tools_that_are_missing_are_built_first_if_a_cluster_is_asked_for() -> None:
    machine = MachineFacts(missing_tools=("etcd", "kubectl"))
    assert plan(machine).build
    assert "First: build etcd, kubectl from source, because this machine lacks them" in plan_text(machine)
    assert not plan(MachineFacts()).build
    without = plan(machine, kube=False)
    assert not without.build
    assert all("not kube" in lane.arguments[1] for lane in without.lanes)


@pytest.mark.parametrize(("strict", "comes"), [(False, "are left out"), (True, "fail, because CI is set")])
def test_a_lane_that_cannot_run_is_named_with_what_is_missing(strict: bool, comes: str) -> None:
    without_go = MachineFacts(missing_tools=("etcd",), go=False, strict=strict)
    assert not plan(without_go).build
    assert f"The tests that need etcd {comes}: Go, which builds them, is not installed" in plan_text(without_go)
    assert f"The tests of a cluster {comes}: they run in a network namespace" in plan_text(
        MachineFacts(root=False, strict=strict)
    )
    assert "root" not in plan_text(MachineFacts(root=False, own_cluster=False))


def test_test_arguments_narrow_all_lanes_and_a_path_is_one_lane() -> None:
    assert all(lane.arguments[2:4] == ("-k", "name") for lane in plan(MachineFacts(), asked=("-k", "name")).lanes)
    (lane,) = plan(MachineFacts(), asked=("tests/gateway",), paths=True).lanes
    assert lane.arguments == ("-m", "not soak", "tests/gateway")
    assert plan_text(MachineFacts(), asked=("-k", "name"), untouched=NOTHING_CHANGED).count("Left out: ") == 1


def ignored(machine: MachineFacts, **how) -> dict[str, set[str]]:
    lanes = plan(machine, **how).lanes
    words = {lane.name: [word for word in lane.arguments if "--ignore=" in word] for lane in lanes}
    return {name: {word.removeprefix("--ignore=") for word in ignoring} for name, ignoring in words.items()}


def test_families_that_a_change_cannot_affect_are_left_out_and_named() -> None:
    left_out = ignored(MachineFacts(), untouched=NOTHING_CHANGED)
    assert left_out.keys() == {"rest", "cluster", "kernels", "images"}, "a lane of which all is left out does not begin"
    tests = {path.rstrip("/") for family in FAMILIES for path in family.tests}
    for name, folder in (("rest", "tests"), ("cluster", "tests/kube"), ("images", "tests/images")):
        left_here = {path for path in tests if path.startswith(f"{folder}/")}
        assert all(within(path, left_out[name]) for path in left_here), name
    assert plan_text(MachineFacts(), untouched=NOTHING_CHANGED).count("Left out: ") == 1 + len(FAMILIES)
    without_cluster = ignored(MachineFacts(), kube=False, untouched=NOTHING_CHANGED)
    assert without_cluster["images"] == {"tests/images/test_installation.py"}
    assert "test cluster's own" not in plan_text(MachineFacts(), kube=False, untouched=NOTHING_CHANGED), (
        "KUBE=no says it all"
    )
    unknown = verdicts({family.name: Change(None, "nobody knows") for family in FAMILIES})
    assert ignored(MachineFacts(), untouched=unknown) == ignored(MachineFacts())
    assert plan_text(MachineFacts(), untouched=unknown).count("(nobody knows)") == len(FAMILIES)


@pytest.mark.parametrize(("kube", "in_file_order"), [(True, {"releases", "cluster", "charts"}), (False, set())])
def test_only_what_shares_an_installation_runs_in_the_order_of_its_files(kube: bool, in_file_order: set[str]) -> None:
    lanes = plan(MachineFacts(), kube=kube).lanes
    assert {lane.name for lane in lanes if "-p no:randomly" in " ".join(lane.arguments)} == in_file_order


def test_the_plan_says_how_long_the_run_took_last_time() -> None:
    chosen = plan(MachineFacts())
    assert "is not known" in plan_text(MachineFacts())
    last = RunRecord(seconds=1210.4, lanes={"releases": 1200.0, "rest": 59.6})
    *lanes, at_last = announced(chosen, last)[: len(chosen.lanes) + 1]
    took = {line.split()[1]: line.rpartition("  ")[2] for line in lanes if line.endswith("last time)")}
    assert took == {"rest:": "(1 min 0 s last time)", "releases:": "(20 min 0 s last time)"}
    assert at_last == "Last time it took 20 min 10 s in all."
    assert "not known" not in "\n".join(announced(replace(chosen, whole=False), None))


# --------------------------------------------------------------------------------------------------------- the closing


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("=== 3 failed, 2898 passed in 1234.56s (0:20:34) ===", {"failed": 3, "passed": 2898}),
        ("1 passed in 0.12s", {"passed": 1}),
        ("== 4 deselected, 1 warning, 2 errors in 9.00s ==", {"deselected": 4, "warning": 1, "error": 2}),
        ("============ no tests ran in 0.01s ============", {}),
        ("tests/a/test_b.py ....   [100%]", None),
        ("the house passed in 3s", None),
    ],
)
def test_a_closing_line_of_pytest_is_read(line: str, counts: dict[str, int] | None) -> None:
    assert counts_of(line) == (None if counts is None else Counter(counts))


def test_closing_lines_are_summed_into_one_that_reads_like_them() -> None:
    both = Counter(passed=2, error=1) + Counter(passed=3, skipped=1, error=1, warning=1)
    line = closing_line(both, 3723.4)
    assert line.strip("=") == " 5 passed, 1 skipped, 1 warning, 2 errors in 3723.40s (1:02:03) "
    assert counts_of(line) == both
    assert "no tests ran in 1.00s" in closing_line(Counter(), 1.0)


@pytest.mark.parametrize(
    ("lanes", "status"),
    [([0, 0], 0), ([0, 1], 1), ([5, 0], 0), ([5, 5], 5), ([5, 1], 1), ([0, -9], -9), ([1, 2], 2)],
)
def test_the_status_is_that_of_one_run(lanes: list[int], status: int) -> None:
    assert exit_status(lanes) == status


def test_durations_are_kept_by_file() -> None:
    report = ET.fromstring(
        '<testsuites><testsuite><testcase file="tests/a.py" name="test_x" time="2.5"/>'
        '<testcase file="tests/a.py" name="test_y" time="1"/><testcase file="tests/b.py" name="test_z" time="3"/>'
        "</testsuite></testsuites>"
    )
    tests = seconds_of_tests(report)
    assert seconds_of_files(tests) == {"tests/a.py": 3.5, "tests/b.py": 3.0}
    assert list(slowest(tests, 1)) == ["    3.00s tests/b.py::test_z"]


@pytest.mark.parametrize("how", ["failure", "error", "skipped"])
def test_a_file_has_not_passed_when_one_of_its_tests_has_not(how: str) -> None:
    report = ET.fromstring(
        '<testsuites><testsuite><testcase file="tests/a.py" name="test_x"/>'
        f'<testcase file="tests/b.py" name="test_y"><{how}/></testcase><testcase file="tests/b.py" name="test_z"/>'
        "</testsuite></testsuites>"
    )
    assert files_not_passed(report) == {"tests/b.py"}


# ------------------------------------------------------------------------------------------------------------- the run


TWO_LANES = """
import sys
from tools.gate import __main__, plan

plan.LANES = {"rest": ("tests",), "stack": ("tests/stack",)}
sys.exit(__main__.main())
"""
"""The real program, with as many lanes as a small tree needs."""


def gate(*arguments: str) -> list[str]:
    return [sys.executable, "-c", TWO_LANES, *arguments]


def environment(folder: Path) -> dict[str, str]:
    here = {name: value for name, value in os.environ.items() if name != "MOTET_CI_BASE"}
    # No plugin is asked for there, and each takes its time to start.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return here | plugins | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}


def run_gate(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        gate(*arguments),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("stack", "images", "kube", "unit"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(f"def test_{name}():\n    pass\n")
    markers = "".join(f"    {name}: x\n" for name in ("soak", "kube"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = -p no:randomly\nmarkers =\n{markers}")
    return tmp_path


def test_two_lanes_end_in_one_line_and_the_next_run_says_how_long_they_took(tree: Path) -> None:
    first = run_gate(tree, "--no-kube", "--slowest", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    lines = first.stdout.splitlines()
    assert counts_of(lines[-1]) == Counter(passed=3)
    assert sum(counts_of(line) is not None for line in lines) == 1, "only one line closes it"
    assert any(line.startswith("   stack | tests/stack/test_stack.py") for line in lines)
    assert any(line.startswith("    rest | tests/unit/test_unit.py") for line in lines)
    assert "test_kube" not in first.stdout
    assert "not known" in first.stdout
    assert "Last time it took" in run_gate(tree, "--no-kube").stdout


FIRST = """
import os, pytest
from pathlib import Path

def is_first():
    seen = Path(os.environ["XDG_CACHE_HOME"]) / "seen"
    first = not seen.exists()
    seen.parent.mkdir(exist_ok=True)
    seen.touch()
    return first
"""
FAILS_ONCE = f"""{FIRST}
class TestIt:
    def test_stack(self):
        assert not is_first()
"""
INHERITS_WHAT_FAILS_ONCE = """
from contract import Contract

class TestIt(Contract):
    pass
"""
CANNOT_BE_SET_UP_ONCE = f"""{FIRST}
@pytest.fixture
def it():
    assert not is_first()

@pytest.mark.parametrize("one", ["a b", "c/d"])
def test_stack(it, one):
    pass
"""
CANNOT_BE_TORN_DOWN_ONCE = f"""{FIRST}
@pytest.fixture
def it():
    yield
    assert not is_first()

def test_stack(it):
    pass
"""


@pytest.mark.parametrize(("content", "passed"), [(FAILS_ONCE, 3), (CANNOT_BE_SET_UP_ONCE, 4)])
def test_a_test_that_fails_only_beside_others_is_run_again_counted_and_named(
    tree: Path, content: str, passed: int
) -> None:
    (tree / "tests" / "stack" / "test_stack.py").write_text(content)
    ran = run_gate(tree, "--no-kube", "--rerun", "3")
    assert ran.returncode == 0, ran.stdout
    *_, named, last = ran.stdout.splitlines()
    assert named.startswith("RERUN tests/stack/test_stack.py::")
    assert counts_of(last) == Counter(passed=passed, rerun=1)
    assert "assert not is_first()" in ran.stdout, "what it said the first time is there to read"


def test_a_test_that_a_class_inherits_is_of_the_file_that_runs_it(tree: Path) -> None:
    """Two files run one contract: what fails in the one is run again there, and its seconds are that file's."""
    (tree / "tests" / "stack" / "contract.py").write_text(FAILS_ONCE.replace("TestIt", "Contract"))
    (tree / "tests" / "stack" / "test_stack.py").write_text(INHERITS_WHAT_FAILS_ONCE)
    ran = run_gate(tree, "--no-kube", "--rerun", "3")
    assert ran.returncode == 0, ran.stdout
    assert counts_of(ran.stdout.splitlines()[-1]) == Counter(passed=3, rerun=1)
    files = json.loads((tree / "cache" / "motet" / "tests.json").read_text())["rest+stack"]["files"]
    assert files.keys() == {f"tests/{name}/test_{name}.py" for name in ("stack", "images", "unit")}


@pytest.mark.parametrize(
    ("content", "options"),
    [("def test_stack():\n    assert 1 == 2\n", ["--rerun", "3"]), (FAILS_ONCE, [])],
    ids=["it fails alone, too", "nobody asked for a rerun"],
)
def test_a_failure_in_one_lane_fails_the_run_and_is_named_at_its_end(
    content: str, options: list[str], tree: Path
) -> None:
    (tree / "tests" / "stack" / "test_stack.py").write_text(content)
    ran = run_gate(tree, "--no-kube", *options)
    assert ran.returncode == 1
    *_, named, last = ran.stdout.splitlines()
    assert named.startswith("FAILED tests/stack/test_stack.py::")
    assert counts_of(last) == Counter(passed=2, failed=1)


def test_a_lane_that_dies_is_an_error_and_not_a_green_run(tree: Path) -> None:
    (tree / "tests" / "stack" / "test_stack.py").write_text("import os\n\ndef test_stack():\n    os._exit(0)\n")
    ran = run_gate(tree, "--no-kube")
    assert ran.returncode != 0
    assert counts_of(ran.stdout.splitlines()[-1]) == Counter(passed=2, error=1)


def test_a_test_that_needs_its_rerun_again_and_again_fails_by_name(tree: Path) -> None:
    file, name = "tests/stack/test_stack.py", "tests/stack/test_stack.py::TestIt::test_stack"
    (tree / file).write_text(FAILS_ONCE)
    content = hashlib.sha256(FAILS_ONCE.encode()).hexdigest()[:16]
    kept = {content: asdict(FileReruns(7, {name: (3, 7)})), "another": asdict(FileReruns(1, {name: (1,)}))}
    ledger = tree / "cache" / "motet" / "reruns.json"
    ledger.parent.mkdir(parents=True)
    ledger.write_text(json.dumps({file: kept}))
    ran = run_gate(tree, "--no-kube", "--rerun", "3")
    assert ran.returncode == 1, ran.stdout
    *_, at_first, named, last = ran.stdout.splitlines()
    assert at_first.startswith(f"RERUN {name}")
    assert named == f"FAILED {name} - it needed a rerun in 3 of the last 20 runs of its file"
    assert counts_of(last) == Counter(passed=2, failed=1)
    after = json.loads(ledger.read_text())[file]
    assert {content: one["needed"][name] for content, one in after.items()} == {content: [3, 7, 8], "another": [1]}


NAME = "tests/a.py::test"
NOW = {"tests/a.py": "content", "tests/b.py": "b"}


def after(runs: str, ledger: Ledger | None = None) -> Ledger:
    """`x` for each run in which the test needed a rerun, and `o` for one of another checkout"""
    for run in runs:
        contents = NOW | {"tests/a.py": "another"} if run == "o" else NOW
        ledger = counted(ledger or {}, contents, [NAME] if run == "x" else [])
    return ledger or {}


@pytest.mark.parametrize(
    ("runs", "fails"),
    [
        ("xx", False),
        ("xxx", True),
        ("x..x......x", True),
        (f"xx{18 * '.'}x", False),
        (f"xx{17 * '.'}x", True),
        ("xoxox", True),
        (f"xx{19 * 'o'}x", True),
        (f"xx{20 * 'o'}x", False),
    ],
)
def test_three_reruns_in_twenty_runs_are_too_many(runs: str, fails: bool) -> None:
    assert too_often(after(runs), NOW, [NAME]) == ([NAME] if fails else [])
    assert too_often(after(runs), NOW, []) == [], "a test that passed at once has not failed"


def test_a_changed_file_has_needed_no_rerun_and_its_former_content_is_kept_for_a_while() -> None:
    mended = {"tests/a.py": "mended"}
    changed = counted(after("xx"), mended, [NAME])
    assert changed == {
        "tests/a.py": {"content": FileReruns(2, {NAME: (1, 2)}, 1), "mended": FileReruns(1, {NAME: (1,)})}
    }
    assert too_often(counted(after("xxx"), mended, [NAME]), mended, [NAME]) == []
    assert after("." * 9) == after("x" + "." * 20) == after("x" + "o" * 20) == {}


@pytest.mark.parametrize("content", ["{broken", "[]", '{"tests/a.py": {"content": 1}}', "\udcff"])
def test_a_damaged_ledger_of_reruns_is_named_and_begun_anew(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reruns, "LEDGER", tmp_path / "reruns.json")
    (tmp_path / "reruns.json").write_text(content, errors="surrogateescape")
    (tmp_path / "test_a.py").touch()
    lane, failed = Lane("one", ()), "test_a.py::test"
    ran = LaneResult(lane, 1, 1.0, Counter(failed=1), [], {failed: 1.0}, failed=[failed])
    assert record_reruns([ran], LaneResult(lane, 0, 1.0, Counter(passed=1), [], {failed: 1.0})) == []
    assert f"{tmp_path}/reruns.json, cannot be read. It begins anew." in capsys.readouterr().out
    [known] = reruns.read()["test_a.py"].values()
    assert known.needed == {failed: (1,)}


def test_a_broken_teardown_is_not_excused(tree: Path) -> None:
    (tree / "tests" / "stack" / "test_stack.py").write_text(CANNOT_BE_TORN_DOWN_ONCE)
    ran = run_gate(tree, "--no-kube", "--rerun", "1")
    assert ran.returncode != 0
    assert "once more" not in ran.stdout


def test_failures_in_many_files_and_what_is_no_failed_test_do_not_run_again() -> None:
    failed = ["a.py::one", "a.py::two", "b.py::one"]
    assert may_run_again(failed, Counter(failed=2, error=1), 2)
    assert not may_run_again(failed, Counter(failed=3), 1)
    assert not may_run_again(failed, Counter(failed=3, error=1), 2), "a file that cannot be imported"
    assert not may_run_again([], Counter(error=1), 2)


def test_an_unknown_test_is_reported(tree: Path) -> None:
    assert run_gate(tree, "--no-kube", "--", "-k", "nobody").returncode == NOTHING_RAN


@pytest.mark.parametrize(
    ("asked", "gate"),
    [((), "--slowest 20 --rerun 3 --leave-out-untouched"), (("--all",), "--slowest 20 --rerun 3")],
)
def test_the_build_server_ends_with_the_one_line_and_its_status(
    tmp_path: Path, asked: tuple[str, ...], gate: str
) -> None:
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
    ran = subprocess.run(
        [tmp_path / ".ci" / "run", *asked],
        env=os.environ | {"PATH": f"{make.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    said = ran.stdout.splitlines()
    assert [line for line in said if line.startswith("make ")] == ["make lint", f"make test GATE_ARGS={gate}"]
    assert said[-1] == lines[1]


# ------------------------------------------------------------------------------------------------- since it was green


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, **files: str) -> str:
    """Names of files have __ for a slash."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "history"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    monkeypatch.chdir(folder)
    return folder


def test_a_change_is_what_was_committed_since_and_what_was_not(history: Path) -> None:
    base = commit(history, kept="1", edited="1", moved="content", gone="1", in_work="1", staged="1")
    git(history, "mv", "moved", "moved_here")
    git(history, "rm", "--quiet", "gone")
    head = commit(history, edited="2")
    assert change.committed() == head
    (history / "in_work").write_text("2")
    (history / "staged").write_text("2")
    git(history, "add", "staged")
    (history / "new ü").touch()
    (history / ".git" / "info" / "exclude").write_text("ignored\n")
    (history / "ignored").touch()
    found = change.since(base)
    assert found.paths == ("edited", "gone", "in_work", "moved", "moved_here", "new ü", "staged")
    assert found.said == f"since {base[:12]}"


@pytest.mark.parametrize("name", ["file", "another"])
def test_a_checkout_with_a_change_is_no_commit(history: Path, name: str) -> None:
    head = commit(history, file="1")
    assert change.committed() == head
    (history / name).write_text("2")
    assert change.committed() is None


def test_a_change_is_not_known_without_the_commit_before_it(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = commit(history, file="1")
    git(history, "checkout", "--quiet", "-b", "beside")
    beside = commit(history, beside="1")
    git(history, "checkout", "--quiet", "main")
    second = commit(history, file="2")
    assert change.since(first).paths == ("file",)
    assert change.since(second).paths == ()
    for other in (beside, "0" * 40, "no-such-name"):
        assert change.since(other).paths is None
    git(history.parent, "clone", "--quiet", "--depth=1", history.as_uri(), "shallow")
    monkeypatch.chdir(history.parent / "shallow")
    assert change.since(second).paths == ()
    assert change.since(first).paths is None
    monkeypatch.chdir(history.parent)
    assert change.since(first).paths is None, "no checkout"
    assert change.committed() is None


@pytest.fixture
def committed_tree(tree: Path) -> Path:
    git(tree, "init", "--quiet")
    passes = "def test_installation():\n    pass\n"
    (tree / "tests" / "images" / "test_installation.py").write_text(passes)
    commit(tree, **{".gitignore": "__pycache__/\n.pytest_cache/\ncache/\n"}, docs__a="1", services__common__a="1")
    return tree


def ci(tree: Path) -> tuple[Counter[str], str]:
    """What it counts, and all that it says."""
    ran = run_gate(tree, "--no-kube", "--leave-out-untouched")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return counts_of(ran.stdout.splitlines()[-1]) or Counter(), ran.stdout


def test_an_unaffected_green_family_is_left_out_and_named_at_the_end(committed_tree: Path) -> None:
    green = git(committed_tree, "rev-parse", "HEAD")[:12]
    assert counts_of(run_gate(committed_tree, "--no-kube").stdout.splitlines()[-1]) == Counter(passed=4)
    commit(committed_tree, docs__a="2")
    counts, out = ci(committed_tree)
    assert counts == Counter(passed=3)
    left_out = f"Left out: installations of images (nothing that they use changed since {green})."
    assert out.splitlines().count(left_out) == 2, "before the first test and before the closing line"
    assert out.splitlines()[-2] == left_out
    (committed_tree / "services" / "common" / "a").write_text("2")
    counts, out = ci(committed_tree)
    assert counts == Counter(passed=4)
    assert f"Not left out: installations of images (services/common/a changed since {green})." in out


@pytest.mark.parametrize("how", ["failed at first", "changed meanwhile", "asked"])
def test_a_run_that_is_not_whole_or_not_of_a_commit_is_not_green(committed_tree: Path, how: str) -> None:
    if how == "failed at first":
        (committed_tree / "tests" / "images" / "test_installation.py").write_text(FAILS_ONCE)
    elif how == "changed meanwhile":
        changing = f"def test_unit():\n    open({str(committed_tree / 'docs' / 'a')!r}, 'w').close()\n"
        (committed_tree / "tests" / "unit" / "test_unit.py").write_text(changing)
    commit(committed_tree)
    run_gate(committed_tree, "--no-kube", "--rerun", "1", *(("--", "-k", "test") if how == "asked" else ()))
    file = committed_tree / "cache" / "motet" / "tests.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    assert kept.get("green", {}).get("commits", {}) == {}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "kept" / "tests.json"
    monkeypatch.setattr(records, "FILE", file)
    monkeypatch.delenv("MOTET_CI_BASE", raising=False)
    return file


def test_each_family_keeps_the_commit_at_which_it_was_green_beside_what_runs_took(kept: Path) -> None:
    assert records.green("mine") == {}
    records.write("rest", RunRecord(1.0))
    records.write_green("mine", ["bench", "images"], "1a")
    records.write_green("mine", ["images"], "2b")
    assert records.green("mine") == {"bench": "1a", "images": "2b"}
    assert records.read("rest") == RunRecord(1.0)
    for broken in ("{broken", "[]", "3"):
        kept.write_text(broken)
        assert records.green("mine") == {}
        records.write("rest", RunRecord(2.0))
        assert records.read("rest") == RunRecord(2.0)


def test_a_green_run_on_another_machine_does_not_count(kept: Path) -> None:
    records.write_green("another", ["bench", "images"], "1a")
    assert records.green("mine") == {}
    records.write_green("mine", ["images"], "2b")
    assert records.green("mine") == {"images": "2b"}
    assert change.machine(own_cluster=True) == change.machine(own_cluster=True) != change.machine(own_cluster=False)


def test_each_family_is_compared_with_its_own_green_commit(history: Path, kept: Path) -> None:
    first = commit(history, docs__a="1")
    second = commit(history, tests__kube__nodes="1")
    records.write_green("mine", ["bench"], first)
    records.write_green("mine", ["operator"], second)
    said = {one.family.name: (one.left_out, one.why) for one in untouched("mine")}
    assert said["bench"] == (False, f"tests/kube/nodes changed since {first[:12]}")
    assert said["operator"] == (True, f"nothing that they use changed since {second[:12]}")
    assert said["images"] == (False, "no commit is known at which they were green, and MOTET_CI_BASE names none")


def test_the_caller_may_name_the_green_commit(history: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = commit(history, docs__a="1")
    head = commit(history, tests__kube__nodes="1")
    records.write_green("mine", [family.name for family in FAMILIES], head)
    monkeypatch.setenv("MOTET_CI_BASE", base)
    assert {one.family.name for one in untouched("mine") if one.left_out} == {"images"}
    monkeypatch.setenv("MOTET_CI_BASE", "0" * 40)
    assert {one.why for one in untouched("mine")} == {"000000000000 is not among the commits before this one"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_gate_interrupts_every_lane(tree: Path, how: signal.Signals) -> None:
    """A test that is stopped in this way still ends what it has started."""
    for name in ("stack", "unit"):
        (tree / "tests" / name / f"test_{name}.py").write_text(
            "import pathlib, time\n\n"
            f"def test_{name}():\n"
            "    here = pathlib.Path(__file__).parent\n"
            "    try:\n"
            "        (here / 'began').touch()\n"
            "        time.sleep(60)\n"
            "    finally:\n"
            "        (here / 'ended').touch()\n"
        )
    with subprocess.Popen(gate("--no-kube"), cwd=tree, env=environment(tree), stdout=subprocess.PIPE, text=True) as ran:
        folders = [tree / "tests" / name for name in ("stack", "unit")]
        while not all((folder / "began").exists() for folder in folders):
            assert ran.poll() is None
            time.sleep(0.01)
        ran.send_signal(how)
        out, _ = ran.communicate(timeout=60)
    assert all((folder / "ended").exists() for folder in folders)
    assert ran.returncode == 2
    assert counts_of(out.splitlines()[-1]) is not None
