"""The tutorials without a cluster or a GPU, and two guides: the test types every command of a page, in order.

Two pages are of `make soak`: each of their many checks and publications imports torch and PEFT again. tests/cli runs
the same commands in one process.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from testbed.compiled_kernels import CACHE
from testbed.local_stack import LocalStack, taken_down
from testbed.tree import ROOT
from tests.docs.blocks import Shell, blocks, type_page

NOTHING: Mapping[str, Path] = {}
pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "page",
    [
        "tutorials/laptop.md",
        "tutorials/tools.md",
        "guides/quotas.md",
        pytest.param("tutorials/notebook.md", marks=pytest.mark.soak),
        pytest.param("guides/adapters.md", marks=pytest.mark.soak),
    ],
)
def test_a_page_for_a_laptop_does_what_it_says(tmp_path: Path, page: str) -> None:
    type_laptop_page(tmp_path, page)


def type_laptop_page(tmp_path: Path, page: str, *, also: Mapping[str, Path] = NOTHING, timeout_s: float = 120) -> None:
    """`also`: folders beside those of the repository, by name"""
    here, home, programs = (tmp_path / name for name in ("motet", "home", "bin"))
    for folder in (here, home, programs):
        folder.mkdir()
    for name, folder in {"cli": ROOT / "cli", **also}.items():
        (here / name).symlink_to(folder)
    # Those of this machine: without them, a runner compiles its kernels for most of a minute.
    CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / ".cache" / "motet").mkdir(parents=True)
    (home / ".cache" / "motet" / "kernels").symlink_to(CACHE)
    stack = LocalStack(tmp_path, data_dir=home / ".local" / "share" / "motet")
    write_programs(programs, stack)
    ours = ("XDG_DATA_HOME", "PYTHONWARNINGS")
    outside = {name: value for name, value in stack.environment().items() if name not in ours}
    env = outside | {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "LANG": "C.UTF-8"}
    with taken_down(stack), Shell(here, scratch=tmp_path, env=env, timeout_s=timeout_s) as shell:
        type_page(blocks(ROOT / "docs" / page), shell)
        assert not stack.processes(), "the page stops what it starts"


def write_programs(folder: Path, stack: LocalStack) -> None:
    """`motet` and `python` of this environment. Port 8000 may be taken on this machine: `up` takes another one."""
    up = f'case $1 in up) set -- "$@" --port {stack.port};; esac'
    (folder / "motet").write_text(f'#!/bin/sh\n{up}\nexec {sys.executable} -P -m motet_cli.main "$@"\n')
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
