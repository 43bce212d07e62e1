"""A virtual environment for one peer: where it lies, what stands in the way of building it, and whether it is complete.

It lies in the user's cache, or in the folder that a variable names, and shares nothing with .venv.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cache_folder import cache_folder
from tools.lock import locked

PYTHONS = (3, 11), (3, 14)
"""The first and the last version for which peers have packages."""
DONE = "motet-peer.json"
"""Says what a complete environment was built from."""
AGAIN = "What is installed is kept: run `make peer` again to go on."


class CannotBuildPeer(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    requirement: str
    """What is built. An environment that was built from another one is not complete."""
    folder: str
    """In the user's cache"""
    named_by: str
    """The variable that names another folder"""
    room: int
    """Bytes: for the environment, and for what pip has downloaded but not yet unpacked."""
    downloads: Callable[[str | None], str]
    """Said before the build, by the index of torch"""
    build: Callable[[Path, str | None], dict[str, str]]
    """Fills an environment in this folder, with torch from this index. Returns the versions that it has."""
    missing: Callable[[], str | None] = lambda: None
    """What this machine lacks for it, or None"""
    afterwards: Callable[[Path], None] = lambda _: None
    """Done each time, also if nothing was built"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def folder(recipe: Recipe, environment: Mapping[str, str]) -> Path:
    return cache_folder(environment, recipe.folder, named_by=recipe.named_by)


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def obstacle(recipe: Recipe, python: tuple[int, int], free: int, *, foreign: bool, path: Path) -> str | None:
    """Why the environment cannot be built, or None."""
    first, last = PYTHONS
    if not first <= python <= last:
        return (
            f"{recipe.name} needs Python {_dotted(first)} to {_dotted(last)}, and this is {_dotted(python)}. "
            "Name another one: make PYTHON=/path/to/python3.12 peer"
        )
    if foreign:
        return f"{path} has files, and is no virtual environment. Set {recipe.named_by} to another folder."
    if free < recipe.room:
        return (
            f"{path} needs {recipe.room / 1e9:.0f} GB, and only {free / 1e9:.1f} GB are free. "
            f"Set {recipe.named_by} to a larger disk."
        )
    return recipe.missing()


def complete(recipe: Recipe, environment: Path) -> bool:
    try:
        built = json.loads((environment / DONE).read_text())
    except (OSError, ValueError):
        return False
    return bool(built.get("peer") == recipe.requirement and python_of(environment).exists())


def make(recipe: Recipe, environment: Path, index: str | None) -> None:
    """Pip goes on where an earlier build stopped."""
    if complete(recipe, environment):
        say(f"Nothing to build: {environment} has {recipe.requirement}.")
    else:
        free, foreign = _room(environment), _is_foreign(environment)
        why = obstacle(recipe, sys.version_info[:2], free, foreign=foreign, path=environment)
        if why is not None:
            raise CannotBuildPeer(why)
        say(f"Building an environment with {recipe.requirement} in {environment}.")
        say(recipe.downloads(index))
        environment.mkdir(parents=True, exist_ok=True)
        (environment / DONE).unlink(missing_ok=True)
        if not python_of(environment).exists():
            run(sys.executable, "-m", "venv", environment, otherwise="Python cannot make virtual environments here.")
        versions = recipe.build(environment, index)
        (environment / DONE).write_text(json.dumps({"peer": recipe.requirement} | versions) + "\n")
        say(f"Built: {environment} has {recipe.requirement}.")
    recipe.afterwards(environment)


def make_alone(recipe: Recipe, index: str | None) -> None:
    """One process at a time builds one environment."""
    environment = folder(recipe, os.environ)
    beside = environment.with_name(f"{environment.name}.lock")
    try:
        with locked(beside, waiting=lambda: say("Another build of this environment is running. Waiting for it.")):
            make(recipe, environment, index)
    except OSError as error:
        named_by = recipe.named_by
        raise CannotBuildPeer(f"{environment} cannot be written: {error}. Set {named_by} to another folder.") from None


def pip(environment: Path, work: str, *arguments: str | Path, otherwise: str, **variables: str) -> None:
    # Nothing stays outside of the environment: no cache of pip's, and its temporary files on the same disk.
    command = (python_of(environment), "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments)
    run(*command, otherwise=otherwise, capture=False, TMPDIR=work, **variables)


def run(*command: str | Path, otherwise: str, capture: bool = True, **variables: str) -> str:
    output = subprocess.PIPE if capture else sys.stderr
    done = subprocess.run(command, env=os.environ | variables, stdout=output, text=True, check=False)
    if done.returncode:
        raise CannotBuildPeer(otherwise)
    return done.stdout or ""


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _room(path: Path) -> int:
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free


def _is_foreign(path: Path) -> bool:
    return path.exists() and not (path / "pyvenv.cfg").exists() and (not path.is_dir() or any(path.iterdir()))
