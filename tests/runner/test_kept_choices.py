"""The file of what was measured at an earlier start."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from motet_runner.execute.tune import kept_choices
from motet_runner.execute.tune.kept_choices import KeptChoices


def choices(folder: Path) -> KeptChoices:
    return KeptChoices(folder / "threads.json", "threads")


def test_a_choice_is_kept_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = choices(tmp_path)
    assert kept.find("a") is None
    kept.keep("a", 2)
    kept.keep("b", 1)
    assert (kept.find("a"), kept.find("b"), kept.find("c")) == (2, 1, None)
    monkeypatch.setattr(kept_choices, "KEPT_SECONDS", -1.0)
    assert kept.find("a") is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 3}', '{"a": {"threads": 2}}', '{"a": {"threads": 2, "at": "1"}}'], ids=repr
)
def test_a_damaged_file_is_no_choice(tmp_path: Path, text: str) -> None:
    kept = choices(tmp_path)
    kept.path.write_text(text, encoding="utf-8")
    assert kept.find("a") is None
    kept.keep("a", 2)
    assert kept.find("a") == 2


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    kept = choices(tmp_path / "none")
    with capture_logs() as logs:
        kept.keep("a", 2)
    assert kept.find("a") is None
    assert [(line["event"], line["choice"]) for line in logs] == [("choice_not_kept", "threads")]
