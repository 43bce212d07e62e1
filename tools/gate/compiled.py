"""Compiles the tree's modules to bytecode, once for all processes that the tests start.

A fresh checkout has none. Most processes would write down what they compile, but many begin at the same time. The
containers of the test cluster cannot: they see the tree read-only, so each would compile all that it imports.
"""

import compileall
from pathlib import Path

FOLDERS = ("services", "kernels", "operator", "simulator", "cli", "testbed", "tools")
"""pytest compiles the tests in its own way."""


def compile_modules(root: Path) -> None:
    """A module that cannot be compiled is left to the test that imports it."""
    for folder in (root / name for name in FOLDERS):
        if folder.is_dir():
            compileall.compile_dir(folder, quiet=2, workers=0)
