from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.runner.judged_once import JudgedOnce
from tests.runner.random_models import EIGHT, save_adapter, save_base
from tests.support.chosen_worker import chosen_worker


@pytest.fixture(scope="session", autouse=True)
def worker() -> Iterator[None]:
    with chosen_worker():
        yield


@pytest.fixture(autouse=True)
def log_of_a_program_that_configures_none() -> Iterator[None]:
    """The engine as a library configures one that says less. Tests after it would look for lines in vain."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="session")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(llama, "llama", spec, folder / str(i), seed=i) for i, spec in enumerate(EIGHT[:4])]


@pytest.fixture
def judged_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are about the gate or the change of kernels."""
    monkeypatch.setattr(JudgedOnce, "remembers", False)
