"""Folders that change, grow, vanish or hang while adapters are fetched from them, and disks that take no writes."""

import asyncio
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.digest import adapter_digest
from motet.domain import Digest
from motet.errors import AdapterFetchFailed
from motet.settings import ProcessSettings
from motet_runner.adapters import folder_fetch, folder_lease
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.digest_lease import DigestLease
from motet_runner.adapters.folder_fetch import copy_folder
from motet_runner.adapters.policy import adapter_policy, effects
from motet_runner.adapters.policy.values import FetchRequest
from motet_runner.daemon_threads import CallHangs, DaemonThreads
from motet_runner.engine_messages import DropAdapter
from motet_runner.interface import AdapterFailed
from motet_runner.settings import Settings
from motet_runner.sources import fetch_errors, process_pool
from motet_runner.sources.fetch_order import FetchOrder
from motet_runner.sources.folder import AdapterFolder
from motet_runner.sources.metrics import FetchMetrics
from motet_runner.sources.source_access import Sources
from motet_runner.sources.volume_threads import mount_of
from tests.common.waiting import until
from tests.runner_service.test_registry import RegistrySetup
from tests.support.adapter_fetches import Fetcher, usual_sources
from tests.support.in_process_runner import write_adapter
from tests.support.small_disk import small_disk

WEIGHTS = "adapter_model.safetensors"
LIMIT = 1 << 20


@pytest.fixture
def cache(tmp_path):
    cache = DiskCache(tmp_path / "cache", max_adapter_bytes=LIMIT)
    cache.prepare()
    return cache


def contents(cache):
    return sorted(path.name for path in cache.folder.iterdir())


class Changing(AdapterFolder):
    """A folder whose owner does something each time a file was looked at and is now opened to be read."""

    def __init__(self, path, change):
        super().__init__(path)
        object.__setattr__(self, "change", change)
        object.__setattr__(self, "looked", False)

    def stat_files(self, max_bytes):
        object.__setattr__(self, "looked", False)
        found = super().stat_files(max_bytes)
        object.__setattr__(self, "looked", True)
        return found

    def open(self, name):
        if self.looked and name == WEIGHTS:
            self.change(self.path)
        return super().open(name)


def request_for(folder: Path, **how):
    return FetchRequest(source=folder.as_uri(), **how)


def test_a_file_that_grows_beyond_the_limit_after_it_was_looked_at_is_refused(tmp_path, cache):
    source = write_adapter(tmp_path / "a")
    growing = Changing(source, lambda folder: os.truncate(folder / WEIGHTS, 4 * LIMIT))
    with pytest.raises(AdapterFetchFailed, match="reads at most 1048576") as failed:
        copy_folder(cache, growing, request_for(source))
    assert failed.value.reason == "TooLarge"
    assert contents(cache) == []


def test_no_more_is_copied_than_was_looked_at(tmp_path, cache, monkeypatch):
    """It grows while it is read, so that nothing but the count of bytes ends the copy."""
    source = write_adapter(tmp_path / "a")
    size = (source / WEIGHTS).stat().st_size
    written = []
    copied = folder_fetch.copy_file

    def grow_once_open(source, expected, target, content, reading):
        @contextmanager
        def grow():
            yield
            with (source.path / expected.name).open("ab") as file:
                file.write(b"x" * LIMIT)

        try:
            copied(source, expected, target, content, grow)
        finally:
            written.append(target.stat().st_size)

    monkeypatch.setattr(folder_fetch, "copy_file", grow_once_open)
    monkeypatch.setattr(folder_fetch, "CHUNK_BYTES", 256)
    with pytest.raises(AdapterFetchFailed, match=r"at most|changes while"):
        copy_folder(cache, AdapterFolder(source), request_for(source))
    assert max(written) <= size
    assert contents(cache) == []


def test_a_file_that_is_swapped_after_it_was_looked_at_is_read_again(tmp_path, cache):
    source, other = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", seed=1)
    changes = [lambda folder: (other / WEIGHTS).replace(folder / WEIGHTS)]
    held = copy_folder(cache, Changing(source, lambda folder: changes and changes.pop()(folder)), request_for(source))
    assert held.digest == adapter_digest(source) == adapter_digest(held.folder)
    assert contents(cache) == [held.folder.name], "nothing of what was there before"


def test_a_folder_that_never_rests_is_tried_again_later(tmp_path, cache):
    source = write_adapter(tmp_path / "a")
    with pytest.raises(AdapterFetchFailed, match="changes while Motet reads it") as failed:
        copy_folder(cache, Changing(source, lambda folder: write_adapter(folder, seed=1)), request_for(source))
    assert failed.value.retry_after > 0
    assert contents(cache) == []


# ------------------------------------------------------------------------------------------------ volumes that hang


class HungVolumes:
    """Folders of some volumes hang in their first stat, as those of a network volume whose server is away."""

    def __init__(self, monkeypatch, *names):
        self.names = names
        self.may_go_on = threading.Event()
        self.stats = 0
        stat_files = AdapterFolder.stat_files

        def hang(folder, max_bytes):
            if set(self.names) & set(folder.path.parts):
                self.stats += 1
                self.may_go_on.wait()
            return stat_files(folder, max_bytes)

        monkeypatch.setattr(AdapterFolder, "stat_files", hang)


