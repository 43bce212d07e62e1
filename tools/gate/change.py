"""What has changed in this checkout since a commit, as git says."""

import hashlib
import importlib.metadata
import platform
import re
import subprocess
import sys

from tools.gate.test_selection import Change


class _Refused(Exception):
    pass


def since(commit: str) -> Change:
    """The changes since a commit, committed or not. Unknown if the commit is not an ancestor of this checkout."""
    short = commit[:12] if re.fullmatch(r"[0-9a-f]{40}", commit) else commit
    try:
        _git("merge-base", "--is-ancestor", f"{commit}^{{commit}}", "HEAD")
        # A moved file counts as two files: a test may still import the old name.
        changed = _git("diff", "--name-only", "--no-renames", "-z", f"{commit}^{{commit}}", "--")
        return Change(tuple(sorted({*_names(changed), *_names(_untracked())})), f"since {short}")
    except _Refused:
        return Change(None, f"{short} is not among the commits before this one")


def committed() -> str | None:
    """The commit of this checkout; None if files have changed since."""
    try:
        commit = _git("rev-parse", "--verify", "HEAD").strip()
        return None if _git("diff", "--name-only", "HEAD", "--") or _untracked() else commit
    except _Refused:
        return None


def machine(*, own_cluster: bool) -> str:
    """A hash of what tests use outside of the checkout. A test that was green on another machine may be red here."""
    packages = sorted(f"{one.name} {one.version}" for one in importlib.metadata.distributions())
    said = "\n".join((sys.version, platform.platform(), f"own cluster: {own_cluster}", *packages))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _untracked() -> str:
    return _git("ls-files", "--others", "--exclude-standard", "-z")


def _names(listed: str) -> list[str]:
    return [name for name in listed.split("\0") if name]


def _git(*arguments: str) -> str:
    """Run git in the folder in which the tests run: the top of the checkout."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise _Refused from error
