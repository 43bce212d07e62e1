"""What `.ci/run` may leave out, and that no change to what those tests use leaves them out."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from testbed.tree import ROOT, tracked
from tests.images.dockerfile import FOLDERS
from tests.repo.dependencies import Dependencies, names, reach
from tools.gate.test_selection import FAMILIES, Change, Family, green, verdicts

BY_NAME = {family.name: family for family in FAMILIES}
STARTED = {"images": ("motet_scheduler.__main__",)}
"""What an installation starts, as its Dockerfile says. The others are started in tests marked soak."""
DOCKERFILES = [(folder / "Dockerfile").relative_to(ROOT).as_posix() for folder in FOLDERS.values()]
FOR_PAGES = ("testbed/cluster/product.py", "tests/kube/page_shell.py")
"""What types pages reads the charts and the examples."""
TOLD = {
    **{("tests/images/dockerfile.py", folder.relative_to(ROOT).as_posix()): DOCKERFILES for folder in FOLDERS.values()},
    **{("testbed/cluster/kubelet/images.py", folder): DOCKERFILES for folder in ("services", "operator")},
    **{(FOR_PAGES[0], path): () for path in ("examples/cluster", "charts/motet", "charts/motet-crds")},
    (FOR_PAGES[1], ""): (),
    # Of the tests of the repository itself.
    **{("testbed/tree.py", path): () for path in ("", "services/common/motet/api/v1")},
    # Of a test marked soak.
    ("tests/images/test_installation.py", "cli/motet_cli/bundled/model"): (),
    # For runners' pods, whose tests run when the runner or the kernels change, too.
    ("testbed/cluster/kubelet/node_host.py", "testbed.cluster.kubelet.compiled_kernels"): (),
}
"""What a file reads of a folder that it names, or starts of a module."""

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def all_files() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in tracked()]


def files_of_tests(family: Family) -> list[str]:
    return [path for path in all_files() if family.is_touched_by(path) and Path(path).match("test_*.py")]


def reached_by(family: Family) -> Dependencies:
    return reach(files_of_tests(family), started=STARTED.get(family.name, ()), told=TOLD)


def left_out(*paths: str) -> set[str]:
    changes = dict.fromkeys(BY_NAME, Change(paths, "since then"))
    return {one.family.name for one in verdicts(changes) if one.left_out}


# --------------------------------------------------------------------------------------------------------- the borders


@every_family
def test_a_family_runs_when_its_imports_programs_or_files_change(family: Family) -> None:
    reached = reached_by(family)
    data = {f"{path}/any" if (ROOT / path).is_dir() else path: by for path, by in reached.data.items()}
    forgotten = {path: by for path, by in {**reached.sources, **data}.items() if family.name in left_out(path)}
    assert forgotten == {}, "each with who uses it: add it to the family's touched_by, or to TOLD with a reason"


def test_families_have_existing_tests_that_are_not_all_long_and_no_test_is_of_two() -> None:
    files = {family.name: files_of_tests(family) for family in FAMILIES}
    assert max(Counter(file for of_one in files.values() for file in of_one).values()) == 1
    for family in FAMILIES:
        for tests in family.tests:
            assert [file for file in files[family.name] if file.startswith(tests)], f"{tests} names no tests"
        for file in files[family.name]:
            mark = (ROOT / file).read_text().partition("pytestmark = ")[2].partition("\n")[0]
            assert "soak" not in mark, f"{file} never runs"


@every_family
def test_a_family_that_runs_pages_is_affected_by_them(family: Family) -> None:
    """It reads the charts and the examples, too, which TOLD does not say."""
    if {"docs/", "charts/", "examples/"} <= set(family.touched_by):
        return
    where = {*FOR_PAGES, "tests/kube/conftest.py"}
    for source in reached_by(family).sources.keys() - where:
        assert not {"testbed.cluster.product", "tests.kube.page_shell"} & names(source), source
    assert not [file for file in files_of_tests(family) if "shell: Shell" in (ROOT / file).read_text()]


def test_reach_sees_what_is_imported_started_and_read() -> None:
    reached = reach(["tests/kube/test_operator_basics.py"])
    assert reached.sources["operator/motet_operator/cluster/__main__.py"] == "testbed/cluster/operators.py", "by -m"
    assert "services/common/motet/resources/crd.py" in reached.sources
    assert "testbed/machine.py" in reached.sources, "a plugin of conftest.py"
    assert reached.data["crds"] == "testbed/cluster/operators.py"
    assert "services/gateway/motet_gateway/__init__.py" in reach(["tests/kube/kubelet/test_environment.py"]).sources


# -------------------------------------------------------------------------------------------------------- the verdicts

ALL_PROCESSES = {"stack", "releases", "benchmarks"}
WITH_A_GATEWAY = {*ALL_PROCESSES, "gateway"}
NEITHER_MODELS_NOR_GATEWAYS = {"bench", "operator", "replay", "images"}


STAY: dict[str, Collection[str]] = {
    "CHANGELOG.md": set(),
    "docs/architecture.md": {"releases"},
    "charts/motet/values.yaml": {"releases"},
    "kernels/motet_kernels/lora_batch.py": BY_NAME.keys() - NEITHER_MODELS_NOR_GATEWAYS,
    "services/gateway/motet_gateway/__main__.py": {*WITH_A_GATEWAY, "trials", "images"},
    "services/scheduler/motet_scheduler/policy/new.py": {*WITH_A_GATEWAY, "trials", "runner", "replay", "images"},
    "simulator/motet_simulator/fake_engine.py": {*WITH_A_GATEWAY, "trials", "runner"},
    "services/common/motet/errors.py": BY_NAME.keys() - {"bench"},
    "testbed/local_stack.py": {*WITH_A_GATEWAY, "trials", "runner"},
    "tests/kube/releases/installed/test_adapters.py": {"releases"},
    "testbed/cluster/kubelet/pod.py": BY_NAME.keys() - {"images"},
}
"""What a change of one path does not leave out."""


def test_a_change_leaves_out_what_it_cannot_touch_and_nothing_if_no_rule_knows_its_path() -> None:
    assert {path: BY_NAME.keys() - left_out(path) for path in STAY} == {path: set(stay) for path, stay in STAY.items()}
    for path in ("pyproject.toml", "Makefile", ".ci/run", "tools/gate/test_selection.py", "conftest.py", "new/x"):
        assert left_out(path, "CHANGELOG.md") == set(), path


# ---------------------------------------------------------------------------------------------------------- the green


def test_a_family_is_green_after_a_whole_run_that_passed() -> None:
    one, two = Family("one", "", ("tests/a/", "tests/b.py"), ()), Family("two", "", ("tests/c.py",), ())
    assert green([one, two], ["tests/a/test_x.py", "tests/b.py", "tests/c.py"], []) == [one, two]
    assert green([one, two], ["tests/a/test_x.py", "tests/c.py"], []) == [two], "a part has not run"
    assert green([one, two], ["tests/a/x.py", "tests/b.py", "tests/c.py"], ["tests/a/x.py"]) == [two]
    assert green([one], ["tests/a/test_x.py", "tests/b.py"], ["tests/elsewhere.py"]) == [one]
