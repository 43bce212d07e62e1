"""An adapter's slab holds what its load makes of the checked bytes, bit for bit. One that is not what was written for
this adapter and this engine is never used, and loses nothing."""

import errno
import fcntl
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch

from motet.domain import Digest
from motet.errors import AdapterFetchFailed
from motet_kernels import LinearGroup, RunLayout
from motet_kernels.int8_layout import int8_layout
from motet_runner.adapters import slab, slab_writer
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import certify
from motet_runner.adapters.host_load import HostLoad
from motet_runner.adapters.layout import SLAB_VERSION, AdapterLayout, FileStamp
from motet_runner.adapters.slab import MAX_SLABS, size_of_slabs, write_slab
from motet_runner.adapters.slab_writer import SlabWriter
from motet_runner.engine import Engine
from motet_runner.interface import AdapterLoaded
from tests.runner.engines import ask, device_of, make_engine, run
from tests.runner.random_models import RandomAdapter, save_adapter, save_base

A = Digest("A")
SPECS = {
    "plain": RandomAdapter(8, 16),
    "of two linears": RandomAdapter(4, 8, targets=("q_proj", "v_proj")),
    "dora": RandomAdapter(6, 6, dora=True),
    "biases": RandomAdapter(8, 8, lora_bias=True, targets=("q_proj", "down_proj")),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def engine(base: Path) -> Engine:
    return make_engine(base)


@pytest.fixture
def adapter(base: Path, engine: Engine, tmp_path: Path) -> AdapterLayout:
    return checked(base, engine, tmp_path / "adapter", SPECS["plain"])


def checked(base: Path, engine: Engine, folder: Path, spec: RandomAdapter, seed: int = 0) -> AdapterLayout:
    save_adapter(base, "llama", spec, folder, seed=seed)
    return certify(folder, engine.info).layout.with_slab("digest", "base", 1, engine.info.run_layout)


def has_slab(adapter: AdapterLayout) -> bool:
    return adapter.file.with_name(adapter.slab).exists()


def write(engine: Engine, adapter: AdapterLayout, number: int = 1) -> int:
    engine.write_slab(number, adapter)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if ended := engine.slabs_written():
            assert [one.number for one in ended] == [number]
            return ended[0].bytes
        assert engine.idle() is not None, "it asks to be called again"
        time.sleep(0.01)
    raise TimeoutError


def load(engine: Engine, adapter: AdapterLayout, memory: torch.Tensor | None = None) -> HostLoad:
    linears = engine.diagnostics.linears
    host = HostLoad(adapter, linears.layout(adapter.rank), linears.base, pinned=False, memory=memory)
    deadline = time.monotonic() + 120
    host.allow(float("inf"))
    while not host.ended(0.1):
        host.allow(float("inf"))
        assert time.monotonic() < deadline
    return host


def used(engine: Engine) -> torch.Tensor:
    """Host memory that an earlier load has left"""
    return torch.full((engine.diagnostics.linears.layout(64).bytes,), 77, dtype=torch.uint8)


def same(one: HostLoad, other: HostLoad) -> bool:
    assert one.run is not None
    assert other.run is not None
    parts = (one.linears, one.scales, one.read_bytes) == (other.linears, other.scales, other.read_bytes)
    return parts and bool(torch.equal(one.run, other.run))


@pytest.mark.parametrize("spec", SPECS)
def test_a_load_from_the_slab_gives_the_same_bytes_as_one_from_the_checked_bytes(
    base: Path, engine: Engine, tmp_path: Path, spec: str
) -> None:
    adapter = checked(base, engine, tmp_path, SPECS[spec])
    expected = load(engine, adapter)
    assert not expected.from_slab
    assert write(engine, adapter) == sum(size_of_slabs(tmp_path).values())
    for memory in (None, used(engine)):
        found = load(engine, adapter, memory)
        assert found.from_slab
        assert same(found, expected)
    assert not load(engine, replace(adapter, slab=""), used(engine)).from_slab
    assert same(load(engine, replace(adapter, slab=""), used(engine)), expected)


def test_an_engine_serves_from_slabs_and_says_where_they_are_missing(
    base: Path, adapter: AdapterLayout, tmp_path: Path
) -> None:
    answers = []
    for lacks_slab in (True, False):
        one = make_engine(base)
        one.load_adapter(A, adapter)
        ran = run(one, ask("a", adapter=A))
        answers.append(ran.tokens["a"])
        assert [event.lacks_slab for event in ran.events if isinstance(event, AdapterLoaded)] == [lacks_slab]
        assert write(one, adapter)
    assert answers[0] == answers[1]


def test_what_a_load_has_made_of_the_checked_bytes_is_the_slab_and_is_not_made_again(
    base: Path, engine: Engine, adapter: AdapterLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(engine, adapter)
    slab = adapter.file.with_name(adapter.slab)
    expected = slab.read_bytes()
    slab.unlink()
    one = make_engine(base)
    one.load_adapter(A, adapter)
    run(one)
    monkeypatch.setattr(slab_writer, "HostLoad", None)
    assert write(one, adapter)
    assert slab.read_bytes() == expected


def test_loads_offer_no_more_memory_than_is_kept_for_slabs(
    engine: Engine, adapter: AdapterLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, host = SlabWriter(engine.diagnostics.linears.layout), load(engine, adapter)
    assert host.memory is not None
    monkeypatch.setattr(slab_writer, "MAX_OFFERED_BYTES", 3 * len(host.memory))
    names = [replace(adapter, slab=f"slab-{number}") for number in range(5)]
    assert all(writer.offer(one, host) for one in names)
    assert [*vars(writer)["_offered"]] == ["slab-2", "slab-3", "slab-4"]
    monkeypatch.setattr(slab_writer, "MAX_OFFERED_BYTES", len(host.memory) - 1)
    assert not writer.offer(adapter, host)
    assert len(vars(writer)["_offered"]) == 3


def test_a_slab_holds_no_long_stretch_of_zeros(base: Path, engine: Engine, tmp_path: Path) -> None:
    run_bytes = engine.diagnostics.linears.layout(16).bytes
    whole = checked(base, engine, tmp_path / "whole", RandomAdapter(16, 16))
    part = checked(base, engine, tmp_path / "part", RandomAdapter(16, 16, targets=("down_proj",)))
    assert run_bytes < write(engine, whole) <= engine.info.slab_bytes(whole.rank)
    with patch.object(slab, "_BLOCK", 64):
        small = write(engine, part)
        assert small < run_bytes / 2
        assert same(load(engine, part, used(engine)), load(engine, replace(part, slab="")))


def damaged(number: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[number] ^= 4
        status = path.stat()
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return flip


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def only_a_head(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def swapped(path: Path) -> None:
    """The sum of all words is the same."""
    content = bytearray(path.read_bytes())
    content[-64:-56], content[-56:-48] = content[-56:-48], content[-64:-56]
    assert content != path.read_bytes()
    path.write_bytes(content)
    os.utime(path, (1, 1))


DAMAGES = {
    "words in another order": swapped,
    "magic": damaged(0),
    "key": damaged(12),
    "run bytes": damaged(24),
    "scales": damaged(32),
    "linears": damaged(33),
    "parts": damaged(37),
    "marks": damaged(41),
    "a part's place": damaged(46),
    "a byte": damaged(-200),
    "the last byte": damaged(-1),
    "truncated": cut,
    "only a head": only_a_head,
    "empty": empty,
    "longer": longer,
}


@pytest.mark.parametrize("seen", [False, True], ids=["new", "loaded before"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_slab_is_found_removed_and_written_again(
    engine: Engine, adapter: AdapterLayout, damage: str, seen: bool
) -> None:
    expected = load(engine, adapter)
    assert write(engine, adapter)
    file = adapter.file.with_name(adapter.slab)
    whole = file.read_bytes()
    beside = file.with_name(f"slab-{'0' * 32}.bin")
    beside.write_bytes(b"of another engine")
    if seen:
        os.utime(file, (1, 1))
        assert load(engine, adapter).from_slab
        assert load(engine, adapter).from_slab, "only sums are compared"
    DAMAGES[damage](file)
    found = load(engine, adapter, used(engine))
    assert not found.from_slab
    assert same(found, expected)
    assert not has_slab(adapter)
    assert beside.exists(), "that of another layout stays"
    assert write(engine, adapter) == len(whole)
    assert file.read_bytes() == whole
    assert load(engine, adapter).from_slab


def test_a_disk_that_gives_other_bytes_without_a_write_is_found_out(engine: Engine, adapter: AdapterLayout) -> None:
    """As if a block of the disk had changed: no time of the file has."""
    assert write(engine, adapter)
    expected = load(engine, adapter)
    assert expected.from_slab
    fill = slab.Slab._fill  # noqa: SLF001

    def filled(self: slab.Slab, into: memoryview, at: int) -> None:
        fill(self, into, at)
        into[5] ^= 1

    with patch.object(slab.Slab, "_fill", filled):
        found = load(engine, adapter)
    assert not found.from_slab
    assert same(found, expected)


def test_the_writer_replaces_a_damaged_slab_that_nobody_has_loaded(engine: Engine, adapter: AdapterLayout) -> None:
    assert write(engine, adapter)
    file = adapter.file.with_name(adapter.slab)
    damaged(3)(file)
    assert write(engine, adapter)
    assert load(engine, adapter).from_slab


Wrong = Callable[..., Any]


def half(write: Wrong, adapter: Any, run: Any, *rest: Any, **named: Any) -> int:
    run = run.copy()
    run[len(run) // 2 :] = 0
    return int(write(adapter, run, *rest, **named))


def last_byte(write: Wrong, adapter: Any, run: Any, *rest: Any, **named: Any) -> int:
    run = run.copy()
    run[np.flatnonzero(run)[-1]] ^= 1
    return int(write(adapter, run, *rest, **named))


def shifted(write: Wrong, adapter: Any, run: Any, *rest: Any, **named: Any) -> int:
    return int(write(adapter, np.roll(run, 16), *rest, **named))


def of_a_neighbour(write: Wrong, adapter: Any, run: Any, *rest: Any, **named: Any) -> int:
    return int(write(adapter, run[::-1].copy(), *rest, **named))


def more_than_there_is(write: Wrong, adapter: Any, run: Any, *rest: Any, **named: Any) -> int:
    run = run.copy()
    run[np.flatnonzero(run == 0)[0]] = 1
    return int(write(adapter, run, *rest, **named))


def a_linear_less(write: Wrong, adapter: Any, run: Any, linears: Any, changed: Any, **named: Any) -> int:
    return int(write(adapter, run, linears, frozenset(sorted(changed)[1:]), **named))


def linears_in_another_order(write: Wrong, adapter: Any, run: Any, linears: Any, changed: Any, **named: Any) -> int:
    changed = frozenset(sorted(changed)[:3])
    return int(write(adapter, run, linears[::-1], changed, **named))


def with_scales(write: Wrong, *rest: Any, scales: bool, **named: Any) -> int:
    return int(write(*rest, scales=not scales, **named))


WRONG = [
    half,
    last_byte,
    shifted,
    of_a_neighbour,
    more_than_there_is,
    a_linear_less,
    linears_in_another_order,
    with_scales,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_writer_with_a_defect_leaves_no_slab(engine: Engine, adapter: AdapterLayout, wrong: Wrong) -> None:
    """A proof has seen what a load makes of the checked bytes, and sees no load from a slab."""
    with patch.object(slab_writer, "write_slab", partial(wrong, write_slab)):
        assert write(engine, adapter) == 0
    assert not size_of_slabs(adapter.file.parent)
    assert [one.name for one in adapter.file.parent.iterdir() if slab.is_slab(one.name)] == []
    assert write(engine, adapter)
    assert load(engine, adapter).from_slab


@pytest.mark.parametrize("defect", ["parts", "sums"])
def test_a_slab_that_is_composed_wrongly_is_not_kept(engine: Engine, adapter: AdapterLayout, defect: str) -> None:
    real = vars(slab)["_parts_of"]

    def parts(run: Any) -> Iterator[slab.Part]:
        found = list(real(run))
        if defect == "parts":
            found[-1:] = [found[-1]._replace(begin=found[-1].begin + 1, size=found[-1].size - 1)]
        else:
            found[0] = found[0]._replace(checksum=found[0].checksum ^ 1)
        return iter(found)

    with patch.object(slab, "_parts_of", parts):
        assert write(engine, adapter) == 0
    assert [one.name for one in adapter.file.parent.iterdir() if slab.is_slab(one.name)] == []


def test_the_slab_of_another_adapter_is_not_believed(base: Path, engine: Engine, tmp_path: Path) -> None:
    one = checked(base, engine, tmp_path / "one", SPECS["plain"])
    other = checked(base, engine, tmp_path / "other", SPECS["plain"], seed=9)
    assert one.slab != other.slab
    assert write(engine, one)
    shutil.copyfile(one.file.with_name(one.slab), other.file.with_name(other.slab))
    expected = load(engine, replace(other, slab=""))
    assert same(load(engine, other), expected)
    assert not has_slab(other)


def test_the_name_depends_on_all_that_the_bytes_depend_on(adapter: AdapterLayout) -> None:
    given = ("digest", "base", 1, "layout")
    others = [tuple("other" if at == number else one for at, one in enumerate(given)) for number in range(4)]
    names = {adapter.with_slab(*one).slab for one in (given, *others)}
    names |= {replace(adapter, rank=32).with_slab(*given).slab}
    names |= {replace(adapter, linears_file="layout-other").with_slab(*given).slab}
    names |= {replace(adapter, stamp=adapter.stamp._replace(inode=1)).with_slab(*given).slab}
    assert len(names) == 8


def test_damage_that_is_found_late_does_not_change_what_is_on_its_way_to_the_device(
    base: Path, engine: Engine, tmp_path: Path
) -> None:
    """The first parts are right, so they may be copied before the last one is read."""
    adapter = checked(base, engine, tmp_path, SPECS["dora"])
    expected = load(engine, adapter)
    with patch.object(slab, "MAX_PART_BYTES", slab._BLOCK):  # noqa: SLF001
        assert write(engine, adapter)
    damaged(-1)(adapter.file.with_name(adapter.slab))
    copied: list[tuple[int, bytes]] = []
    before = HostLoad._read_checked  # noqa: SLF001

    def read(self: HostLoad, into: torch.Tensor) -> None:
        copied.append((self.read_bytes, into[: self.read_bytes].numpy().tobytes()))
        before(self, into)

    with patch.object(HostLoad, "_read_checked", read):
        found = load(engine, adapter, used(engine))
    ((count, of_slab),) = copied
    assert count > 0
    assert expected.run is not None
    assert of_slab == expected.run[:count].numpy().tobytes()
    assert same(found, expected)


def test_files_that_have_changed_are_not_served_from_their_slab(engine: Engine, adapter: AdapterLayout) -> None:
    assert write(engine, adapter)
    adapter.file.touch()
    with pytest.raises(AdapterFetchFailed, match="has changed"):
        load(engine, adapter)


def test_files_that_have_changed_get_no_slab(engine: Engine, adapter: AdapterLayout) -> None:
    adapter.file.touch()
    assert write(engine, adapter) == 0
    assert size_of_slabs(adapter.file.parent) == {}


def test_a_slab_of_a_folder_that_is_replaced_meanwhile_goes_with_the_old_folder(
    engine: Engine, adapter: AdapterLayout, tmp_path: Path
) -> None:
    folder, gone = adapter.file.parent, tmp_path / "gone"
    contents = slab._contents  # noqa: SLF001

    def replaced(*given: object, **more: object) -> object:
        folder.rename(gone)
        shutil.copytree(gone, folder, ignore=shutil.ignore_patterns(".*"))
        return contents(*given, **more)

    with patch.object(slab, "_contents", replaced):
        assert write(engine, adapter)
    assert size_of_slabs(folder) == {}
    assert len(size_of_slabs(gone)) == 1


@pytest.mark.parametrize("call", ["open", "write", "rename"])
def test_on_a_full_disk_the_adapter_serves_and_no_draft_stays(
    engine: Engine, adapter: AdapterLayout, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    expected = load(engine, adapter)
    full = OSError(errno.ENOSPC, "No space left on device")
    if call == "write":

        def contents(*_: object, **__: object) -> object:
            yield b"x"
            raise full

        monkeypatch.setattr(slab, "_contents", contents)
    else:
        real = getattr(os, call)

        def fails(path: object, *given: object, **more: object) -> object:
            if str(path).startswith(".slab-"):
                raise full
            return real(path, *given, **more)

        monkeypatch.setattr(os, call, fails)
    assert write(engine, adapter) == 0
    assert size_of_slabs(adapter.file.parent) == {}
    monkeypatch.undo()
    assert same(load(engine, adapter), expected)
    assert write(engine, adapter)


def test_there_are_few_slabs_of_one_adapter(engine: Engine, adapter: AdapterLayout) -> None:
    folder = adapter.file.parent
    adapters = [adapter.with_slab("digest", "base", number, "layout") for number in range(MAX_SLABS + 2)]
    for number, one in enumerate(adapters):
        assert write(engine, one, number)
        os.utime(folder / one.slab, (number + 10, number + 10))
    assert {path.name for path in size_of_slabs(folder)} == {one.slab for one in adapters[-MAX_SLABS:]}


def test_a_new_slab_stays_whatever_the_times_of_the_others(engine: Engine, adapter: AdapterLayout) -> None:
    later = time.time() + 1000
    for number in range(MAX_SLABS):
        other = adapter.file.with_name(f"slab-{number:032}.bin")
        other.write_bytes(b"of a machine whose clock is ahead")
        os.utime(other, (later, later))
    assert write(engine, adapter)
    assert has_slab(adapter)
    assert len(size_of_slabs(adapter.file.parent)) == MAX_SLABS


def test_drafts_whose_process_has_ended_go_at_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 64)
    folder.mkdir()
    left, written = folder / ".slab-left", folder / ".slab-written"
    left.write_bytes(b"left")
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        DiskCache(tmp_path, max_adapter_bytes=1).prepare()
        assert list(folder.iterdir()) == [written]
    DiskCache(tmp_path, max_adapter_bytes=1).prepare()
    assert list(folder.iterdir()) == []


def test_a_draft_is_locked_while_it_is_written(engine: Engine, adapter: AdapterLayout) -> None:
    contents = slab._contents  # noqa: SLF001
    drafts: list[int] = []

    def begun(*given: Any, **more: Any) -> Iterator[bytes | memoryview]:
        for part in contents(*given, **more):
            slab.remove_drafts(adapter.file.parent)
            drafts.append(len(size_of_slabs(adapter.file.parent)))
            yield part

    with patch.object(slab, "_contents", begun):
        assert write(engine, adapter)
    assert drafts
    assert set(drafts) == {1}


def test_the_names_of_drafts_are_no_ones_else(engine: Engine, adapter: AdapterLayout) -> None:
    """In containers, the processes of two runners may have the same number."""
    names: list[str] = []
    rename = os.rename

    def renamed(path: str, *given: Any, **more: Any) -> None:
        names.append(path)
        rename(path, *given, **more)

    with patch.object(os, "rename", renamed):
        for _ in range(2):
            assert write(engine, adapter)
            adapter.file.with_name(adapter.slab).unlink()
    assert len(set(names)) == 2
    assert all(str(os.getpid()) not in name.removeprefix(f".{adapter.slab}").split("-") for name in names)


def test_on_a_disk_that_is_nearly_full_nothing_is_even_converted(engine: Engine, adapter: AdapterLayout) -> None:
    disk = os.statvfs(adapter.file)
    free = slab.MAX_FREE_BYTES + 5 * engine.info.slab_bytes(adapter.rank)
    blocks = -(-free // disk.f_frsize)

    def nearly_full(_: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=left, f_frsize=disk.f_frsize, f_blocks=100 * slab.FREE_SHARE * blocks)

    with patch.object(os, "statvfs", nearly_full), patch.object(slab_writer, "HostLoad", wraps=HostLoad) as loads:
        left = slab.MAX_FREE_BYTES // disk.f_frsize
        assert write(engine, adapter) == 0
        assert not loads.called
        left = blocks
        assert write(engine, adapter)


def test_a_damaged_slab_that_cannot_be_removed_is_not_asked_for_again(engine: Engine, adapter: AdapterLayout) -> None:
    expected = load(engine, adapter)
    assert expected.lacks_slab
    assert write(engine, adapter)
    assert not load(engine, adapter).lacks_slab
    damaged(-1)(adapter.file.with_name(adapter.slab))
    with patch.object(Path, "unlink", side_effect=OSError(errno.EROFS, "Read-only file system")):
        found = load(engine, adapter)
    assert not found.lacks_slab
    assert same(found, expected)
    assert load(engine, adapter).lacks_slab, "now it is removed"


def test_to_find_the_parts_of_a_run_takes_little_memory() -> None:
    run = np.ones(64 << 20, np.uint8)
    tracemalloc.start()
    try:
        parts = list(slab._parts_of(run))  # noqa: SLF001
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(part.size for part in parts) == len(run)
    assert most < 8 << 20


def test_engines_of_other_kernels_share_no_slabs(base: Path, engine: Engine) -> None:
    """DoRA's numbers come from a product with the base, which exact kernels compute in another order."""
    exact = make_engine(base, kernels="exact")
    assert exact.info.run_layout.endswith(", kernels exact")
    assert engine.info.run_layout.endswith(", kernels torch")


GOLDEN = {
    "of 16 bits": "1e1d72246e257469eea17230b25156d2bf65176005894859e482b2140d1752c4",
    "of 8 bits": "37b083e97796182a2ef70064b2b7be680f02d2b37a4bd448de95e29b6c10faf0",
}
"""What is in the files of SLAB_VERSION 2"""


@pytest.mark.parametrize("kind", GOLDEN)
def test_what_is_in_a_slab_changes_only_with_its_version(tmp_path: Path, kind: str) -> None:
    """If this fails: is a slab that an earlier version has written still right? If not, count SLAB_VERSION up."""
    groups = [LinearGroup(32, {"q": 16, "k": 8}), LinearGroup(16, {"down": 64}), LinearGroup(8, {"none": 65536})]
    layout = (int8_layout if kind == "of 8 bits" else RunLayout)(16, groups, torch.bfloat16)
    run = torch.zeros(layout.bytes, dtype=torch.uint8)
    for number, (linear, inputs, outputs) in enumerate((("q", 32, 16), ("k", 32, 8), ("down", 16, 64))):
        a = torch.arange(4 * inputs, dtype=torch.float32).reshape(4, inputs) / 64 - number
        b = torch.arange(outputs * 4, dtype=torch.float32).reshape(outputs, 4) / 32 + number
        layout.write(run, linear, a.to(torch.bfloat16), b.to(torch.bfloat16), 0.5)
    layout.write_scaling(run, "k", torch.arange(8) / 8, torch.arange(8) / 4)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"checked")
    adapter = replace(AdapterLayout.of(file, FileStamp.of(file), 16, ()), slab=f"slab-{'5a' * 16}.bin")
    write_slab(adapter, run.numpy(), list(layout.offsets), frozenset(("q", "k", "down")), scales=True)
    content = file.with_name(adapter.slab).read_bytes()
    assert (SLAB_VERSION, sha256(content).hexdigest()) == (2, GOLDEN[kind])


def test_an_adapter_that_cannot_be_read_ends_only_its_own_order(
    base: Path, engine: Engine, adapter: AdapterLayout, tmp_path: Path
) -> None:
    other = checked(base, engine, tmp_path / "other", SPECS["plain"], seed=2)
    adapter.file.unlink()
    engine.write_slab(1, adapter)
    engine.write_slab(2, other)
    ended: list[tuple[int, bool]] = []
    deadline = time.monotonic() + 120
    while len(ended) < 2 and time.monotonic() < deadline:
        ended += [(one.number, one.bytes > 0) for one in engine.slabs_written()]
        time.sleep(0.01)
    assert ended == [(1, False), (2, True)]


def test_no_file_stays_open(engine: Engine, adapter: AdapterLayout) -> None:
    assert write(engine, adapter)
    damaged(-1)(adapter.file.with_name(adapter.slab))
    load(engine, adapter)
    write(engine, adapter)
    load(engine, adapter)
    assert not [one for one in psutil.Process().open_files() if Path(one.path).parent == adapter.file.parent]


def test_the_next_load_takes_the_memory_of_the_last_one(base: Path, engine: Engine, tmp_path: Path) -> None:
    """If no slab is to be written of it"""
    one = make_engine(base)
    folders = [tmp_path / str(number) for number in range(3)]
    each = [checked(base, engine, folder, SPECS["plain"], seed=number) for number, folder in enumerate(folders)]
    adapters = [replace(adapter, slab="") for adapter in each]
    for number, adapter in enumerate(adapters):
        one.load_adapter(Digest(str(number)), adapter)
    made: list[int] = []
    before = np.zeros

    def zeros(size: object, *given: object, **more: object) -> object:
        if size == one.diagnostics.linears.layout(adapters[0].rank).bytes:
            made.append(1)
        return before(size, *given, **more)

    with patch("motet_runner.adapters.host_load.np.zeros", zeros):
        run(one)  # nobody waits for them, so they load one after the other
        answers = run(one, *(ask(str(number), adapter=Digest(str(number))) for number in range(3))).tokens
    assert len(made) == (0 if device_of("torch").type == "cuda" else 1)
    alone = [run(fresh(base, adapter), ask(str(number), adapter=A)).tokens for number, adapter in enumerate(adapters)]
    assert [answers[str(number)] for number in range(3)] == [one[str(number)] for number, one in enumerate(alone)]


def fresh(base: Path, adapter: AdapterLayout) -> Engine:
    engine = make_engine(base)
    engine.load_adapter(A, adapter)
    return engine
