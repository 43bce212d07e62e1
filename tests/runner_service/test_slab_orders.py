"""When the engine is asked for an adapter's slab: one at a time, where the disk has room that nothing else wants."""

import asyncio
import errno
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.domain import Digest
from motet.errors import AdapterFetchFailed
from motet_runner.adapters.cache import CERTIFICATE, DiskCache
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.policy.eviction import CacheLimits, Eviction
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.policy.slabs import MAX_FAILURES, PAUSE_SECONDS
from motet_runner.adapters.policy.values import CacheContents
from motet_runner.adapters.slab import is_slab, remove_slabs, size_of_slabs, write_slab
from motet_runner.engine_messages import LoadAdapter, WriteSlab
from motet_runner.interface import AdapterLoaded, SlabWritten
from tests.common.waiting import until
from tests.runner_service.test_disk_limit import bytes_in
from tests.runner_service.test_registry import RegistrySetup
from tests.support.in_process_runner import write_adapter

RUN_BYTES = 3000


class SlabSetup(RegistrySetup):
    """Its engine writes slabs when it is told to."""

    def __init__(self, folder: Path, **more) -> None:
        super().__init__(folder, **{"run_layout": "one", "capacity": 99} | more)

    async def ensure(self, *given, **more) -> AdapterLife:
        life = await super().ensure(*given, **more)
        await self.loaded(life, lacks_slab=bool(layout_of(life).slab) and not has_slab(life))
        return life

    @property
    def ordered(self) -> list[WriteSlab]:
        return [one for one in self.posted if isinstance(one, WriteSlab)]

    async def write(self, order: WriteSlab) -> int:
        size = write_slab(order.layout, np.full(RUN_BYTES, 7, np.uint8), ["q"], frozenset("q"), scales=False)
        await self.end(order, size)
        return size

    async def end(self, order: WriteSlab, size: int) -> None:
        self.posted.remove(order)
        self.adapters.on_slab(SlabWritten(order.number, size))
        await self.settled()

    async def loaded(self, life: AdapterLife, *, lacks_slab: bool) -> None:
        self.adapters.on_loaded(AdapterLoaded(life.digest, 1, 0.1, lacks_slab=lacks_slab))
        await self.settled()

    def bytes(self) -> int:
        return bytes_in(self.cache.folder) + self.of_slabs()

    def of_slabs(self) -> int:
        return sum(path.stat().st_size for path in self.cache.folder.rglob("*") if is_slab(path.name))


def has_slab(life: AdapterLife) -> bool:
    return layout_of(life).file.with_name(layout_of(life).slab).exists()


def layout_of(life: AdapterLife) -> AdapterLayout:
    assert life.checked is not None
    return life.checked.layout


async def test_after_its_first_load_an_adapters_slab_is_written_once_for_all_runners_and_starts(tmp_path: Path) -> None:
    setup = SlabSetup(tmp_path)
    one = await setup.ensure(1)
    (order,) = setup.ordered
    assert order.layout == layout_of(one)
    await setup.write(order)
    await setup.ensure(1)
    await setup.loaded(one, lacks_slab=False)
    other = SlabSetup(tmp_path)
    await other.ensure(1)
    assert setup.ordered == other.ordered == []
    of_another_layout = SlabSetup(tmp_path, run_layout="other")
    assert layout_of(await of_another_layout.ensure(1)).slab != order.layout.slab
    assert len(of_another_layout.ordered) == 1
    for each in (setup, other, of_another_layout):
        each.adapters.close()


async def test_a_slab_is_for_the_version_of_motet_that_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = SlabSetup(tmp_path)
    one = await setup.ensure(1)
    await setup.write(setup.ordered[0])
    monkeypatch.setattr("motet_runner.adapters.checks.SLABS_BY", "99.0")
    after_an_upgrade = SlabSetup(tmp_path)
    again = await after_an_upgrade.ensure(1)
    assert again.digest == one.digest
    assert layout_of(again).slab != layout_of(one).slab
    assert len(after_an_upgrade.ordered) == 1
    for each in (setup, after_an_upgrade):
        each.adapters.close()


async def test_an_adapter_has_its_slab_before_its_first_request(tmp_path: Path) -> None:
    """Where none is proved, no load finds it missing."""
    setup = SlabSetup(tmp_path)
    one = await RegistrySetup.ensure(setup, 1)
    (order,) = setup.ordered
    assert order.layout == layout_of(one)
    await setup.write(order)
    await setup.loaded(one, lacks_slab=False)
    assert setup.ordered == []
    setup.adapters.close()


