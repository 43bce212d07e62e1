"""Ids of mechanisms, such as those in parentheses at the end of a docstring, can be looked up in docs/mechanisms.md."""

import re
from collections import Counter
from pathlib import Path

import pytest

from motet_runner.plan import PRESETS
from testbed.tree import ROOT, written_text
from tests.docs.pages import DOCS

PAGE = DOCS / "mechanisms.md"
ID = r"\b[A-Z][A-Z0-9]-\d\d[a-z]?\b"
LINE = re.compile(rf"^\| ({ID}) \|(.*)\|$", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./([^)#]+)\)")
CODE = ("services/", "kernels/", "operator/", "simulator/", "cli/")

LINES = LINE.findall(PAGE.read_text())


def used() -> dict[str, set[str]]:
    """The files that name it, by id."""
    found: dict[str, set[str]] = {}
    for path, text in written_text().items():
        if ROOT / path not in (PAGE, Path(__file__)):
            for mechanism in re.findall(ID, text):
                found.setdefault(mechanism, set()).add(path)
    return found


def test_each_used_id_has_exactly_one_line() -> None:
    lines = Counter(mechanism for mechanism, _ in LINES)
    assert lines == Counter(used().keys())


def test_no_range_of_ids_is_abbreviated() -> None:
    ranges = re.compile(rf"{ID}(?: to |\.\.+| ?[–—] ?){ID}")
    assert {path: found for path, text in written_text().items() if (found := ranges.findall(text))} == {}


@pytest.mark.parametrize(("mechanism", "line"), LINES, ids=[mechanism for mechanism, _ in LINES])
def test_a_line_has_a_description_and_links_to_code_that_names_the_id(mechanism: str, line: str) -> None:
    what, section, where = (cell.strip() for cell in line.split("|"))
    links = LINK.findall(where)
    assert what.endswith(".")
    assert section
    assert links
    for link in links:
        assert link.startswith(CODE), link
        assert re.search(rf"\b{mechanism}\b", (ROOT / link).read_text()), f"{link} does not name {mechanism}"


def test_each_preset_has_one_line() -> None:
    section = PAGE.read_text().split("## Presets")[1].split("\n## ")[0]
    assert Counter(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)) == Counter(PRESETS.keys())


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_the_page_is_found(page: str) -> None:
    assert "mechanisms.md)" in (ROOT / page).read_text()
