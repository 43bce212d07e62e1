"""A slab that is in the page cache is read straight into its run, bit for bit what a thread would have copied there
(PU-07). Whatever speaks against that leads to the thread, and never to other bytes or to a wait for a disk."""

import errno
import os
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

from motet.domain import Digest
from motet_kernels.cpp import read_file
from motet_runner.adapters import cached_files, slab
from motet_runner.adapters.cached_files import NOWAIT
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.slab import ReadFile
from motet_runner.adapters.slab_in_place import NotInPlace, SlabInPlace
from motet_runner.engine import Engine
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.interface import AdapterLoaded
from motet_runner.plan import AdapterLoad, LoadArrived
from testbed.compiled_kernels import compiled_library
from tests.runner.engines import ask, make_engine, run
from tests.runner.test_slabs import DAMAGES, SPECS, checked, has_slab, load, write

A = Digest("A")
PAGE_BYTES = 1 << 16
FIRST_PAGE = 1
LEFT_THERE = 77
"""What the last owner of the pages has left in each byte"""


@pytest.fixture(scope="module")
def engine(llama: Path) -> Engine:
    return make_engine(llama)


@pytest.fixture
def adapter(llama: Path, engine: Engine, tmp_path: Path) -> AdapterLayout:
    """Its slab is written, and was read once."""
    return with_slab(llama, engine, tmp_path, "plain")


