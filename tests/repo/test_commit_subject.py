"""The subject of the newest commit is in the form that CONTRIBUTING describes; real repositories, made here."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.repo.tree import ROOT
from tools.commit_subject import check, faults

LONGEST = "gateway: " + "x" * 63


@pytest.mark.parametrize(
    "subject",
    [
        "gateway: refuse a body above the limit",
        "gpu-runner: park the newest sequence first",
        "tests/kube: wait for the Lease",
        "keys, cli: name the key that follows",
        "cli: `motet up --detach` says where logs are: in the state directory",
        LONGEST,
    ],
)
def test_a_subject_in_the_form_has_no_faults(subject: str) -> None:
    assert faults(subject) == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        (f"{LONGEST}x", "it has 73 characters; at most 72 are allowed"),
        ("Refuse large bodies", "it does not begin with `area: `"),
        ("Gateway: refuse large bodies", "it does not begin with `area: `"),
        ("the gateway and its keys: refuse large bodies", "it does not begin with `area: `"),
        ("gateway:refuse large bodies", "it does not begin with `area: `"),
        ("gateway: ", "it does not begin with `area: `"),
        ("", "it does not begin with `area: `"),
        ("gateway: refuse large bodies.", "it ends with a full stop"),
    ],
)
def test_a_fault_is_named(subject: str, fault: str) -> None:
    assert fault in faults(subject)


def test_the_examples_of_the_page_are_in_the_form() -> None:
    commits = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Commits")[2]
    (block,) = re.findall(r"^```text\n(.*?)^```$", commits, re.MULTILINE | re.DOTALL)
    examples = [line for line in block.splitlines() if line and not line.startswith(" ")]
    assert len(examples) == 3
    assert {example: found for example in examples if (found := faults(example))} == {}


# ------------------------------------------------------------------------------------------------------ in repositories


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=n@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, message: str) -> None:
    git(folder, "commit", "--allow-empty", "--quiet", "--message", message)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    return folder


def test_only_the_newest_commit_counts(repository: Path) -> None:
    commit(repository, "Something old")
    assert check(repository).startswith('The subject of the newest commit is "Something old": it does not begin')
    commit(
        repository, "docs: something new\n\nA body may say anything, and a line of it may be longer than a subject is."
    )
    assert check(repository) == ""


def test_a_merge_is_not_checked_in_a_full_or_shallow_clone(repository: Path, tmp_path: Path) -> None:
    commit(repository, "docs: one")
    git(repository, "checkout", "--quiet", "-b", "other")
    commit(repository, "docs: two")
    git(repository, "checkout", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-ff", "--message", "Merge other", "other")
    assert check(repository) == ""
    git(tmp_path, "clone", "--quiet", "--depth", "1", repository.as_uri(), "shallow")
    assert check(tmp_path / "shallow") == ""


def test_a_shallow_clone_is_checked(repository: Path, tmp_path: Path) -> None:
    commit(repository, "docs: one")
    commit(repository, "Two")
    git(tmp_path, "clone", "--quiet", "--depth", "1", repository.as_uri(), "shallow")
    assert "Two" in check(tmp_path / "shallow")


def test_without_commits_or_repository_or_git_there_is_nothing_to_check(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(repository) == ""
    assert check(tmp_path) == ""
    commit(repository, "Something old")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check(repository) == ""


def test_a_tree_inside_the_repository_of_something_else_is_not_checked(repository: Path) -> None:
    commit(repository, "Something old")
    inside = repository / "vendored"
    inside.mkdir()
    assert check(inside) == ""
