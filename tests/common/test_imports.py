"""Imports of the processes: collections of garbage do not slow them down."""

import ast
import gc
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from motet.imports import without_collections

STARTED = (
    "motet.store.__main__",
    "motet_cli.main",
    "motet_gateway.__main__",
    "motet_operator.__main__",
    "motet_operator.cluster.__main__",
    "motet_operator.local.parent",
    "motet_predictor.__main__",
    "motet_predictor.refit",
    "motet_runner.__main__",
    "motet_runner.adapters.check_process",
    "motet_runner.engine_process",
    "motet_runner.sources.fetch_process",
    "motet_scheduler.__main__",
    "motet_supervisor.__main__",
)


def test_objects_made_without_collections_are_never_scanned() -> None:
    with without_collections():
        assert not gc.isenabled()
        made: list[object] = [[]]
    try:
        assert gc.isenabled()
        assert all(made is not one and made[0] is not one for one in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(made is one for one in gc.get_objects())


def test_collections_that_were_off_stay_off_and_nothing_is_frozen() -> None:
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with without_collections():
            made: list[object] = [[]]
        assert not gc.isenabled()
        assert gc.get_freeze_count() == frozen
        assert any(made is one for one in gc.get_objects())
    finally:
        gc.enable()


def test_in_another_process_the_module_of_one_freezes_nothing() -> None:
    script = (
        "import gc, motet_runner.adapters.check_process, motet_runner.sources.fetch_process, motet_predictor.refit\n"
    )
    script += "print(gc.get_freeze_count(), gc.isenabled())"
    said = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "0 True\n"


@pytest.mark.parametrize("module", STARTED)
def test_what_a_process_is_started_with_imports_libraries_without_collections(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    first = [
        one for one in ast.parse(Path(spec.origin).read_text()).body if isinstance(one, ast.Import | ast.ImportFrom)
    ]
    names = {alias.name for one in first if isinstance(one, ast.Import) for alias in one.names}
    names |= {str(one.module) for one in first if isinstance(one, ast.ImportFrom)}
    assert {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names} == {"motet.imports"}


def test_a_process_that_prints_nothing_in_colour_does_not_import_what_does() -> None:
    """`motet_cli` does print, and finds it."""
    script = "import sys, motet.telemetry; print('rich' in sys.modules); import rich.table; print(rich.table.Table)"
    started = "from motet.imports import without_collections\nwith without_collections(): pass\n"
    for first, imported in (("", "True"), (started, "False")):
        said = subprocess.run([sys.executable, "-P", "-c", first + script], capture_output=True, text=True, check=True)
        assert said.stdout.splitlines() == [imported, "<class 'rich.table.Table'>"]
