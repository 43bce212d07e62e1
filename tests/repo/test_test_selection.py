"""What `.ci/run` may leave out, and that no change to what those tests use leaves them out."""

from pathlib import Path

import pytest

from tests.images.dockerfile import FOLDERS
from tests.repo.dependencies import Dependencies, names, reach
from tests.repo.tree import ROOT, tracked
from tools.gate.test_selection import FAMILIES, Change, Family, green, verdicts

BY_NAME = {family.name: family for family in FAMILIES}
STARTED = {"images": ("motet_scheduler.__main__", "motet_operator.cluster.__main__", "motet.store.__main__")}
"""What an installation starts, as its Dockerfile says. The others are started in tests marked soak."""
DOCKERFILES = [(folder / "Dockerfile").relative_to(ROOT).as_posix() for folder in FOLDERS.values()]
FOR_PAGES = ("tests/kube/product.py", "tests/kube/page_shell.py")
"""What types pages reads the charts and the examples."""
TOLD = {
    **{("tests/images/dockerfile.py", folder.relative_to(ROOT).as_posix()): DOCKERFILES for folder in FOLDERS.values()},
    **{("tests/kube/kubelet/images.py", folder): DOCKERFILES for folder in ("services", "operator")},
    **{(FOR_PAGES[0], path): () for path in ("examples/cluster", "charts/motet", "charts/motet-crds")},
    (FOR_PAGES[1], ""): (),
    # Of the tests of the repository itself.
    **{("tests/repo/tree.py", path): () for path in ("", "services/common/motet/api/v1")},
    # Of a test marked soak.
    ("tests/images/test_installation.py", "cli/motet_cli/bundled/model"): (),
    # For runners' pods, whose tests run when the runner or the kernels change, too.
    ("tests/kube/kubelet/node_host.py", "tests.kube.kubelet.compiled_kernels"): (),
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


@every_family
def test_every_family_has_existing_tests_that_are_not_all_long(family: Family) -> None:
    files = files_of_tests(family)
    for tests in family.tests:
        assert [file for file in files if file.startswith(tests)], f"{tests} names no tests"
    for file in files:
        text = (ROOT / file).read_text()
        assert "soak" not in text.partition("pytestmark = ")[2].partition("\n")[0], f"{file} never runs"


@every_family
def test_a_family_that_runs_pages_is_affected_by_them(family: Family) -> None:
    """It reads the charts and the examples, too, which TOLD does not say."""
    if {"docs/", "charts/", "examples/"} <= set(family.touched_by):
        return
    where = {*FOR_PAGES, "tests/kube/conftest.py"}
    for source in reached_by(family).sources.keys() - where:
        assert not {"tests.kube.product", "tests.kube.page_shell"} & names(source), source
    assert not [file for file in files_of_tests(family) if "shell: Shell" in (ROOT / file).read_text()]


def test_no_test_is_of_two_families() -> None:
    files = [file for family in FAMILIES for file in files_of_tests(family)]
    assert len(files) == len(set(files))


def test_reach_sees_what_is_imported_started_and_read() -> None:
    reached = reach(["tests/kube/test_operator_basics.py"])
    assert reached.sources["operator/motet_operator/cluster/__main__.py"] == "tests/kube/operators.py", "by -m"
    assert "services/common/motet/resources/crd.py" in reached.sources
    assert "tests/support/machine.py" in reached.sources, "a plugin of conftest.py"
    assert reached.data["crds"] == "tests/kube/operators.py"
    assert "services/gateway/motet_gateway/__init__.py" in reach(["tests/kube/kubelet/test_environment.py"]).sources


# -------------------------------------------------------------------------------------------------------- the verdicts

ALL_PROCESSES = {"stack", "releases", "benchmarks"}
WITH_A_GATEWAY = {*ALL_PROCESSES, "gateway"}
NEITHER_MODELS_NOR_GATEWAYS = {"bench", "operator", "replay", "images"}


@pytest.mark.parametrize(
    ("path", "stay"),
    [
        ("CHANGELOG.md", set()),
        ("docs/architecture.md", {"releases"}),
        ("docs/guides/client.md", {"stack", "releases"}),
        ("docs/tutorials/laptop.md", {"stack", "releases"}),
        ("charts/motet/values.yaml", {"releases"}),
        ("benchmarks/gateway.py", {"benchmarks"}),
        ("kernels/motet_kernels/lora_batch.py", BY_NAME.keys() - NEITHER_MODELS_NOR_GATEWAYS),
        ("services/gateway/motet_gateway/app.py", WITH_A_GATEWAY),
        ("services/gateway/motet_gateway/__main__.py", {*WITH_A_GATEWAY, "images"}),
        ("services/gpu-runner/motet_runner/engine.py", {*WITH_A_GATEWAY, "runner"}),
        ("services/scheduler/motet_scheduler/policy/new.py", {*WITH_A_GATEWAY, "runner", "replay", "images"}),
        ("services/predictor/Dockerfile", BY_NAME.keys()),
        ("services/common/motet/errors.py", BY_NAME.keys() - {"bench"}),
        ("operator/motet_operator/cluster/cluster_operator.py", {*ALL_PROCESSES, "operator", "replay", "images"}),
        ("crds/motet.dev_loraadapters.yaml", {"operator", "replay", "releases"}),
        ("tests/gateway/test_app.py", {"gateway"}),
        ("tests/stack/harness.py", {*WITH_A_GATEWAY, "runner"}),
        ("tests/kube/releases/installed/test_adapters.py", {"releases"}),
        ("tests/kube/kubelet/test_nodes.py", {"bench"}),
        ("tests/kube/kubelet/pod.py", BY_NAME.keys() - {"images"}),
    ],
)
def test_a_change_leaves_out_what_it_cannot_touch(path: str, stay: set[str]) -> None:
    assert BY_NAME.keys() - left_out(path) == set(stay)


@pytest.mark.parametrize(
    "path",
    [
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        ".ci/run",
        "tools/gate/test_selection.py",
        "conftest.py",
        "new/x",
    ],
)
def test_a_path_that_no_rule_knows_leaves_out_nothing(path: str) -> None:
    assert left_out(path, "CHANGELOG.md") == set()


def test_a_change_that_is_not_known_leaves_out_nothing_and_one_of_nothing_all() -> None:
    unknown = verdicts(dict.fromkeys(BY_NAME, Change(None, "nobody knows")))
    assert not any(one.left_out for one in unknown)
    assert str(unknown[0]) == "Not left out: the test cluster's own tests (nobody knows)."
    assert left_out() == BY_NAME.keys()


def test_a_decision_names_the_changes_and_their_base() -> None:
    paths = ("docs/x.md", "tests/kube/kubelet/pod.py", "tests/kube/nodes.py")
    changes = {name: Change(paths if name == "bench" else (), "since 1a2b") for name in BY_NAME}
    bench, operator, *_ = map(str, verdicts(changes))
    assert bench.endswith("(tests/kube/kubelet/pod.py and 1 more changed since 1a2b).")
    assert operator == "Left out: the operator on a real API server (nothing that they use changed since 1a2b)."


# ---------------------------------------------------------------------------------------------------------- the green


def test_a_family_is_green_after_a_whole_run_that_passed() -> None:
    one, two = Family("one", "", ("tests/a/", "tests/b.py"), ()), Family("two", "", ("tests/c.py",), ())
    assert green([one, two], ["tests/a/test_x.py", "tests/b.py", "tests/c.py"], []) == [one, two]
    assert green([one, two], ["tests/a/test_x.py", "tests/c.py"], []) == [two], "a part has not run"
    assert green([one, two], ["tests/a/x.py", "tests/b.py", "tests/c.py"], ["tests/a/x.py"]) == [two]
    assert green([one], ["tests/a/test_x.py", "tests/b.py"], ["tests/elsewhere.py"]) == [one]
