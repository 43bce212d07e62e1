"""The disk cache is bounded in bytes, with those of unfinished fetches. What is used or awaited stays."""

import asyncio
import errno
import os
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import FakeClock
from motet.digest import ADAPTER_FILES, ADAPTER_OPTIONAL_FILES, adapter_digest
from motet.domain import Digest
from motet.errors import AdapterFetchFailed
from motet.runner_info import Failure
from motet_runner.adapters import cache as disk_cache
from motet_runner.adapters import wishes
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.policy import effects
from motet_runner.adapters.policy.adapter_policy import AdapterPolicy
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.policy.failures import SourceFailures
from motet_runner.adapters.policy.frequency import Frequency
from motet_runner.adapters.policy.values import CacheContents, Cached, FetchRequest, Held, Order
from motet_runner.engine_messages import DropAdapter, LoadAdapter
from motet_runner.interface import AdapterLoaded
from motet_runner.sources.fetch_errors import RETRY_SOON_SECONDS, no_room, no_space, temporary
from testbed.adapter_uses import best_hits, hits_on_disk, uses_of
from tests.runner_service.test_registry import RegistrySetup
from tests.support.adapter_fetches import settle
from tests.support.in_process_runner import write_adapter


def digest(number: int) -> Digest:
    return Digest(f"sha256:{number:064x}")


def bytes_in(folder: Path) -> int:
    """Of adapters' files, also of those that come. None is counted twice: a folder is renamed while it is read."""
    names = {*ADAPTER_FILES, *ADAPTER_OPTIONAL_FILES}
    sizes: dict[int, int] = {}
    for root, _, files in os.walk(folder):  # `rglob` raises if a folder goes while it is read
        for name in names & set(files):
            with suppress(FileNotFoundError):
                status = Path(root, name).stat()
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


@pytest.fixture
def one_size(tmp_path: Path) -> int:
    """What an adapter takes."""
    setup = RegistrySetup(tmp_path / "measured")

    async def measure() -> int:
        await setup.ensure(1)
        return bytes_in(setup.cache.folder)

    size = asyncio.run(measure())
    setup.adapters.close()
    return size


async def test_the_disk_holds_no_more_bytes_than_allowed_and_the_oldest_makes_room(tmp_path, one_size):
    setup = RegistrySetup(tmp_path, capacity=99, disk_bytes=3 * one_size + 100)
    lives = []
    for number in range(6):
        lives.append(await setup.ensure(number))
        assert bytes_in(setup.cache.folder) <= 3 * one_size + 100
    assert setup.cached() == {one.digest for one in lives[-3:]}
    assert DropAdapter(lives[0].digest) in setup.posted
    setup.adapters.close()


async def test_an_adapter_larger_than_the_disk_may_hold_is_refused_at_once_with_field_and_size(tmp_path):
    setup = RegistrySetup(tmp_path, disk_bytes=1000)
    kept = write_adapter(tmp_path / "large", rank=64)
    size = sum(path.stat().st_size for path in kept.iterdir())
    order = scheduler_pb2.EnsureAdapter(adapter=common_pb2.AdapterRef(name="large"), source=kept.as_uri())
    with pytest.raises(
        AdapterFetchFailed, match=rf"has {size} bytes, but engine\.adapterDiskMiB allows 1000"
    ) as caught:
        await setup.adapters.ensure(order)
    assert caught.value.reason == "TooLarge"
    assert not caught.value.retry_after
    assert list(setup.cache.folder.iterdir()) == []
    setup.adapters.close()


async def test_without_room_the_used_adapters_stay_and_the_fetch_fails_for_now(tmp_path, one_size):
    setup = RegistrySetup(tmp_path, capacity=99, disk_bytes=2 * one_size + 100)
    kept = [await setup.ensure(number) for number in (1, 2)]
    for one in kept:
        setup.users[one.digest] = 1
    with pytest.raises(AdapterFetchFailed, match=r"no room for .*adapterDiskMiB") as caught:
        await setup.ensure(3)
    assert caught.value.reason == "NoSpace"
    assert caught.value.retry_after > 0
    await settle(setup.adapters)
    assert setup.cached() == {one.digest for one in kept}
    setup.users.clear()
    setup.clock.advance(100)
    third = await setup.ensure(3)
    assert third.digest in setup.cached()
    setup.adapters.close()


