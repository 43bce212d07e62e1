"""What interrupted fetches leave on the disk: bounded for each namespace, and cleared when it is of no use."""

import errno
import os
import time

import pytest

from motet.digest import adapter_digest, hex_of
from motet.domain import Digest
from motet.errors import AdapterFetchFailed
from motet_runner.adapters.policy.effects import Fetch
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.policy.values import FetchRequest
from motet_runner.daemon_threads import DaemonThreads
from motet_runner.sources.fetch_errors import no_room
from motet_runner.sources.partial_fetch import KEPT_SECONDS, PartialFetches, locked
from motet_runner.sources.source_access import RemoteFiles
from tests.runner_service.fake_peers import until
from tests.support.adapter_fetches import settle
from tests.support.in_process_runner import write_adapter
from tests.support.source_servers import EndlessBody, ErrorStatus

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def fetches(tmp_path):
    return PartialFetches(tmp_path / "partial", max_count=3, max_bytes=1 << 20)


def leave(fetches, namespace, source, *, size=1000, age=0.0):
    folder = fetches.folder_of(namespace, source)
    folder.mkdir(parents=True)
    file = folder / f"{WEIGHTS}.part"
    file.write_bytes(b"x" * size)
    for path in (file, folder):
        os.utime(path, (time.time() - age, time.time() - age))
    return folder


def test_a_namespace_keeps_its_newest_ones_and_takes_nothing_from_others(fetches):
    other = leave(fetches, "zeta", "https://zeta/", age=1000)
    left = [leave(fetches, "acme", f"https://acme/{n}/", age=100 - n) for n in range(10)]
    fetches.make_room("acme")
    assert [folder.exists() for folder in left] == [False] * 7 + [True] * 3
    assert other.exists()


def test_a_namespace_keeps_no_more_than_its_bytes(fetches):
    left = [leave(fetches, "acme", f"https://acme/{n}/", size=600_000, age=100 - n) for n in range(3)]
    fetches.make_room("acme")
    assert [folder.exists() for folder in left] == [False, False, True]


async def test_a_fetch_that_runs_is_never_removed(fetches):
    left = leave(fetches, "acme", "https://acme/", age=2 * KEPT_SECONDS)
    async with locked(left, DaemonThreads("locks", 1)) as folder:
        for n in range(5):
            leave(fetches, "acme", f"https://acme/{n}/")
        fetches.make_room("acme")
        fetches.clear(all_of_them=False)
        fetches.clear(all_of_them=True)
        fetches.forget("acme", "https://acme/")
        assert folder.exists()
        assert len(list(folder.parent.iterdir())) == 1
    fetches.forget("acme", "https://acme/")
    assert not folder.exists()


def test_what_is_too_old_goes_also_as_earlier_versions_left_it(fetches):
    old, new = (leave(fetches, "acme", f"https://acme/{age}/", age=age) for age in (2 * KEPT_SECONDS, 10))
    before = fetches.root / "0123456789abcdef"
    before.mkdir()
    os.utime(before, (0, 0))
    fetches.clear(all_of_them=False)
    assert (old.exists(), new.exists(), before.exists()) == (False, True, False)
    fetches.clear(all_of_them=True)
    assert not list(fetches.root.iterdir())


async def interrupted(web, fetch_setup, adapter, name, **how):
    source = web.put(f"/{name}/", adapter)
    web.faults[f"/{name}/{WEIGHTS}"] = ErrorStatus(503)
    with pytest.raises(AdapterFetchFailed, match="answers 503"):
        await fetch_setup.fetch(source, **how)
    return source


def kept(fetch_setup):
    return {path.parent for path in fetch_setup.partial()}


async def test_a_tenant_with_many_adapters_cannot_fill_the_disk(web, fetch_setup, adapter):
    fetch_setup.settings |= {"max_partial_fetches": 2}
    for n in range(4):
        await interrupted(web, fetch_setup, adapter, f"a{n}", manifest=f"a{n}")
        assert len(kept(fetch_setup)) == min(n + 1, 2)


async def test_what_is_left_goes_with_its_source_and_its_manifest(web, fetch_setup, adapter):
    await interrupted(web, fetch_setup, adapter, "first")
    (first,) = kept(fetch_setup)
    await interrupted(web, fetch_setup, adapter, "second")
    await until(lambda: not first.exists())
    assert len(kept(fetch_setup)) == 1
    fetch_setup.fetcher.registry.drop(Digest(""), "tenant-b/a")
    fetch_setup.fetcher.registry.drop(Digest(""), "tenant-a/a")
    await until(lambda: not kept(fetch_setup))


async def test_what_another_manifest_will_go_on_with_stays(web, fetch_setup, adapter):
    for manifest in ("one", "two"):
        source = await interrupted(web, fetch_setup, adapter, "shared", manifest=manifest)
    registry = fetch_setup.fetcher.registry
    registry.drop(Digest(""), "tenant-a/one")
    await settle(registry)
    assert kept(fetch_setup)
    web.faults.clear()
    await fetch_setup.fetch(source, manifest="two")


