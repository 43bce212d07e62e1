"""The reasons that conditions give are those of the table, and the table has no others."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import motet_operator.reconcile
from motet.resources.reasons import ADAPTER_REASONS, POOL_REASONS
from motet.resources.status import ADAPTER_CONDITIONS, POOL_CONDITIONS
from testbed.tree import ROOT

REPEATING = {"Reconciling", "Stalled"}


def reasons_in(path: Path) -> Iterator[tuple[str, str]]:
    """(condition, reason) wherever both stand in a call of `yes`, `no` or `unknown`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("yes", "no", "unknown"):
            match node.args:
                case [ast.Constant(str(condition)), ast.Constant(str(reason)), *_]:
                    yield condition, reason


def modules() -> list[Path]:
    return sorted(Path(next(iter(motet_operator.reconcile.__path__))).glob("*.py"))


@pytest.mark.parametrize("module", modules(), ids=lambda path: path.stem)
def test_every_reason_of_reconcile_is_in_the_table(module: Path) -> None:
    for condition, reason in reasons_in(module):
        tables = [table for table in (ADAPTER_REASONS, POOL_REASONS) if condition in table]
        assert any(reason in table[condition] for table in tables), (condition, reason)


def test_every_condition_is_in_the_table() -> None:
    assert ADAPTER_REASONS.keys() | REPEATING == ADAPTER_CONDITIONS.keys()
    assert POOL_REASONS.keys() | REPEATING == POOL_CONDITIONS.keys()


def test_every_reason_of_the_table_is_given_somewhere() -> None:
    sources = [*modules(), *(ROOT / "operator/motet_operator/cluster").glob("*.py")]
    sources += (ROOT / "services/gpu-runner/motet_runner").rglob("*.py")
    sources += [ROOT / "services/common/motet/errors.py"]
    text = "\n".join(path.read_text() for path in sources)
    reasons = {reason for table in (ADAPTER_REASONS, POOL_REASONS) for row in table.values() for reason in row}
    assert {reason for reason in reasons if f'"{reason}"' not in text} == set()


def test_every_reason_of_a_failed_check_is_given_by_a_runner() -> None:
    """A set in the operator's code gives no reason."""
    runner = (ROOT / "services/gpu-runner/motet_runner").rglob("*.py")
    text = "\n".join(path.read_text() for path in runner)
    checks = ADAPTER_REASONS["Certified"].keys() - ADAPTER_REASONS["ArtifactReady"].keys() - {"FitsBaseModel"}
    assert {reason for reason in checks if f'"{reason}"' not in text} == set()


@pytest.mark.parametrize("reasons", [*ADAPTER_REASONS.values(), *POOL_REASONS.values()])
def test_a_reason_is_one_word_with_a_sentence(reasons: dict[str, str]) -> None:
    for reason, sentence in reasons.items():
        assert reason.isalpha()
        assert reason[0].isupper()
        assert sentence.endswith(".")
