"""Decides which slow tests a change cannot affect. Pure: takes changes, returns what may be left out and why.

Only `.ci/run` leaves tests out; `make test` runs everything. Nothing is left out if the change is unknown, or if it
includes a path without a rule. `tests/repo/test_test_selection.py` compares each family with the files that its tests
import, start and read.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

KNOWN = (
    *("services/", "operator/", "simulator/", "cli/", "kernels/", "charts/", "crds/", "docs/", "examples/"),
    *("benchmarks/", "testbed/", "tests/"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)
"""The paths that families list. Any other path, such as pyproject.toml or tools/, affects all families."""

EVERY_TEST = (
    "tests/__init__.py",
    "tests/conftest.py",
    "tests/support/",
    "tests/repo/__init__.py",
    *("testbed/__init__.py", "testbed/machine.py", "testbed/ports.py", "testbed/tree.py"),
)
A_CLUSTER = (
    *(*EVERY_TEST, "testbed/cluster/", "tests/kube/", "tests/docs/__init__.py", "tests/docs/blocks.py"),
    *("services/common/motet/__init__.py", "services/common/motet/clock.py", "services/common/motet/processes/"),
    "services/common/motet/keys.py",
    *("services/*/Dockerfile", "operator/Dockerfile"),
)
"""Code that starts the control plane and its nodes, lists the images, and sends requests to a gateway."""
AN_OPERATOR = (*A_CLUSTER, "services/common/", "operator/", "crds/")
HELPERS = ("tests/", "testbed/", "services/*/Dockerfile", "operator/Dockerfile")
"""The helpers of all tests: tests that start the product use many of them."""
THE_PRODUCT = ("services/", "operator/", "simulator/", "cli/", "kernels/", "examples/")
PACKAGES = tuple(f"{folder}/{name}" for folder in ("*/*", "services/*/*") for name in ("__init__.py", "__main__.py"))


@dataclass(frozen=True)
class Family:
    """Tests that the same changes affect."""

    name: str
    what: str
    tests: tuple[str, ...]
    """Files, and folders with a slash at their end."""
    touched_by: tuple[str, ...]
    """Files, folders with a slash at their end, or patterns with one part for each folder. A file of tests affects only
    itself, unless it is listed here: a family lists each test file that it imports."""

    def is_touched_by(self, path: str) -> bool:
        is_of_tests = path.startswith("tests/") and path.rpartition("/")[2].startswith("test_")
        if is_of_tests and path not in self.touched_by:
            return any(_matches(pattern, path) for pattern in self.tests)
        return any(_matches(pattern, path) for pattern in self.tests + self.touched_by)


FAMILIES = (
    Family(
        "bench",
        "the test cluster's own tests",
        (
            "tests/kube/kubelet/",
            "tests/kube/test_test_cluster.py",
            "tests/kube/test_control_plane.py",
            "tests/kube/test_tools.py",
        ),
        (*A_CLUSTER, "services/gateway/motet_gateway/__init__.py"),
    ),
    Family(
        "operator",
        "the operator on a real API server",
        tuple(f"tests/kube/test_operator_{name}.py" for name in ("basics", "faults", "obstacles", "restore")),
        AN_OPERATOR,
    ),
    Family(
        "replay",
        "the operator beside a scheduler, killed after each of its writes, and of two versions",
        ("tests/kube/test_operator_crashes.py", "tests/kube/test_operator_scheduler.py", "tests/kube/test_versions.py"),
        (*AN_OPERATOR, "services/scheduler/"),
    ),
    Family(
        "images",
        "installations of images",
        ("tests/images/test_installation.py",),
        (
            *(*EVERY_TEST, "tests/images/", "services/*/Dockerfile", "operator/Dockerfile"),
            # The wheel contains all packages, and README.md as its description. These tests start the scheduler; `make
            # soak` starts the others.
            *(*PACKAGES, "README.md", "LICENSE", "services/common/", "services/scheduler/"),
        ),
    ),
    Family(
        "runner",
        "the runner and its engine",
        ("tests/runner/", "tests/runner_service/", "tests/contract/test_engines.py", "tests/contract/test_runners.py"),
        (
            *HELPERS,
            "services/common/",
            "services/gpu-runner/",
            "services/scheduler/",
            "services/supervisor/",
            "simulator/",
            "kernels/",
            "cli/motet_cli/bundled/",
            "docs/guides/offline.md",
        ),
    ),
    Family(
        "gateway",
        "the gateway",
        ("tests/gateway/",),
        (*HELPERS, "services/", "simulator/", "kernels/", "cli/motet_cli/bundled/"),
    ),
    Family(
        "trials",
        "the whole system in virtual time",
        ("tests/simulator/test_trials.py", "tests/simulator/test_adapters.py", "tests/simulator/test_defects.py"),
        (*HELPERS, "services/", "operator/", "simulator/", "kernels/"),
    ),
    Family(
        "stack",
        "all processes together",
        ("tests/stack/", "tests/contract/test_http.py"),
        (*HELPERS, *THE_PRODUCT, "docs/guides/client.md", "docs/tutorials/laptop.md", "README.md"),
    ),
    Family(
        "releases",
        "installations of the charts, and the pages",
        ("tests/kube/releases/",),
        (*HELPERS, *THE_PRODUCT, "charts/", "crds/", "docs/", "README.md", "LICENSE"),
    ),
    Family(
        "benchmarks",
        "a short run of each benchmark",
        (
            "tests/benchmarks/test_runs.py",
            "tests/benchmarks/test_engine_cases.py",
            "tests/benchmarks/test_vllm_peer.py",
        ),
        (*HELPERS, *THE_PRODUCT, "benchmarks/"),
    ),
)


@dataclass(frozen=True)
class Change:
    """The files that have changed since a commit."""

    paths: tuple[str, ...] | None
    """The changed paths; None if they are unknown."""
    said: str
    """The commit, as `since …`; or why the paths are unknown."""


@dataclass(frozen=True)
class SelectionResult:
    family: Family
    left_out: bool
    why: str

    def __str__(self) -> str:
        return f"{'Left out' if self.left_out else 'Not left out'}: {self.family.what} ({self.why})."


def verdicts(changes: Mapping[str, Change], families: Sequence[Family] = FAMILIES) -> list[SelectionResult]:
    """One verdict for each family. `changes` has the family's name as its key."""
    return [_verdict(family, changes[family.name]) for family in families]


def _verdict(family: Family, change: Change) -> SelectionResult:
    if change.paths is None:
        return SelectionResult(family, False, change.said)
    if unknown := [path for path in change.paths if not any(_matches(known, path) for known in KNOWN)]:
        return SelectionResult(family, False, f"{_named(unknown)} changed {change.said}, which may affect any test")
    if touching := [path for path in change.paths if family.is_touched_by(path)]:
        return SelectionResult(family, False, f"{_named(touching)} changed {change.said}")
    return SelectionResult(family, True, f"nothing that they use changed {change.said}")


def green(not_left_out: Sequence[Family], ran: Collection[str], not_passed: Collection[str]) -> list[Family]:
    """The families whose tests have all run and passed. `ran` and `not_passed` are files of tests."""
    return [
        family
        for family in not_left_out
        if all(any(_matches(tests, file) for file in ran) for tests in family.tests)
        and not any(_matches(tests, file) for tests in family.tests for file in not_passed)
    ]


def _matches(pattern: str, path: str) -> bool:
    if pattern.endswith("/"):
        return path.startswith(pattern)
    names, wanted = path.split("/"), pattern.split("/")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def _named(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
