"""What the repository says about itself, for tests that check it."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GENERATED_API = ROOT / "services" / "common" / "motet" / "api" / "v1"
WRITTEN = {".py", ".pyi", ".proto", ".md", ".yaml", ".tpl", ".txt", ".toml", ".sh", ".cpp", ".h", ""}
"""Suffixes of what people write, Makefile and Dockerfiles too; the others are data."""


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def package_folders() -> list[Path]:
    """The importable packages, as listed for the wheel."""
    return [ROOT / folder for folder in pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]


def tracked(*folders: Path) -> list[Path]:
    """Every file that git knows, under these folders or anywhere, and that has not just been deleted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *map(str, folders)], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def tracked_text() -> list[tuple[Path, str]]:
    found = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            found.append((path, data.decode()))
    return found


def written_text() -> dict[str, str]:
    """Of what people write, by its path from the root."""
    return {path.relative_to(ROOT).as_posix(): text for path, text in tracked_text() if path.suffix in WRITTEN}


def git(folder: Path, *words: str) -> str:
    """In a repository that a test has made."""
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, message: str = "change", **files: str) -> str:
    """Names of files have __ for a slash."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", message)
    return git(folder, "rev-parse", "HEAD")
