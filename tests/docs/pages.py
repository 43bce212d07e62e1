"""The pages that people wrote, and what they are made of."""

import ast
import re
from functools import cache
from pathlib import Path

from testbed.tree import ROOT

DOCS = ROOT / "docs"


def written_pages() -> list[Path]:
    """All but the generated ones."""
    return sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "reference")


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = re.split(rf"^## {re.escape(heading)}$", page.read_text(), maxsplit=1, flags=re.MULTILINE)[1]
    lines = re.split(r"^## ", section, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


@cache
def names_of_tests() -> frozenset[str]:
    """Of every test of the repository."""
    return frozenset(
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )
