from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from motet.domain import PAGE_TOKENS
from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.external.vllm.differences import DIFFERENCES
from motet_runner.interface import EngineConfig
from tests.contract.engines import Size, fake, on_vllm, real, vllm
from tests.runner.external.vllm_itself import OneTest, VllmItself, needs_vllm
from tests.runner.random_models import ENDS, RandomAdapter, llama, save_adapter, save_base


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="session")
def layout(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterLayout:
    """The layout of an adapter that the real engine can load. Adapters of the fake engine have no bytes."""
    folder = save_adapter(base_model, "llama", RandomAdapter(4, 8), tmp_path_factory.mktemp("adapter") / "a", seed=1)
    return certify(folder, real(base_model, Size()).info).layout


@pytest.fixture(scope="session")
def one_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmItself]:
    """It loads once, and a test may use a part of what it has. The linears of its model are those of `base_model`."""
    shape = llama()
    shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim = 2, 1, 32  # fewer are too narrow for vLLM
    base = save_base("llama", tmp_path_factory.mktemp("vllm") / "base", config=shape)
    config = EngineConfig(
        model=base, dtype="float32", kv_cache_mib=4, max_concurrent_sequences=8, max_resident_adapters=2
    )
    itself = VllmItself(config)
    yield itself
    itself.close()


@pytest.fixture
def vllm_itself(one_vllm: VllmItself) -> Iterator[Callable[[Size], object]]:
    used = []

    def make(size: Size) -> object:
        for one in used:
            one.close()
        known = replace(one_vllm.facts, blocks=size.pages, block_tokens=PAGE_TOKENS, max_model_length=size.length)
        used.append(OneTest(one_vllm, known, next(_NUMBERS)))
        return on_vllm(used[-1], size, ENDS["eos_token_id"])

    yield make
    for one in used:
        one.close()


_NUMBERS = count(1)
VLLM_ITSELF = pytest.param("vllm itself", marks=[pytest.mark.soak, needs_vllm])


@pytest.fixture(params=["fake", "fake, one ahead", "real", "real, one ahead", "vllm", VLLM_ITSELF])
def engine_of(request: pytest.FixtureRequest) -> Callable[[Size], object]:
    kind = request.param.partition(",")[0]
    if kind == "real":
        make = partial(real, request.getfixturevalue("base_model"))
    elif kind == "vllm itself":
        make = request.getfixturevalue("vllm_itself")
    else:
        make = {"fake": fake, "vllm": vllm}[kind]
    ahead = int(request.param.endswith("ahead"))

    def engine_of(size: Size) -> object:
        return make(replace(size, ahead=ahead))

    engine_of.ahead = ahead
    engine_of.lacks = frozenset(DIFFERENCES) if kind.startswith("vllm") else frozenset()
    """What it does not do; every test of the rest holds for it."""
    return engine_of
