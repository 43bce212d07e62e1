"""Pages are made of what can be tried."""

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from motet.resources import read_text
from testbed.tree import ROOT, package_folders, tracked
from tests.docs.blocks import Block, blocks
from tests.docs.pages import DOCS, written_pages

EXECUTED = {
    *("tutorials/kubernetes.md", "guides/platform.md", "guides/tenant.md"),  # tests/kube/releases/test_pages.py
    *(
        "tutorials/laptop.md",
        "tutorials/notebook.md",
        "tutorials/tools.md",
        "guides/quotas.md",
        "guides/adapters.md",
    ),  # tests/stack/test_pages.py
    "tutorials/gpu.md",  # tests/stack/test_gpu_page.py
    "guides/client.md",  # tests/stack/test_tenants.py
    "guides/offline.md",  # tests/runner/test_offline.py
    "guides/keys.md",  # tests/docs/test_keys.py
    "guides/capacity.md",  # tests/docs/test_capacity.py
}

BLOCKS = [block for page in (*written_pages(), ROOT / "README.md") for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.kind in ("sh", "console")]
PYTHON = [block for block in BLOCKS if block.kind == "python"]
EXCUSED_AT_MOST = 5


def test_every_block_has_a_known_kind() -> None:
    for before, block in pairwise([None, *BLOCKS]):
        assert block is not None
        if block.kind == "text":
            assert before is not None, block
            assert before.is_python, f"{block}: what prints it?"
            assert before.page == block.page
        else:
            assert block.kind in ("sh", "console", "yaml", "python"), block


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_shell_block_is_shell(block: Block) -> None:
    for step in block.steps:
        done = subprocess.run(["bash", "-n"], input=step.command, text=True, capture_output=True, check=False)
        assert not done.stderr


def test_few_blocks_of_the_executed_pages_are_not_run_and_each_says_why() -> None:
    excused = [block for block in SHELL if not block.runs]
    assert all(len(block.reason_not_to_run) > 20 for block in excused)
    assert len(excused) <= EXCUSED_AT_MOST


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_block_is_python(block: Block) -> None:
    compile(block.text, str(block), "exec", dont_inherit=True)


def test_a_page_with_commands_or_python_is_executed() -> None:
    pages = {block.page for block in [*SHELL, *PYTHON] if block.page.is_relative_to(DOCS)}
    assert {str(page.relative_to(DOCS)) for page in pages} == EXECUTED


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "yaml"], ids=str)
def test_a_manifest_on_a_page_is_valid(block: Block) -> None:
    assert [str(problem) for problem in read_text(block.text, file=str(block)).problems] == []


def prose(page: Path) -> list[str]:
    """A page's lines outside of blocks, indented code and tables"""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if not line.startswith(("|", "    "))]


ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


@pytest.mark.parametrize("page", [*written_pages(), *ROOT_PAGES], ids=lambda page: page.name)
def test_one_space_is_between_two_words(page: Path) -> None:
    assert [line for line in prose(page) if re.search(r"\S {2,}\S", line)] == []


def test_metrics_on_pages_exist() -> None:
    known = set(re.findall(r"^\| `(\w+)`", (DOCS / "reference" / "metrics.md").read_text(), re.MULTILINE))
    packages = {folder.name for folder in package_folders()}
    for page in (*written_pages(), DOCS / "reference" / "api.md"):
        named = set(re.findall(r"\b(motet_[a-z_]+)\b(?!\.json)", page.read_text())) - packages
        assert named - known == set(), page


def test_a_metric_belongs_to_one_process() -> None:
    """Locally all of them stand on one page: the same name twice would be added up."""
    names = re.findall(r"^\| `([\w:]+)`", (DOCS / "reference" / "metrics.md").read_text(), re.MULTILINE)
    assert [name for name in set(names) if names.count(name) > 1] == []


@pytest.mark.parametrize(
    "page", [*written_pages(), *map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md"))], ids=lambda page: page.name
)
def test_a_link_with_the_name_of_a_file_leads_to_that_file(page: Path) -> None:
    links = re.findall(r"\[`?([\w./-]+\.(?:py|proto))`?\]\(([^)#]+)", page.read_text())
    assert [
        name for name, path in links if not f"/{path}".endswith(f"/{name}") or not (page.parent / path).is_file()
    ] == []


def readmes_of_packages() -> list[Path]:
    return [path for path in tracked(*(folder.parent for folder in package_folders())) if path.name == "README.md"]


@pytest.mark.parametrize("page", readmes_of_packages(), ids=lambda page: page.parent.name)
def test_a_module_in_the_readme_of_a_package_exists(page: Path) -> None:
    modules = [f"/{path.as_posix()}" for path in tracked(page.parent, ROOT / "tests")]
    named = set(re.findall(r"[\w/]+\.py\b", page.read_text()))
    assert named
    assert {name for name in named if not any(module.endswith(f"/{name}") for module in modules)} == set()


def test_fields_and_values_on_pages_exist() -> None:
    """Whatever is written with dots and backticks is a chart's value or a field of ours, or its last parts are."""
    known = chart_values() | {f"{kind}.{name}" for kind in ("spec", "status") for name in fields()}
    tails = {
        ".".join(parts[at:]) for parts in (name.split(".") for name in known | fields()) for at in range(len(parts))
    }
    for page in written_pages():
        dotted = set(re.findall(r"`([a-z]\w*(?:\.[a-z][A-Za-z]+)+)(?::[^`]*)?`", page.read_text()))
        assert {name for name in dotted if not NO_FIELD.search(name)} - tails == set(), page


NO_FIELD = re.compile(
    r"\.(motet\.dev|motet\.internal|json|yaml|py|crt|key|md|proto|toml|io|safetensors|jinja|svg)$|^motet\.|^app\.|^response\."
)
"""Resources, hosts, files, modules, and events of streams."""


def chart_values() -> set[str]:
    def paths(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, one in schema.get("properties", {}).items():
            yield f"{prefix}{name}"
            yield from paths(one, f"{prefix}{name}.")

    readme = (ROOT / "charts/motet/README.md").read_text()
    return set(re.findall(r"^\| `([\w.]+)`", readme, re.MULTILINE)) | set(
        paths(json.loads((ROOT / "charts/motet/values.schema.json").read_text()))
    )


def fields() -> set[str]:
    """Of both kinds, without `spec.` and brackets."""
    text = "".join((DOCS / "reference" / name).read_text() for name in ("manifests.md", "crds.md"))
    found = re.findall(r"^\| `(?:spec\.)?([\w.\[\]]+)`", text, re.MULTILINE)
    return {name.replace("[]", "") for name in found}