async def test_the_slab_of_an_adapter_that_is_proved_waits_for_the_load_of_its_proof(tmp_path: Path) -> None:
    """It may be there already: that load says so."""
    setup = SlabSetup(tmp_path, proves_with="torch")
    ordered = asyncio.create_task(RegistrySetup.ensure(setup, 1))
    await until(lambda: any(isinstance(one, LoadAdapter) for one in setup.posted), every=0.001)
    (load,) = (one for one in setup.posted if isinstance(one, LoadAdapter))
    assert setup.ordered == []
    setup.adapters.on_loaded(AdapterLoaded(load.digest, 1, 0.1, lacks_slab=True))
    assert [one.layout for one in setup.ordered] == [load.layout]
    assert not ordered.done(), "before it is proved, and so before any request"
    ordered.cancel()
    setup.adapters.close()


async def test_an_engine_that_loads_no_slabs_is_asked_for_none(tmp_path: Path) -> None:
    setup = SlabSetup(tmp_path, run_layout="")
    one = await setup.ensure(1)
    await setup.loaded(one, lacks_slab=True)
    assert (layout_of(one).slab, setup.ordered) == ("", [])
    setup.adapters.close()


async def test_slabs_are_written_one_at_a_time_in_order(tmp_path: Path) -> None:
    setup = SlabSetup(tmp_path)
    lives = [await setup.ensure(number) for number in range(3)]
    for life in lives:
        (order,) = setup.ordered
        assert order.layout == layout_of(life)
        await setup.write(order)
    assert setup.ordered == []
    setup.adapters.close()


async def test_a_slab_that_a_load_has_found_damaged_is_written_again(tmp_path: Path) -> None:
    setup = SlabSetup(tmp_path)
    one = await setup.ensure(1)
    await setup.write(setup.ordered[0])
    await setup.loaded(one, lacks_slab=True)
    await setup.loaded(one, lacks_slab=True)
    assert [order.layout for order in setup.ordered] == [layout_of(one)]
    setup.adapters.close()


async def test_slabs_count_and_make_room_for_adapters_and_none_makes_room_for_them(
    tmp_path: Path,
) -> None:
    measured = SlabSetup(tmp_path / "measured")
    await measured.ensure(1)
    of_adapter, of_slab = measured.bytes(), await measured.write(measured.ordered[0])
    measured.adapters.close()
    limit = 3 * of_adapter + 2 * of_slab + 100
    setup = SlabSetup(tmp_path, disk_bytes=limit, slab_bytes=lambda _: of_slab + 50)
    lives = [await setup.ensure(number) for number in (1, 2, 3)]
    for _ in range(2):
        await setup.write(setup.ordered[0])
        assert setup.bytes() <= limit
    assert setup.ordered == [], "the third has no room"
    assert setup.cached() == {life.digest for life in lives}
    setup.users[lives[0].digest] = setup.users[lives[1].digest] = setup.users[lives[2].digest] = 1
    fourth = await setup.ensure(4)
    assert setup.cached() == {life.digest for life in (*lives, fourth)}, "slabs leave, also those of adapters in use"
    assert setup.bytes() <= limit
    slabs = [bool(size_of_slabs(layout_of(life).file.parent)) for life in lives]
    assert of_adapter < of_slab
    assert slabs == [False, True, False], "only what is needed, of the one that was used longest ago first"
    setup.adapters.close()


async def test_a_fetch_that_gets_no_room_anyway_takes_no_slab_from_others(tmp_path: Path) -> None:
    measured = SlabSetup(tmp_path / "measured")
    await measured.ensure(1)
    of_adapter, of_slab = measured.bytes(), await measured.write(measured.ordered[0])
    measured.adapters.close()
    setup = SlabSetup(tmp_path, disk_bytes=2 * (of_adapter + of_slab) + 500, slab_bytes=lambda _: of_slab + 50)
    lives = [await setup.ensure(number) for number in (1, 2)]
    for life in lives:
        await setup.write(setup.ordered[0])
        setup.users[life.digest] = 1
    size = sum(path.stat().st_size for path in write_adapter(tmp_path / "measured" / "large", rank=56).iterdir())
    assert 2 * of_slab + 500 < size < 2 * (of_adapter + of_slab) + 500
    with pytest.raises(AdapterFetchFailed) as caught:
        await setup.ensure(3, rank=56)
    assert caught.value.reason == "NoSpace"
    assert all(has_slab(life) for life in lives)
    setup.adapters.close()


