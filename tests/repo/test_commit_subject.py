"""The subject of the newest commit is in the form that CONTRIBUTING describes; real repositories, made here."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.repo.tree import ROOT
from tools.commit_subject import check, faults

LONGEST = "gateway: " + "x" * 63


def test_a_subject_in_the_form_has_no_faults() -> None:
    subjects = (
        LONGEST,
        "gpu-runner: park",
        "tests/kube: wait",
        "keys, cli: name",
        "cli: say where logs are: in a folder",
    )
    assert {subject: faults(subject) for subject in subjects} == {subject: [] for subject in subjects}


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        (f"{LONGEST}x", "it has 73 characters; at most 72 are allowed"),
        ("Refuse large bodies", "it does not begin with `area: `"),
        ("Gateway: refuse large bodies", "it does not begin with `area: `"),
        ("the gateway and its keys: refuse large bodies", "it does not begin with `area: `"),
        ("gateway: ", "it does not begin with `area: `"),
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


def test_only_the_newest_commit_counts_and_no_merge(repository: Path, tmp_path: Path) -> None:
    assert check(repository) == "", "there is none yet"
    commit(repository, "Something old")
    assert check(repository).startswith('The subject of the newest commit is "Something old": it does not begin')
    git(tmp_path, "clone", "--quiet", "--depth", "1", repository.as_uri(), "shallow")
    assert "Something old" in check(tmp_path / "shallow")
    git(repository, "checkout", "--quiet", "-b", "other")
    commit(repository, "docs: something new\n\nA line of a body may be longer than a subject is.".ljust(90, "."))
    assert check(repository) == ""
    git(repository, "checkout", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-ff", "--message", "Merge other", "other")
    assert check(repository) == ""


def test_without_git_or_in_another_repository_there_is_nothing_to_check(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repository, "Something old")
    (repository / "vendored").mkdir()
    assert check(repository / "vendored") == ""
    assert check(tmp_path) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check(repository) == ""
