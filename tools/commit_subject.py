"""Checks the subject of the newest commit, for `make lint`: `area: what changes`, in at most 72 characters.

It does not check a merge, a tree without git, or a tree inside another repository.
"""

import re
import subprocess
import sys
from pathlib import Path

MAX_CHARACTERS = 72
IN_FORM = re.compile(r"[a-z][\w./-]*(?:, [a-z][\w./-]*)*: \S")
"""One or more areas, separated by commas, and what changes."""


def faults(subject: str) -> list[str]:
    found = []
    if not IN_FORM.match(subject):
        found.append("it does not begin with `area: `")
    if len(subject) > MAX_CHARACTERS:
        found.append(f"it has {len(subject)} characters; at most {MAX_CHARACTERS} are allowed")
    if subject.endswith("."):
        found.append("it ends with a full stop")
    return found


def subject_of(commit: str) -> str | None:
    """The subject of a commit as git stores it; None for a merge. In a shallow clone, too, it names the parents."""
    head, _, message = commit.partition("\n\n")
    if len(re.findall(r"^parent ", head, re.MULTILINE)) > 1:
        return None
    return " ".join(message.strip().partition("\n\n")[0].split("\n"))


def check(root: Path) -> str:
    """What is wrong with the subject; empty if nothing is."""
    try:
        top = _git(root, "rev-parse", "--show-toplevel")
        commit = _git(root, "cat-file", "commit", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return ""
    subject = subject_of(commit)
    if Path(top.strip()).resolve() != root.resolve() or subject is None or not (found := faults(subject)):
        return ""
    return (
        f'The subject of the newest commit is "{subject}": {", ".join(found)}. '
        "CONTRIBUTING.md has examples; `git commit --amend` changes it."
    )


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)
    return done.stdout.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(check(Path(__file__).parents[1]) or None)
