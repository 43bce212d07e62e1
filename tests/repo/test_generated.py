"""Committed files that a tool writes are what the tool writes now."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from motet.settings import RENAMED
from testbed.tree import GENERATED_API, ROOT, package_folders, tracked
from tools.compat import NAMED_BY as OF_COMPAT
from tools.peer import RECIPES

OF_THE_TESTS = "MOTET_RUNNER_WORKER"
"""See `tests/support/chosen_worker.py`"""


def generate(tool: str, out: Path) -> None:
    # The generators call plugins by name: those of this interpreter's environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, "--out", out],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def contents(folder: Path, pattern: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob(pattern)}


def test_the_api_modules_equal_their_protos(tmp_path: Path) -> None:
    generate("generate_api.py", tmp_path)
    written = contents(tmp_path / "motet" / "api" / "v1", "*_pb2*")
    committed = contents(GENERATED_API, "*_pb2*")
    assert written.keys() == committed.keys()
    assert [name for name in written if written[name] != committed[name]] == [], "run `make generate`"


def test_the_crds_equal_their_models(tmp_path: Path) -> None:
    generate("generate_crds.py", tmp_path)
    written, committed = contents(tmp_path, "*.yaml"), contents(ROOT / "crds", "*")
    assert written.keys() == committed.keys()
    assert [name for name in written if written[name] != committed[name]] == [], "run `make generate`"
    chart = ROOT / "charts" / "motet-crds" / "templates"
    assert contents(tmp_path / "templates", "*.yaml") == contents(chart, "*"), "run `make generate`"


def test_the_charts_values_equal_their_schema(tmp_path: Path) -> None:
    generate("generate_charts.py", tmp_path)
    for name, written in contents(tmp_path, "*").items():
        assert written == (ROOT / "charts" / "motet" / name).read_text(), f"{name}: run `make generate`"


def test_the_reference_pages_equal_the_code(tmp_path: Path) -> None:
    """So every setting, metric, error and manifest field is in the docs; without an explanation none is written."""
    generate("generate_docs.py", tmp_path)
    written, committed = contents(tmp_path, "*.md"), contents(ROOT / "docs" / "reference", "*.md")
    assert written.keys() == committed.keys()
    assert [name for name in written if written[name] != committed[name]] == [], "run `make generate`"


def test_the_tables_and_plots_of_the_performance_page_equal_the_results(tmp_path: Path) -> None:
    generate("generate_performance.py", tmp_path)
    assert (tmp_path / "performance.md").read_text() == (ROOT / "docs" / "performance.md").read_text(), "make generate"
    written = contents(tmp_path / "images", "*.svg")
    assert written == contents(ROOT / "docs" / "images", "performance-*.svg"), "run `make generate`"


GENERATED_FILES = (
    *GENERATED_API.glob("*_pb2*"),
    *(ROOT / "crds").glob("*.yaml"),
    *(ROOT / "charts" / "motet-crds" / "templates").glob("*.yaml"),
    ROOT / "charts" / "motet" / "values.yaml",
    *(ROOT / "docs" / "reference").glob("*.md"),
)


@pytest.mark.parametrize("path", GENERATED_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_generated_file_begins_with_what_to_change_and_how(path: Path) -> None:
    first_line = path.read_text().partition("\n")[0].removeprefix("<!-- ").removeprefix("# ").removesuffix(" -->")
    found = re.fullmatch(r"Generated from (.+): change that, not this file, and run `make generate`\.", first_line)
    assert found is not None, first_line
    origins = found[1].removeprefix("each package's ").split(" and ")
    assert [one for one in origins if not any((folder / one).exists() for folder in (ROOT, *package_folders()))] == []


def test_pages_speak_only_of_variables_that_exist() -> None:
    settings = (ROOT / "docs" / "reference" / "settings.md").read_text()
    known = {*re.findall(r"MOTET_[A-Z0-9_]+", settings), OF_COMPAT, OF_THE_TESTS}
    known |= {recipe.named_by for recipe in RECIPES.values()}
    for path in tracked():
        if path.suffix == ".md":
            named = set(re.findall(r"MOTET_[A-Z0-9_]*[A-Z0-9]\b(?!_)", path.read_text()))
            old = RENAMED.keys() if path.name not in ("settings.md", "CHANGELOG.md") else set()
            assert named - (known - old) == set(), path.relative_to(ROOT)


def test_a_renamed_setting_leads_to_one_that_exists() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    known = set(re.findall(r"^\| `(MOTET_\w+)`", page, re.MULTILINE))
    assert RENAMED.keys() & known == set()
    assert set(RENAMED.values()) - known == set()


def test_links_between_pages_lead_somewhere() -> None:
    for path in tracked():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_the_quickstart_is_two_commands_and_then_a_question() -> None:
    quickstart = (ROOT / "README.md").read_text().split("## Quickstart", 1)[1].split("\n## ", 1)[0]
    first, second = re.findall(r"```(?:sh|bash|console)\n(.*?)```", quickstart, re.DOTALL)[:2]
    assert first.split("\n")[:-1] == ["make up", "make test"]
    assert second.startswith("curl ")


def test_make_help_names_every_word() -> None:
    makefile = (ROOT / "Makefile").read_text()
    words = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    said = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert {line.split()[1] for line in said.splitlines() if line} == words