async def test_what_another_runner_keeps_in_a_shared_cache_and_does_not_use_leaves_for_a_fetch(tmp_path, one_size):
    """Also while it has no order and no fetch of its own."""
    idle, asks = (RegistrySetup(tmp_path, capacity=99, disk_bytes=3 * one_size + 100) for _ in range(2))
    kept = [await idle.ensure(number) for number in (1, 2)]
    used = await asks.ensure(3)
    asks.users[used.digest] = 1
    with pytest.raises(AdapterFetchFailed, match=r"or kept by another runner in this cache, leaves too little"):
        await asks.ensure(4)
    await asks.settled()
    idle.users[kept[0].digest] = 1
    idle.adapters.tick()
    await idle.settled()
    assert idle.cached() == {kept[0].digest, used.digest}
    assert DropAdapter(kept[1].digest) in idle.posted
    fetched = await asks.ensure(4)
    assert asks.cached() == {kept[0].digest, used.digest, fetched.digest}
    for one in (idle, asks):
        one.adapters.close()


async def test_what_another_runner_wishes_for_leaves_only_if_that_helps_and_while_it_wishes(
    tmp_path, one_size, monkeypatch
):
    idle, asks = (RegistrySetup(tmp_path, capacity=99, disk_bytes=2 * one_size + 100) for _ in range(2))
    kept = {(await idle.ensure(number)).digest for number in (1, 2)}

    async def left() -> set[Digest]:
        idle.adapters.tick()
        await idle.settled()
        return idle.cached()

    asks.cache.wish(2 * one_size)
    idle.users = dict.fromkeys(sorted(kept)[:1], 1)
    assert await left() == kept, "one is used, so there is no room for two"
    idle.users.clear()
    with monkeypatch.context() as patch:
        patch.setattr(wishes, "WISH_SECONDS", 0.0)
        assert await left() == kept
    assert not list((tmp_path / "cache.wishes").iterdir()), "it was an old one"
    asks.cache.wish(one_size)
    pinned = sorted(kept)[:1]
    idle.adapters.pin(pinned)
    assert await left() == {*pinned}, "what the platform wants here leaves for nobody elsewhere"
    idle.adapters.pin([])
    asks.cache.wish(2 * one_size)
    assert await left() == set()
    for one in (idle, asks):
        one.adapters.close()


async def test_adapters_that_are_fetched_together_fit_together(tmp_path, one_size):
    setup = RegistrySetup(tmp_path, capacity=99, disk_bytes=3 * one_size + 100)
    largest = 0

    async def watch() -> None:
        nonlocal largest
        while True:
            largest = max(largest, bytes_in(setup.cache.folder))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    found = await asyncio.gather(*(setup.ensure(number) for number in range(8)), return_exceptions=True)
    watching.cancel()
    await settle(setup.adapters)
    assert {one.reason for one in found if isinstance(one, AdapterFetchFailed)} <= {"NoSpace"}
    assert any(not isinstance(one, Exception) for one in found)
    assert 0 < largest <= 3 * one_size + 100
    setup.adapters.close()


async def test_the_scheduler_says_which_adapter_leaves_last(tmp_path: Path) -> None:
    setup = RegistrySetup(tmp_path, capacity=2)
    source = write_adapter(tmp_path / "pinned", seed=9)
    order = scheduler_pb2.EnsureAdapter(
        adapter=common_pb2.AdapterRef(namespace="default", name="pinned"),
        source=source.as_uri(),
        stage=common_pb2.ADAPTER_STAGE_CERTIFIED,
    )
    pinned = await setup.settled(setup.adapters.ensure(order))
    setup.adapters.pin([pinned.digest])
    await setup.ensure(1)
    second = await setup.ensure(2)
    assert setup.cached() == {pinned.digest, second.digest}, "the oldest stays"
    setup.adapters.close()


