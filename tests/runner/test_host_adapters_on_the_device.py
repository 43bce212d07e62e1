"""Adapters that have left the device load again from the host's memory."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from motet.domain import Digest
from motet_runner.adapters.certification import certify
from motet_runner.adapters.host_load import HostLoad
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.engine import Engine
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.interface import AdapterFailed, AdapterLoaded
from motet_runner.memory.adapter_memory import adapter_memory
from motet_runner.plan import AdapterLoad, HostCopy
from tests.runner.engines import EngineRun, ask, make_engine, run, step_beside_load
from tests.runner.random_models import RandomAdapter, save_adapter, save_base

A, B, C = map(Digest, "ABC")
PROMPT = list(range(5, 25))
MIB = 8


def known(engine: Engine, digest: Digest, folder: Path) -> AdapterLayout:
    layout = certify(folder, engine.info).layout
    engine.load_adapter(digest, layout)
    return layout


def answer(engine: Engine, digest: Digest) -> tuple[list[int], EngineRun]:
    ran = run(engine, ask("q", adapter=digest, prompt=PROMPT))
    engine.check()
    return ran.tokens["q"], ran


def from_host(ran: EngineRun) -> list[bool]:
    return [one.from_host for one in ran.of(AdapterLoaded)]


def place_of(engine: Engine, digest: Digest) -> torch.Tensor:
    host = engine.diagnostics.planner.adapters.host
    kept = host._kept[digest]  # noqa: SLF001
    loads = engine.diagnostics.worker.loads
    assert loads is not None
    assert loads.in_host is not None
    return loads.in_host[kept.begin : kept.begin + kept.size]


@pytest.fixture
def folders(adapters: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copytree(one, tmp_path / one.name)) for one in adapters]


@pytest.fixture
def engine(llama: Path, folders: list[Path]) -> Engine:
    """It has one place for two adapters."""
    engine = make_engine(llama, max_resident_adapters=1, host_adapters_mib=MIB)
    known(engine, A, folders[0])
    known(engine, B, folders[1])
    return engine


def test_what_was_removed_from_the_disk_answers_the_same_from_host_memory(engine: Engine, folders: list[Path]) -> None:
    before, ran = answer(engine, A)
    assert [(one.from_host, one.in_host) for one in ran.of(AdapterLoaded) if one.digest == A] == [(False, True)]
    other, ran = answer(engine, B)
    assert from_host(ran) == [False]
    assert before != other
    shutil.rmtree(folders[0])
    after, ran = answer(engine, A)
    assert after == before
    assert [(one.from_host, one.in_host, one.lacks_slab) for one in ran.of(AdapterLoaded)] == [(True, True, False)]
    report = engine.report()
    assert report.host_adapters == 2
    assert 0 < report.host_adapter_bytes <= MIB << 20


def test_without_the_setting_the_disk_is_read(llama: Path, folders: list[Path]) -> None:
    engine = make_engine(llama, max_resident_adapters=1)
    known(engine, A, folders[0])
    known(engine, B, folders[1])
    for digest in (A, B):
        answer(engine, digest)
    shutil.rmtree(folders[0])
    ran = run(engine, ask("q", adapter=A, prompt=PROMPT))
    assert [one.digest for one in ran.of(AdapterFailed)] == [A]
    assert engine.report().host_adapter_bytes == 0


@pytest.mark.parametrize("kind", ["plain", "of two linears", "dora"])
def test_the_bytes_are_those_that_the_disk_gives(tmp_path: Path, kind: str) -> None:
    qwen2 = save_base("qwen2", tmp_path / "base")
    specs = {
        "plain": RandomAdapter(8, 16),
        "of two linears": RandomAdapter(4, 8, targets=("q_proj", "v_proj")),
        "dora": RandomAdapter(6, 6, dora=True),
    }
    engine = make_engine(qwen2, max_resident_adapters=1, host_adapters_mib=MIB)
    layouts = {}
    for number, digest in enumerate((A, B)):
        folder = save_adapter(qwen2, "qwen2", specs[kind], tmp_path / digest, seed=number)
        layouts[digest] = known(engine, digest, folder)
    answers = {digest: answer(engine, digest)[0] for digest in (A, B)}
    linears = engine.diagnostics.linears
    for digest, layout in layouts.items():
        host = HostLoad(layout, linears.layout(layout.rank), linears.base, pinned=False)
        while not host.ended(0.1):
            host.allow(float("inf"))
        assert host.run is not None
        assert torch.equal(place_of(engine, digest)[: len(host.run)], host.run)
        after, ran = answer(engine, digest)
        assert (after, from_host(ran)) == (answers[digest], [True])


def test_a_place_that_another_adapter_has_had_holds_nothing_of_it(llama: Path, tmp_path: Path) -> None:
    """The next one changes fewer linears."""
    wide = save_adapter(llama, "llama", RandomAdapter(8, 16), tmp_path / "wide", seed=1)
    narrow = save_adapter(llama, "llama", RandomAdapter(8, 16, targets=("q_proj",)), tmp_path / "narrow", seed=2)
    alone = make_engine(llama)
    known(alone, B, narrow)
    size = alone.diagnostics.linears.run_bytes(certify(wide, alone.info).layout.rank)
    with patch("motet_runner.engine.MIB", -(-size // 4096) * 4096):  # room for one
        engine = make_engine(llama, max_resident_adapters=1, host_adapters_mib=1)
    known(engine, A, wide)
    known(engine, B, narrow)
    answer(engine, A)
    expected = answer(alone, B)[0]
    assert answer(engine, B)[0] == expected
    assert engine.report().host_adapters == 1
    answer(engine, A)
    assert answer(engine, B)[0] == expected


def test_others_go_on_while_a_kept_adapter_is_copied_in_slices(engine: Engine, monkeypatch) -> None:
    before, _ = answer(engine, A)
    answer(engine, B)
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 4096)
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.MAX_SLICE_BYTES", 4096)
    ran = run(engine, ask("base", max_tokens=80), steps=1)
    engine.add(ask("q", adapter=A, prompt=PROMPT))
    steps = 0
    while not ran.tokens.get("q"):
        count = len(ran.tokens["base"])
        step_beside_load(engine, ran)
        assert len(ran.tokens["base"]) == count + 1
        steps += 1
    run(engine, ran=ran)
    assert ran.tokens["q"] == before
    assert from_host(ran) == [True]
    assert steps > 10


def test_an_adapter_that_is_dropped_takes_no_room(engine: Engine) -> None:
    answer(engine, A)
    answer(engine, B)
    before = engine.report().host_adapter_bytes
    engine.drop_adapter(A)
    run(engine)
    engine.check()
    assert (engine.report().host_adapters, engine.report().host_adapter_bytes) == (1, before // 2)


def test_where_there_is_no_memory_adapters_load_from_the_disk(llama: Path, folders: list[Path]) -> None:
    zeros = np.zeros

    def none_left(size: object, *given: object, **more: object) -> np.ndarray:
        if size == MIB << 20:
            raise MemoryError
        return zeros(size, *given, **more)

    with patch("motet_runner.memory.adapter_memory.np.zeros", none_left):
        engine = make_engine(llama, max_resident_adapters=1, host_adapters_mib=MIB)
    known(engine, A, folders[0])
    known(engine, B, folders[1])
    first, _ = answer(engine, A)
    answer(engine, B)
    again, ran = answer(engine, A)
    assert (again, from_host(ran)) == (first, [False])
    assert engine.report().host_adapter_bytes == 0


@pytest.mark.parametrize("available", [(MIB << 20) - 1, MIB << 20])
def test_more_than_the_host_has_is_not_taken(llama: Path, available: int) -> None:
    """Mutation: the kernel gives it page by page, and ends the runner once there is no more."""
    with patch("motet_runner.memory.adapter_memory.available_host_bytes", lambda: available), capture_logs() as logs:
        engine = make_engine(llama, host_adapters_mib=MIB)
    assert engine.diagnostics.planner.adapters.host.size == (0 if available < MIB << 20 else MIB << 20)
    told = [(one["mib"], one["reason"]) for one in logs if one["event"] == "no_memory_for_adapters"]
    assert told == ([(8, "7 MiB are available")] if available < MIB << 20 else [])


class Driver:
    """Pins, or refuses to. What failed last, it tells after the next launch of a kernel, whatever that was."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.failed = 0
        self.let_go: list[int] = []

    def cudaHostRegister(self, *_: int) -> int:
        self.failed = self.answer
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:
        self.let_go.append(address)

    def launch(self, *_: object, dtype: object, device: str) -> None:
        assert (dtype, device) == (torch.uint8, "cuda")
        failed, self.failed = self.failed, 0
        self.check(failed)

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize(("refused", "has_memory"), [(0, True), (2, False)])
def test_memory_that_the_driver_does_not_pin_is_not_used(refused: int, has_memory: bool) -> None:
    driver = Driver(refused)
    with (
        patch("torch.cuda.cudart", lambda: driver),
        patch("torch.cuda.check_error", driver.check),
        patch("torch.ones", driver.launch),
    ):
        memory = adapter_memory(1 << 16, pinned=True)
        assert not driver.failed, "what the engine launches next would fail"
        assert (memory is not None) is has_memory
        if memory is not None:
            assert len(memory) == 1 << 16
            address = memory.data_ptr()
            del memory
            assert driver.let_go == [address], "the memory goes, and is pinned no more"


