"""The control plane runs where torch is not installed."""

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from testbed.tree import ROOT, package_folders, tracked

WITHOUT_TORCH = [
    "motet",
    "motet_gateway",
    "motet_scheduler",
    "motet_supervisor",
    "motet_predictor",
    "motet_operator",
    "motet_cli",
    "motet_simulator",
    "motet_runner.plan",
    "motet_runner.service",
]

SCRIPT = """
import importlib, pkgutil, sys

blocked = set(sys.argv[2].split(","))

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocked())
for package in sys.argv[1].split(","):
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(getattr(root, "__path__", []), root.__name__ + "."):
        if ".migrations" not in module.name:  # alembic runs these itself
            importlib.import_module(module.name)
assert not blocked & sys.modules.keys()
"""


TORCH = ("torch", "transformers", "peft")
ELSEWHERE = {
    "motet_scheduler": ("kopf", "sqlalchemy", "fastapi", "typer"),
    "motet_operator.cluster": ("fastapi", "typer"),
    "motet_operator.local": ("kopf", "kubernetes", "aiohttp", "fastapi"),
}
"""What is not installed where this runs: in its image, or with `make up`."""


def imports_without(packages: Iterable[str], blocked: tuple[str, ...]) -> str:
    """What one process complains of that imports all their modules."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, ",".join(packages), ",".join(blocked)],
        capture_output=True,
        text=True,
        check=False,
    ).stderr


def test_every_module_imports_with_torch_blocked() -> None:
    assert not imports_without(WITHOUT_TORCH, TORCH)


@pytest.mark.parametrize(("package", "blocked"), ELSEWHERE.items())
def test_every_module_imports_without_what_others_need(package: str, blocked: tuple[str, ...]) -> None:
    assert not imports_without([package], blocked)


def test_benchmarks_and_the_testbed_know_no_tests_and_only_their_own_tests_know_benchmarks() -> None:
    def importing(package: str, *folders: str) -> set[str]:
        asked = re.compile(rf"^\s*(from|import) {package}\b", re.MULTILINE)
        files = [file for folder in folders for file in tracked(ROOT / folder) if file.suffix == ".py"]
        return {str(file.relative_to(ROOT).parent) for file in files if asked.search(file.read_text())}

    assert importing("tests", "benchmarks", "testbed", "tools") == set()
    assert importing("benchmarks", "testbed", "tests") == {"tests/benchmarks"}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """In whatever block. Not their expressions, which are nine of ten nodes."""
    todo = [tree]
    while todo:
        yield (statement := todo.pop())
        for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(statement, blocks, ())


def bound_names(statement: ast.AST) -> Iterator[str]:
    """But `from … import *`, and names in expressions."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in names)
        case ast.Assign(targets=targets):
            yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        case ast.AnnAssign(target=target) | ast.For(target=target):
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def test_every_name_that_is_imported_from_our_modules_is_there() -> None:
    """mypy reads no tests, and a whole run says it only at its end."""
    files = [file for file in tracked() if file.suffix in (".py", ".pyi")]
    roots = sorted({ROOT, *(folder.parent for folder in package_folders())}, key=lambda root: -len(root.parts))
    bound: dict[str, set[str]] = {}
    imports: list[tuple[Path, int, str, list[str]]] = []
    gc.disable()  # collections take half of the time
    try:
        for file in files:
            root = next(root for root in roots if file.is_relative_to(root))
            module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            names = bound.setdefault(module, set())
            for statement in statements(ast.parse(file.read_text())):
                names.update(bound_names(statement))
                if isinstance(statement, ast.ImportFrom) and statement.module:
                    given = [alias.name for alias in statement.names]
                    imports.append((file, statement.lineno, statement.module, given))
    finally:
        gc.enable()
    ours = {module.split(".")[0] for module in bound}
    missing = {
        f"{file.relative_to(ROOT)}:{line}: from {module} import {name}"
        for file, line, module, names in imports
        if module.split(".")[0] in ours
        for name in names
        if name not in bound.get(module, ()) and f"{module}.{name}" not in bound
    }
    assert missing == set()


def test_only_our_own_engine_knows_its_page_size():
    """Other engines bring their own: the plan has a parameter, and runners report theirs as part of their capacity."""
    folders = ["gpu-runner/motet_runner/plan", "scheduler", "supervisor", "gateway", "predictor"]
    found = [
        str(file.relative_to(ROOT))
        for file in tracked()
        if file.suffix == ".py" and any(file.is_relative_to(ROOT / "services" / folder) for folder in folders)
        if "PAGE_TOKENS" in file.read_text()
    ]
    assert found == []