async def test_the_engine_is_told_what_is_pinned_and_when_that_ends(tmp_path: Path) -> None:
    setup = RegistrySetup(tmp_path)
    source = write_adapter(tmp_path / "pinned", seed=9)
    order = scheduler_pb2.EnsureAdapter(
        adapter=common_pb2.AdapterRef(namespace="default", name="pinned"),
        source=source.as_uri(),
        stage=common_pb2.ADAPTER_STAGE_DEVICE,
    )
    setup.adapters.pin([adapter_digest(source), digest(7)])
    one = await setup.settled(setup.adapters.ensure(order))
    told = [(command.digest, command.pinned) for command in setup.posted if isinstance(command, LoadAdapter)]
    assert told == [(one.digest, True)]
    setup.adapters.on_loaded(AdapterLoaded(one.digest, 10, 0.1))
    setup.adapters.pin([digest(7)])
    await setup.settled(setup.adapters.ensure(order))
    setup.adapters.pin([one.digest, digest(7)])
    setup.adapters.pin([one.digest])
    setup.adapters.pin([])
    told = [(command.digest, command.pinned) for command in setup.posted if isinstance(command, LoadAdapter)]
    assert told == [(one.digest, pinned) for pinned in (True, False, True, False)]
    setup.adapters.close()


class Told:
    """A policy whose cache is full, and the effects of what it is told."""

    def __init__(self, limits: CacheLimits) -> None:
        self.users: dict[Digest, int] = {}
        self.clock = FakeClock()
        self.policy = AdapterPolicy(
            limits=limits,
            users_of=lambda one: self.users.get(one, 0),
            clock=self.clock,
            failures=SourceFailures(),
        )

    def tell(self, happened: Any, *args: Any) -> list[Any]:
        happened(*args)
        return self.policy.take_effects()

    def order(self, number: int, *, expected: str = "") -> Any:
        ref = common_pb2.AdapterRef(namespace="acme", name=f"a{number}")
        request = FetchRequest(source=f"https://acme/{number}/", namespace="acme", expected=expected)
        (begun,) = self.tell(self.policy.order, Order(number, ref, request))
        return begun

    def hold(self, number: int) -> list[Any]:
        find = self.order(number, expected=digest(number))
        return self.tell(self.policy.answered, find.number, held(number))


def held(number: int) -> Held:
    checked = Certification.of(scheduler_pb2.Certificate(), None)
    return Held(digest(number), 10, (1, number), None, checked)


def contents(*numbers: int, unfinished: int = 0) -> CacheContents:
    return CacheContents(tuple(Cached(digest(one), 10) for one in numbers), unfinished)


def evictions(told: Told, listing: effects.ListCache, found: CacheContents) -> list[Digest]:
    """What leaves the cache, one after the other, until nothing more does."""
    gone: list[Digest] = []
    done = told.tell(told.policy.answered, listing.number, found)
    while evicted := [one for one in done if isinstance(one, effects.Evict)]:
        gone += [one.digest for one in evicted]
        done = told.tell(told.policy.answered, evicted[0].number, None)
    return gone


def full_of(*numbers: int, pinned: tuple[int, ...] = ()) -> tuple[Told, effects.ListCache]:
    """A runner that holds these adapters, and a fetch of 20 bytes that waits for room."""
    told = Told(CacheLimits(99, 10 * len(numbers)))
    told.tell(told.policy.pin, frozenset(map(digest, pinned)))
    for number in numbers:
        *_, listing = told.hold(number)
        told.tell(told.policy.answered, listing.number, contents(*numbers))
    fetch = told.order(100)
    (listing,) = told.tell(told.policy.needs, fetch.number, 20)
    assert listing.room == 10 * len(numbers) - 20
    return told, listing


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_order_that_is_cancelled_during_the_check_loads_nothing(cancelled: bool) -> None:
    told = Told(CacheLimits(9))
    ref = common_pb2.AdapterRef(namespace="acme", name="a")
    request = FetchRequest(source="https://acme/1/", namespace="acme", expected=digest(1))
    (find,) = told.tell(told.policy.order, Order(7, ref, request, load=True))
    (check,) = told.tell(told.policy.answered, find.number, replace(held(1), certification=None))
    if cancelled:
        told.tell(told.policy.cancel_order, 7)
    layout = AdapterLayout.of(Path("x"), FileStamp(0, 0, 0), 1, ())
    done = told.tell(told.policy.answered, check.number, Certification.of(scheduler_pb2.Certificate(), layout))
    assert any(isinstance(one, LoadAdapter) for one in done) is not cancelled


def test_what_few_requests_use_leaves_before_what_many_use() -> None:
    told, listing = full_of(1, 2, 3)
    for number in (1, 1, 1, 2, 3, 3):
        told.tell(told.policy.use, digest(number))
    assert evictions(told, listing, contents(1, 2, 3)) == [digest(2), digest(3)]


