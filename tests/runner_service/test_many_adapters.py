"""An adapter that only waits costs little: no open file, few bytes, and nothing in reports."""

import errno
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from motet.digest import adapter_digest
from motet.domain import Digest
from motet_runner.adapters import digest_lease
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.digest_lease import DigestLeases
from motet_runner.adapters.folder_fetch import copy_folder
from motet_runner.adapters.policy.values import FetchRequest
from motet_runner.sources.folder import AdapterFolder
from tests.support.in_process_runner import write_adapter

ROOT = Path(__file__).parents[2]
MAX_FILES = 64
ADAPTERS = 80


def test_more_adapters_than_files_may_be_open_are_registered_checked_and_served(tmp_path):
    program = textwrap.dedent(f"""
        import asyncio, os, resource
        from pathlib import Path

        resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_FILES}, {MAX_FILES}))

        from motet_runner.adapters.certification import EngineLimits
        from motet_runner.adapters.check_processes import CheckProcesses
        from motet_runner.adapters.weight_reader import WeightReader
        from tests.runner_service.test_registry import RegistrySetup

        LIMITS = EngineLimits({{"model.layers.0.self_attn.q_proj": (16, 16)}}, 16, "float32")

        async def main():
            checks = CheckProcesses(LIMITS)
            setup = RegistrySetup(Path({str(tmp_path)!r}), capacity={ADAPTERS}, check=checks.check)
            digests = [(await setup.ensure(n)).digest for n in range({ADAPTERS})]
            assert len(set(digests)) == {ADAPTERS}
            for digest in digests:
                assert setup.adapters.for_request(digest) is not None
                await setup.settled()
                layout = setup.posted[-1].layout
                assert not layout.packed
                with WeightReader(layout) as weights:
                    assert [weights.read(one.a).shape for one in layout.linears] == [(4, 16)]
            print(len(os.listdir("/proc/self/fd")))
            setup.adapters.close()
            checks.close()

        asyncio.run(main())
    """)
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < MAX_FILES // 2


@pytest.fixture
def cached(tmp_path):
    """A cached adapter that this process does not use: the cache's folder and the digest."""
    source = write_adapter(tmp_path / "a")
    cache = DiskCache(tmp_path / "cache", max_adapter_bytes=1 << 20)
    cache.prepare()
    copy_folder(cache, AdapterFolder(source), FetchRequest(source=source.as_uri())).lease.release()
    return cache.folder, adapter_digest(source)


def test_one_process_may_lease_an_adapter_twice_and_holds_it_until_the_last_release(cached):
    folder, digest = cached
    leases, other = DigestLeases(folder), DigestLeases(folder)
    one, two = leases.lease(digest), leases.lease(digest)
    assert not one.become_exclusive(), "the other lease is of the same process"
    one.release()
    one.release()
    theirs = other.lease(digest)
    assert not theirs.become_exclusive()
    two.release()
    assert theirs.become_exclusive()
    theirs.release()


def test_who_comes_while_an_adapter_is_removed_waits_and_finds_nothing(cached):
    folder, digest = cached
    leases = DigestLeases(folder)
    for others in (leases, DigestLeases(folder)):
        lease = leases.lease(digest)
        assert lease.become_exclusive()
        found = []

        def look(others=others, found=found):
            try:
                found.append(others.lease(digest))
            except FileNotFoundError as error:
                found.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join(0.1)
        assert not found, "the adapter may be gone in a moment"
        leases.path_of(digest).rename(folder / "elsewhere")
        lease.release()
        thread.join(10)
        assert isinstance(found[0], FileNotFoundError)
        (folder / "elsewhere").rename(leases.path_of(digest))


def test_a_runner_that_stands_still_while_it_removes_an_adapter_holds_back_that_one_alone(cached, monkeypatch):
    folder, digest = cached
    monkeypatch.setattr(digest_lease, "MAX_WAIT_SECONDS", 0.05)
    stopped = DigestLeases(folder).lease(digest)
    assert stopped.become_exclusive()
    cache = DiskCache(folder, max_adapter_bytes=1 << 20)
    assert cache.find(digest) is None, "it is fetched, as if it had gone"
    assert not cache.evict(digest, None)
    with pytest.raises(TimeoutError, match="another process removes this adapter, and does not go on"):
        DigestLeases(folder).lease(digest)
    stopped.become_shared()
    held = cache.find(digest)
    assert held is not None
    held.lease.release()
    stopped.release()
    assert cache.evict(digest, None), "no lock is left of those that waited"