async def test_without_room_the_next_one_is_asked_for_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = SlabSetup(tmp_path, disk_bytes=6000, slab_bytes=lambda _: 6000)
    one = await setup.ensure(1)
    listings = []
    contents = setup.cache.contents
    monkeypatch.setattr(setup.cache, "contents", lambda *given: listings.append(given) or contents(*given))
    await setup.loaded(one, lacks_slab=True)
    assert listings == [], "nobody looks again so soon"
    setup.clock.advance(PAUSE_SECONDS)
    await setup.loaded(one, lacks_slab=True)
    assert len(listings) == 1
    assert setup.ordered == []
    setup.adapters.close()


async def test_one_that_cannot_be_written_holds_up_no_other_and_after_some_there_is_a_pause(tmp_path: Path) -> None:
    setup = SlabSetup(tmp_path)
    lives = [await setup.ensure(number) for number in range(MAX_FAILURES + 2)]
    await setup.end(setup.ordered[0], 0)
    await setup.write(setup.ordered[0])
    for _ in range(MAX_FAILURES):
        await setup.end(setup.ordered[0], 0)
    await setup.loaded(lives[0], lacks_slab=True)
    assert setup.ordered == []
    setup.clock.advance(PAUSE_SECONDS)
    setup.adapters.tick()
    await setup.settled()
    assert len(setup.ordered) == 1
    setup.adapters.close()


async def test_an_adapter_stays_while_its_slab_is_written(tmp_path: Path) -> None:
    setup = SlabSetup(tmp_path, capacity=1)
    first = await setup.ensure(1)
    await setup.ensure(2)
    third = await setup.ensure(3)
    assert first.digest in setup.cached()
    setup.adapters.drop(first.digest)
    assert first.held is not None
    assert not first.held.lease.released
    await setup.end(setup.ordered[0], 0)
    assert setup.adapters.get(first.digest) is None
    fourth = await setup.ensure(4)
    assert setup.cached() <= {third.digest, fourth.digest}
    setup.adapters.close()


async def test_an_answer_to_an_order_that_has_ended_changes_nothing(tmp_path: Path) -> None:
    setup = SlabSetup(tmp_path)
    await setup.ensure(1)
    await setup.ensure(2)
    (order,) = setup.ordered
    setup.adapters.on_slab(SlabWritten(order.number + 7, 10))
    assert setup.adapters.policy.slab_under_way == layout_digest(order)
    setup.adapters.close()


def layout_digest(order: WriteSlab) -> Digest:
    return Digest(f"sha256:{order.layout.file.parent.name}")


async def test_slabs_that_another_runner_has_written_or_removed_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = SlabSetup(tmp_path, disk_bytes=1 << 30)
    lives = [await setup.ensure(number) for number in range(3)]
    monkeypatch.setattr("motet_runner.adapters.cache.RECENT_NS", 0)
    setup.cache.contents(0, 1 << 30)
    await asyncio.sleep(0.05)
    for life in lives:
        write_slab(layout_of(life), np.full(RUN_BYTES, 7, np.uint8), ["q"], frozenset("q"), scales=False)
    assert setup.cache.contents(0, 1 << 30).bytes == setup.bytes()
    with_slabs = setup.bytes()
    await asyncio.sleep(0.05)
    remove_slabs(layout_of(lives[1]).file.parent)
    assert setup.bytes() < with_slabs
    assert setup.cache.contents(0, 1 << 30).bytes == setup.bytes()
    setup.adapters.close()


async def test_a_slab_that_this_runner_has_written_counts_before_all_folders_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = SlabSetup(tmp_path, disk_bytes=1 << 30, slab_bytes=lambda _: 5000)
    found: list[int] = []
    contents = setup.cache.contents

    def noting(*how: Any) -> CacheContents:
        listed = contents(*how)
        found.append(listed.bytes)
        return listed

    monkeypatch.setattr(setup.cache, "contents", noting)
    await setup.ensure(1)
    monkeypatch.setattr(setup.cache, "_recount_at", inf)
    await setup.write(setup.ordered[0])
    await setup.ensure(2)
    assert setup.of_slabs() > 0
    assert found[-1] == setup.bytes()
    setup.adapters.close()


async def test_slabs_written_right_after_a_listing_are_counted(tmp_path: Path) -> None:
    """Some disks have the same time for both."""
    setup = SlabSetup(tmp_path, disk_bytes=1 << 30)
    life = await setup.ensure(1)
    folder = layout_of(life).file.parent
    setup.cache.contents(0, 1 << 30)
    write_slab(layout_of(life), np.full(RUN_BYTES, 7, np.uint8), ["q"], frozenset("q"), scales=False)
    assert setup.cache._sizes[folder.name].changed == 0, "too recent to be believed"  # noqa: SLF001
    assert setup.cache.contents(0, 1 << 30).bytes == setup.bytes()
    setup.adapters.close()