def test_what_the_platform_wants_resident_leaves_last() -> None:
    told, listing = full_of(1, 2, 3, pinned=(1,))
    told.tell(told.policy.use, digest(2))
    assert evictions(told, listing, contents(1, 2, 3)) == [digest(3), digest(2)]
    told, listing = full_of(1, 2, pinned=(1, 2))
    assert evictions(told, listing, contents(1, 2)) == [digest(1), digest(2)]


@pytest.mark.parametrize("limits", [CacheLimits(2), CacheLimits(99, 20)])
def test_what_the_platform_wants_resident_leaves_room_for_what_a_request_has_brought(limits: CacheLimits) -> None:
    told = Told(limits)
    told.tell(told.policy.pin, frozenset(map(digest, (1, 2, 4))))
    told.tell(told.policy.use, digest(3))
    *_, listing = told.hold(4)
    gone = evictions(told, listing, contents(1, 2, 3, 4))
    assert gone == [digest(1), digest(2)], "the request for 3 is still to come: 4 and 3 stay"


def test_a_pinned_adapter_that_comes_back_lets_stay_what_a_request_has_brought() -> None:
    told = Told(CacheLimits(99, 20))
    told.tell(told.policy.pin, frozenset(map(digest, (1, 2))))
    for number in (2, 3):
        *_, listing = told.hold(number)
        told.tell(told.policy.answered, listing.number, contents(2, 3))
    told.tell(told.policy.use, digest(3))
    find = told.order(1, expected=digest(1))
    (fetch,) = told.tell(told.policy.answered, find.number, None)
    (listing,) = told.tell(told.policy.needs, fetch.number, 10)
    assert evictions(told, listing, contents(2, 3)) == [digest(2)]


@pytest.mark.parametrize("sizes", [(600, 50, 50, 50, 50, 50, 50), (550, 100, 100, 100, 100)])
def test_a_large_pinned_adapter_leaves_last_and_so_do_the_small_ones_beside_it(sizes: tuple[int, ...]) -> None:
    told = Told(CacheLimits(99, 1000))
    pinned = range(3) if len(sizes) == 7 else range(1)
    told.tell(told.policy.pin, frozenset(map(digest, pinned)))
    fetch = told.order(100)
    (listing,) = told.tell(told.policy.needs, fetch.number, 150)
    found = CacheContents(tuple(Cached(digest(number), size) for number, size in enumerate(sizes)))
    assert not {*evictions(told, listing, found)} & {*map(digest, pinned)}


def test_what_is_expected_or_ordered_or_used_stays() -> None:
    told, listing = full_of(1, 2, 3, 4)
    told.users[digest(1)] = 1
    told.tell(told.policy.use, digest(2), told.clock() + 2)
    told.order(3, expected=digest(3))
    assert evictions(told, listing, contents(1, 2, 3, 4)) == [digest(4)]


def test_interrupted_fetches_count_and_a_fetch_that_has_ended_since_the_listing_does_too() -> None:
    told = Told(CacheLimits(99, 100))
    first, second = told.order(1), told.order(2)
    (listing,) = told.tell(told.policy.needs, first.number, 40)
    assert told.tell(told.policy.answered, listing.number, contents(unfinished=60)) == [effects.GrantRoom(first.number)]
    (listing,) = told.tell(told.policy.needs, second.number, 10)
    told.tell(told.policy.answered, first.number, held(1))
    done = told.tell(told.policy.answered, listing.number, contents(unfinished=60))
    assert effects.GrantRoom(second.number) not in done, "the listing was made before the first had ended"
    assert any(isinstance(one, effects.ListCache) for one in done), "what has arrived may leave"


def test_a_fetch_that_asks_during_a_listing_is_not_refused_by_it() -> None:
    told = Told(CacheLimits(99, 30))
    told.users[digest(3)] = 1
    first, second = told.order(1), told.order(2)
    (listing,) = told.tell(told.policy.needs, first.number, 10)
    assert told.tell(told.policy.needs, second.number, 20) == []
    grant, again = told.tell(told.policy.answered, listing.number, contents(3))
    assert grant == effects.GrantRoom(first.number)
    told.users.clear()
    (evict,) = told.tell(told.policy.answered, again.number, contents(3))
    assert told.tell(told.policy.answered, evict.number, None) == [effects.GrantRoom(second.number)]