@pytest.fixture
def volumes(tmp_path):
    root = tmp_path / "volumes"
    for volume in ("well", "hung"):
        for n in range(8):
            write_adapter(root / volume / f"a{n}", seed=n)
    return root


def sources_of(tmp_path, volumes, *, stall_seconds, **how):
    process = ProcessSettings(data_dir=tmp_path / "data", time_scale=1.0)
    settings = Settings(volumes=str(volumes), fetch_stall_seconds=stall_seconds, **how)
    return Sources(settings, process, CollectorRegistry())


async def test_a_hung_volume_holds_up_nobody_else(tmp_path, cache, volumes, monkeypatch):
    hung = HungVolumes(monkeypatch, "hung")
    fetcher = Fetcher(cache, sources_of(tmp_path, volumes, stall_seconds=0.5))
    stuck = [
        asyncio.create_task(fetcher.fetch(request_for(volumes / "hung" / f"a{n % 8}", namespace="acme")))
        for n in range(64)
    ]
    await until(lambda: hung.stats == 2)
    for n in range(8):
        source = volumes / "well" / f"a{n}"
        assert (await fetcher.fetch(request_for(source))).digest == adapter_digest(source)
    failures = await asyncio.gather(*stuck, return_exceptions=True)
    assert all(isinstance(one, AdapterFetchFailed) and "does not answer" in one.message for one in failures)
    assert all(one.retry_after > 0 for one in failures)
    assert hung.stats == 2, "no more threads than two wait for the volume"
    assert [thread.name for thread in threading.enumerate()].count(f"volume {volumes / 'hung'}") == 2
    volumes_read = fetcher.files.volumes.by_name.values()
    assert not any(one.threads.calls for one in volumes_read), "what waited behind them is forgotten"
    hung.may_go_on.set()
    source = volumes / "hung" / "a0"
    assert (await fetcher.fetch(request_for(source))).digest == adapter_digest(source)
    fetcher.registry.close()


async def test_what_a_hung_volume_brings_after_all_is_not_kept_locked(tmp_path, cache, volumes, monkeypatch):
    hung = HungVolumes(monkeypatch, "hung")
    fetcher = Fetcher(cache, sources_of(tmp_path, volumes, stall_seconds=0.2))
    with pytest.raises(AdapterFetchFailed, match="does not answer"):
        await fetcher.fetch(request_for(volumes / "hung" / "a0"))
    hung.may_go_on.set()
    await until(lambda: len(contents(cache)) == 1 and not contents(cache)[0].startswith("."))
    digest = adapter_digest(volumes / "hung" / "a0")
    await until(lambda: cache.evict(digest, None))


async def test_a_slow_copy_is_not_taken_for_a_hung_volume(tmp_path, cache, volumes, monkeypatch):
    monkeypatch.setattr(folder_fetch, "CHUNK_BYTES", 64)
    read = os.fdopen
    pause = threading.Event()

    def slow(*args, **how):
        pause.wait(0.15)
        return read(*args, **how)

    monkeypatch.setattr(folder_fetch.os, "fdopen", slow)
    fetcher = Fetcher(cache, sources_of(tmp_path, volumes, stall_seconds=0.25))
    source = volumes / "well" / "a0"
    assert (await fetcher.fetch(request_for(source))).digest == adapter_digest(source)
    fetcher.registry.close()


async def test_a_volume_is_not_taken_for_hung_while_the_own_disk_flushes(tmp_path, cache, volumes, monkeypatch):
    flush, may_go_on = os.fsync, threading.Event()

    def slow(file):
        may_go_on.wait(20)
        flush(file)

    monkeypatch.setattr(folder_fetch.os, "fsync", slow)
    fetcher = Fetcher(cache, sources_of(tmp_path, volumes, stall_seconds=0.2))
    fetches = [asyncio.create_task(fetcher.fetch(request_for(volumes / "well" / f"a{n}"))) for n in range(3)]
    done, _ = await asyncio.wait(fetches, timeout=1.0)  # two of them flush, and one waits for its turn
    assert not done
    may_go_on.set()
    for n, held in enumerate(await asyncio.gather(*fetches)):
        assert held.digest == adapter_digest(volumes / "well" / f"a{n}")
    fetcher.registry.close()


# --------------------------------------------------------------------------------------------- an own disk that hangs

IMPATIENT = 0.2
HANGS = "This runner's disk cache does not answer: a call got nothing for 0.2"


async def until_it_answers(fetch):
    """What `fetch` gives once the disk goes on: on a busy machine its first calls may still take too long."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await fetch()
            except AdapterFetchFailed as failure:
                if HANGS not in failure.message:
                    raise


class HungDisk:
    """One of the runner's own calls hangs, each time that it begins."""

    def __init__(self, monkeypatch, owner, name):
        self.may_go_on = threading.Event()
        self.began = 0
        call = getattr(owner, name)

        def hang(*args, **how):
            self.began += 1
            self.may_go_on.wait(20)
            return call(*args, **how)

        monkeypatch.setattr(owner, name, hang)


