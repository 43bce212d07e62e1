"""What a file of tests can reach of this repository: what it imports, starts and reads, and what those do.

Read from the source: imports, `-m` beside the name of a module, code in strings, modules named in strings, and paths
put together from words. What comes about in no such way is told by the caller.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

from testbed.tree import ROOT, package_folders, tracked

_IN_CODE = re.compile(r"\b(?:import|from) +([\w.]+(?:, *[\w.]+)*)")

_A_PATH = re.compile(r"\w[\w.-]*(?:/[\w.-]+)+/?")


@cache
def modules() -> dict[str, str]:
    """Ours, by the name that they are imported by: the file, from the root."""
    roots = sorted({folder.parent for folder in package_folders()} | {ROOT}, key=lambda root: -len(root.parts))
    found = {}
    for path in tracked():
        if path.suffix == ".py":
            root = next(root for root in roots if path.is_relative_to(root))
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.relative_to(ROOT).as_posix()
    return found


@dataclass(frozen=True)
class Dependencies:
    """From the root of the repository; to each who reaches it first."""

    sources: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    """Files and folders that are named."""


def reach(
    starts: Iterable[str], *, started: Iterable[str] = (), told: Mapping[tuple[str, str], Iterable[str]] | None = None
) -> Dependencies:
    """`started`: modules that run in processes, however they are named. `told`: what a file reads of a folder, or that
    it never starts a module here."""
    reached, told = Dependencies(), told or {}
    waiting = [(start, "itself") for start in starts] + [(modules()[name], "itself") for name in started]
    while waiting:
        source, by = waiting.pop()
        if source in reached.sources:
            continue
        reached.sources[source] = by
        waiting += [(conftest, source) for conftest in _conftests(source)]
        waiting += [(modules()[name], source) for name in names(source) if (source, name) not in told]
        for path in paths(source) if source.startswith(("tests/", "testbed/", "tools/", "benchmarks/")) else ():
            reached.data.update(dict.fromkeys(told.get((source, path), (path,)), source))
    return reached


@cache
def names(source: str) -> frozenset[str]:
    """The modules of ours that a file imports or starts, with the packages around them."""
    named = set(_named(_tree(source)))
    around = {".".join(name.split(".")[:count]) for name in named for count in range(1, name.count(".") + 2)}
    return frozenset(around & modules().keys())


@cache
def paths(source: str) -> frozenset[str]:
    """Files and folders of this repository that a file names; the empty one for a name that is only known later."""
    tree = _tree(source)
    divided = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
    parts = {id(node.left) for node in divided}
    chains = {_joined(node) for node in divided if id(node) not in parts}
    words = {node.value.rstrip("/") for node in _strings(tree) if _A_PATH.fullmatch(node.value)}
    return frozenset({path for path in chains if path is not None} | {path for path in words if (ROOT / path).exists()})


def _conftests(source: str) -> Iterator[str]:
    if source.startswith("tests/"):
        for folder in Path(source).parents:
            if (ROOT / folder / "conftest.py").exists():
                yield (folder / "conftest.py").as_posix()


@lru_cache(maxsize=1)  # all trees together would be what each collection of garbage visits
def _tree(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text())


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=imported):
                yield from (one.name for one in imported)
            case ast.ImportFrom(module=str(module), names=imported):
                yield module
                yield from (f"{module}.{one.name}" for one in imported)
            case ast.ImportFrom():
                raise AssertionError("a relative import")
            case ast.List(elts=words) | ast.Tuple(elts=words) | ast.Call(args=words):
                for before, word in pairwise(words):
                    if _value(before) == "-m":
                        yield from (str(_value(word)), f"{_value(word)}.__main__")
    for text in _strings(tree):
        if "." in text.value:
            yield text.value
        yield from (name.strip() for found in _IN_CODE.findall(text.value) for name in found.split(","))


def _strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Without those that only say something."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node


def _joined(node: ast.expr) -> str | None:
    """Of `ROOT / "a" / name`, what is known: `a`. None for what does not begin at the root of the repository."""
    words: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        words.insert(0, node.right)
        node = node.left
    if ast.unparse(node) not in ("ROOT", "Path(__file__).parents[2]"):
        return None
    known: list[str] = []
    for word in words:
        if not isinstance(value := _value(word), str):
            break
        known.append(value)
    return "/".join(known)


def _value(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None
