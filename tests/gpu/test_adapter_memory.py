"""Adapters of 8-bit integers share one pool with KV, at the size that they have there, in an engine whose worker and
kernels are a GPU's (G5)."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import LlamaConfig

from motet.domain import Digest
from motet.errors import AdapterIncompatible, Declined
from motet_runner.engine import Engine
from motet_runner.execute.worker.device_worker import DeviceWorker
from motet_runner.interface import AdapterEvicted
from tests.gpu.devices import DEVICE
from tests.runner.engines import EngineRun, ask, load, make_engine, run
from tests.runner.random_models import ENDS, VOCABULARY, RandomAdapter, save_adapter, save_base
from tests.support.chosen_worker import chosen_worker

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

PAGE_BYTES = 2 * 16 * 16 * 2
"""Keys and values of one layer with one head, 16 wide, fp16, 16 tokens"""
RANK = 16
LINEARS = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)]
"""Inputs and outputs of q, k, v, o, gate, up and down"""
OF_A_ROW = sum(inputs + outputs for inputs, outputs in LINEARS)
"""Numbers for each row of the rank"""
PAGES_OF_HALVES = -(-RANK * OF_A_ROW * 2 // PAGE_BYTES)
PAGES_OF_INTEGERS = -(-RANK * (OF_A_ROW + 4 * len(LINEARS)) // PAGE_BYTES)
POOL = 2 * PAGES_OF_HALVES + 5
"""Room for two adapters in fp16, or for four of integers, and for a sequence beside them"""
NAMES = [Digest(f"sha256:{number:064}") for number in range(4)]
PROMPT = tuple(range(5, 12))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Of the base and of adapters of one size"""
    folder = tmp_path_factory.mktemp("adapter memory")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        **ENDS,
    )
    base = save_base("llama", folder / "base", config=config)
    rank = RandomAdapter(RANK, 4 * RANK)
    return [base, *(save_adapter(base, "llama", rank, folder / str(seed), seed=seed) for seed in range(len(NAMES)))]


def engine_of(folders: Sequence[Path], adapter_dtype: str, pages: int = POOL) -> Engine:
    with chosen_worker("device"):
        engine = make_engine(
            folders[0],
            kernels="triton",
            device=DEVICE.type,
            dtype="float16",
            adapter_dtype=adapter_dtype,
            kv_cache_mib=pages * PAGE_BYTES / (1 << 20),
            max_resident_adapters=4,
            max_concurrent_sequences=2,
            plan_ahead=1,
        )
    assert isinstance(engine.diagnostics.worker, DeviceWorker)
    assert (engine.info.pages, engine.info.page_bytes) == (pages, PAGE_BYTES)
    for name, folder in zip(NAMES, folders[1:], strict=True):
        load(engine, name, folder)
        run(engine)
    return engine


def on_device(engine: Engine) -> set[str]:
    return {entry.digest for entry in engine.report().adapters if entry.on_device}


def say(engine: Engine, name: Digest, ran: EngineRun | None = None) -> list[int]:
    ran = run(engine, ask(name, prompt=PROMPT, adapter=name, max_tokens=2), ran=ran)
    return ran.tokens.pop(name)


@pytest.mark.parametrize(("adapter_dtype", "pages"), [("auto", PAGES_OF_HALVES), ("int8", PAGES_OF_INTEGERS)])
def test_as_many_are_there_as_fit_and_those_that_come_back_say_the_same(
    folders: Sequence[Path], adapter_dtype: str, pages: int
) -> None:
    engine = engine_of(folders, adapter_dtype)
    fit, there = {"auto": 2, "int8": 4}[adapter_dtype], on_device(engine)
    assert len(there) == fit, "what nobody waits for takes empty pages only"
    assert set(map(engine.diagnostics.planner.memory.adapters.pages_of, there)) == {pages}
    ran = EngineRun()
    first = {name: say(engine, name, ran) for name in NAMES}
    assert len(set(map(tuple, first.values()))) == len(NAMES)
    assert {name: say(engine, name, ran) for name in reversed(NAMES)} == first
    assert len(on_device(engine)) == fit
    assert len(ran.of(AdapterEvicted)) == {"auto": 4, "int8": 0}[adapter_dtype]
    assert engine.report().pages_free == POOL


def test_integers_in_use_stay_and_idle_ones_go(folders: Sequence[Path]) -> None:
    engine = engine_of(folders, "int8", 2 * PAGES_OF_INTEGERS + 2)
    a, b, c, _ = NAMES
    alone = {name: say(engine, name) for name in (a, b, c)}
    ran = run(engine, *(ask(name, prompt=PROMPT, adapter=name, max_tokens=2) for name in (b, c)), steps=1)
    with pytest.raises(
        Declined, match="3 pages are expected to be needed with it, and 0 can be given beside the adapters"
    ):
        engine.add(ask(a, prompt=PROMPT, adapter=a, max_tokens=2))
    run(engine, ran=ran)
    assert on_device(engine) == {b, c}
    run(engine, ask(a, prompt=PROMPT, adapter=a, max_tokens=2), ran=ran)
    assert ran.tokens == alone
    assert len(ran.of(AdapterEvicted)) == 1
    assert a in on_device(engine)


def test_what_is_too_large_in_halves_is_served_in_integers(folders: Sequence[Path]) -> None:
    pages = PAGES_OF_INTEGERS + 1
    assert len(say(engine_of(folders, "int8", pages), NAMES[0])) == 2
    with pytest.raises(AdapterIncompatible, match=r"takes 16 rows of device memory\. This runner has memory for 0\."):
        say(engine_of(folders, "auto", pages), NAMES[0])