@pytest.fixture
def impatient(tmp_path):
    setup = RegistrySetup(tmp_path, capacity=1, disk_stall_seconds=IMPATIENT)
    yield setup
    setup.adapters.close()


async def test_orders_fail_while_the_cache_hangs_and_their_late_leases_are_released(impatient, monkeypatch):
    digest = (await impatient.ensure(1)).digest
    impatient.adapters.drop(digest)
    hung = HungDisk(monkeypatch, DiskCache, "find")
    for _ in range(3):
        with pytest.raises(AdapterFetchFailed, match=HANGS) as failure:
            await impatient.ensure_digest(1, digest)
        assert failure.value.retry_after > 0
    assert hung.began == 1, "no other call begins behind one that hangs"
    hung.may_go_on.set()
    await until(lambda: impatient.cache.evict(digest, None))
    assert (await until_it_answers(lambda: impatient.ensure_digest(1, digest))).digest == digest


async def test_a_check_that_hangs_fails_its_order(impatient, monkeypatch):
    hung = HungDisk(monkeypatch, impatient.files.checks, "certify")
    with pytest.raises(AdapterFetchFailed, match=HANGS):
        await impatient.ensure(1)
    assert not list(impatient.adapters.policy)
    hung.may_go_on.set()
    assert (await until_it_answers(lambda: impatient.ensure(1))).checked is not None


async def test_an_adapter_whose_eviction_hangs_counts_as_gone(impatient, monkeypatch):
    one = await impatient.ensure(1)
    hung = HungDisk(monkeypatch, DigestLease, "become_exclusive")
    second = asyncio.create_task(impatient.ensure(2))
    await until(lambda: impatient.adapters.get(one.digest) is None)
    assert hung.began == 1
    assert DropAdapter(one.digest) in impatient.posted
    hung.may_go_on.set()
    await second
    await until(lambda: one.digest not in impatient.cached())
    assert (await until_it_answers(lambda: impatient.ensure_digest(1, one.digest))).ready


async def test_a_fetch_fails_when_the_own_disk_hangs_and_the_volume_is_not_blamed(
    tmp_path, cache, volumes, monkeypatch
):
    hung = HungDisk(monkeypatch, folder_fetch.os, "fsync")
    fetcher = Fetcher(cache, sources_of(tmp_path, volumes, stall_seconds=0.2, disk_stall_seconds=IMPATIENT))
    fetches = [fetcher.fetch(request_for(volumes / "well" / f"a{n}")) for n in range(3)]
    for failure in await asyncio.gather(*fetches, return_exceptions=True):
        assert isinstance(failure, AdapterFetchFailed), failure
        assert HANGS in failure.message
    hung.may_go_on.set()
    fetched = await until_it_answers(lambda: fetcher.fetch(request_for(volumes / "well" / "a3")))
    assert fetched.digest == adapter_digest(volumes / "well" / "a3")
    fetcher.registry.close()


@pytest.mark.parametrize("known", [False, True], ids=["stored", "found"])
@pytest.mark.parametrize("how", ["it hangs", "the fetch is stopped"])
async def test_a_fetch_that_ends_while_it_tidies_keeps_nothing_locked(tmp_path, cache, monkeypatch, how, known):
    source = write_adapter(tmp_path / "volume" / "a")
    digest = adapter_digest(source)
    sources = sources_of(tmp_path, source.parent, stall_seconds=20, disk_stall_seconds=0.5 if how == "it hangs" else 20)
    fetcher = Fetcher(cache, sources)
    if known:
        copy_folder(cache, AdapterFolder(source), request_for(source)).lease.release()

    async def bring(what, remote, folder, on_progress, room):
        for file in source.iterdir():
            shutil.copy(file, folder)

    monkeypatch.setattr(sources, "fetch_into", bring)
    hung = HungDisk(monkeypatch, shutil, "rmtree")
    request = FetchRequest(source="https://acme/a/", expected=digest if known else "")
    fetch = asyncio.create_task(fetcher.files.fetch(effects.Fetch(1, request)))
    if how == "the fetch is stopped":
        await until(lambda: hung.began)
        fetch.cancel()
        hung.may_go_on.set()
    with pytest.raises((CallHangs, asyncio.CancelledError)):
        await fetch
    hung.may_go_on.set()
    await until(lambda: cache.evict(digest, None))
    fetcher.registry.close()


