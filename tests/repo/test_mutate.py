"""`make mutate`: what it changes, and that it tells a test that bites from one that does not."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.tree import ROOT
from tools.mutate.__main__ import Drawn, is_found
from tools.mutate.mutants import mutants_of
from tools.mutate.plugin import MODULE, RECORD, SOURCE
from tools.mutate.vllm import FAULTS, NEEDS_VLLM, copied

POLICY = '''
"""Words that are not changed: 1 < 2."""
import structlog
log = structlog.get_logger()

def take(queue: list[int], most: int = 3) -> bool:
    if len(queue) >= most:
        log.info("full", most=1)
        raise ValueError(f"{most + 1}", 7)
    queue.append(divmod(most, 2)[0])
    return True
'''


def test_everything_that_acts_is_changed_and_nothing_that_is_read() -> None:
    changes = {(mutant.line, mutant.kind, mutant.before, mutant.after) for mutant in mutants_of(POLICY)}
    assert changes == {
        (6, "constant", "3", "4"),
        (7, "comparison", "len(queue) >= most", "(len(queue) > most)"),
        (10, "statement", "queue.append(divmod(most, 2)[0])", "pass"),
        (10, "argument order", "divmod(most, 2)", "divmod(2, most)"),
        (10, "constant", "2", "3"),
        (10, "constant", "0", "1"),
        (11, "constant", "True", "False"),
    }


def test_what_changes_nothing_is_left_alone() -> None:
    assert not mutants_of("most = max(first, min(second, third))\nfor pair in zip(left, strict=True): pass\n")
    assert mutants_of("max(first, second, key=length)"), "of two equally long ones, the first"


def test_what_runs_at_import_is_told_from_what_a_test_reaches() -> None:
    """A test that reaches a function has not run its head: defaults were computed when the module was imported."""
    source = "MOST = 3\n\nclass Queue:\n    size: int = 4\n    def take(self, most=5):\n        return most > 6\n"
    mutants = mutants_of(f"{source}\nkey = lambda n: n + 7\n")
    assert {mutant.before for mutant in mutants if mutant.at_import} == {"3", "4", "5"}
    assert {mutant.before for mutant in mutants if not mutant.at_import} == {"most > 6", "6", "7"}


def test_a_mutant_takes_the_place_of_its_module_and_lines_are_recorded(tmp_path: Path) -> None:
    def run(**variables: str) -> int:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.mutate.plugin", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"} | variables
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode

    policy, changed, recorded = (tmp_path / name for name in ("policy.py", "changed", "tests.json"))
    policy.write_text("def take(n):\n    if n > 3:\n        return 1\n    return 0\n")
    (tmp_path / "test_policy.py").write_text("import policy\n\ndef test_it():\n    assert policy.take(3) == 0\n")
    assert run(**{RECORD: str(recorded), "MOTET_MUTATE_FOLDER": str(policy)}) == 0
    assert f'"lines": {{"{policy}": [2, 4]}}' in recorded.read_text()
    for operator, status in (("<", 0), (">=", 1)):
        changed.write_text(policy.read_text().replace(">", operator))
        assert run(**{MODULE: "policy", SOURCE: str(changed)}) == status, operator


def test_a_mutant_with_which_tests_cannot_be_imported_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    policy, tests = tmp_path / "rule.py", tmp_path / "test_rule.py"
    policy.write_text("def take(n):\n    return 6 // n\n")
    tests.write_text("import rule\n\nSIX = rule.take(1)\n\ndef test_it():\n    assert SIX == 6\n")
    breaks = replace(mutants_of(policy.read_text())[0], source="def take(n):\n    return 6 // (n - 1)\n")
    assert is_found(Drawn(policy, "rule", breaks, [f"{tests}::test_it"], 1.0))
    with pytest.raises(SystemExit, match="status 4"):
        is_found(Drawn(ROOT / "rule.py", "rule", breaks, [f"{tests}::test_nowhere"], 1.0))


def test_each_fault_of_the_engine_with_vllm_can_be_made() -> None:
    """Its text is in the module once, and what comes of it can be imported."""
    assert len(FAULTS) >= 50
    assert len({(one.module, one.before, one.after) for one in FAULTS}) == len(FAULTS)
    for one in FAULTS:
        compile(one.applied(), one.module, "exec")
    with pytest.raises(ValueError, match="0 times, and not once"):
        replace(FAULTS[0], before="nowhere").applied()


def test_a_process_with_vllm_gets_the_fault(tmp_path: Path) -> None:
    """It is started with the folders of its parent's packages."""
    fault = next(one for one in FAULTS if one.module in NEEDS_VLLM)
    code = "from tests.runner.external.vllm_itself import variables; print(variables()['PYTHONPATH'])"
    environment = os.environ | copied(fault, tmp_path)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    folders = [Path(one) for one in done.stdout.strip().split(os.pathsep)]
    found = next(one for one in folders if (one / "motet_runner").exists())
    assert (found / "motet_runner/external/vllm" / fault.path.name).read_text() == fault.applied()


@pytest.mark.soak
@pytest.mark.parametrize("module", ["tools.mutate", "tools.mutate.vllm"])
def test_the_tests_find_enough_small_faults(module: str) -> None:
    """`make mutate`, with another seed each time, and those of the engine with vLLM: a failure names the seed and the
    faults that no test found."""
    ran = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"