async def test_a_listing_that_fails_leaves_no_slab_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = SlabSetup(tmp_path, disk_bytes=100_000, slab_bytes=lambda _: 5000)
    one = await setup.ensure(1)
    await setup.write(setup.ordered[0])

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(setup.cache, "contents", fails)
    await setup.loaded(one, lacks_slab=True)
    assert setup.adapters.policy.slab_under_way is None
    assert setup.ordered == []
    monkeypatch.undo()
    await setup.loaded(one, lacks_slab=True)
    assert len(setup.ordered) == 1
    setup.adapters.close()


async def test_slabs_that_come_and_go_change_nothing_of_the_order_in_which_adapters_leave(tmp_path: Path) -> None:
    setup = SlabSetup(tmp_path, disk_bytes=1 << 20, slab_bytes=lambda _: 5000)
    lives = [await setup.ensure(number) for number in range(3)]
    order = [one.digest for one in setup.cache.contents().by_last_use]
    for _ in range(3):
        await setup.write(setup.ordered[0])
    assert setup.of_slabs() > 0
    assert [one.digest for one in setup.cache.contents().by_last_use] == order
    assert setup.cache.remove_slabs(setup.of_slabs()) > 0
    listed = setup.cache.contents(0, 0)
    assert setup.of_slabs() == 0
    assert [one.digest for one in listed.by_last_use] == order == [life.digest for life in lives]
    setup.adapters.close()


async def test_slabs_on_a_disk_that_takes_no_writes_stay_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = SlabSetup(tmp_path, disk_bytes=1 << 20, slab_bytes=lambda _: 5000)
    await setup.ensure(1)
    await setup.write(setup.ordered[0])

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    assert setup.cache.remove_slabs(1) == 0
    assert setup.cache.contents(0, 1).bytes == setup.bytes()
    setup.adapters.close()


@pytest.mark.parametrize("at", ["store", "keep"])
async def test_on_a_full_disk_slabs_leave_for_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Also without engine.adapterDiskMiB."""
    setup = SlabSetup(tmp_path)
    first = await setup.ensure(1)
    await setup.write(setup.ordered[0])
    full = OSError(errno.ENOSPC, "No space left on device")
    real = getattr(DiskCache, f"_{at}")
    calls: list[int] = []
    ever_full = False

    def fails(*given, **more):
        calls.append(setup.of_slabs())
        if ever_full or setup.of_slabs():
            raise full
        return real(*given, **more)

    monkeypatch.setattr(DiskCache, f"_{at}", fails)
    second = await setup.ensure(2)
    assert setup.cached() == {first.digest, second.digest}
    assert layout_of(second).file.with_name(CERTIFICATE).exists()
    assert (len(calls), setup.of_slabs()) == (2, 0)
    ever_full = True
    if at == "store":
        with pytest.raises(AdapterFetchFailed, match="no space left"):
            await setup.ensure(3)
    else:
        assert not layout_of(await setup.ensure(3)).file.with_name(CERTIFICATE).exists()
    assert len(calls) == 3, "nothing could leave, so there is no second attempt"
    setup.adapters.close()


async def test_a_fetch_evicts_nothing_for_a_slab_that_is_being_written_and_the_slab_yields(tmp_path: Path) -> None:
    measured = SlabSetup(tmp_path / "measured")
    await measured.ensure(1)
    of_adapter, of_slab = measured.bytes(), await measured.write(measured.ordered[0])
    measured.adapters.close()
    assert of_adapter < of_slab
    limit = 2 * of_adapter + of_slab + 100
    setup = SlabSetup(tmp_path, disk_bytes=limit, slab_bytes=lambda _: of_slab)
    lives = [await setup.ensure(1), await setup.ensure(2)]
    (order,) = setup.ordered
    lives.append(await setup.ensure(3))
    assert setup.cached() == {life.digest for life in lives}, "none leaves"
    await setup.write(order)
    assert setup.bytes() <= limit
    assert setup.of_slabs() == 0
    assert setup.cached() == {life.digest for life in lives}
    setup.adapters.close()


def test_a_slab_that_no_longer_fits_is_looked_for_after_a_listing_that_is_under_way() -> None:
    eviction = Eviction(CacheLimits(10, 100))
    assert eviction.ask_spare(40)
    eviction.listed(CacheContents(unfinished=50), lambda _: False, lambda _: False, {})
    assert eviction.spare_granted()
    assert not eviction.ended()
    assert eviction.ask(1, 45)
    eviction.listed(CacheContents(unfinished=50), lambda _: False, lambda _: False, {})
    assert eviction.granted() == [1]
    assert not eviction.spare_ended(40), "a listing is under way"
    assert eviction.ended(), "there is another one"
    assert eviction.room == 55
    assert not eviction.ended(), "but only one"
