"""Fetches of adapters from a source into the shared disk cache."""

import asyncio
import errno
import importlib.util
import os
import resource
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from motet.digest import ContentDigest, adapter_digest
from motet.errors import AdapterFetchFailed, AdapterIncompatible
from motet_runner.adapters import cache as cache_module
from motet_runner.adapters.cache import MAX_ORIGINS, DiskCache
from motet_runner.adapters.folder_fetch import _move_files
from motet_runner.adapters.folder_lease import FolderLease
from motet_runner.adapters.policy.values import FetchRequest
from motet_runner.sources.partial_fetch import key_of
from tests.common.waiting import PATIENCE_S
from tests.support.adapter_fetches import Fetcher
from tests.support.in_process_runner import write_adapter
from tests.support.small_disk import small_disk


@pytest.fixture
def cache(tmp_path):
    cache = DiskCache(tmp_path / "cache", max_adapter_bytes=1 << 20)
    cache.prepare()
    return cache


def contents(cache):
    return sorted(path.name for path in cache.folder.iterdir())


async def test_a_fetched_adapter_lies_under_its_digest(tmp_path, cache):
    source = write_adapter(tmp_path / "a")
    fetched = await Fetcher(cache).fetch(FetchRequest(source=source.as_uri()))
    assert fetched.digest == adapter_digest(source) == adapter_digest(fetched.folder)
    assert contents(cache) == [fetched.digest.removeprefix("sha256:")]


async def test_an_adapters_own_template_is_fetched_and_changes_the_digest(tmp_path, cache):
    source = write_adapter(tmp_path / "a")
    fetcher = Fetcher(cache)
    without = await fetcher.fetch(FetchRequest(source=source.as_uri()))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "added_tokens.json").write_text("{}")
    (source / "README.md").write_text("hello")
    fetched = await fetcher.fetch(FetchRequest(source=source.as_uri()))
    assert fetched.digest == adapter_digest(source) == adapter_digest(fetched.folder) != without.digest
    names = {path.name for path in fetched.folder.iterdir() if not path.name.startswith(".")}
    assert names == {path.name for path in source.iterdir()} - {"README.md"}
    assert fetched.bytes == sum((fetched.folder / name).stat().st_size for name in names)
    again = Fetcher(cache)
    assert (await again.fetch(FetchRequest(source=source.as_uri(), expected=fetched.digest))).bytes == fetched.bytes
    (source / "chat_template.jinja").unlink()
    (source / "added_tokens.json").unlink()
    assert (await fetcher.fetch(FetchRequest(source=source.as_uri()))).digest == without.digest


@pytest.mark.parametrize(("name", "limit"), [("chat_template.jinja", 16 << 20), ("tokenizer.json", 64 << 20)])
async def test_an_optional_file_beyond_its_bound_is_refused_by_name(tmp_path, cache, name, limit):
    source = write_adapter(tmp_path / "a")
    (source / name).touch()
    os.truncate(source / name, limit + 1)
    with pytest.raises(
        AdapterFetchFailed, match=rf"{name} has {limit + 1} bytes, but Motet reads at most {limit}"
    ) as failed:
        await Fetcher(cache).fetch(FetchRequest(source=source.as_uri()))
    assert failed.value.reason == "TooLarge"
    assert contents(cache) == []


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
async def test_an_optional_file_that_is_not_a_regular_file_is_refused(tmp_path, cache, make):
    source = write_adapter(tmp_path / "a")
    make(source / "tokenizer_config.json")
    with pytest.raises(AdapterFetchFailed, match=r"tokenizer_config\.json is not a regular file"):
        await Fetcher(cache).fetch(FetchRequest(source=source.as_uri()))


async def test_concurrent_fetches_share_one_copy(tmp_path, cache):
    """Those that come after it has begun have the folder looked at again, since it may have changed."""
    source = write_adapter(tmp_path / "a").as_uri()
    fetcher = Fetcher(cache)
    async with asyncio.timeout(PATIENCE_S):
        fetched = await asyncio.gather(*(fetcher.fetch(FetchRequest(source=source)) for _ in range(20)))
    assert len({each.digest for each in fetched}) == 1
    assert fetcher.copies == 1