def test_bytes_that_arrive_while_adapters_leave_count() -> None:
    told = Told(CacheLimits(99, 40))
    first, second = told.order(1), told.order(2)
    (listing,) = told.tell(told.policy.needs, first.number, 20)
    assert told.tell(told.policy.answered, listing.number, contents(unfinished=20)) == [effects.GrantRoom(first.number)]
    (listing,) = told.tell(told.policy.needs, second.number, 20)
    (evict,) = told.tell(told.policy.answered, listing.number, contents(3, 4))
    told.tell(told.policy.answered, first.number, held(1))
    (another,) = told.tell(told.policy.answered, evict.number, None)
    assert isinstance(another, effects.Evict)
    assert told.tell(told.policy.answered, another.number, None)[0] == effects.GrantRoom(second.number)


def test_a_fetch_waits_for_those_that_run_and_the_cache_is_listed_when_they_end() -> None:
    told = Told(CacheLimits(99, 30))
    first, second = told.order(1), told.order(2)
    (listing,) = told.tell(told.policy.needs, first.number, 20)
    told.tell(told.policy.answered, listing.number, contents())
    (listing,) = told.tell(told.policy.needs, second.number, 20)
    assert told.tell(told.policy.answered, listing.number, contents(3)) == [], "the adapter leaves when it must"
    failure = Failure("adapter_fetch_failed", "The source is away.", 5.0)
    done = told.tell(told.policy.answered, first.number, failure)
    (listing,) = [one for one in done if isinstance(one, effects.ListCache)]
    assert told.tell(told.policy.answered, listing.number, contents(3)) == [effects.GrantRoom(second.number)]


def test_a_fetch_that_waits_is_looked_at_again_as_time_passes() -> None:
    told = Told(CacheLimits(99, 20))
    told.order(3, expected=digest(3))
    fetch = told.order(1)
    (listing,) = told.tell(told.policy.needs, fetch.number, 20)
    assert told.tell(told.policy.answered, listing.number, contents(3)) == [], "an order may bring it, and then ends"
    told.users[digest(3)] = 1
    (listing,) = told.tell(told.policy.tick)
    (refused,) = told.tell(told.policy.answered, listing.number, contents(3))
    assert isinstance(refused, effects.RefuseRoom)


def test_nothing_leaves_for_a_fetch_that_gets_no_room_anyway() -> None:
    told = Told(CacheLimits(99, 100))
    told.users[digest(1)] = 1
    fetch = told.order(100)
    (listing,) = told.tell(told.policy.needs, fetch.number, 95)
    (refused,) = told.tell(told.policy.answered, listing.number, contents(*range(1, 11)))
    assert isinstance(refused, effects.RefuseRoom)


def test_once_another_runner_is_found_to_use_what_is_needed_nothing_more_leaves() -> None:
    told = Told(CacheLimits(99, 30))
    fetch = told.order(100)
    (listing,) = told.tell(told.policy.needs, fetch.number, 30)
    (evict,) = told.tell(told.policy.answered, listing.number, contents(1, 2, 3))
    failure = Failure("adapter_fetch_failed", "Another runner uses it.", 5.0)
    refused, wish = told.tell(told.policy.answered, evict.number, failure)
    assert isinstance(refused, effects.RefuseRoom)
    assert wish == effects.WishRoom(30), "the other one may not use all that it keeps"


def test_a_failed_listing_refuses_with_its_failure_and_grants_nothing() -> None:
    told = Told(CacheLimits(99, 100))
    fetch = told.order(1)
    (listing,) = told.tell(told.policy.needs, fetch.number, 90)
    failure = Failure("adapter_fetch_failed", "The disk hangs.", 5.0)
    assert told.tell(told.policy.answered, listing.number, failure) == [effects.RefuseRoom(fetch.number, failure)]


def test_without_room_the_time_to_the_next_attempt_does_not_grow() -> None:
    failures, request = SourceFailures(), FetchRequest(source="https://acme/1/", namespace="acme")
    full = Failure.of(no_space("There is no room."))
    assert {failures.note(request, full, 0.0).retry_after for _ in range(6)} == {full.retry_after}


def test_a_fetch_that_gets_no_room_beside_others_comes_again_later_each_time() -> None:
    """Each attempt lists the cache, and may be made for nothing."""
    failures, request = SourceFailures(), FetchRequest(source="https://acme/1/", namespace="acme")
    noted = [failures.note(request, Failure.of(no_room("Others use it.")), 0.0) for _ in range(10)]
    assert [one.retry_after for one in noted] == [*(RETRY_SOON_SECONDS * 2**n for n in range(6)), *[300.0] * 4]
    assert {one.reason for one in noted} == {"NoSpace"}


