"""Pages leave a device and come back beside its computation, through a few pieces of memory (S3-11)."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from motet.domain import KVShape, ParkMethod, RequestId
from motet.errors import SetupError
from motet_runner.memory import host_pages
from motet_runner.memory.host_pages import PIECES, HostPagesAside
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import Copy, Tier
from tests.runner.engines import ask, make_device_engine, make_local_engine, run
from tests.support.late_copies import LateCopies

SHAPE = KVShape(layers=1, kv_heads=1, head_dim=8, dtype_bytes=4)
PAGES = 40


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "PIECE_BYTES", 3 * SHAPE.bytes_per_page())


def store_of_numbers() -> PagedStore:
    store = PagedStore(PAGES, SHAPE, torch.float32, torch.device("cpu"))
    for page in range(PAGES):
        store.data[page] = page
    return store


def numbers_of(store: PagedStore, pages: list[int]) -> list[float]:
    return [float(store.data[page].unique()) for page in pages]


@pytest.mark.parametrize("count", [1, 3, 3 * PIECES, PAGES])
def test_pages_come_back_as_they_left_although_their_places_were_written_at_once(count: int) -> None:
    store, stream = store_of_numbers(), LateCopies()
    host = HostPagesAside(store, PAGES, stream)
    pages, places = list(range(count)), list(reversed(range(count)))
    host.take(pages, places)
    store.clear(pages)
    back = [(page + 7) % PAGES for page in pages]
    host.give(places, back)
    assert numbers_of(store, back) == pages
    stream.end()
    assert host.take_swap_time().pages == 2 * count
    assert host.take_swap_time().pages == 0


def test_the_model_waits_only_for_what_it_needs() -> None:
    store, stream = store_of_numbers(), LateCopies()
    host = HostPagesAside(store, PAGES, stream)
    host.take(list(range(3 * PIECES)), list(range(3 * PIECES)))
    assert not stream.model_waited
    assert host.take_swap_time().pages == 0, "none has arrived"
    host.take([30], [30])
    assert stream.model_waited == 1
    assert stream.ended == 3, "the pages of the piece that was used longest ago"


def test_memory_on_the_device_is_taken_once() -> None:
    store, stream = store_of_numbers(), LateCopies()
    host = HostPagesAside(store, PAGES, stream)
    addresses = {piece.data.data_ptr() for piece in host.pieces}
    for first in range(0, PAGES, 5):
        host.take(list(range(first, first + 5)), list(range(5)))
        host.give(list(range(5)), list(range(first, first + 5)))
    assert {piece.data.data_ptr() for piece in host.pieces} == addresses
    assert len(addresses) == PIECES
    assert numbers_of(store, list(range(PAGES))) == list(range(PAGES))


def test_what_is_taken_is_known_before() -> None:
    host = HostPagesAside(store_of_numbers(), PAGES, LateCopies())
    taken = sum(piece.data.nbytes for piece in host.pieces)
    assert taken == host_pages.bytes_beside_pages(SHAPE.bytes_per_page())


def test_without_host_pages_nothing_is_taken() -> None:
    assert not HostPagesAside(store_of_numbers(), 0, LateCopies()).pieces


def test_memory_that_cannot_be_pinned_is_refused_with_the_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    store = store_of_numbers()
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(SetupError, match=r"The 1 MiB .* cannot be pinned\. Lower MOTET_RUNNER_HOST_KV_MIB"):
        HostPagesAside(store, 1024, LateCopies())


@pytest.fixture
def stream() -> Iterator[LateCopies]:
    late = LateCopies()
    with patch("motet_runner.memory.tiers.HostPages", lambda device, count, clock: HostPagesAside(device, count, late)):
        yield late


@pytest.mark.parametrize("make", [make_local_engine, make_device_engine])
def test_sequences_that_are_swapped_beside_others_say_what_they_would_have_said(
    llama: Path, stream: LateCopies, make: type
) -> None:
    names = [f"r{number}" for number in range(6)]
    asked = [ask(name, prompt=90, seed=7, temperature=0.8) for name in names]
    with patch("motet_runner.memory.tiers.HostPages", host_pages.HostPages):
        expected = run(make_local_engine(llama), *asked).tokens
    engine = make(llama, host_kv_mib=4)
    engine.set_supervised(True)
    ran = run(engine, *asked, steps=5)
    for turn in range(12):
        name = RequestId(names[turn % 6])
        promise = next(entry.promise for entry in engine.report().sequences if entry.request == name)
        assert engine.park(name, 1, promise, promise + 1, ParkMethod.SWAP)
        run(engine, ran=ran, steps=2)
        assert engine.resume(name, 1, promise + 1)
        run(engine, ran=ran, steps=1)
    run(engine, ran=ran)
    assert ran.tokens == expected
    assert stream.launched > 100


def test_a_page_is_copied_both_ways_by_the_plans_effects(stream: LateCopies) -> None:
    store = store_of_numbers()
    tiers = PageTiers(store, 4)
    tiers.carry_out(Copy(Tier.DEVICE, (5, 6), Tier.HOST, (1, 0)))
    store.clear([5, 6])
    tiers.carry_out(Copy(Tier.HOST, (0, 1), Tier.DEVICE, (5, 6)))
    assert numbers_of(store, [5, 6]) == [6, 5]
    assert stream.launched == 4