async def test_a_fetch_after_the_bytes_changed_gets_the_new_ones(tmp_path, cache):
    source = write_adapter(tmp_path / "a", seed=1)
    fetcher = Fetcher(cache)
    first = asyncio.create_task(fetcher.fetch(FetchRequest(source=source.as_uri())))
    await first
    write_adapter(source, seed=2)
    second = await fetcher.fetch(FetchRequest(source=source.as_uri()))
    assert first.result().digest != second.digest
    assert second.digest == adapter_digest(source)
    assert len(contents(cache)) == 2


async def test_a_waiter_that_gives_up_does_not_stop_the_fetch(tmp_path, cache):
    source = write_adapter(tmp_path / "a").as_uri()
    fetcher = Fetcher(cache)
    impatient, patient = (asyncio.create_task(fetcher.fetch(FetchRequest(source=source))) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    assert (await patient).folder.is_dir()


async def test_an_expected_digest_is_found_without_reading_the_source(tmp_path, cache):
    source = write_adapter(tmp_path / "a")
    fetcher = Fetcher(cache)
    fetched = await fetcher.fetch(FetchRequest(source=source.as_uri()))
    shutil.rmtree(source)
    assert (await fetcher.fetch(FetchRequest(source=source.as_uri(), expected=fetched.digest))).folder == fetched.folder


async def test_another_digest_than_expected_is_refused_and_leaves_nothing(tmp_path, cache):
    source = write_adapter(tmp_path / "a").as_uri()
    with pytest.raises(AdapterFetchFailed, match="has the digest"):
        await Fetcher(cache).fetch(FetchRequest(source=source, expected="sha256:" + "1" * 64))
    assert contents(cache) == []


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("ftp://host/a", "source.uri: must begin with file:// or hf:// or https:// or oci:// or s3://"),
        ("oci://host/a", "source.image: oci://host/a must name a registry, a repository in it, and a tag or a digest"),
        ("file://elsewhere/a", "is not a folder of this machine"),
        ("file:///nonexistent/a", "There is no folder /nonexistent/a"),
    ],
)
async def test_a_source_that_cannot_be_read_says_why(cache, uri, words):
    with pytest.raises(AdapterFetchFailed, match=words):
        await Fetcher(cache).fetch(FetchRequest(source=uri))


async def test_a_pickled_adapter_is_refused_with_advice(tmp_path, cache):
    source = write_adapter(tmp_path / "a")
    (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    with pytest.raises(AdapterFetchFailed, match=r"adapter_model\.bin.*only safetensors"):
        await Fetcher(cache).fetch(FetchRequest(source=source.as_uri()))


async def test_a_folder_without_config_is_refused(tmp_path, cache):
    source = write_adapter(tmp_path / "a")
    (source / "adapter_config.json").unlink()
    with pytest.raises(AdapterFetchFailed, match=r"has no adapter_config\.json"):
        await Fetcher(cache).fetch(FetchRequest(source=source.as_uri()))


async def test_weights_beyond_the_bound_are_refused_unread(tmp_path, cache):
    source = write_adapter(tmp_path / "a")
    os.truncate(source / "adapter_model.safetensors", 2 << 20)
    with pytest.raises(AdapterFetchFailed, match="at most 1048576"):
        await Fetcher(cache).fetch(FetchRequest(source=source.as_uri()))


async def test_weights_that_are_cut_short_leave_nothing(tmp_path, cache):
    source = write_adapter(tmp_path / "a")
    weights = source / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4)
    with pytest.raises(AdapterIncompatible):
        await Fetcher(cache).fetch(FetchRequest(source=source.as_uri()))
    assert contents(cache) == []


@pytest.fixture
def full_disk(tmp_path):
    """A file system with space for a few pages."""
    with small_disk(tmp_path / "small", "16k") as place:
        yield place


async def test_a_full_disk_gives_a_clear_error_and_leaves_no_files(tmp_path, full_disk):
    source = write_adapter(tmp_path / "a", rank=256)
    cache = DiskCache(full_disk / "cache", max_adapter_bytes=1 << 20)
    cache.prepare()
    with pytest.raises(AdapterFetchFailed, match=r"no space left in .*needs \d+ bytes"):
        await Fetcher(cache).fetch(FetchRequest(source=source.as_uri()))
    assert contents(cache) == []
    fetcher = Fetcher(cache)
    small = await fetcher.fetch(FetchRequest(source=write_adapter(tmp_path / "b").as_uri()))
    assert contents(cache) == [small.folder.name]
    fetcher.registry.close()


