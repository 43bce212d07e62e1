from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.external.vllm.differences import DIFFERENCES
from tests.contract.engines import Size, fake, real, vllm
from tests.runner.random_models import RandomAdapter, save_adapter, save_base


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="session")
def layout(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterLayout:
    """The layout of an adapter that the real engine can load. Adapters of the fake engine have no bytes."""
    folder = save_adapter(base_model, "llama", RandomAdapter(4, 8), tmp_path_factory.mktemp("adapter") / "a", seed=1)
    return certify(folder, real(base_model, Size()).info).layout


@pytest.fixture(params=["fake", "fake, one ahead", "real", "real, one ahead", "vllm"])
def engine_of(request: pytest.FixtureRequest) -> Callable[[Size], object]:
    kind = request.param.partition(",")[0]
    make = {"fake": fake, "vllm": vllm}.get(kind) or partial(real, request.getfixturevalue("base_model"))
    ahead = int(request.param.endswith("ahead"))

    def engine_of(size: Size) -> object:
        return make(replace(size, ahead=ahead))

    engine_of.ahead = ahead
    engine_of.lacks = frozenset(DIFFERENCES) if kind == "vllm" else frozenset()
    """What it does not do; every test of the rest holds for it."""
    return engine_of
