"""KV and adapters share the pages of one pool, which is taken once; running out of it is one adapter's failure."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from motet.domain import Digest
from motet.errors import AdapterIncompatible, Declined, InvalidRequest, Overloaded
from motet_runner.adapters.certification import certify
from motet_runner.adapters.load_threads import LoadThreads, Work
from motet_runner.adapters.weight_reader import WeightReader
from motet_runner.engine import Engine
from motet_runner.execute.memory_budget.page_budget import CPU_KV_MIB, MIB, RANK_RESERVED, copy_bytes_of
from motet_runner.interface import AdapterEvicted, AdapterFailed, AdapterLoaded, Finish, ParkedNow, State
from motet_runner.plan import Copy
from tests.runner.engines import ask, load, make_engine, run, step_beside_load
from tests.runner.random_models import RandomAdapter, save_adapter

RANKS = (4, 64, 16, 32, 8, 60)
PAGE_BYTES = 2 * 3 * 2 * 16 * 16 * 4
"""Keys and values of three layers with two heads, each 16 wide, float32, 16 tokens. An adapter takes as much for each
row of its rank."""


@pytest.fixture(scope="module")
def ranks(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return {rank: save_adapter(llama, "llama", RandomAdapter(rank, 8), folder / str(rank), seed=rank) for rank in RANKS}


def pool(pages: int) -> dict[str, float]:
    """An engine with `pages` pages. An adapter of rank r takes r of them, and a request 4."""
    return {"kv_cache_mib": pages * PAGE_BYTES / MIB}


def on_device(engine: Engine) -> set[str]:
    return {entry.digest for entry in engine.report().adapters if entry.on_device}


def held(engine: Engine) -> int:
    """Bytes behind all pages and all copies of runs."""
    backend = engine.diagnostics.backend
    assert backend._memory.untyped_storage().data_ptr() == engine.diagnostics.store.data.untyped_storage().data_ptr()  # noqa: SLF001
    return sum(tensor.untyped_storage().nbytes() for tensor in (backend._memory, backend._stacks._copies))  # noqa: SLF001


def test_memory_is_taken_once_whatever_ranks_come_and_go(llama: Path, ranks: dict[int, Path]) -> None:
    engine = make_engine(llama, max_resident_adapters=4, kernels="torch")
    for rank, folder in ranks.items():
        load(engine, Digest(str(rank)), folder)
    assert engine.info.page_bytes == PAGE_BYTES
    taken = engine.info.pages * PAGE_BYTES + copy_bytes_of(
        engine.diagnostics.kernel_choice.serving, engine.diagnostics.linears, engine.diagnostics.config
    )
    assert held(engine) == taken
    alone = {}
    for rank in (*RANKS, *reversed(RANKS)):
        tokens = run(engine, ask("q", adapter=Digest(str(rank)))).tokens["q"]
        assert alone.setdefault(rank, tokens) == tokens
        assert held(engine) == taken
        assert engine.diagnostics.worker.loads._arrived.keys() == on_device(engine), "it forgets those that have gone"  # noqa: SLF001


def test_on_a_cpu_the_default_has_room_for_the_adapters_beside_the_kv(llama: Path) -> None:
    engine = make_engine(llama, kv_cache_mib=None, max_resident_adapters=5)
    assert engine.info.pages == CPU_KV_MIB * MIB // PAGE_BYTES + 5 * RANK_RESERVED
    assert engine.info.adapter_rank_bytes * 8 == 8 * PAGE_BYTES
    assert engine.info.adapter_rank_tile == 8


def test_an_adapter_that_does_not_fit_beside_those_in_use_is_declined_and_later_evicts_idle_ones(
    llama: Path, ranks: dict[int, Path]
) -> None:
    engine = make_engine(llama, **pool(80))
    for rank in (64, 16, 8):
        load(engine, Digest(str(rank)), ranks[rank])
    prompt = ask("q").prompt
    expected = {rank: run(engine, ask("q", adapter=Digest(str(rank)))).tokens["q"] for rank in (64, 16, 8)}
    ran = run(engine, ask("small", adapter=Digest("16"), prompt=prompt), steps=3)
    assert engine.report().pages == 64
    with pytest.raises(Declined, match="0 can be given beside the adapters"):
        engine.add(ask("large", adapter=Digest("64"), prompt=prompt))
    engine.add(ask("other", adapter=Digest("8"), prompt=prompt))
    assert engine.report().pages == 56
    run(engine, ran=ran)
    assert engine.report().pages == engine.report().pages_free == 80
    run(engine, ask("large", adapter=Digest("64"), prompt=prompt), ran=ran)
    assert ran.tokens == {"small": expected[16], "large": expected[64], "other": expected[8]}
    assert [event.digest for event in ran.of(AdapterEvicted)] == ["16"], "the one that was used less recently"
    assert on_device(engine) == {"8", "64"}


def test_an_adapter_that_becomes_known_waits_for_those_in_use(llama: Path, ranks: dict[int, Path]) -> None:
    engine = make_engine(llama, **pool(80))
    load(engine, Digest("16"), ranks[16])
    ran = run(engine, ask("small", adapter=Digest("16"), max_tokens=25), steps=1)
    while not ran.tokens.get("small"):  # on a busy machine, its adapter takes some steps to load
        ran.take(engine)
    engine.add(ask("large", adapter=Digest("64")))
    load(engine, Digest("64"), ranks[64])
    while "small" in {entry.request for entry in engine.report().sequences}:
        assert {entry.request: entry.state for entry in engine.report().sequences}["large"] is State.LOADING
        assert on_device(engine) == {"16"}
        ran.take(engine)
    run(engine, ran=ran)
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == {"small": 25, "large": 40}


def test_adapters_and_kv_moved_for_a_large_one_give_the_same_answers(llama: Path, ranks: dict[int, Path]) -> None:
    engine = make_engine(llama, **pool(86))
    for rank in (16, 8):  # 16 lies at the end, and 8 before it
        load(engine, Digest(str(rank)), ranks[rank])
        run(engine)
    prompt = ask("q").prompt
    expected = {rank: run(engine, ask("q", adapter=Digest(str(rank)), prompt=prompt)).tokens["q"] for rank in (8, 16)}
    ran = run(engine, ask("r8", adapter=Digest("8"), prompt=prompt), steps=5)
    moved: list[int] = []
    carry_out = engine.diagnostics.worker.tiers.carry_out

    def noted(copy: Copy) -> None:
        moved.extend(copy.pages)
        carry_out(copy)

    engine.diagnostics.worker.tiers.carry_out = noted
    load(engine, Digest("64"), ranks[64])
    engine.add(ask("r64", adapter=Digest("64"), prompt=prompt))
    while not ran.tokens.get("r64"):
        step_beside_load(engine, ran)
    assert ran.last["r8"].finish is None, "it does not wait for the small one to end"
    assert {62, 69} <= set(moved), "the adapter in use was moved"
    run(engine, ran=ran)
    fresh = make_engine(llama)
    load(fresh, Digest("64"), ranks[64])
    expected[64] = run(fresh, ask("q", adapter=Digest("64"), prompt=prompt)).tokens["q"]
    assert ran.tokens == {"r8": expected[8], "r64": expected[64]}
    assert [event.digest for event in ran.of(AdapterEvicted)] == ["16"]


def test_an_idle_adapters_pages_become_kv_and_back(llama: Path, ranks: dict[int, Path]) -> None:
    engine = make_engine(llama, **pool(24))
    load(engine, Digest("16"), ranks[16])
    run(engine)
    expected = run(engine, ask("q", adapter=Digest("16"))).tokens["q"]
    adapters, store = engine.diagnostics.planner.adapters, engine.diagnostics.store
    first = adapters.first_page_of(Digest("16"))
    with torch.inference_mode():  # what it leaves need not be numbers
        store.data[first : first + adapters.pages_of(Digest("16"))] = torch.nan
    ran = run(engine, *(ask(f"r{index}", prompt=ask(f"{index}").prompt) for index in range(6)))
    assert [event.digest for event in ran.of(AdapterEvicted)] == ["16"]
    assert not ran.of(ParkedNow)
    alone = make_engine(llama)
    for index in range(6):
        assert ran.tokens[f"r{index}"] == run(alone, ask("q", prompt=ask(f"{index}").prompt)).tokens["q"]
    assert run(engine, ask("q", adapter=Digest("16"))).tokens["q"] == expected


def test_cached_pages_yield_before_idle_adapters(llama: Path, ranks: dict[int, Path]) -> None:
    engine = make_engine(llama, **pool(24))
    load(engine, Digest("16"), ranks[16])
    run(engine, ask("cached", prompt=100, max_tokens=5, tenant="t"))
    assert engine.report().prefix_pages == 6
    ran = run(engine, ask("a"), ask("b"))
    assert not ran.of(AdapterEvicted)
    assert engine.report().prefix_pages < 6


def test_a_load_that_nobody_needs_is_given_up_for_kv(
    llama: Path, ranks: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ended, reads = threading.Event(), threading.Event(), []
    read, start = WeightReader.read_into, LoadThreads.run

    def slow(self: WeightReader, into: object, matrix: object) -> None:
        assert answers.wait(60)
        reads.append(matrix)
        read(self, into, matrix)

    def until_ended(work: Work) -> None:
        work()
        ended.set()

    monkeypatch.setattr(WeightReader, "read_into", slow)
    monkeypatch.setattr(LoadThreads, "run", lambda threads, work: start(threads, partial(until_ended, work)))
    monkeypatch.setattr("motet_runner.adapters.host_load.MAX_BYTES_TOGETHER", 1)
    engine = make_engine(llama, **pool(24))
    load(engine, Digest("16"), ranks[16])
    run(engine, steps=2)
    assert engine.diagnostics.planner.adapters.loading(), "it has its pages"
    names = [f"r{index}" for index in range(6)]
    ran = run(engine, *map(ask, names), steps=25)
    assert not engine.diagnostics.planner.adapters.loading()
    answers.set()
    run(engine, ran=ran)
    assert {len(ran.tokens[name]) for name in names} == {40}
    assert not ran.of(AdapterEvicted), "it has never been there"
    assert not ran.of(AdapterLoaded)
    assert ended.wait(60)
    assert len(reads) <= 2, "the thread reads no further"
    assert len(run(engine, ask("tuned", adapter=Digest("16"))).tokens["tuned"]) == 40


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
    read, reads = WeightReader.read_into, []

    def no_memory(self: WeightReader, into: object, matrix: object) -> None:
        reads.append(matrix)
        if self._layout.rank == 16 and len(reads) > 5:
            raise error
        read(self, into, matrix)

    monkeypatch.setattr(WeightReader, "read_into", no_memory)
    ran = run(engine, ask("poor", adapter=Digest("16")), ask("good", adapter=Digest("8")), ask("base"))
    assert ran.last["poor"].finish is Finish.FAILED
    assert isinstance(ran.last["poor"].error, Overloaded)
    assert "engine.maxResidentAdapters" in ran.last["poor"].error.message
    assert [event.digest for event in ran.of(AdapterFailed)] == ["16"]
    assert {len(ran.tokens["good"]), len(ran.tokens["base"])} == {40}
    monkeypatch.undo()
    assert len(run(engine, ask("again", adapter=Digest("16"))).tokens["again"]) == 40


def test_an_adapter_larger_than_all_pages_is_refused_by_its_check(llama: Path, ranks: dict[int, Path]) -> None:
    engine = make_engine(llama, **pool(60))
    with pytest.raises(AdapterIncompatible, match=r"rank is 64.*has memory for 5\d\..*engine\.kvCacheMiB") as refused:
        certify(ranks[64], engine.info)
    assert refused.value.reason == "RankTooLarge"
    assert certify(ranks[16], engine.info).certificate.device_rank == 16


def test_an_adapter_that_leaves_no_page_for_a_request_is_refused_by_its_check_and_by_the_engine(
    llama: Path, ranks: dict[int, Path]
) -> None:
    engine = make_engine(llama, **pool(64))
    with pytest.raises(AdapterIncompatible, match=r"has memory for 56"):
        certify(ranks[64], engine.info)
    engine.load_adapter(Digest("64"), certify(ranks[64], make_engine(llama).info).layout)
    with pytest.raises(AdapterIncompatible, match=r"needs 64 pages .* has 64"):
        engine.add(ask("q", adapter=Digest("64"), prompt=2, max_tokens=2, promise=1))
    engine = make_engine(llama, **pool(65))
    load(engine, Digest("64"), ranks[64])
    assert len(run(engine, ask("q", adapter=Digest("64"), prompt=2, max_tokens=2, promise=1)).tokens["q"]) == 2


def test_an_engine_without_room_for_the_smallest_adapter_says_so(llama: Path, ranks: dict[int, Path]) -> None:
    engine = make_engine(llama, **pool(8))
    assert engine.info.max_device_rank == 0
    with pytest.raises(AdapterIncompatible, match=r"has memory for 0"):
        certify(ranks[8], engine.info)


def test_an_adapter_larger_than_all_pages_is_refused(llama: Path, ranks: dict[int, Path]) -> None:
    layout = certify(ranks[64], make_engine(llama).info).layout
    engine = make_engine(llama, **pool(60))
    engine.add(ask("early", adapter=Digest("64")))
    engine.load_adapter(Digest("64"), layout)
    ran = run(engine)
    assert [(event.digest, event.error.reason) for event in ran.of(AdapterFailed)] == [("64", "RankTooLarge")]
    assert isinstance(ran.last["early"].error, AdapterIncompatible)
    with pytest.raises(AdapterIncompatible, match=r"needs 64 pages .* has 60.*engine\.kvCacheMiB.*maxResidentAdapters"):
        engine.add(ask("late", adapter=Digest("64")))


def test_a_request_that_could_never_be_computed_beside_its_adapter_is_refused(
    llama: Path, ranks: dict[int, Path]
) -> None:
    engine = make_engine(llama, **pool(20))
    engine.add(ask("early", adapter=Digest("16"), prompt=30, max_tokens=50, promise=2))
    load(engine, Digest("16"), ranks[16])
    early = run(engine).last["early"]
    assert isinstance(early.error, InvalidRequest)
    with pytest.raises(InvalidRequest, match=r"needs 5 pages .* its adapter 16.*has 20.*engine\.kvCacheMiB"):
        engine.add(ask("late", adapter=Digest("16"), prompt=30, max_tokens=50, promise=2))
    assert len(run(engine, ask("base", prompt=30, max_tokens=50)).tokens["base"]) == 50
    assert len(run(engine, ask("fits", adapter=Digest("16"))).tokens["fits"]) == 40
