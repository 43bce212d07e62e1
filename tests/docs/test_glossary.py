"""The glossary has each word once and says where the code defines it; its rules for names hold."""

import ast
import re
from collections.abc import Iterator
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from motet.domain import ParkMethod
from motet.keys import KeyScope
from motet.runner_info import RequestClass, SequenceState, Tier
from motet_runner.plan.presets import PRESETS
from motet_scheduler.policy.values import AdapterReadiness, AdapterStage, ScalingMode
from testbed.tree import ROOT, package_folders, tracked
from tests.docs.pages import DOCS, rows

PAGE = DOCS / "glossary.md"
TEXT = PAGE.read_text()
SECTIONS = re.findall(r"^## ([A-Z](?: to [A-Z])?)$", TEXT, re.MULTILINE)
TABLES = {section: rows(PAGE, section) for section in SECTIONS}
ENTRIES = {word.strip("*"): (meaning, code) for table in TABLES.values() for word, meaning, _, code in table}
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./([^)#]+)\)")

VALUES = {
    "class": RequestClass,
    "park": ParkMethod,
    "readiness of an adapter": AdapterReadiness,
    "scaling mode": ScalingMode,
    "scope of a key": KeyScope,
    "sequence": SequenceState,
    "stage": AdapterStage,
    "tier": Tier,
}

DEPLOYABLES = {folder.name for folder in (ROOT / "services").iterdir() if (folder / "Dockerfile").exists()} | {
    "operator"
}


@cache
def names() -> dict[str, frozenset[str]]:
    """A module's name and those that it defines, by its path."""
    return {
        path.relative_to(ROOT).as_posix(): frozenset({path.stem, *_defined(ast.parse(path.read_text()))})
        for path in tracked(*package_folders(), ROOT / "tests" / "support")
        if path.suffix == ".py" and "_pb2" not in path.name
    }


def _defined(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def test_words_are_sorted_and_unique() -> None:
    listed = [word.strip("*").casefold() for table in TABLES.values() for word, *_ in table]
    assert listed == sorted(set(listed))


def test_a_word_is_in_the_section_of_its_letter() -> None:
    for section, table in TABLES.items():
        assert [word for word, *_ in table if not section[0] <= word.strip("*")[0].upper() <= section[-1]] == [], (
            section
        )


@pytest.mark.parametrize(("meaning", "code"), ENTRIES.values(), ids=ENTRIES)
def test_a_word_has_a_meaning_and_links_to_what_defines_it(meaning: str, code: str) -> None:
    assert meaning.endswith(".")
    links = LINK.findall(code)
    assert links
    for name, path in links:
        assert path == name or path.endswith(f"/{name}") or is_defined(name, ROOT / path), (
            f"{path} does not define {name}"
        )


def is_defined(name: str, path: Path) -> bool:
    kind = r"(?:(?:async )?def |class |message |rpc |service )?"
    return re.search(rf"^ *{kind}{re.escape(name)}\b *[(\[{{:=]", path.read_text(), re.MULTILINE) is not None


@pytest.mark.parametrize(("word", "values"), VALUES.items(), ids=VALUES)
def test_an_entry_names_every_value_of_its_enumeration(word: str, values: type[Enum]) -> None:
    meaning = ENTRIES[word][0].lower()
    missing = {value.name for value in values if value.name != "NONE" and value.name.lower() not in meaning}
    assert missing == set()


def test_every_preset_is_named() -> None:
    assert set(re.findall(r"`([\w-]+)`", ENTRIES["preset"][0])) == set(PRESETS)


def test_every_service_has_its_word() -> None:
    assert {name.removeprefix("gpu-") for name in DEPLOYABLES} - set(ENTRIES) == set()


def test_both_kinds_have_their_words() -> None:
    kinds = {
        re.search(r"^    kind: (\w+)$", path.read_text(), re.MULTILINE)[1]  # type: ignore[index]
        for path in (ROOT / "crds").glob("*.yaml")
    }
    defined = {name for _, code in ENTRIES.values() for name, _ in LINK.findall(code)}
    assert kinds
    assert kinds - defined == set()


UNUSED = [word for cell, _ in rows(PAGE, "Words that Motet does not use") for word in re.findall(r"`(\w+)`", cell)]
RULES = rows(PAGE, "Names in the code")
EXAMPLES = [name for _, cell, _ in RULES for name in re.findall(r"`(\w+)`", cell)]
REFUSED = [pattern for *_, cell in RULES for pattern in re.findall(r"`([\w*]+)`", cell)]


@pytest.mark.parametrize("word", UNUSED)
def test_no_name_has_a_word_that_is_not_used(word: str) -> None:
    found = {path: {name for name in defined if has_part(name, word)} for path, defined in names().items()}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def has_part(name: str, beginning: str) -> bool:
    """Of `a_name`, `A_NAME` and `AName` the parts are "a" and "name"."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return any(part.lower().startswith(beginning) for part in parts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_a_rule_is_a_name_in_the_code(name: str) -> None:
    assert any(name in defined for defined in names().values())


@pytest.mark.parametrize("pattern", REFUSED)
def test_no_name_breaks_a_rule(pattern: str) -> None:
    found = {path: {name for name in defined if fnmatchcase(name, pattern)} for path, defined in names().items()}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_the_page_is_found(page: str) -> None:
    assert "glossary.md" in (ROOT / page).read_text()