class Thread(SimpleNamespace):
    """A `HostLoad` of 64 bytes whose disk hangs"""

    def __init__(self) -> None:
        super().__init__(
            allow=lambda _: None,
            ended=lambda _=0.0: False,
            give_up=lambda: None,
            thread_ended=False,
            run=None,
            read_bytes=0,
            progress=0,
            layout=SimpleNamespace(bytes=64, rank=8),
        )


def test_the_plan_learns_when_a_thread_that_was_given_up_writes_no_more() -> None:
    thread = Thread()
    layout = SimpleNamespace(bytes=64)
    memory = torch.zeros(4, 64, dtype=torch.uint8)
    loads = AdapterLoads(memory, lambda _: layout, lambda: 0.0, in_host=torch.zeros(128, dtype=torch.uint8))
    with patch("motet_runner.execute.adapters.adapter_uploads.HostLoad", lambda *_, **__: thread):
        load = AdapterLoad(1, A, SimpleNamespace(rank=8), HostCopy(64, None))
        assert not loads.advance([load], {1: 2}, hurry=False).left
    assert not loads.advance([], {}, hurry=False).left, "it was given up, and its disk may answer yet"
    thread.thread_ended = True
    assert loads.advance([], {}, hurry=False).left == (1,)
    assert not loads.advance([], {}, hurry=False).left, "once"


def test_a_load_without_a_thread_leaves_its_place_at_once() -> None:
    layout = SimpleNamespace(bytes=64)
    memory = torch.zeros(4, 64, dtype=torch.uint8)
    loads = AdapterLoads(memory, lambda _: layout, lambda: 0.0, in_host=torch.zeros(128, dtype=torch.uint8))

    def no_threads(*_: object, **__: object) -> Thread:
        raise RuntimeError("can't start new thread")

    with patch("motet_runner.execute.adapters.adapter_uploads.HostLoad", no_threads):
        found = loads.advance([AdapterLoad(1, A, SimpleNamespace(rank=8), HostCopy(64, None))], {1: 2}, hurry=False)
    assert [one.number for one in found.failed] == [1]
    assert found.left == (1,)
