"""What mypy learned in one clone serves the next; stand-ins for mypy write and read its cache."""

import sys
from pathlib import Path

import pytest

from tools import type_check

LEARNS = "import os, sys; os.mkdir('.mypy_cache'); open('.mypy_cache/db', 'w').write(sys.argv[1])"
READS = "import sys; sys.exit(open('.mypy_cache/db').read() != sys.argv[1])"


def test_a_fresh_clone_starts_with_what_another_learned_without_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(clone: str, script: str, argument: str = "") -> int:
        (tmp_path / clone).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / clone)
        return type_check.run([sys.executable, "-c", script, argument], kept=tmp_path / "home" / "motet" / "mypy")

    assert run("findings", f"{LEARNS}; sys.exit(1)", "wrong") == 1
    assert run("one", LEARNS, "much") == 0
    assert run("other", READS, "much") == 0
    (tmp_path / "other" / ".mypy_cache" / "db").write_text("more")
    assert run("other", READS, "more") == 0
    assert run("one", READS, "much") == 0
    assert run("third", READS, "much") == 0