@pytest.mark.parametrize("clearable", ["slabs", "partial"])
def test_slabs_and_interrupted_fetches_leave_only_if_that_lets_a_fetch_in(clearable: str) -> None:
    def found() -> CacheContents:
        of_slabs = 40 if clearable == "slabs" else 0
        return CacheContents((Cached(digest(1), 50 + of_slabs, of_slabs),), partial=40 - of_slabs)

    told = Told(CacheLimits(99, 100))
    told.users[digest(1)] = 1
    fetch = told.order(100)
    (listing,) = told.tell(told.policy.needs, fetch.number, 51)
    (refused,) = told.tell(told.policy.answered, listing.number, found())
    assert (refused.fetch, listing.clear) == (fetch.number, 0)
    (listing,) = told.tell(told.policy.needs, fetch.number, 30)
    (listing,) = told.tell(told.policy.answered, listing.number, found())
    assert (listing.room, listing.clear) == (70, 20), "these are missing"
    (refused,) = told.tell(told.policy.answered, listing.number, found())
    assert isinstance(refused, effects.RefuseRoom), "they cannot be removed"
    (listing,) = told.tell(told.policy.needs, fetch.number, 10)
    assert told.tell(told.policy.answered, listing.number, found()) == [effects.GrantRoom(fetch.number)]


def grants(done: list[Any]) -> list[int]:
    return [one.fetch for one in done if isinstance(one, effects.GrantRoom)]


def test_of_fetches_that_hold_room_and_wait_for_each_other_the_youngest_ends() -> None:
    told = Told(CacheLimits(99, 100))
    first, second, third = (told.order(one).number for one in (1, 2, 3))
    for fetch, size in ((first, 1), (second, 1), (second, 60)):
        (listing,) = told.tell(told.policy.needs, fetch, size)
        assert grants(told.tell(told.policy.answered, listing.number, contents())) == [fetch]
    (listing,) = told.tell(told.policy.needs, first, 60)
    told.tell(told.policy.answered, listing.number, contents())
    (listing,) = told.tell(told.policy.needs, third, 1)
    assert told.tell(told.policy.answered, listing.number, contents()) == [], "it comes after the first"
    (listing,) = told.tell(told.policy.needs, second, 61)
    assert grants(told.tell(told.policy.answered, listing.number, contents())) == [second], "it does not wait for them"
    (listing,) = told.tell(told.policy.needs, second, 100)
    (refused,) = told.tell(told.policy.answered, listing.number, contents())
    assert (refused.fetch, refused.failure.reason) == (second, "NoRoom")
    listing, failed = told.tell(told.policy.answered, second, refused.failure)
    assert failed.failure.reason == "NoSpace", "users read that"
    assert grants(told.tell(told.policy.answered, listing.number, contents())) == [first, third]


def test_what_fetches_have_stored_and_not_told_yet_refuses_nobody() -> None:
    """Each has a lease of its adapter, as another runner would have."""
    in_use, told = Failure.of(temporary("Another runner uses it.")), Told(CacheLimits(99, 20))
    first, second, third, fourth = (told.order(one).number for one in (1, 2, 3, 4))
    for fetch in (first, second):
        (listing,) = told.tell(told.policy.needs, fetch, 10)
        assert grants(told.tell(told.policy.answered, listing.number, contents())) == [fetch]

    def tried(listing: effects.ListCache) -> list[Any]:
        done = told.tell(told.policy.answered, listing.number, contents(1, 2))
        for number in (1, 2):
            (evict,) = [one for one in done if isinstance(one, effects.Evict)]
            assert evict.digest == digest(number)
            done = told.tell(told.policy.answered, evict.number, in_use)
        return done

    (listing,) = told.tell(told.policy.needs, third, 10)
    assert tried(listing) == []
    (listing,) = told.tell(told.policy.needs, fourth, 10)
    for fetch in (first, second):
        told.tell(told.policy.answered, fetch, Failure.of(temporary("It was stored, and then something failed.")))
    (listing,) = tried(listing)
    refused = [one.fetch for one in tried(listing) if isinstance(one, effects.RefuseRoom)]
    assert refused == [third, fourth], "nobody fetches, so another runner uses them"