def test_a_cache_whose_disk_was_read_only_is_bounded_once_it_is_not(cached, monkeypatch):
    folder, digest = cached
    opens = os.open

    def read_only(path, flags, *mode, **how):
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opens(path, flags, *mode, **how)

    cache = DiskCache(folder, max_adapter_bytes=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(digest_lease.os, "open", read_only)
        held = cache.find(digest)
        cache.renew_leases()
        assert not cache.evict(digest, held)
        assert not DiskCache(folder, max_adapter_bytes=1).evict(digest, None), "it is used"
    cache.renew_leases()
    assert not DiskCache(folder, max_adapter_bytes=1).evict(digest, None), "it is used"
    assert cache.evict(digest, held)


def test_an_adapter_that_came_back_is_another_one(cached):
    folder, digest = cached
    lease = DigestLeases(folder).lease(digest)
    source = folder.parent / "a"
    cache = DiskCache(folder, max_adapter_bytes=1 << 20)
    lease.folder.rename(folder.parent / "removed")
    held = copy_folder(cache, AdapterFolder(source), FetchRequest(source=source.as_uri()))
    assert held.lease.is_live()
    assert not lease.is_live()
    held.lease.release()


def test_a_folder_that_another_runner_stores_during_a_lookup_is_known_by_its_weights(cached, monkeypatch):
    folder, digest = cached
    leases = DigestLeases(folder)
    place, aside = leases.path_of(digest), folder.parent / "filled"
    place.rename(aside)
    look = os.stat

    def stored_after_the_first_look(path, **how):
        try:
            return look(path, **how)
        except FileNotFoundError:
            if aside.exists():
                aside.rename(place)
            raise

    monkeypatch.setattr(os, "stat", stored_after_the_first_look)
    lease = leases.lease(digest)
    monkeypatch.undo()
    assert lease.is_live()
    assert lease.inode == leases.lease(digest).inode


def test_leases_hold_after_the_whole_cache_was_removed_and_filled_again(cached):
    folder, digest = cached
    cache = DiskCache(folder, max_adapter_bytes=1 << 20)
    before = cache.find(digest)
    assert before is not None
    subprocess.run(["rm", "-r", folder, f"{folder}.leases"], check=True)
    cache.prepare()
    source = folder.parent / "a"
    held = copy_folder(cache, AdapterFolder(source), FetchRequest(source=source.as_uri()))
    assert not DiskCache(folder, max_adapter_bytes=1).evict(digest, None)
    held.lease.release()
    before.lease.release()
    assert DiskCache(folder, max_adapter_bytes=1).evict(digest, None)


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("removed", [False, True])
def test_leases_get_their_locks_as_soon_as_there_is_a_lock_file(cached, monkeypatch, removed):
    """It was removed, or could not be made for a while."""
    folder, digest = cached
    locks = Path(f"{folder}.leases")
    leases = DigestLeases(folder)
    if removed:
        lease = leases.lease(digest)
    shutil.rmtree(locks)
    if not removed:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", full)
            lease = leases.lease(digest)
    with suppress(FileNotFoundError):
        leases.lease(Digest(digest[:10] + "0" * 61))  # another one with the same lock file
    assert not DigestLeases(folder).lease(digest).become_exclusive()
    lease.release()
    assert DigestLeases(folder).lease(digest).become_exclusive()


def test_a_full_disk_without_lock_files_gets_room_again(cached, monkeypatch):
    """Nobody has a lock there, and nothing else would ever be removed."""
    folder, digest = cached
    shutil.rmtree(f"{folder}.leases")
    cache = DiskCache(folder, max_adapter_bytes=1 << 20)
    monkeypatch.setattr(Path, "mkdir", full)
    used = cache.find(digest)
    assert not cache.evict(digest, None), "this process uses it"
    used.lease.release()
    lease = DigestLeases(folder).lease(digest)
    assert lease.become_exclusive()
    lease.become_shared()
    lease.release()
    assert cache.evict(digest, None)
    assert not cache.path_of(digest).exists()


@pytest.mark.parametrize("both", [True, False])
def test_on_a_full_disk_without_lock_files_an_adapter_that_is_used_stays(cached, monkeypatch, both):
    """Also if the other runner can make a lock file meanwhile."""
    folder, digest = cached
    shutil.rmtree(f"{folder}.leases")
    one, other = (DiskCache(folder, max_adapter_bytes=1 << 20) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        used, twice = other.find(digest), other.find(digest)
        assert not (both and one.evict(digest, None))
    assert not one.evict(digest, None)
    used.lease.release()
    assert not one.evict(digest, None)
    assert twice.lease.is_live()
    other.renew_leases()
    assert not one.evict(digest, None)
    twice.lease.release()
    assert one.evict(digest, None)


def test_an_adapter_that_another_runner_uses_on_a_full_disk_stays_in_use_here(cached, monkeypatch):
    folder, digest = cached
    shutil.rmtree(f"{folder}.leases")
    one, other = (DiskCache(folder, max_adapter_bytes=1 << 20) for _ in range(2))
    monkeypatch.setattr(Path, "mkdir", full)
    held, theirs = one.find(digest), other.find(digest)
    assert not one.evict(digest, held)
    theirs.lease.release()
    assert not other.evict(digest, None)
    held.lease.release()
    assert other.evict(digest, None)


def test_where_folders_may_have_no_lock_nothing_is_evicted(cached, monkeypatch):
    """Another runner that uses as many adapters as this one may use what has none."""
    folder, digest = cached
    source = write_adapter(folder.parent / "b", seed=1)
    one = DiskCache(folder, max_adapter_bytes=1 << 20)
    copy_folder(one, AdapterFolder(source), FetchRequest(source=source.as_uri())).lease.release()
    shutil.rmtree(f"{folder}.leases")
    one, other = (DiskCache(folder, max_adapter_bytes=1 << 20) for _ in range(2))
    monkeypatch.setattr(digest_lease, "MAX_FOLDERS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        theirs = [other.find(of) for of in (adapter_digest(source), digest)]
        assert not one.evict(digest, one.find(digest))
    one.renew_leases()
    other.renew_leases()
    assert not one.evict(digest, None)
    for held in theirs:
        held.lease.release()
    assert one.evict(adapter_digest(source), None)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_no_lock_files_keeps_its_adapters(cached, monkeypatch, number):
    """Another runner may use them."""
    folder, digest = cached
    shutil.rmtree(f"{folder}.leases")

    def not_writable(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", not_writable)
    assert not DiskCache(folder, max_adapter_bytes=1 << 20).evict(digest, None)
    assert (folder / digest.removeprefix("sha256:")).exists()


def test_leases_hold_by_each_path_to_the_cache(cached):
    folder, digest = cached
    link = folder.parent / "elsewhere" / "adapters"
    link.parent.mkdir()
    link.symlink_to(folder)
    lease = DigestLeases(link).lease(digest)
    assert not DigestLeases(folder).lease(digest).become_exclusive()
    lease.release()


def test_a_release_makes_no_lock_files(cached):
    """The folder may be removed at that moment, as after a test."""
    folder, digest = cached
    lease = DigestLeases(folder).lease(digest)
    subprocess.run(["rm", "-r", f"{folder}.leases"], check=True)
    lease.release()
    assert not Path(f"{folder}.leases").exists()


def test_whoever_has_an_adapter_for_himself_is_alone_and_no_lock_is_left(cached):
    """Four threads of two processes."""
    folder, digest = cached
    mutex, inside, failed = threading.Lock(), Counter(), []

    def work(leases: DigestLeases, chance: random.Random) -> None:
        for _ in range(300):
            lease = leases.lease(digest)
            alone = chance.random() < 0.3 and lease.become_exclusive()
            kind = "alone" if alone else "shared"
            with mutex:
                inside[kind] += 1
                failed.extend([dict(inside)] * (inside["alone"] > 0 and inside.total() > 1))
            time.sleep(chance.random() * 1e-4)
            with mutex:
                inside[kind] -= 1
            if alone and chance.random() < 0.5:
                lease.become_shared()
            lease.release()

    processes = [DigestLeases(folder), DigestLeases(folder)]
    threads = [threading.Thread(target=work, args=(processes[n % 2], random.Random(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert DigestLeases(folder).lease(digest).become_exclusive(), "a lock is left"