async def test_a_fetch_process_that_cannot_be_killed_holds_up_nobody(tmp_path, monkeypatch):
    """As one does that waits for a disk."""
    killed, kill = [], asyncio.subprocess.Process.kill

    def survive(process):
        killed.append(process)

    monkeypatch.setattr(asyncio.subprocess.Process, "kill", survive)
    monkeypatch.setattr(process_pool, "COMMAND", (sys.executable, "-c", "import time; time.sleep(20)"))
    monkeypatch.setattr(process_pool, "END_SECONDS", 0.05)
    pool = process_pool.FetchProcessPool(FetchMetrics(CollectorRegistry()), max_processes=1)
    order = FetchOrder(
        what="adapter",
        uri="https://acme/a/",
        into=str(tmp_path),
        max_bytes=1,
        stall_seconds=0.01,
        min_average_bytes_per_second=1000,
    )
    with pytest.raises(AdapterFetchFailed, match="did not arrive completely"):
        await pool.fetch(order, lambda *_: None)
    (process,) = killed
    assert process.returncode is None
    kill(process)
    await process.wait()


NEEDS_ROOM = """
import sys, time
from pathlib import Path
from motet_runner.sources import fetch_process as child
from motet_runner.sources.fetch_order import FetchOrder
order = FetchOrder.decode(sys.stdin.buffer.readline())
if order.uri.endswith("slow/"):
    time.sleep(1.3)
watch = child.TransferWatch(order)
watch.start()
if order.uri.endswith("ends/"):
    child.send(needs=[1000])
    sys.exit(1)
child.RoomOnDisk(watch).need({"adapter_model.safetensors": 1000})
if order.uri.endswith("slow/"):
    for _ in range(13):
        time.sleep(0.1)
        watch.check(1 << 20)
child.send(bytes=1000, done=True)
"""


async def fetch_that_needs_room(folder, monkeypatch, uri, room):
    monkeypatch.setattr(process_pool, "COMMAND", (sys.executable, "-c", NEEDS_ROOM))
    pool = process_pool.FetchProcessPool(FetchMetrics(CollectorRegistry()), max_processes=1)
    async with asyncio.timeout(20):
        await pool.fetch(needs_room(folder, uri), lambda *_: None, room=room)


def needs_room(folder, uri="https://acme/a/", *, stall_seconds=0.5):
    return FetchOrder(
        what="adapter",
        uri=uri,
        into=str(folder),
        max_bytes=1,
        stall_seconds=stall_seconds,
        min_average_bytes_per_second=1000,
        asks_room=True,
    )


async def test_a_source_is_not_too_slow_while_there_is_no_room(tmp_path, monkeypatch):
    waited = []

    async def room(size):
        await asyncio.sleep(3)  # longer than the source may stall, and than the whole fetch may take
        waited.append(size)

    await fetch_that_needs_room(tmp_path, monkeypatch, "https://acme/a/", room)
    assert waited == [1000]


async def test_a_fetch_that_waits_for_room_takes_no_place_from_others(tmp_path, monkeypatch):
    """There may be room for a smaller one, and a base model needs none."""
    monkeypatch.setattr(process_pool, "COMMAND", (sys.executable, "-c", NEEDS_ROOM))
    pool = process_pool.FetchProcessPool(FetchMetrics(CollectorRegistry()), max_processes=1)
    may_go_on, asked = asyncio.Event(), []

    async def room(size):
        asked.append(size)
        await may_go_on.wait()

    async def at_once(_): ...

    async with asyncio.timeout(20):
        waits = asyncio.create_task(
            pool.fetch(needs_room(tmp_path / "a", stall_seconds=10), lambda *_: None, room=room)
        )
        while not asked:
            await asyncio.sleep(0.01)
        await pool.fetch(needs_room(tmp_path / "b", stall_seconds=10), lambda *_: None, room=at_once)
        assert not waits.done()
        may_go_on.set()
        await waits
    assert asked == [1000], "what it was granted stays"


UNKNOWN_SIZE = """
import sys
from pathlib import Path
import httpx2
from motet_runner.sources import fetch_process as child
from motet_runner.sources.fetch_order import FetchOrder
from motet_runner.sources.file_selection import WantedFile
from motet_runner.sources.web_folder import WebFolder
order = FetchOrder.decode(sys.stdin.buffer.readline())
def body():
    for _ in range(7):
        with open(order.into + ".sent", "ab") as sent:
            sent.write(b"x")
        yield b"x" * (1 << 20)
client = httpx2.Client(transport=httpx2.MockTransport(lambda _: httpx2.Response(200, content=body())))
need = child.RoomOnDisk(child.TransferWatch(order)).need
WebFolder("https://acme/a/", client, {}, need).fetch(WantedFile("weights", limit=1 << 30), Path(order.into))
child.send(bytes=7 << 20, done=True)
"""


async def fetch_of_unknown_size(folder, monkeypatch, room):
    folder.mkdir()
    monkeypatch.setattr(process_pool, "COMMAND", (sys.executable, "-c", UNKNOWN_SIZE))
    monkeypatch.setattr(process_pool, "ROOM_SECONDS", 0.05)
    pool = process_pool.FetchProcessPool(FetchMetrics(CollectorRegistry()), max_processes=1)
    async with asyncio.timeout(60):
        await pool.fetch(needs_room(folder), lambda *_: None, room=room)


async def test_a_file_of_unknown_size_does_not_come_again_each_time_that_it_waits_for_room(tmp_path, monkeypatch):
    async def room(size):
        await asyncio.sleep(2)  # in all, longer than the whole fetch may take

    await fetch_of_unknown_size(tmp_path / "a", monkeypatch, room)
    assert (tmp_path / "a.sent").stat().st_size <= 7 + 2


