"""The subject of the newest commit is in the form that CONTRIBUTING describes; real repositories, made here."""

from pathlib import Path

import pytest

from testbed.tree import ROOT, commit, git
from tools.commit_subject import check, faults

LONGEST = "gateway: " + "x" * 63
FORM = "it does not begin with `area: `"


def test_faults_are_named() -> None:
    right = (LONGEST, "gpu-runner: park", "tests/kube: wait", "keys, cli: name", "cli: say where logs are: in a folder")
    assert {subject: faults(subject) for subject in right} == {subject: [] for subject in right}
    for subject in ("Refuse large bodies", "Gateway: refuse", "the gateway and its keys: refuse", "gateway: "):
        assert FORM in faults(subject), subject
    assert faults(f"{LONGEST}x") == ["it has 73 characters; at most 72 are allowed"]
    assert faults("gateway: refuse large bodies.") == ["it ends with a full stop"]


def test_the_examples_of_the_page_are_in_the_form() -> None:
    commits = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Commits")[2]
    block = commits.partition("```text\n")[2].partition("```")[0]
    examples = [line for line in block.splitlines() if line and not line.startswith(" ")]
    assert len(examples) == 3
    assert {example: found for example in examples if (found := faults(example))} == {}


def test_only_the_newest_commit_of_this_repository_counts_and_no_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository := tmp_path / "repository").mkdir()
    assert check(tmp_path) == ""
    git(repository, "init", "--quiet", "--initial-branch", "main")
    assert check(repository) == "", "there is none yet"
    commit(repository, "Something old", vendored__file="")
    assert check(repository).startswith(f'The subject of the newest commit is "Something old": {FORM}')
    assert check(repository / "vendored") == ""
    git(repository, "checkout", "--quiet", "-b", "other")
    commit(repository, "docs: something new\n\nA line of a body may be longer than a subject is.".ljust(90, "."))
    assert check(repository) == ""
    git(repository, "checkout", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-ff", "--message", "Merge other", "other")
    assert check(repository) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check(repository) == "", "without git there is nothing to check"