@pytest.fixture(autouse=True)
def page_cache_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder is known. The page cache has whatever is read, also on a machine that is short of memory, or whose
    files are on a file system that may wait."""
    monkeypatch.setattr(cached_files, "_known", set())
    preadv, opened = os.preadv, cached_files._open  # noqa: SLF001

    def has(file: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        try:
            return preadv(file, buffers, at, flags)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
        return preadv(file, buffers, at)

    def knows(path: str, flags: int) -> int:
        try:
            return opened(path, flags)
        except BlockingIOError:
            return os.open(path, flags)

    monkeypatch.setattr(os, "preadv", has)
    monkeypatch.setattr(cached_files, "_open", knows)


def with_slab(base: Path, engine: Engine, folder: Path, spec: str) -> AdapterLayout:
    adapter = checked(base, engine, folder / "adapter", SPECS[spec])
    assert write(engine, adapter)
    assert load(engine, adapter).from_slab
    return adapter


class Loads:
    """Loads into pages that another adapter has left."""

    def __init__(self, engine: Engine, adapter: AdapterLayout, read_file: ReadFile | None = None) -> None:
        linears = engine.diagnostics.linears
        self.layout = linears.layout(adapter.rank)
        pages = FIRST_PAGE + -(-self.layout.bytes // PAGE_BYTES)
        self.memory = torch.full((pages, PAGE_BYTES), LEFT_THERE, dtype=torch.uint8)
        self.loads = AdapterLoads(self.memory, linears.layout, lambda: 0.0, linears.base, read_file=read_file)
        self.adapter = adapter

    @property
    def run(self) -> torch.Tensor:
        begin = FIRST_PAGE * PAGE_BYTES
        return self.memory.view(-1)[begin : begin + self.layout.bytes]

    def advance(self, *, begin: bool, hurry: bool = True) -> LoadArrived | None:
        begun = [AdapterLoad(1, A, self.adapter)] if begin else []
        with torch.inference_mode():
            found = self.loads.advance(begun, {1: FIRST_PAGE}, hurry=hurry)
        assert not found.failed
        return found.arrived[0] if found.arrived else None

    def to_the_end(self) -> LoadArrived:
        arrived, begin = None, True
        while arrived is None:
            arrived, begin = self.advance(begin=begin), False
        return arrived


def same_bytes(engine: Engine, loads: Loads) -> bool:
    expected = load(engine, replace(loads.adapter, slab="")).run
    assert expected is not None
    return bool(torch.equal(loads.run, expected))


def no_thread() -> Any:
    return patch("motet_runner.execute.adapters.adapter_uploads.HostLoad", side_effect=AssertionError("a thread"))


@pytest.mark.parametrize("spec", SPECS)
def test_it_arrives_at_once_without_a_thread_and_has_the_same_bytes(
    llama: Path, engine: Engine, tmp_path: Path, spec: str
) -> None:
    adapter = with_slab(llama, engine, tmp_path, spec)
    loads = Loads(engine, adapter)
    with no_thread():
        arrived = loads.advance(begin=True)
    assert arrived is not None
    assert not arrived.lacks_slab
    assert same_bytes(engine, loads)
    placed = loads.loads.placed(A, FIRST_PAGE)
    assert placed.linears == load(engine, adapter).linears
    assert bool((loads.memory[0] == LEFT_THERE).all()), "of another owner"


def test_zeros_and_parts_of_parts_come_in_slices(
    llama: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 1000)
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.MAX_SLICE_BYTES", 1000)
    monkeypatch.setattr(slab, "_SHORTEST_GAP", 0)
    loads = Loads(engine, with_slab(llama, engine, tmp_path, "of two linears"))
    left = LEFT_THERE * torch.ones_like(loads.run)
    with no_thread():
        for number in range(1, -(-loads.layout.bytes // 1000)):
            assert loads.advance(begin=number == 1, hurry=False) is None
            assert torch.equal(loads.run[1000 * number :], left[1000 * number :]), "no more than the slice"
        assert loads.advance(begin=False, hurry=False) is not None
    assert same_bytes(engine, loads)


def test_several_share_what_an_iteration_reads(
    engine: Engine, adapter: AdapterLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(engine, adapter)
    size = loads.layout.bytes
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", size + 1000)
    begun = [AdapterLoad(number, Digest(str(number)), adapter) for number in (1, 2)]
    loads.memory = loads.loads.memory = torch.full((2 * len(loads.memory), PAGE_BYTES), LEFT_THERE, dtype=torch.uint8)
    second = len(loads.memory) // 2
    with no_thread(), torch.inference_mode():
        found = loads.loads.advance(begun, {1: FIRST_PAGE, 2: second}, hurry=False)
        assert [one.number for one in found.arrived] == [1]
        place = loads.memory.view(-1)[second * PAGE_BYTES :]
        assert torch.equal(place[:1000], loads.run[:1000])
        assert bool((place[1000:] == LEFT_THERE).all())
        assert [one.number for one in loads.loads.advance([], {2: second}, hurry=False).arrived] == [2]
    assert torch.equal(place[:size], loads.run)


def test_a_folder_of_which_nothing_was_read_is_read_on_a_thread_first(engine: Engine, adapter: AdapterLayout) -> None:
    cached_files._known.clear()  # noqa: SLF001
    loads = Loads(engine, adapter)
    with patch.object(cached_files, "_open") as opened:
        loads.to_the_end()
    opened.assert_not_called()
    assert same_bytes(engine, loads)
    with no_thread():
        assert Loads(engine, adapter).advance(begin=True) is not None


@pytest.mark.parametrize("before", range(4))
def test_what_the_page_cache_does_not_have_is_read_on_a_thread(
    engine: Engine, adapter: AdapterLayout, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`before`: this number of reads find theirs."""
    monkeypatch.setattr(slab, "MAX_PART_BYTES", slab._BLOCK)  # noqa: SLF001
    adapter.file.with_name(adapter.slab).unlink()
    assert write(engine, adapter)
    assert load(engine, adapter).from_slab
    found, preadv = [], os.preadv

    def some(file: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        if flags & NOWAIT:
            if len(found) == before:
                raise BlockingIOError(errno.EAGAIN, "not in the page cache")
            found.append(at)
        return preadv(file, buffers, at, flags)

    loads = Loads(engine, adapter)
    files = psutil.Process().num_fds()
    with patch.object(os, "preadv", some):
        assert not loads.to_the_end().lacks_slab
    assert len(found) == before
    assert psutil.Process().num_fds() == files
    assert same_bytes(engine, loads)


def test_a_file_system_that_may_wait_is_never_read_in_place(engine: Engine, adapter: AdapterLayout) -> None:
    cached_files._known.clear()  # noqa: SLF001
    preadv = os.preadv

    def waits(file: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        if flags & NOWAIT:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return preadv(file, buffers, at, flags)

    with patch.object(os, "preadv", waits):
        assert load(engine, adapter).from_slab
    with pytest.raises(NotInPlace):
        SlabInPlace(adapter, engine.diagnostics.linears.layout(adapter.rank))


def test_a_kernel_without_such_a_call_reads_on_threads(engine: Engine, adapter: AdapterLayout) -> None:
    loads = Loads(engine, adapter)
    with patch.object(cached_files, "_OPENAT2", 4095):
        with pytest.raises(OSError, match="not implemented"):
            cached_files.open_cached(str(adapter.file))
        loads.to_the_end()
    assert same_bytes(engine, loads)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_slab_is_found_and_removed(engine: Engine, adapter: AdapterLayout, damage: str) -> None:
    DAMAGES[damage](adapter.file.with_name(adapter.slab))
    loads = Loads(engine, adapter)
    assert loads.to_the_end().lacks_slab
    assert not has_slab(adapter)
    assert same_bytes(engine, loads)


def test_a_disk_that_gives_other_bytes_without_a_write_is_found_out(engine: Engine, adapter: AdapterLayout) -> None:
    fill = slab.Slab._fill  # noqa: SLF001

    def filled(self: slab.Slab, into: memoryview, at: int) -> None:
        fill(self, into, at)
        into[5] ^= 1

    loads = Loads(engine, adapter)
    with patch.object(slab.Slab, "_fill", filled):
        assert loads.to_the_end().lacks_slab
    assert same_bytes(engine, loads)


@pytest.mark.parametrize("spec", SPECS)
def test_the_compiled_reader_reads_the_same_bytes(llama: Path, engine: Engine, tmp_path: Path, spec: str) -> None:
    adapter, asked = with_slab(llama, engine, tmp_path, spec), []

    def read(file: int, at: int, into: slab.Bytes, flags: int) -> int:
        assert flags == NOWAIT, "it never waits for a disk"
        asked.append(len(into))
        return read_file(compiled_library(), file, at, into, 0)

    loads = Loads(engine, adapter, read)
    slab._verified.clear()  # noqa: SLF001
    with no_thread():
        assert loads.advance(begin=True) is not None
        assert same_bytes(engine, loads)
        assert not asked, "only the checksums of its parts say that it is right"
        loads.run.fill_(LEFT_THERE)
        assert loads.advance(begin=True) is not None
    with slab.Slab(adapter, loads.layout.bytes, loads.layout.offsets) as opened:
        assert asked == [part.size for part in opened.parts]
    assert same_bytes(engine, loads)


@pytest.mark.parametrize("wrong", ["another sum", "not in the page cache"])
def test_what_the_compiled_reader_does_not_read_right_is_read_otherwise(
    engine: Engine, adapter: AdapterLayout, wrong: str
) -> None:
    def read(file: int, at: int, into: slab.Bytes, _flags: int) -> int:
        if wrong == "not in the page cache":
            raise BlockingIOError(errno.EAGAIN, wrong)
        return read_file(compiled_library(), file, at, into, 0) + 1

    loads = Loads(engine, adapter, read)
    loads.to_the_end()
    assert same_bytes(engine, loads)


def test_an_engine_whose_compiled_kernels_serve_has_their_reader(llama: Path) -> None:
    for kernels in ("cpp", "torch"):
        worker = make_engine(llama, kernels=kernels)._worker  # noqa: SLF001
        assert worker.loads is not None
        assert (worker.loads.read_file is not None) is (kernels == "cpp")


def test_files_that_have_changed_since_the_check_are_not_read(engine: Engine, adapter: AdapterLayout) -> None:
    adapter.file.touch()
    with pytest.raises(NotInPlace):
        SlabInPlace(adapter, engine.diagnostics.linears.layout(adapter.rank))


def test_no_file_stays_open(engine: Engine, adapter: AdapterLayout) -> None:
    layout = engine.diagnostics.linears.layout(adapter.rank)
    before = psutil.Process().num_fds()
    ended, given_up = SlabInPlace(adapter, layout), SlabInPlace(adapter, layout)
    run_of_it = torch.zeros(layout.bytes, dtype=torch.uint8).numpy()
    ended.read(run_of_it, inf)
    given_up.read(run_of_it, 100)
    given_up.give_up()
    adapter.file.with_name(adapter.slab).write_bytes(b"")
    with pytest.raises(NotInPlace):
        SlabInPlace(adapter, layout)
    assert psutil.Process().num_fds() == before


def test_a_load_that_is_given_up_half_way_closes_its_file(
    engine: Engine, adapter: AdapterLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 1000)
    loads = Loads(engine, adapter)
    before = psutil.Process().num_fds()
    assert loads.advance(begin=True, hurry=False) is None
    assert psutil.Process().num_fds() == before + 1
    loads.loads.advance([], {}, hurry=False)
    assert psutil.Process().num_fds() == before


def test_what_this_process_has_written_is_not_compared_as_a_whole_again(engine: Engine, adapter: AdapterLayout) -> None:
    adapter.file.with_name(adapter.slab).unlink()
    assert write(engine, adapter)
    with patch.object(slab, "_checksum", side_effect=AssertionError("it is known")), no_thread():
        assert Loads(engine, adapter).advance(begin=True) is not None


def test_an_engine_answers_the_same_from_a_slab_in_place(llama: Path, adapter: AdapterLayout) -> None:
    answers = []
    for known in (False, True):
        one = make_engine(llama)
        if not known:
            cached_files._known.clear()  # noqa: SLF001
        one.load_adapter(A, adapter)
        ran = run(one, ask("a", adapter=A))
        answers.append(ran.tokens["a"])
        assert [event.lacks_slab for event in ran.events if isinstance(event, AdapterLoaded)] == [False]
    assert answers[0] == answers[1]
