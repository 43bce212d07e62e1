"""The memory of adapters is taken once and never outgrown; running out of it is one adapter's failure."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from motet.domain import Digest
from motet.errors import Overloaded, SetupError
from motet_runner.adapters.certification import certify
from motet_runner.adapters.weight_reader import WeightReader
from motet_runner.engine import MIB, Engine
from motet_runner.interface import AdapterEvicted, AdapterFailed, Finish, State
from tests.runner.engines import ask, load, make_engine, run
from tests.runner.random_models import RandomAdapter, save_adapter

RANKS = (4, 64, 16, 32, 8, 60)


@pytest.fixture(scope="module")
def ranks(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return {rank: save_adapter(llama, "llama", RandomAdapter(rank, 8), folder / str(rank), seed=rank) for rank in RANKS}


def held(engine: Engine) -> int:
    """Bytes behind all runs and all copies of runs."""
    backend = engine._backend
    return sum(tensor.untyped_storage().nbytes() for tensor in (backend._memory, backend._stacks._copies))


def test_memory_is_taken_once_whatever_ranks_come_and_go(llama: Path, ranks: dict[int, Path]) -> None:
    engine = make_engine(llama, max_resident_adapters=4, kernels="torch")
    for rank, folder in ranks.items():
        load(engine, Digest(str(rank)), folder)
    page_bytes = engine.info.page_bytes
    adapter_pages, copy_bytes = engine._adapter_memory(page_bytes)
    assert held(engine) == adapter_pages * page_bytes + copy_bytes
    alone = {}
    for rank in (*RANKS, *reversed(RANKS)):
        tokens = run(engine, ask("q", adapter=Digest(str(rank)))).tokens["q"]
        assert alone.setdefault(rank, tokens) == tokens
        assert held(engine) == adapter_pages * page_bytes + copy_bytes


def test_a_large_adapter_waits_for_adapters_in_use_and_evicts_only_idle_ones(
    llama: Path, ranks: dict[int, Path]
) -> None:
    engine = make_engine(llama, max_resident_adapters=4)  # rank 64 takes all of it
    for rank in (64, 16, 8):
        load(engine, Digest(str(rank)), ranks[rank])
    expected = {rank: run(engine, ask("q", adapter=Digest(str(rank)))).tokens["q"] for rank in (64, 16, 8)}
    prompt = ask("q").prompt
    ran = run(engine, ask("small", adapter=Digest("16"), prompt=prompt), steps=3)
    engine.add(ask("large", adapter=Digest("64"), prompt=prompt))
    engine.add(ask("other", adapter=Digest("8"), prompt=prompt))
    while "small" in {entry.request for entry in engine.report().sequences}:
        assert {entry.request: entry.state for entry in engine.report().sequences}["large"] is State.LOADING
        ran.take(engine)
    run(engine, ran=ran)
    assert ran.tokens == {"small": expected[16], "large": expected[64], "other": expected[8]}


def test_adapters_moved_for_a_large_one_give_the_same_answers(llama: Path, ranks: dict[int, Path]) -> None:
    engine = make_engine(llama, max_resident_adapters=6)  # a total rank of 96
    for rank in (4, 8, 64):
        load(engine, Digest(str(rank)), ranks[rank])
    expected = {rank: run(engine, ask("q", adapter=Digest(str(rank)))).tokens["q"] for rank in (4, 8, 64)}
    prompt = ask("q").prompt
    ran = run(engine, *(ask(f"r{rank}", adapter=Digest(str(rank)), prompt=prompt) for rank in (4, 8)), steps=5)
    engine.add(ask("r64", adapter=Digest("64"), prompt=prompt))
    while not ran.tokens.get("r64"):
        ran.take(engine)
    assert all(last.finish is None for last in ran.last.values()), "it does not wait for the small ones to end"
    run(engine, ran=ran)
    assert ran.tokens == {f"r{rank}": tokens for rank, tokens in expected.items()}
    assert not ran.of(AdapterEvicted)[1:]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_running_out_of_memory_while_loading_fails_that_adapter_only(
    llama: Path, ranks: dict[int, Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = make_engine(llama)
    load(engine, Digest("8"), ranks[8])
    load(engine, Digest("16"), ranks[16])
    read, reads = WeightReader.read, []

    def no_memory(self: WeightReader, matrix: object) -> object:
        reads.append(matrix)
        if self._layout.rank == 16 and len(reads) > 5:
            raise error
        return read(self, matrix)

    monkeypatch.setattr(WeightReader, "read", no_memory)
    ran = run(engine, ask("poor", adapter=Digest("16")), ask("good", adapter=Digest("8")), ask("base"))
    assert ran.last["poor"].finish is Finish.FAILED
    assert isinstance(ran.last["poor"].error, Overloaded)
    assert "engine.maxResidentAdapters" in ran.last["poor"].error.message
    assert [event.digest for event in ran.of(AdapterFailed)] == ["16"]
    assert {len(ran.tokens["good"]), len(ran.tokens["base"])} == {40}
    monkeypatch.undo()
    assert len(run(engine, ask("again", adapter=Digest("16"))).tokens["again"]) == 40


def test_a_rank_that_the_memory_cannot_hold_is_refused(llama: Path, ranks: dict[int, Path]) -> None:
    layout = certify(ranks[64], make_engine(llama).info).layout
    engine = make_engine(llama, max_resident_adapters=1, max_lora_rank=8)
    engine.load_adapter(Digest("64"), layout)
    failed = run(engine, ask("q", adapter=Digest("64"))).last["q"]
    assert failed.error is not None
    assert failed.error.reason == "RankTooLarge"
    assert "engine.maxLoraRank" in failed.error.message


def test_on_a_device_pages_leave_memory_for_adapters(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(llama)
    engine._config = replace(engine._config, kv_cache_mib=None)
    engine._loaded.device = SimpleNamespace(type="cuda")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (60 * MIB, 100 * MIB))
    page = MIB // 2
    assert engine._pages(page, 0) == 100
    assert engine._pages(page, 20 * MIB) == 60
    with pytest.raises(SetupError, match=r"lower engine\.maxResidentAdapters: adapters take 50\.00 MiB"):
        engine._pages(page, 50 * MIB)
