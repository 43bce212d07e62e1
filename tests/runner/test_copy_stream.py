"""Adapters are copied to a device beside its computation, and are there only when their copies have ended (PU-07)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from motet.domain import Digest
from motet_runner.engine import Engine
from motet_runner.execute.adapters.adapter_uploads import (
    HURRY_SECONDS,
    SILENT_SECONDS,
    AdapterLoads,
    LoadResults,
)
from motet_runner.execute.adapters.load_pace import SHARE
from motet_runner.memory.copy_stream import CopyStream, OwnStream
from motet_runner.plan import AdapterLoad
from tests.runner.engines import ask, load, make_device_engine, make_local_engine, run, step_beside_load
from tests.support.late_copies import LateCopies

A = Digest("A")


@pytest.fixture
def stream() -> Iterator[LateCopies]:
    late = LateCopies()
    with patch("motet_runner.engine.copy_stream_for", lambda _: late):
        yield late


@pytest.mark.parametrize("make", [make_local_engine, make_device_engine])
def test_a_sequence_waits_for_the_end_of_its_adapters_copies_and_nobody_else_does(
    llama: Path, adapters: list[Path], stream: LateCopies, make: type[Engine]
) -> None:
    expected = run_alone(llama, adapters[0])
    engine = make(llama)
    ran = run(engine, ask("other", max_tokens=300), steps=2)
    load(engine, A, adapters[0])
    engine.add(ask("tuned", adapter=A))
    for _ in range(40):
        step_beside_load(engine, ran)
    assert stream.launched
    assert not stream.ended
    assert "tuned" not in ran.tokens
    assert len(ran.tokens["other"]) > 30
    stream.end()
    run(engine, ran=ran)
    assert ran.tokens["tuned"] == expected


def run_alone(llama: Path, adapter: Path) -> list[int]:
    with patch("motet_runner.engine.copy_stream_for", lambda _: CopyStream()):
        engine = make_local_engine(llama)
    load(engine, A, adapter)
    return run(engine, ask("tuned", adapter=A)).tokens["tuned"]


class Host(SimpleNamespace):
    @property
    def progress(self) -> int:
        return self.read_bytes  # type: ignore[no-any-return]


def read_host(waits: list[float] | None = None) -> SimpleNamespace:
    """An adapter of 64 bytes, all of which are in host memory. `waits`: for how long its end was waited for"""
    return Host(
        allow=lambda _: None,
        ended=lambda wait=0.0: waits is None or waits.append(wait) is None,
        cpu_seconds=0.0,
        give_up=lambda: None,
        run=torch.ones(64, dtype=torch.uint8),
        read_bytes=64,
        layout=SimpleNamespace(bytes=64, rank=8),
        linears=frozenset({"q"}),
        memory=None,
        lacks_slab=True,
        from_slab=False,
        scales=False,
    )


def loads_of(stream: CopyStream, waits: list[float] | None = None) -> AdapterLoads:
    """`waits`: each of them takes its time."""
    layout = SimpleNamespace(bytes=64)
    clock = partial(sum, [] if waits is None else waits)
    return AdapterLoads(torch.zeros(4, 64, dtype=torch.uint8), lambda _: layout, clock, stream=stream)


def begun(stream: LateCopies) -> AdapterLoads:
    """An adapter of 64 bytes, all of which are on their way to page 2"""
    host, loads = read_host(), loads_of(stream)
    with patch("motet_runner.execute.adapters.adapter_uploads.HostLoad", lambda *_, **__: host):
        assert not loads.advance([AdapterLoad(1, A, SimpleNamespace(rank=8, slab=""))], {1: 2}, hurry=False).arrived
    assert stream.launched == 1
    assert not stream.ended
    return loads


def begin_three(loads: AdapterLoads, hosts: list[SimpleNamespace], *, hurry: bool) -> LoadResults:
    """In pages 1 to 3; the last one is the first in the plan."""
    three = [AdapterLoad(number, Digest(str(number)), SimpleNamespace(rank=8, slab="")) for number in (1, 2, 3)]
    with patch("motet_runner.execute.adapters.adapter_uploads.HostLoad", lambda *_, **__: hosts.pop(0)):
        return loads.advance(three, {3: 3, 1: 1, 2: 2}, hurry=hurry)


def test_loads_share_what_one_iteration_copies_and_the_plan_says_which_comes_first(monkeypatch) -> None:
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 96)
    loads = loads_of(CopyStream())
    begun = begin_three(loads, [read_host() for _ in range(3)], hurry=False)
    assert [one.number for one in begun.arrived] == [3]
    assert loads.memory.sum(1).tolist() == [0, 32, 0, 64]
    assert [one.number for one in loads.advance([], {1: 1, 2: 2}, hurry=False).arrived] == [1, 2]
    assert loads.memory.sum(1).tolist() == [0, 64, 64, 64]


def test_loads_share_what_one_iteration_reads(monkeypatch) -> None:
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 96)
    allowed: list[tuple[int, float]] = []
    hosts = [read_host() for _ in range(3)]
    for number, host in enumerate(hosts, 1):
        host.read_bytes = 0
        host.allow = lambda size, number=number: allowed.append((number, size))
    loads = loads_of(CopyStream())
    begin_three(loads, hosts, hurry=False)
    assert allowed == [(3, 96), (1, 32), (2, 0)]
    allowed.clear()
    loads.advance([], {3: 3, 1: 1, 2: 2}, hurry=False)
    assert allowed == [(3, 96), (1, 96), (2, 96)], "who has read nothing since leaves it to the others"


def test_in_a_hurry_one_load_is_waited_for_and_all_are_copied() -> None:
    waits: list[float] = []
    hosts = [read_host(waits) for _ in range(3)]
    assert len(begin_three(loads_of(CopyStream(), waits), hosts, hurry=True).arrived) == 3
    assert sum(waits) == HURRY_SECONDS


def test_an_iteration_waits_once_for_new_loads_that_it_may_read_whole(monkeypatch) -> None:
    """One in the page cache arrives with the plan that begins it. A disk takes longer, and nobody waits again."""
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 150)
    waits: list[list[float]] = [[], [], []]
    hosts = [read_host(one) for one in waits]
    for host in hosts:
        host.read_bytes = 0
    loads = loads_of(CopyStream())
    loads.pace.iterated(1.0)
    begin_three(loads, [*hosts], hurry=False)
    assert waits == [[SHARE], [0], [SHARE]], "two may be read whole"
    loads.advance([], {3: 3, 1: 1, 2: 2}, hurry=False)
    assert waits == [[SHARE, 0], [0, 0], [SHARE, 0]]


def test_new_loads_share_what_an_iteration_waits() -> None:
    waits: list[float] = []
    hosts = [read_host(waits) for _ in range(3)]
    loads = loads_of(CopyStream(), waits)
    loads.pace.iterated(1.0)
    assert len(begin_three(loads, hosts, hurry=False).arrived) == 3
    assert (waits[0], sum(waits)) == (SHARE, SHARE)


def test_a_load_that_fails_when_a_part_of_it_was_copied_ends(monkeypatch) -> None:
    host, loads = read_host(), loads_of(CopyStream())
    host.read_bytes = 32
    with patch("motet_runner.execute.adapters.adapter_uploads.HostLoad", lambda *_, **__: host):
        assert not loads.advance([AdapterLoad(1, A, SimpleNamespace(rank=8, slab=""))], {1: 2}, hurry=False).failed
    host.ended = Mock(side_effect=OSError("the disk"))
    assert [one.number for one in loads.advance([], {1: 2}, hurry=False).failed] == [1]


def test_a_load_is_silent_once_its_disk_has_not_answered_for_long_though_it_may_read(monkeypatch) -> None:
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 64)
    passed: list[float] = []
    hosts = [read_host() for _ in range(3)]
    for host in hosts:
        host.read_bytes = 0
    loads = loads_of(CopyStream(), passed)
    three = {3: 3, 1: 1, 2: 2}
    assert not begin_three(loads, [*hosts], hurry=False).silent
    hosts[0].layout = SimpleNamespace(bytes=200, rank=8)  # it takes all that there is, as long as it reads
    silent = []
    for _ in range(3):
        passed.append(SILENT_SECONDS)
        hosts[0].read_bytes += 1
        silent.append(loads.advance([], three, hurry=False).silent)
    assert silent == [(3,), (), ()], "the second one may read nothing"
    for silent in ((1,), (2,), ()):
        passed.append(SILENT_SECONDS)
        assert loads.advance([], three, hurry=False).silent == silent


def test_it_has_arrived_once_when_its_copies_have_ended() -> None:
    stream = LateCopies()
    loads = begun(stream)
    assert not loads.advance([], {1: 2}, hurry=False).arrived
    stream.end()
    assert [one.number for one in loads.advance([], {1: 2}, hurry=False).arrived] == [1]
    assert loads.placed(A, 2).offset == 128
    assert stream.launched == 1
    assert not loads.advance([], {}, hurry=False).arrived


def test_in_a_hurry_the_end_of_the_copies_is_waited_for() -> None:
    stream = LateCopies()
    assert begun(stream).advance([], {1: 2}, hurry=True).arrived


def test_the_pages_of_a_load_that_is_given_up_are_written_after_its_copies() -> None:
    stream = LateCopies()
    loads = begun(stream)
    assert not loads.advance([], {}, hurry=False).arrived
    assert stream.model_waited == 1


def test_pages_are_moved_after_the_copies_into_them() -> None:
    stream = LateCopies()
    loads = begun(stream)
    loads.before_copies()
    assert stream.model_waited == 1
    assert int(loads.memory[2].sum()) == 64


@pytest.mark.gpu
def test_a_gpu_copies_beside_the_model_and_in_its_order() -> None:
    """The model still reads what was there when the copy is launched; what it is told after it waits, it finds new."""
    device = torch.device("cuda")
    stream = OwnStream(device)
    memory = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
    new = torch.ones(1 << 26, dtype=torch.uint8).pin_memory()
    torch.cuda._sleep(10_000_000)  # noqa: SLF001
    before = memory.clone()
    stream.follow_model()
    stream.copy(memory, new)
    mark = stream.mark()
    assert not mark.passed()
    stream.let_model_wait()
    after = memory.clone()
    mark.wait()
    assert (int(before.sum()), int(after.sum())) == (0, 1 << 26)