async def test_a_write_that_fails_leaves_nothing(tmp_path, cache):
    source = write_adapter(tmp_path / "a", rank=64)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(AdapterFetchFailed, match="cannot copy"):
            await Fetcher(cache).fetch(FetchRequest(source=source.as_uri()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(cache) == []


def test_no_space_names_the_cache_and_what_is_needed(tmp_path):
    cache = DiskCache(tmp_path, max_adapter_bytes=1)
    sentence = cache.explain(OSError(errno.ENOSPC, "No space left on device"), str(tmp_path / "a"), 12345).message
    assert "no space left" in sentence
    assert "needs 12345 bytes" in sentence


def test_files_of_a_dead_process_are_removed_and_those_of_a_live_one_are_kept(tmp_path, cache):
    left, live = cache.folder / ".fetch-1-1", cache.folder / ".fetch-2-1"
    left.mkdir()
    live.mkdir()
    lease = FolderLease(live)
    cache.prepare()
    assert contents(cache) == [".fetch-2-1"]
    lease.release()


async def test_a_runner_that_starts_beside_a_fetch_breaks_nothing(tmp_path, cache, monkeypatch):
    """It removes folders without a lock. It may start after a folder is made and before that is locked."""
    starts = [cache.prepare, lambda: None]

    def lease_beside_a_start(folder: Path) -> FolderLease:
        if starts and folder.name.startswith(".fetch-"):
            starts.pop(0)()
        return FolderLease(folder)

    monkeypatch.setattr(cache_module, "FolderLease", lease_beside_a_start)
    fetched = await Fetcher(cache).fetch(FetchRequest(source=write_adapter(tmp_path / "a").as_uri()))
    assert contents(cache) == [fetched.folder.name]
    assert not starts


async def test_a_leased_folder_is_not_removed(tmp_path, cache):
    fetched = await Fetcher(cache).fetch(FetchRequest(source=write_adapter(tmp_path / "a").as_uri()))
    theirs = FolderLease(fetched.folder)
    assert not cache.evict(fetched.digest, fetched)
    assert not cache.evict(fetched.digest, None)
    theirs.release()
    assert not cache.evict(fetched.digest, None)
    assert cache.evict(fetched.digest, fetched)
    with pytest.raises(FileNotFoundError):
        FolderLease(fetched.folder)


def test_runners_whose_processes_have_the_same_number_share_a_cache(tmp_path):
    """As in containers. Each has a module of its own here."""

    def of_one_more() -> DiskCache:
        spec = importlib.util.spec_from_file_location("motet_runner.adapters.cache", cache_module.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.DiskCache(tmp_path / "cache", max_adapter_bytes=1 << 20)

    def copy(source: Path, target: Path, content: ContentDigest) -> None:
        _move_files(shutil.copytree(source, tmp_path / f"fetched-{source.name}"), target, content)

    a, b = (write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("ab", 1))
    one, two = of_one_more(), of_one_more()
    of_two = []

    def fill(target: Path, content: ContentDigest) -> None:
        of_two.append(two.store(partial(copy, b), FetchRequest(source=b.as_uri()), "b", 1))
        assert two.contents(room=1 << 40).unfinished == 0
        copy(a, target, content)
        assert two.contents(room=1 << 40).unfinished > 0, "what the other one fetches takes room"

    held = one.store(fill, FetchRequest(source=a.as_uri()), "a", 1)
    assert [held.digest, of_two[0].digest] == [adapter_digest(a), adapter_digest(b)]


async def test_what_a_killed_process_has_begun_to_write_goes_at_a_later_start(tmp_path, cache, monkeypatch):
    fetched = await Fetcher(cache).fetch(FetchRequest(source=write_adapter(tmp_path / "a").as_uri()))
    before = sorted(fetched.folder.iterdir())

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", killed)
        cache.keep(fetched.folder, {"certificate.json": b"{}"})
    (draft,) = {*fetched.folder.iterdir()} - {*before}
    cache.prepare()
    assert draft.exists(), "another runner may write it"
    os.utime(draft, (0, 0))
    cache.prepare()
    assert sorted(fetched.folder.iterdir()) == before


@pytest.mark.parametrize("beginning", [".fetch", ".trash"])
def test_what_a_killed_runner_leaves_takes_no_room_although_none_starts_in_its_place(cache, beginning):
    left = cache.folder / f"{beginning}-0123456789abcdef-0"
    left.mkdir()
    (left / "adapter_model.safetensors").write_bytes(bytes(5000))
    used = FolderLease(left)
    assert cache.contents(room=1 << 40).unfinished == 5000
    used.release()
    assert cache.contents(room=1 << 40).unfinished == 0
    assert contents(cache) == []


def test_what_cannot_be_opened_lets_a_runner_start(cache, monkeypatch):
    """Another user may have left it, or its disk fails."""
    (left := cache.folder / ".fetch-0123456789abcdef-0").mkdir()

    def denied(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(cache_module, "FolderLease", denied)
    cache.prepare()
    assert left.exists()


async def test_two_runners_that_fetch_the_same_bytes_do_not_disturb_each_other(tmp_path, cache):
    source = write_adapter(tmp_path / "a").as_uri()
    other = DiskCache(cache.folder, max_adapter_bytes=1 << 20)
    one, two = await asyncio.gather(*(Fetcher(own).fetch(FetchRequest(source=source)) for own in (cache, other)))
    assert (one.inode, one.folder) == (two.inode, two.folder)
    assert one.lease.is_live()
    assert two.lease.is_live()
    assert contents(cache) == [Path(one.folder).name]


async def test_of_many_origins_of_an_adapter_those_used_last_are_known(tmp_path, cache):
    """A tenant may name the same files in any number of ways. That costs no other tenant anything."""
    fetcher, folder = Fetcher(cache), write_adapter(tmp_path / "a")

    def named(number, namespace="many"):
        (name := tmp_path / f"{number}").exists() or name.symlink_to(folder)
        return FetchRequest(source=name.as_uri(), namespace=namespace, digest_verified=False)

    fetched = await fetcher.fetch(named(0, "another"))
    for number in range(MAX_ORIGINS + 3):
        await fetcher.fetch(named(number))
        assert cache.find(fetched.digest, named(0)) is not None
    assert len(list(fetched.folder.glob(".origin-*"))) == MAX_ORIGINS + 1
    known = [named(0), named(MAX_ORIGINS + 2), named(0, "another")]
    assert all(cache.find(fetched.digest, one) for one in known)
    assert not any(cache.find(fetched.digest, named(number)) for number in (1, 3))


async def test_what_a_namespace_has_read_from_a_source_it_may_use_again_with_another_revision_and_secret(
    tmp_path, cache
):
    """So it goes back to an earlier revision, which the source may have lost."""
    source = write_adapter(tmp_path / "a").as_uri()
    first = FetchRequest(source=source, revision="v1", credentials="own/first", namespace="own", digest_verified=False)
    fetched = await Fetcher(cache).fetch(first)
    now = replace(first, revision="v2", credentials="own/second", expected=fetched.digest)
    assert cache.find(fetched.digest, now) is not None
    others = {"namespace": "other"}, {"source": f"{source}/v2"}, {"folder": "team-a"}, {"max_bytes": 1}
    assert not any(cache.find(fetched.digest, replace(now, **other)) for other in others)


@pytest.mark.parametrize("beginning", ["", "own"])
async def test_an_origin_that_an_earlier_build_has_recorded_is_known_to_its_namespace_alone(tmp_path, cache, beginning):
    source = write_adapter(tmp_path / "a").as_uri()
    own, other = (FetchRequest(source=source, namespace=one, digest_verified=False) for one in ("own", "other"))
    fetched = await Fetcher(cache).fetch(own)
    (mark,) = fetched.folder.glob(".origin-*")
    namespace = f"{key_of(beginning)}-" if beginning else ""
    mark.rename(fetched.folder / f".origin-{namespace}{key_of(*own.origin)}")
    assert cache.find(fetched.digest, other) is None
    assert cache.find(fetched.digest, own) is not None
    assert list(fetched.folder.glob(".origin-*")) == [mark], "it has the name of now"
    assert cache.find(fetched.digest, own) is not None
    assert cache.find(fetched.digest, other) is None