async def test_a_full_disk_is_cleared_of_what_is_left(web, fetch_setup, adapter, monkeypatch):
    await interrupted(web, fetch_setup, adapter, "left", manifest="left")

    def full(*_args, **_how):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch_setup.cache, "_store", full)
    with pytest.raises(AdapterFetchFailed, match="no space left") as failed:
        await fetch_setup.fetch(adapter.as_uri(), manifest="local")
    assert failed.value.reason == "NoSpace"
    assert not fetch_setup.partial()


async def test_a_fetch_that_gets_no_room_beside_others_clears_nothing(web, fetch_setup, adapter):
    """The disk is not full: what is in use leaves too little of what is allowed."""
    await interrupted(web, fetch_setup, adapter, "left", manifest="left")

    async def room(size):
        raise no_room(f"Others use what {size} bytes need.")

    request = FetchRequest(source=adapter.as_uri(), namespace="tenant-a")
    with pytest.raises(AdapterFetchFailed, match="Others use"):
        await fetch_setup.fetcher.files.fetch(Fetch(1, request), room)
    assert kept(fetch_setup)


async def test_the_upkeep_clears_what_is_too_old(web, fetch_setup, adapter):
    await interrupted(web, fetch_setup, adapter, "old")
    for path in (*fetch_setup.partial(), *kept(fetch_setup)):
        os.utime(path, (0, 0))
    fetch_setup.fetcher.registry.tick()
    await until(lambda: not fetch_setup.partial())


def size_of(adapter):
    return sum(path.stat().st_size for path in adapter.iterdir())


async def test_a_fetch_from_the_web_or_a_hub_begins_when_there_is_room_and_interrupted_ones_go_first(
    web, fetch_setup, adapter, tmp_path
):
    source = write_adapter(tmp_path / "small", seed=3)
    limit = size_of(adapter) + 3 * size_of(source)
    fetch_setup.limits = CacheLimits(1000, limit)
    small = await fetch_setup.fetch(source.as_uri(), manifest="small")
    changed = write_adapter(tmp_path / "other", rank=512, seed=5)
    with_chat = await interrupted_at_a_template(web, fetch_setup, adapter)
    assert kept(fetch_setup)
    fetched = await fetch_setup.fetch(web.put("/second/", changed), manifest="second")
    assert fetched.digest == adapter_digest(changed)
    assert not kept(fetch_setup), "there was no room for both"
    assert hex_of(small.digest) in fetch_setup.cached(), "an interrupted fetch goes before an adapter"
    web.faults.clear()
    await fetch_setup.fetch(with_chat, manifest="left")
    assert bytes_in(fetch_setup.folder / "data/cache") <= limit


async def interrupted_at_a_template(web, fetch_setup, adapter):
    """The weights have come, and what comes after them has not."""
    source = web.put("/left/", adapter)
    web.faults["/left/chat_template.jinja"] = ErrorStatus(503)
    with pytest.raises(AdapterFetchFailed, match="answers 503"):
        await fetch_setup.fetch(source, manifest="left")
    return source


@pytest.mark.parametrize("served", ["web", "hub", "without a size"])
async def test_what_never_fits_is_refused_before_its_weights_come(web, hub, fetch_setup, adapter, served):
    server = hub if served == "hub" else web
    fetch_setup.settings["fetch_ca_file"] = str(server.ca_file)
    fetch_setup.limits = CacheLimits(1000, 50_000)
    source = server.publish("org/pirate", adapter) if served == "hub" else server.put("/pirate/", adapter)
    if served == "without a size":
        server.faults["/pirate/adapter_model.safetensors"] = EndlessBody()
    with pytest.raises(AdapterFetchFailed, match=r"bytes, but engine\.adapterDiskMiB allows 50000") as failed:
        await fetch_setup.fetch("hf://org/pirate" if served == "hub" else source)
    assert failed.value.reason == "TooLarge"
    assert not fetch_setup.partial()
    if served == "web":
        assert str(size_of(adapter)) in failed.value.message


async def test_what_an_interrupted_fetch_has_left_counts_until_its_next_one_asks_for_room(web, fetch_setup, adapter):
    """Before, it may wait long for its turn."""
    source = await interrupted(web, fetch_setup, adapter, "left")
    web.faults.clear()
    sources, counted = fetch_setup.sources, []
    left = await sources.partial_bytes()
    assert left > 0

    async def room(_):
        counted.append(await sources.partial_bytes())

    remote = RemoteFiles(uri=source, namespace="tenant-a", max_bytes=1 << 20)
    async with sources.partial_folder(remote) as folder:
        assert [*folder.iterdir()], "it goes on in the same folder"
        counted.append(await sources.partial_bytes())
        await sources.fetch_into("adapter", remote, folder, lambda *_: None, room)
    assert counted[0] == left
    assert set(counted[1:]) == {0}


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
