from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from motet_runner import adapter_inspection
from motet_runner.adapters.certification import EngineLimits
from motet_runner.adapters.check_processes import CheckProcesses


@pytest.fixture(scope="module")
def kept_checks() -> Iterator[None]:
    """Processes that check adapters stay, as in a runner: to start one takes four fifths of a check."""
    with ExitStack() as ending, pytest.MonkeyPatch.context() as patch:

        @cache
        def kept(limits: bytes) -> CheckProcesses:
            checks = CheckProcesses(EngineLimits.of(orjson.loads(limits)))
            ending.callback(checks.close)
            return checks

        def checks_of(limits: EngineLimits) -> SimpleNamespace:
            if limits.model:  # each stack has a link of its own to one folder
                limits = limits._replace(model=str(Path(limits.model).resolve()))
            return SimpleNamespace(check=kept(limits.encode()).check, close=lambda: None)

        patch.setattr(adapter_inspection, "CheckProcesses", checks_of)
        yield
