"""A plugin of pytest for `tools.mutate`: it records the lines that each test reaches, or puts a mutant in the place of
its module.

MOTET_MUTATE_RECORD=FILE MOTET_MUTATE_FOLDER=FOLDER     the lines of the modules in this folder
MOTET_MUTATE_MODULE=NAME MOTET_MUTATE_SOURCE=FILE       this module has that source
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

RECORD, FOLDER = "MOTET_MUTATE_RECORD", "MOTET_MUTATE_FOLDER"
MODULE, SOURCE = "MOTET_MUTATE_MODULE", "MOTET_MUTATE_SOURCE"


class Recorder:
    """Writes for each test that passed its seconds, and the lines of each file that it reached."""

    def __init__(self, folder: str, into: Path) -> None:
        self._folder = folder
        self._into = into
        self._lines: set[tuple[str, int]] = set()
        self._tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """With its fixtures."""
        self._lines = set()
        began = time.perf_counter()
        sys.settrace(self._of_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            lines: dict[str, list[int]] = {}
            for path, line in sorted(self._lines):
                lines.setdefault(path, []).append(line)
            self._tests[item.nodeid] = {"seconds": time.perf_counter() - began, "lines": lines}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self._tests.setdefault(report.nodeid, {})["unusable"] = True

    def pytest_sessionfinish(self) -> None:
        usable = {name: one for name, one in self._tests.items() if one.get("lines") and "unusable" not in one}
        self._into.write_text(json.dumps(usable), encoding="utf-8")

    def _of_call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        return self._of_line if frame.f_code.co_filename.startswith(self._folder) else None

    def _of_line(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._of_line


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module, with another source than its file has."""

    def __init__(self, module: str, source: Path) -> None:
        self._module = module
        self._source = source

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert found is not None
        assert found.origin is not None
        self._origin = found.origin
        found.loader = self
        return found

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source.read_text(encoding="utf-8"), self._origin, "exec"), module.__dict__)


def pytest_configure(config: pytest.Config) -> None:
    if RECORD in os.environ:
        config.pluginmanager.register(Recorder(os.environ[FOLDER], Path(os.environ[RECORD])))


if MODULE in os.environ:  # before anybody imports that module
    sys.meta_path.insert(0, MutantFinder(os.environ[MODULE], Path(os.environ[SOURCE])))
