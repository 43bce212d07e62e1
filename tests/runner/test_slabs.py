"""An adapter's slab holds what its load makes of the checked bytes, bit for bit. One that is not what was written for
this adapter and this engine is never used, and loses nothing."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch

from motet.domain import Digest
from motet.errors import AdapterFetchFailed
from motet_runner.adapters import slab
from motet_runner.adapters.certification import certify
from motet_runner.adapters.host_load import HostLoad
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.slab import MAX_SLABS, has_slab, size_of_slabs
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


def write(engine: Engine, adapter: AdapterLayout, number: int = 1) -> int:
    engine.write_slab(number, adapter)
    deadline = time.monotonic() + 20
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
    deadline = time.monotonic() + 20
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
    for from_slab in (False, True):
        one = make_engine(base)
        one.load_adapter(A, adapter)
        ran = run(one, ask("a", adapter=A))
        answers.append(ran.tokens["a"])
        assert [event.from_slab for event in ran.events if isinstance(event, AdapterLoaded)] == [from_slab]
        assert write(one, adapter)
    assert answers[0] == answers[1]


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


def test_there_are_few_slabs_of_one_adapter_and_old_drafts_go(engine: Engine, adapter: AdapterLayout) -> None:
    folder = adapter.file.parent
    draft, fresh = folder / f".slab-{'1' * 32}.bin-1-1", folder / f".slab-{'2' * 32}.bin-1-1"
    for one in (draft, fresh):
        one.write_bytes(b"left")
    os.utime(draft, (1, 1))
    adapters = [adapter.with_slab("digest", "base", number, "layout") for number in range(MAX_SLABS + 2)]
    for number, one in enumerate(adapters):
        assert write(engine, one, number)
        os.utime(folder / one.slab, (number + 10, number + 10))
    assert {path.name for path in size_of_slabs(folder)} == {fresh.name, *(one.slab for one in adapters[2:])}


def test_an_adapter_that_cannot_be_read_ends_only_its_own_order(
    base: Path, engine: Engine, adapter: AdapterLayout, tmp_path: Path
) -> None:
    other = checked(base, engine, tmp_path / "other", SPECS["plain"], seed=2)
    adapter.file.unlink()
    engine.write_slab(1, adapter)
    engine.write_slab(2, other)
    ended: list[tuple[int, bool]] = []
    deadline = time.monotonic() + 20
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
    one = make_engine(base)
    adapters = [checked(base, engine, tmp_path / str(number), SPECS["plain"], seed=number) for number in range(3)]
    for number, adapter in enumerate(adapters):
        one.load_adapter(Digest(str(number)), adapter)
    made: list[int] = []
    before = np.zeros

    def zeros(size: object, *given: object, **more: object) -> object:
        if size == one.diagnostics.linears.layout(adapters[0].rank).bytes:
            made.append(1)
        return before(size, *given, **more)

    with patch("motet_runner.adapters.host_load.np.zeros", zeros):
        answers = run(one, *(ask(str(number), adapter=Digest(str(number))) for number in range(3))).tokens
    assert len(made) == (0 if device_of("torch").type == "cuda" else 1)
    alone = [run(fresh(base, adapter), ask(str(number), adapter=A)).tokens for number, adapter in enumerate(adapters)]
    assert [answers[str(number)] for number in range(3)] == [one[str(number)] for number, one in enumerate(alone)]


def fresh(base: Path, adapter: AdapterLayout) -> Engine:
    engine = make_engine(base)
    engine.load_adapter(A, adapter)
    return engine
