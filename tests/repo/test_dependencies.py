"""What pyproject.toml says that the product needs, beside what it imports."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from testbed.tree import ROOT, package_folders
from tests.images.dockerfile import FOLDERS, read

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ALSO = {
    # Each part of the core that needs more is imported by those alone who have it.
    "motet": ("store", "kubernetes", "predictor", "grammars", "templates"),
    "motet_scheduler": ("kubernetes",),
    "motet_operator": ("cluster", "folder"),
    "motet_kernels": ("runner", "gpu"),
    # `motet up` starts everything.
    "motet_cli": ("local",),
    "motet_simulator": ("local",),
}
"""Extras beside the package's own."""
ELSEWHERE = {
    "vllm": "services/gpu-runner/motet_runner/external/vllm/surface.py",
    "peft": "services/gpu-runner/motet_runner/answer_recording.py",
}
"""In the environment of whoever has them, such as one for training, and imported only by this file."""
BROUGHT_BY_NAME = {
    "aiosqlite": "SQLAlchemy's driver for SQLite",
    "asyncpg": "SQLAlchemy's driver for PostgreSQL",
}
"""Needed, and imported by a library that finds it by its name."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(requirements: list[str]) -> Iterator[str]:
    """Distributions, with those of the extras of our own that are named."""
    for requirement in requirements:
        name, _, extras = re.match(r"([\w.-]+)(\[([\w, -]+)\])?", requirement).groups()
        if name == PROJECT["name"]:
            for extra in extras.split(","):
                yield from needed(EXTRAS[extra.strip()])
        else:
            yield canonical(name)


@cache
def imported(folder: Path) -> dict[str, str]:
    """Modules of others at the top of a name, each with a file that imports it."""
    ours = {path.name for path in package_folders()}
    found = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            found |= {name.partition(".")[0]: path.relative_to(ROOT).as_posix() for name in names}
    found = {name: by for name, by in found.items() if name not in sys.stdlib_module_names | ours}
    return {name: by for name, by in found.items() if ELSEWHERE.get(name) != by}


@cache
def distributions() -> Mapping[str, list[str]]:
    """Those that install a module. To find it, all lists of installed files are read."""
    return packages_distributions()


def packages() -> list[Path]:
    return [folder for folder in package_folders() if folder.name.startswith("motet")]


def not_installed(folder: Path, extras: Iterable[str]) -> dict[str, str]:
    """Modules that are imported there and come with none of these extras, each with a file that imports it."""
    installed = set(needed([*PROJECT["dependencies"], *(f"motet[{extra}]" for extra in extras)]))
    return {
        module: by
        for module, by in imported(folder).items()
        if not {canonical(name) for name in distributions().get(module, [module])} & installed
    }


@pytest.mark.parametrize("folder", packages(), ids=lambda folder: folder.name)
def test_the_extra_of_a_package_installs_its_imports(folder: Path) -> None:
    own = folder.name.removeprefix("motet_")
    extras = [name for name in (own, *ALSO.get(folder.name, ())) if name in EXTRAS]
    missing = not_installed(folder, extras)
    assert missing == {}, f"name them in pyproject.toml, among {', '.join(extras) or 'the dependencies'}"


@pytest.mark.parametrize("name", FOLDERS)
def test_an_image_installs_what_its_program_imports(name: str) -> None:
    """`make soak` installs each of them."""
    image = read(FOLDERS[name])
    program = FOLDERS[name].joinpath(*image.entrypoint[-1].split("."))
    assert not_installed(program, image.extras) == {}, f"name an extra in the Dockerfile, beside {image.extras}"


def test_every_dependency_is_imported() -> None:
    used = {
        canonical(name)
        for folder in packages()
        for module in imported(folder)
        for name in distributions().get(module, [module])
    }
    of_the_product = EXTRAS.keys() - {"dev", "wheels"}
    declared = set(needed([*PROJECT["dependencies"], *(f"motet[{name}]" for name in of_the_product)]))
    assert declared - used - BROUGHT_BY_NAME.keys() == set()