async def test_a_fetch_that_has_room_gets_the_place_of_one_that_waits_for_room(tmp_path, monkeypatch):
    """Whatever has come of that one: its room comes when the other one has ended."""
    monkeypatch.setattr(process_pool, "ROOM_SECONDS", 0.05)
    pool = process_pool.FetchProcessPool(FetchMetrics(CollectorRegistry()), max_processes=2)
    waits, other_ended = asyncio.Event(), asyncio.Event()

    async def room(size):
        if size > 5 << 20:
            waits.set()
            await other_ended.wait()

    async def at_once(_): ...

    def fetch(folder, program, room):
        folder.mkdir()
        monkeypatch.setattr(process_pool, "COMMAND", (sys.executable, "-c", program))
        return pool.fetch(needs_room(folder, stall_seconds=10), lambda *_: None, namespace="acme", room=room)

    async with asyncio.timeout(60):
        larger = asyncio.create_task(fetch(tmp_path / "a", UNKNOWN_SIZE, room))
        await waits.wait()
        await fetch(tmp_path / "b", NEEDS_ROOM, at_once)
        assert not larger.done()
        other_ended.set()
        monkeypatch.setattr(process_pool, "COMMAND", (sys.executable, "-c", UNKNOWN_SIZE))
        await larger


async def test_a_fetch_has_no_more_time_because_it_has_waited_for_room(tmp_path, monkeypatch):
    async def room(size):
        await asyncio.sleep(3)

    with pytest.raises(AdapterFetchFailed, match="did not arrive completely in 2 s"):
        await fetch_that_needs_room(tmp_path, monkeypatch, "https://acme/slow/", room)


async def test_a_file_of_unknown_size_that_fits_is_not_refused(tmp_path, monkeypatch):
    """Although there is no room for more than it takes."""

    async def room(size):
        if size > limit:
            raise fetch_errors.no_space("There is no room.")

    limit = 7 << 20
    await fetch_of_unknown_size(tmp_path / "a", monkeypatch, room)
    limit -= 1
    with pytest.raises(AdapterFetchFailed, match="no room"):
        await fetch_of_unknown_size(tmp_path / "b", monkeypatch, room)


async def test_a_fetch_that_is_stopped_asks_for_no_room_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(process_pool, "COMMAND", (sys.executable, "-c", NEEDS_ROOM))
    pool = process_pool.FetchProcessPool(FetchMetrics(CollectorRegistry()), max_processes=1)
    asks, stopped = asyncio.Event(), asyncio.Event()

    async def room(_):
        asks.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    for wait in (0.0, 2 * process_pool.ROOM_SECONDS):
        asks.clear()
        stopped.clear()
        async with asyncio.timeout(20):
            fetching = asyncio.create_task(pool.fetch(needs_room(tmp_path), lambda *_: None, room=room))
            await asks.wait()
            await asyncio.sleep(wait)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            await stopped.wait()


async def test_a_fetch_process_that_has_ended_waits_for_no_room(tmp_path, monkeypatch):
    async def room(_):
        await asyncio.Event().wait()

    with pytest.raises(AdapterFetchFailed, match="the fetch process ended with status 1"):
        await fetch_that_needs_room(tmp_path, monkeypatch, "https://acme/ends/", room)


async def test_a_call_waits_for_its_turn_as_long_as_those_before_it_do_not_hang():
    threads, may_go_on = DaemonThreads("calls", 1), threading.Event()
    first = asyncio.create_task(threads.run(may_go_on.wait, seconds=20))
    second = asyncio.create_task(threads.run(lambda: 2, seconds=0.01))
    done, _ = await asyncio.wait({second}, timeout=0.1)
    assert not done
    may_go_on.set()
    assert (await first, await second) == (True, 2)


def test_a_larger_adapter_may_take_longer(tmp_path):
    sources = usual_sources(tmp_path, disk_stall_seconds=60)
    assert sources.disk_seconds(1 << 30) > sources.disk_seconds(1 << 20) > 60


