"""Who reads a file here can look up what it names: it names no document that lies elsewhere."""

import re
from pathlib import Path

from testbed.tree import ROOT, tracked, written_text

ELSEWHERE = re.compile(
    r"\bDESIGN\b|\bthe design (?:says|promises|asks)\b|\bmechanisms \d|(?<!%)\bC[1-9]\b|shared/reference"
)
"""A design that is not published, its chapters, and its numbered decisions."""
A_PAGE = re.compile(r"\w[\w./-]*\.md\b")
MADE_UP = {"page.md", "docs/x.md", "readme.md"}
"""Pages that tests make for themselves."""


def texts() -> dict[str, str]:
    return {path: text for path, text in written_text().items() if ROOT / path != Path(__file__)}


def test_no_document_that_lies_elsewhere_is_named() -> None:
    assert {path: found for path, text in texts().items() if (found := ELSEWHERE.findall(text))} == {}


def test_a_page_that_is_named_exists() -> None:
    pages = {f"/{path.relative_to(ROOT).as_posix()}" for path in tracked() if path.suffix == ".md"}
    missing = {
        (path, named)
        for path, text in texts().items()
        for named in A_PAGE.findall(text)
        if not any(page.endswith(f"/{named}") for page in pages)
        and not (path.startswith("tests/") and named in MADE_UP)
    }
    assert missing == set()