def test_small_fetches_pass_a_large_one_that_waits_for_a_slow_one_and_never_delay_it() -> None:
    told = Told(CacheLimits(99, 100))
    slow, large = told.order(1).number, told.order(2).number
    (listing,) = told.tell(told.policy.needs, slow, 60)
    assert grants(told.tell(told.policy.answered, listing.number, contents())) == [slow]
    (listing,) = told.tell(told.policy.needs, large, 70)
    assert told.tell(told.policy.answered, listing.number, contents()) == []
    passed = []
    for number in range(3, 9):
        small = told.order(number).number
        (listing,) = told.tell(told.policy.needs, small, 10)
        passed += grants(told.tell(told.policy.answered, listing.number, contents()))
    assert len(passed) == 3, "a fourth would have no room beside the large one"
    done = told.tell(told.policy.answered, slow, held(1))
    (listing,) = [one for one in done if isinstance(one, effects.ListCache)]
    cached = CacheContents((Cached(digest(1), 60),))
    done = [listing]
    while listings := [one for one in done if isinstance(one, effects.ListCache)]:
        done = told.tell(told.policy.answered, listings[0].number, cached)  # first what has come just now is spared
    (evict,) = [one for one in done if isinstance(one, effects.Evict)]
    assert grants(told.tell(told.policy.answered, evict.number, None)) == [large], "although small ones are under way"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
def test_fetches_that_ask_several_times_all_end_in_any_order_within_the_limit(
    grows: list[list[int]], random: Random
) -> None:
    told, limit = Told(CacheLimits(99, 100)), 100
    steps = {told.order(one).number: list(accumulate(each)) for one, each in enumerate(grows)}
    may_write, cached, asking, asks = dict.fromkeys(steps, 0), dict[int, int](), set[int](), list[Any]()
    for _ in range(1000):
        if not steps:
            break
        at = random.choice([*asks, *(steps.keys() - asking)] or [0])
        if isinstance(at, effects.ListCache):
            found = tuple(Cached(digest(one), size) for one, size in cached.items())
            done = told.tell(told.policy.answered, at.number, CacheContents(found))
            asks.remove(at)
        elif isinstance(at, effects.Evict):
            del cached[int(at.digest[-8:], 16)]
            done = told.tell(told.policy.answered, at.number, None)
            asks.remove(at)
        elif at == 0:
            done = told.tell(told.policy.tick)
        elif steps[at]:
            asking.add(at)
            done = told.tell(told.policy.needs, at, steps[at][0])
        else:
            del steps[at]
            cached[at] = may_write.pop(at)
            done = told.tell(told.policy.answered, at, held(at))
        for one in done:
            match one:
                case effects.ListCache() | effects.Evict():
                    asks.append(one)
                case effects.GrantRoom(fetch):
                    asking.remove(fetch)
                    may_write[fetch] = steps[fetch].pop(0)
                case effects.RefuseRoom(fetch):
                    asking.remove(fetch)
                    del steps[fetch], may_write[fetch]
                    asks += told.tell(told.policy.answered, fetch, one.failure)
        asks = [one for one in asks if isinstance(one, effects.ListCache | effects.Evict)]
        assert sum(may_write.values()) + sum(cached.values()) <= limit
    assert not steps, "a fetch never ends"


def test_an_adapter_that_goes_while_it_is_listed_and_comes_again_has_its_bytes(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_adapter_bytes=1 << 20)
    cache.prepare()
    folder = cache.folder / f"{1:064x}"
    folder.mkdir()
    assert cache.contents(10, 1000.0).bytes == 0, "its files have gone"
    for name in ADAPTER_FILES:
        (folder / name).write_bytes(b"x" * 100)
    assert cache.contents(10, 1000.0).bytes == 100 * len(ADAPTER_FILES)


