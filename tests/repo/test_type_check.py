"""What mypy learned in one clone serves the next; stand-ins for mypy write and read its cache."""

import sys
from pathlib import Path

import pytest

from tools import type_check

LEARNS = "import os, sys; os.mkdir('.mypy_cache'); open('.mypy_cache/db', 'w').write(sys.argv[1])"
READS = "import sys; sys.exit(open('.mypy_cache/db').read() != sys.argv[1])"


@pytest.fixture
def in_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(clone: str, script: str, argument: str = "") -> int:
        folder = tmp_path / clone
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        return type_check.run([sys.executable, "-c", script, argument], kept=tmp_path / "home" / "motet" / "mypy")

    return run


def test_a_fresh_clone_starts_with_the_cache_of_another(in_clone) -> None:
    assert in_clone("one", LEARNS, "much") == 0
    assert in_clone("other", READS, "much") == 0


def test_a_clone_that_has_a_cache_keeps_its_own(in_clone, tmp_path: Path) -> None:
    in_clone("one", LEARNS, "much")
    in_clone("other", READS, "much")
    (tmp_path / "other" / ".mypy_cache" / "db").write_text("more")
    assert in_clone("other", READS, "more") == 0
    assert in_clone("one", READS, "much") == 0
    assert in_clone("third", READS, "much") == 0


def test_the_status_is_that_of_mypy_and_a_run_with_findings_leaves_nothing_to_others(in_clone, tmp_path: Path) -> None:
    assert in_clone("one", f"{LEARNS}; sys.exit(1)", "much") == 1
    in_clone("other", "pass")
    assert not (tmp_path / "other" / ".mypy_cache").exists()