def test_a_process_ends_although_a_volume_hangs(tmp_path, volumes):
    program = textwrap.dedent(f"""
        import asyncio, threading
        from pathlib import Path
        from motet_runner.adapters.cache import DiskCache
        from motet_runner.adapters.policy.values import FetchRequest
        from motet_runner.sources.folder import AdapterFolder
        from tests.support.adapter_fetches import Fetcher, usual_sources

        hung = threading.Event()

        def hang(folder, max_bytes):
            hung.set()
            threading.Event().wait()

        AdapterFolder.stat_files = hang

        async def main():
            cache = DiskCache(Path({str(tmp_path / "cache")!r}), max_adapter_bytes=1 << 20)
            cache.prepare()
            fetcher = Fetcher(cache)
            fetch = asyncio.create_task(fetcher.fetch(FetchRequest(source={(volumes / "hung/a0").as_uri()!r})))
            while not hung.is_set():
                await asyncio.sleep(0.01)
            fetcher.registry.close()
            print("ends")

        asyncio.run(main())
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


@pytest.mark.parametrize(("path", "mount"), [("/proc/self/status", "/proc"), ("/nowhere/at/all", "/")])
def test_a_path_belongs_to_the_mount_that_it_lies_on(path, mount):
    assert mount_of(Path(path)) == mount


# -------------------------------------------------------------------------------------- disks and folders that change


@pytest.fixture
def setup(tmp_path):
    setup = RegistrySetup(tmp_path)
    yield setup
    setup.adapters.close()


async def test_a_vanished_folder_costs_a_fetch_and_no_more(setup):
    one = await setup.ensure(1)
    digest = one.digest
    shutil.rmtree(one.held.folder)
    assert setup.adapters.for_request(digest) is not None, "nobody has noticed yet"
    await setup.settled()
    assert setup.adapters.for_request(digest) is None
    assert not list(setup.adapters.residency.all())
    waiting = asyncio.create_task(setup.adapters.wait_for(digest))
    await setup.ensure_digest(1, digest)
    await waiting
    assert setup.adapters.for_request(digest) is not None


async def test_a_cache_that_hangs_does_not_hold_up_who_releases_a_folder(setup, monkeypatch):
    one = await setup.ensure(1)
    hangs, may_go_on = threading.Event(), threading.Event()

    def hang(lease):
        hangs.set()
        return may_go_on.wait(20)

    monkeypatch.setattr(DigestLease, "is_live", hang)
    setup.adapters.tick()
    await asyncio.to_thread(hangs.wait)
    started = time.monotonic()
    lease = one.held.lease
    setup.adapters.drop(one.digest)
    assert setup.adapters.get(one.digest) is None
    setup.adapters.close()
    assert time.monotonic() - started < 10
    may_go_on.set()
    await until(lambda: lease.released)


def test_a_folder_that_cannot_be_locked_exclusively_stays_with_its_lease(tmp_path, cache, monkeypatch):
    """As on NFS, which does so only for who may write to what is open."""
    source = write_adapter(tmp_path / "a")
    held = copy_folder(cache, AdapterFolder(source), request_for(source))
    lock = fcntl.flock

    def on_nfs(file, how):
        if how & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(file, how)

    monkeypatch.setattr(folder_lease.fcntl, "flock", on_nfs)
    assert not cache.evict(held.digest, held)
    assert held.lease.is_live()
    held.lease.release()


async def test_a_cache_that_was_removed_is_made_again(setup):
    one = await setup.ensure(1)
    shutil.rmtree(setup.cache.folder)
    assert (await setup.ensure(1)).digest == one.digest
    assert setup.adapters.for_request(one.digest)


async def test_what_is_no_digest_is_not_there(setup):
    assert await setup.request(Digest("sha256:../../etc")) is None


async def test_requests_do_not_pile_up_looks_at_a_folder(setup):
    one = await setup.ensure(1)
    for _ in range(1000):
        setup.adapters.for_request(one.digest)
    assert len(setup.adapters.tasks) <= 2
    await setup.settled()


async def test_a_vanished_folder_is_noticed_without_a_request(setup):
    one = await setup.ensure(1)
    shutil.rmtree(one.held.folder)
    setup.adapters.tick()
    await setup.settled()
    assert setup.adapters.get(one.digest) is None


async def test_looks_at_a_slow_disk_do_not_pile_up_and_let_other_calls_pass(setup, monkeypatch):
    monkeypatch.setattr(adapter_policy, "CONFIRMED_AT_ONCE", 1)
    lives = [await setup.ensure(n) for n in (1, 2)]
    hangs, may_go_on, looks = threading.Event(), threading.Event(), []

    def slow(lease):
        hangs.set()
        looks.append(lease)
        return may_go_on.wait(20)

    monkeypatch.setattr(DigestLease, "is_live", slow)
    for _ in range(5):
        setup.adapters.tick()
    await asyncio.to_thread(hangs.wait)
    assert not setup.files.folders.calls, "others would wait for them"
    may_go_on.set()
    await setup.settled()
    assert looks == [life.held.lease for life in lives]
    setup.adapters.tick()
    await setup.settled()
    assert len(looks) == 4, "the next round"


async def test_lock_files_that_were_removed_are_made_again_without_a_request(setup):
    one = await setup.ensure(1)
    shutil.rmtree(f"{setup.cache.folder}.leases")
    setup.adapters.tick()
    await setup.settled()
    assert not evicted_by_another_process(setup.cache, one.digest)


async def test_a_folder_that_cannot_be_looked_at_hides_no_other_that_has_vanished(setup):
    bad, gone = [await setup.ensure(n) for n in (1, 2)]
    place = bad.held.folder
    place.rename(place.with_name("aside"))
    place.symlink_to(place.name)
    shutil.rmtree(gone.held.folder)
    setup.adapters.tick()
    await setup.settled()
    assert setup.adapters.get(gone.digest) is None
    assert setup.adapters.get(bad.digest).ready


async def test_a_look_that_fails_ends_no_round(setup, monkeypatch):
    one = await setup.ensure(1)

    async def fails(_):
        raise CallHangs(1.0)

    with monkeypatch.context() as patch:
        patch.setattr(setup.files, "vanished", fails)
        setup.adapters.tick()
        await setup.settled()
    shutil.rmtree(one.held.folder)
    setup.adapters.tick()
    await setup.settled()
    assert setup.adapters.get(one.digest) is None


async def test_a_cached_folder_that_lacks_a_file_is_replaced(setup, tmp_path):
    one = await setup.ensure(1)
    setup.adapters.close()
    (one.held.folder / WEIGHTS).unlink()
    again = RegistrySetup(tmp_path)
    assert await again.request(one.digest) is None
    found = await again.ensure(1)
    assert adapter_digest(found.held.folder) == one.digest
    again.adapters.close()


def test_a_folder_that_another_runner_has_stored_a_moment_ago_is_not_removed(tmp_path, cache, monkeypatch):
    source = write_adapter(tmp_path / "a")
    first = copy_folder(cache, AdapterFolder(source), request_for(source))
    first.lease.release()
    (first.folder / WEIGHTS).unlink()
    others = []
    look = cache.held

    def look_late(digest, lease):
        try:
            return look(digest, lease)
        except FileNotFoundError:
            if not others:
                shutil.rmtree(lease.folder)
                other = DiskCache(cache.folder, max_adapter_bytes=LIMIT)
                others.append(copy_folder(other, AdapterFolder(source), request_for(source)))
            raise

    monkeypatch.setattr(cache, "held", look_late)
    held = copy_folder(cache, AdapterFolder(source), request_for(source))
    assert others[0].lease.is_live()
    assert held.inode == others[0].inode
    for one in (held, *others):
        one.lease.release()


@pytest.fixture
def own_mount(tmp_path):
    """A file system for the cache that can be made read-only."""
    with small_disk(tmp_path / "cache") as place:
        yield place


async def test_what_is_on_a_read_only_disk_still_serves(own_mount, tmp_path):
    setup = RegistrySetup(tmp_path, capacity=1)
    one, other = await setup.ensure(1), await setup.ensure(2)
    setup.adapters.close()
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", own_mount], check=True)
    again = RegistrySetup(tmp_path, capacity=1)
    assert await again.request(other.digest)
    for _ in range(3):
        assert again.adapters.for_request(other.digest)
        await again.settled()
    with pytest.raises(AdapterFetchFailed, match="Read-only file system"):
        await again.ensure_digest(1, one.digest)
    assert again.adapters.for_request(other.digest)
    newer = RegistrySetup(tmp_path, checker=99)
    assert (await newer.ensure_digest(2, other.digest)).certificate.checker == 99, (
        "it is checked, although nothing can be kept of it"
    )
    for each in (again, newer):
        each.adapters.close()


async def test_an_error_of_any_kind_ends_only_its_order(setup, monkeypatch):
    kept = await setup.ensure(1)
    for error in (OSError(5, "Input/output error"), KeyError("a defect"), UnicodeDecodeError("utf-8", b"x", 0, 1, "")):

        def fails(*_args, raised=error, **_how):
            raise raised

        with monkeypatch.context() as patch:
            patch.setattr(setup.cache, "store", fails)
            with pytest.raises((AdapterFetchFailed, Exception)) as failed:
                await setup.ensure(2)
            assert hasattr(failed.value, "code"), "an error of the table"
    assert setup.adapters.for_request(kept.digest)
    assert await setup.ensure(2)


# ------------------------------------------------------------------------------------------------------ two processes


async def test_after_a_new_fetch_the_lease_holds_the_new_folder(setup, tmp_path):
    """Another process evicts nothing that is in use here, although it was fetched again meanwhile."""
    one = await setup.ensure(1)
    digest = one.digest
    (one.held.folder / WEIGHTS).write_bytes(b"changed")
    setup.adapters.on_failed(_engine_failure(digest))
    with pytest.raises(AdapterFetchFailed, match="have changed"):
        await setup.ensure_digest(1, digest)
    await setup.ensure_digest(1, digest)
    setup.users[digest] = 1
    assert setup.adapters.get(digest).held.lease.is_live()
    assert not evicted_by_another_process(setup.cache, digest)
    setup.users[digest] = 0
    setup.adapters.drop(digest)
    await setup.settled()
    assert evicted_by_another_process(setup.cache, digest)


async def test_a_folder_that_another_process_has_replaced_is_held_anew(setup, tmp_path):
    one = await setup.ensure(1)
    old = one.held
    setup.users[one.digest] = 1
    other = RegistrySetup(tmp_path)
    shutil.rmtree(old.folder)
    await other.ensure(1)
    setup.adapters.tick()
    await setup.settled()
    held = setup.adapters.get(one.digest).held
    assert held.inode != old.inode
    other.adapters.close()
    assert not evicted_by_another_process(setup.cache, one.digest)


async def test_an_order_that_finds_another_folder_than_the_one_held_takes_its_lease(setup, tmp_path):
    one = await setup.ensure(1)
    old = one.held
    other = RegistrySetup(tmp_path)
    shutil.rmtree(old.folder)
    await other.ensure(1)
    other.adapters.close()
    await setup.ensure_digest(1, one.digest)
    held = setup.adapters.get(one.digest).held
    assert held.inode != old.inode
    assert held.lease.is_live()
    assert not old.lease.is_live(), "it is released"
    assert not evicted_by_another_process(setup.cache, one.digest)


async def test_whoever_evicts_a_folder_that_was_replaced_leaves_the_new_one(cache, tmp_path):
    source = write_adapter(tmp_path / "a")
    old = copy_folder(cache, AdapterFolder(source), request_for(source))
    shutil.rmtree(old.folder)
    copy_folder(cache, AdapterFolder(source), request_for(source)).lease.release()
    assert cache.evict(old.digest, old)
    assert old.folder.exists()


async def test_an_adapter_that_another_process_uses_stays_on_the_disk(setup, tmp_path):
    other = RegistrySetup(tmp_path)
    theirs = await other.ensure(1)
    for n in (1, 2, 3, 4):
        await setup.ensure(n)
    assert theirs.digest in setup.cached()
    assert setup.adapters.for_request(theirs.digest)
    other.adapters.close()
    await setup.ensure(5)
    assert len(setup.cached()) == 2


def evicted_by_another_process(cache: DiskCache, digest: Digest) -> bool:
    program = textwrap.dedent(f"""
        from pathlib import Path
        from motet_runner.adapters.cache import DiskCache
        print(DiskCache(Path({str(cache.folder)!r}), max_adapter_bytes=1).evict({digest!r}, None))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout == "True\n"


def _engine_failure(digest):
    return AdapterFailed(digest, AdapterFetchFailed("changed"))


# ----------------------------------------------------------------------------------------------- equal bytes of tenants


async def test_a_tenants_failure_is_its_own_although_another_has_the_same_bytes(setup, tmp_path):
    digest = adapter_digest(write_adapter(tmp_path / "acme" / "a"))
    write_adapter(tmp_path / "zeta" / "a")
    shutil.rmtree(tmp_path / "acme" / "a")
    waiting = {
        tenant: asyncio.create_task(setup.adapters.wait_for(digest, f"{tenant}/a")) for tenant in ("acme", "zeta")
    }
    await setup.settled()

    def order(tenant):
        return setup.adapters.ensure(
            scheduler_pb2.EnsureAdapter(
                adapter=common_pb2.AdapterRef(namespace=tenant, name="a"),
                source=(tmp_path / tenant / "a").as_uri(),
                expected_digest=digest,
                stage=common_pb2.ADAPTER_STAGE_DEVICE,
            )
        )

    with pytest.raises(AdapterFetchFailed, match="/acme/a"):
        await order("acme")
    with pytest.raises(AdapterFetchFailed, match="/acme/a"):
        await waiting["acme"]
    assert not waiting["zeta"].done()
    await order("zeta")
    await waiting["zeta"]


async def test_a_request_of_an_earlier_gateway_fails_without_a_word_about_a_source(setup, tmp_path):
    digest = Digest("sha256:" + "1" * 64)
    waiting = asyncio.create_task(setup.adapters.wait_for(digest))
    await setup.settled()
    with pytest.raises(AdapterFetchFailed, match="nowhere"):
        await setup.adapters.ensure(
            scheduler_pb2.EnsureAdapter(
                adapter=common_pb2.AdapterRef(namespace="acme", name="a"),
                source=(tmp_path / "nowhere").as_uri(),
                expected_digest=digest,
                stage=common_pb2.ADAPTER_STAGE_DEVICE,
            )
        )
    with pytest.raises(AdapterFetchFailed) as failed:
        await waiting
    assert str(tmp_path) not in failed.value.message


async def test_refused_orders_leave_nothing_behind(setup, tmp_path):
    """A kept exception would grow with each order that raises it again."""
    order = scheduler_pb2.EnsureAdapter(
        adapter=common_pb2.AdapterRef(namespace="acme", name="a"),
        source=(tmp_path / "nowhere").as_uri(),
        expected_digest="sha256:" + "1" * 64,
        stage=common_pb2.ADAPTER_STAGE_DEVICE,
    )
    depths = []
    for _ in range(5):
        with pytest.raises(AdapterFetchFailed) as failed:
            await setup.adapters.ensure(order)
        depths.append(len(failed.traceback))
    assert len(set(depths)) == 1
    assert setup.adapters.get(order.expected_digest) is None


TALKS = """
import threading
from motet_runner.sources import fetch_process as child
def talk():
    while True:
        child.send(bytes=1)
for _ in range(3):
    threading.Thread(target=talk, daemon=True).start()
child.end(0, {"done": True})
"""


def test_no_thread_of_a_fetch_process_says_anything_after_its_last_line():
    for _ in range(5):
        ran = subprocess.run([sys.executable, "-c", TALKS], capture_output=True, check=True)
        assert ran.stdout.splitlines()[-1] == b'{"done":true}'
