"""The page on vLLM has each difference that the contract suite leaves room for, and no other one."""

import re
from collections.abc import Collection

from motet_runner.external.vllm.differences import DIFFERENCES
from motet_runner.external.vllm.versions import TESTED
from tests.docs.pages import DOCS

PAGE = (DOCS / "guides" / "vllm.md").read_text()


def listed() -> Collection[str]:
    _, _, section = PAGE.partition("## What differs\n")
    return [" ".join(one.split()) for one in re.split(r"^- ", section, flags=re.MULTILINE)[1:]]


def test_the_page_has_the_differences() -> None:
    assert listed() == list(DIFFERENCES.values())


def test_the_page_names_the_tested_versions() -> None:
    assert all(f"version {version}" in PAGE for version in TESTED)
