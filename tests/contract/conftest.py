from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path

import pytest

from motet.domain import PAGE_TOKENS
from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.external.vllm.differences import DIFFERENCES
from motet_runner.interface import EngineConfig, NewSequence
from tests.contract.engines import ADAPTER_PAGES, Size, fake, on_vllm, real, vllm
from tests.runner.engines import ask
from tests.runner.external.vllm_itself import OneTest, VllmItself, needs_vllm
from tests.runner.random_models import ENDS, RandomAdapter, llama, save_adapter, save_base


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="session")
def layout(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterLayout:
    """The layout of an adapter that the real engine can load. Adapters of the fake engine have no bytes."""
    folder = save_adapter(base_model, "llama", RandomAdapter(4, 8), tmp_path_factory.mktemp("adapter") / "a", seed=1)
    return certify(folder, real(base_model, Size(pages=ADAPTER_PAGES + 1)).info).layout


def longer(
    factor: int, request: str, *, prompt: int | tuple[int, ...] = 20, max_tokens: int = 40, **more: object
) -> NewSequence:
    """The tests' lengths are for pages of 16 tokens. With larger pages, prompts and answers are longer by that factor:
    so they have as many pages."""
    promise = ask(request, prompt=prompt, max_tokens=max_tokens, **more).promise
    return replace(ask(request, prompt=prompt * factor, max_tokens=max_tokens * factor, **more), promise=promise)


@pytest.fixture(scope="session")
def vllm_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, int], VllmItself]]:
    """By its workers, and the tokens of a block. Each loads once, and a test may use a part of what it has. The linears
    of its model are those of `base_model`."""
    shape = llama()
    shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim = 2, 2, 32  # fewer are too narrow for vLLM
    shape.max_position_embeddings = MAX_TOKENS
    base = save_base("llama", tmp_path_factory.mktemp("vllm") / "base", config=shape)

    @cache
    def started(workers: int, block_tokens: int) -> VllmItself:
        config = EngineConfig(
            model=base,
            dtype="float32",
            kv_cache_mib=16,
            max_concurrent_sequences=8,
            max_resident_adapters=2,
            max_model_length=MAX_TOKENS,
            tensor_parallel=workers,
        )
        return running.enter_context(closing(VllmItself(config, block_tokens=block_tokens)))

    with ExitStack() as running:
        yield started


@pytest.fixture
def vllm_itself(vllm_of: Callable[[int, int], VllmItself]) -> Iterator[Callable[[int, Size], object]]:
    used = []

    def make(workers: int, size: Size) -> object:
        for one in used:
            one.close()
        itself = vllm_of(workers, size.page_tokens)
        assert (itself.facts.block_tokens, itself.facts.shares_prefixes) == (size.page_tokens, True)
        known = replace(itself.facts, blocks=size.pages, max_model_length=size.length)
        used.append(OneTest(itself, known, next(_NUMBERS)))
        return on_vllm(used[-1], size, ENDS["eos_token_id"])

    yield make
    for one in used:
        one.close()


_NUMBERS = count(1)
MAX_TOKENS = 4096
"""Of a sequence, in the tests with the largest pages"""
VLLM_ITSELF = [
    pytest.param(f"vllm itself{workers}, pages of {tokens}", marks=[pytest.mark.soak, needs_vllm])
    for workers, tokens in (("", 32), ("", 128), (" on-two", 32))
]


ENGINES = [
    "fake",
    "fake, one ahead",
    "fake, pages of 32",
    "fake, pages of 128",
    "real",
    "real, one ahead",
    "vllm",
    "vllm, pages of 32",
    *VLLM_ITSELF,
]


@pytest.fixture(params=ENGINES)
def engine_of(request: pytest.FixtureRequest) -> Callable[[Size], object]:
    kind = request.param.partition(",")[0]
    if kind == "real":
        make = partial(real, request.getfixturevalue("base_model"))
    elif kind.startswith("vllm itself"):
        make = partial(request.getfixturevalue("vllm_itself"), 1 + kind.endswith("on-two"))
    else:
        make = {"fake": fake, "vllm": vllm}[kind]
    ahead = int(request.param.endswith("ahead"))
    page_tokens = int(request.param.partition("pages of ")[2] or PAGE_TOKENS)
    factor = page_tokens // PAGE_TOKENS

    def engine_of(size: Size) -> object:
        return make(replace(size, ahead=ahead, page_tokens=page_tokens, length=size.length * factor))

    engine_of.ahead = ahead
    lacks = {"vllm": frozenset(DIFFERENCES), "fake": frozenset({"masks", "proofs"})}
    engine_of.lacks = lacks.get(kind[:4], frozenset())
    """What it does not do; every test of the rest holds for it."""
    engine_of.factor = factor
    engine_of.ask = partial(longer, factor)
    return engine_of
