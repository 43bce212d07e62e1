import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.runner.random_models import EIGHT, save_adapter, save_base
from tests.support.fixed_batches import fixed_batches

WORKER = os.environ.get("MOTET_RUNNER_WORKER", "local")
"""All tests of engines also hold with `device`: the worker of a GPU, with a CPU in its place; and with `recorded`: it
has recorded decodes, too, if the kernels are the compiled ones."""


@pytest.fixture(scope="session", autouse=True)
def worker() -> Iterator[None]:
    with ExitStack() as stack:
        if WORKER != "local":
            stack.enter_context(patch("motet_runner.engine.computes_by_itself", lambda _: True))
        if WORKER == "recorded":
            stack.enter_context(fixed_batches())
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="session")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(llama, "llama", spec, folder / str(i), seed=i) for i, spec in enumerate(EIGHT[:4])]