def test_a_listing_reads_only_the_folders_that_are_new_or_have_changed_here(tmp_path: Path, monkeypatch) -> None:
    """Thousands of adapters have come before. Each order that is answered, and each fetch, lists the cache."""
    cache = DiskCache(tmp_path / "cache", max_adapter_bytes=1 << 20)
    cache.prepare()
    read: list[str] = []
    size_of = disk_cache._size_of_adapter  # noqa: SLF001
    monkeypatch.setattr(disk_cache, "_size_of_adapter", lambda one: read.append(one.name) or size_of(one))

    def add(number: int) -> None:
        folder = cache.folder / f"{number:064x}"
        folder.mkdir()
        for name in ADAPTER_FILES:
            (folder / name).write_bytes(b"x" * 100)

    def listed(capacity: int = 99, room: int = 10_000, changed: tuple[int, ...] = ()) -> tuple[int, list[int]]:
        read.clear()
        found = cache.contents(capacity, room, [*map(digest, changed)])
        return found.bytes // 100, sorted(int(one, 16) for one in read)

    for number in range(10):
        add(number)
    assert listed() == (20, [*range(10)])
    assert listed() == (20, [])
    add(10)
    assert listed() == (22, [10])
    (cache.folder / f"{3:064x}" / "slab-1").write_bytes(b"y" * 300)
    assert listed() == (22, []), "another runner has written it, perhaps"
    assert listed(changed=(3,)) == (25, [3])
    assert cache.evict(digest(4), None)
    assert listed() == (23, [])
    assert listed(room=2000) == (23, [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]), "exact before anything leaves"
    assert listed(capacity=9) == (23, [0, 1, 2, 3, 5, 6, 7, 8, 9, 10])
    (cache.folder / f"{5:064x}" / "slab-1").write_bytes(b"y" * 300)
    assert listed() == (23, [])
    monkeypatch.setattr(cache, "_recount_at", 0.0)
    assert listed() == (26, [0, 1, 2, 3, 5, 6, 7, 8, 9, 10])


async def test_adapters_that_come_together_all_find_room_in_turn(tmp_path, one_size):
    setup = RegistrySetup(tmp_path, capacity=99, disk_bytes=2 * one_size + 100)
    found = await asyncio.gather(*(setup.ensure(number) for number in range(12)), return_exceptions=True)
    assert [one for one in found if isinstance(one, Exception)] == []
    setup.adapters.close()


@pytest.mark.parametrize(("skew", "least"), [(1.5, 0.97), (1.0, 0.87)])
def test_the_hits_come_near_those_of_an_eviction_that_knows_the_future(skew: float, least: float) -> None:
    uses = uses_of(skew)
    assert hits_on_disk(uses) / best_hits(uses) >= least


def test_what_was_popular_long_ago_leaves_and_counts_stay_finite_and_few() -> None:
    frequency = Frequency(1)
    for _ in range(1000):
        frequency.used(digest(1))
    for number in range(2, 100_000):
        frequency.used(digest(2 + number % 5000))
    assert 0.0 == frequency.of(digest(1)) < frequency.of(digest(2 + 99_999 % 5000)) < inf


WRITES = {
    "mkdir": "making the folder",
    "fsync": "flushing a file",
    "fchmod": "setting a mode",
    "rename": "putting the folder in its place",
}


@pytest.mark.parametrize("call", WRITES, ids=list(WRITES.values()))
async def test_a_disk_that_is_full_at_any_write_loses_nothing_and_is_named(tmp_path, monkeypatch, call):
    setup = RegistrySetup(tmp_path, disk_bytes=1 << 20)
    kept = await setup.ensure(1)
    before = {path: path.read_bytes() for path in setup.cache.folder.rglob("*") if path.is_file()}
    source = write_adapter(tmp_path / "a2", seed=2)
    real = getattr(os, call)

    def full(path: Any, *args: Any, **how: Any) -> Any:
        at = os.fspath(Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else path)
        if at.startswith(f"{setup.cache.folder}/.fetch-"):
            raise OSError(errno.ENOSPC, "No space left on device", at)
        return real(path, *args, **how)

    monkeypatch.setattr(os, call, full)
    order = scheduler_pb2.EnsureAdapter(
        adapter=common_pb2.AdapterRef(name="a2"), source=source.as_uri(), stage=common_pb2.ADAPTER_STAGE_CERTIFIED
    )
    with pytest.raises(AdapterFetchFailed) as caught:
        await setup.adapters.ensure(order)
    await settle(setup.adapters)
    assert caught.value.reason == "NoSpace"
    assert str(setup.cache.folder) in caught.value.message
    assert {path: path.read_bytes() for path in setup.cache.folder.rglob("*") if path.is_file()} == before
    assert setup.adapters.for_request(kept.digest) is not None
    monkeypatch.undo()
    setup.clock.advance(100)
    assert (await setup.settled(setup.adapters.ensure(order))).digest == adapter_digest(source)
    setup.adapters.close()
