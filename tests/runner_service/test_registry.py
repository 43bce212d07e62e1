"""Which adapters a runner keeps on its disk: up to a limit; the least recently used goes first, those in use stay."""

import asyncio
import errno
import shutil
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import FakeClock
from motet.domain import Digest
from motet.errors import AdapterFetchFailed, AdapterIncompatible, Internal
from motet_runner.adapters import cache
from motet_runner.adapters.adapter_files import DiskAdapterFiles
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.checks import Checks
from motet_runner.adapters.compatibility_check import CHECK_VERSION
from motet_runner.adapters.digest_lease import DigestLeases
from motet_runner.adapters.kept_proofs import KeptProofs, ProofKey
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.peft_config import WEIGHTS_NAME
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.engine_messages import DropAdapter, LoadAdapter
from motet_runner.interface import AdapterEvicted, AdapterFailed, AdapterLeftHost, AdapterLoaded, EngineAdapterReport
from motet_runner.metrics import Metrics
from tests.support.adapter_fetches import settle, usual_sources
from tests.support.in_process_runner import write_adapter
from tests.support.surroundings import REAL, with_clock

BASE_DIGEST = Digest("sha256:" + "b" * 64)


class RegistrySetup:
    def __init__(
        self,
        folder,
        *,
        capacity=2,
        disk_bytes=None,
        base=BASE_DIGEST,
        checker=CHECK_VERSION,
        refuses="refuse",
        engine="",
        check=None,
        proves_with=None,
        proves_linears=True,
        version="1",
        backend="motet",
        hardware="",
        machine="",
        run_layout="",
        slab_bytes=lambda _: 0,
        **settings,
    ):
        self.folder = folder
        self.posted = []
        self.users = {}
        self.checks = 0
        self.refuses = refuses
        self.engine = engine
        self.clock = FakeClock()
        cache = DiskCache(folder / "cache", max_adapter_bytes=1 << 20)
        cache.prepare()
        self.cache = cache
        sources = usual_sources(folder, **settings)
        key = ProofKey(base, engine, "tile 8", backend, "cpu", version, checker, hardware, machine)
        proofs = None if proves_with is None else KeptProofs(cache, key, linears=proves_linears)
        checks = Checks(
            cache,
            check or self.check,
            base_digest=base,
            engine_limits=engine,
            run_layout=run_layout,
            version=checker,
            proofs=proofs,
        )
        self.files = DiskAdapterFiles(cache, checks, sources)
        self.adapters = AdapterRegistry(
            self.files,
            limits=CacheLimits(capacity, disk_bytes),
            users_of=lambda digest: self.users.get(digest, 0),
            post=self.posted.append,
            metrics=Metrics(CollectorRegistry(), wall=REAL.wall),
            time_scale=sources.time_scale,
            surroundings=with_clock(self.clock),
            proves_with=proves_with,
            proves_linears=proves_linears,
            build=key.build_name if proves_with is not None and proves_linears else "",
            slab_bytes=slab_bytes,
        )

    def check(self, folder):
        self.checks += 1
        if self.refuses in (folder / "adapter_config.json").read_text():
            raise AdapterIncompatible("it says refuse")
        layout = AdapterLayout.of(folder / WEIGHTS_NAME, FileStamp.of(folder / WEIGHTS_NAME), 4, ())
        return Certification.of(scheduler_pb2.Certificate(rank=4), layout, self.engine)

    async def ensure(self, n, stage=common_pb2.ADAPTER_STAGE_CERTIFIED, **config):
        source = write_adapter(self.folder / f"a{n}", seed=n, **config)
        ref = common_pb2.AdapterRef(namespace="default", name=f"a{n}")
        order = scheduler_pb2.EnsureAdapter(adapter=ref, source=source.as_uri(), stage=stage)
        return await self.settled(self.adapters.ensure(order))

    async def settled(self, work=None):
        """What `work` brings, once everything that follows from it has happened."""
        found = await work if work is not None else None
        await settle(self.adapters)
        return found

    async def request(self, digest):
        """The adapter for a request that waits for it, or None if only an order could bring it."""
        waiting = asyncio.create_task(self.adapters.wait_for(digest))
        await asyncio.sleep(0)
        await self.settled()
        waiting.cancel()
        return self.adapters.for_request(digest)

    async def ensure_digest(self, n, digest):
        order = scheduler_pb2.EnsureAdapter(
            adapter=common_pb2.AdapterRef(namespace="default", name=f"a{n}"),
            source=(self.folder / f"a{n}").as_uri(),
            expected_digest=digest,
            stage=common_pb2.ADAPTER_STAGE_DEVICE,
        )
        return await self.settled(self.adapters.ensure(order))

    def cached(self):
        return {one.digest for one in self.cache.contents().by_last_use}


@pytest.fixture
def setup(tmp_path):
    setup = RegistrySetup(tmp_path)
    yield setup
    setup.adapters.close()


async def test_the_least_recently_used_leaves_the_disk_first(setup):
    first, second = await setup.ensure(1), await setup.ensure(2)
    setup.adapters.for_request(first.digest)
    third = await setup.ensure(3)
    assert setup.cached() == {first.digest, third.digest}
    assert DropAdapter(second.digest) in setup.posted
    assert setup.adapters.get(second.digest) is None


async def test_an_adapter_with_requests_never_leaves(setup):
    kept = [await setup.ensure(n) for n in (1, 2)]
    for one in kept:
        setup.users[one.digest] = 1
    third = await setup.ensure(3)
    assert setup.cached() == {one.digest for one in kept} | {third.digest}
    fourth = await setup.ensure(4)
    assert setup.cached() == {one.digest for one in kept} | {fourth.digest}


async def test_an_expected_adapter_stays_until_the_hint_lapses(setup):
    first = await setup.ensure(1)
    setup.adapters.expect(first.digest, 2.0)
    await setup.ensure(2)
    await setup.ensure(3)
    assert first.digest in setup.cached()
    setup.clock.advance(3.0)
    await setup.ensure(4)
    assert first.digest not in setup.cached()


async def test_a_certificate_is_kept_and_not_made_twice(setup, tmp_path):
    first = await setup.ensure(1)
    setup.adapters.close()
    again = RegistrySetup(tmp_path)
    found = await again.request(first.digest)
    assert found is not None
    assert found.certificate == first.certificate
    assert again.checks == 0
    assert LoadAdapter(first.digest, first.checked.layout) in again.posted
    again.adapters.close()


async def test_a_certificate_for_another_base_model_counts_for_nothing(setup, tmp_path):
    first = await setup.ensure(1)
    other = RegistrySetup(tmp_path, base=Digest("sha256:" + "c" * 64))
    assert await other.request(first.digest) is None
    checked = await other.ensure(1)
    assert other.checks == 1
    assert checked.certificate.base_digest.endswith("c")
    other.adapters.close()


async def test_an_adapter_passed_by_an_older_checker_is_checked_again(setup, tmp_path):
    first = await setup.ensure(1)
    assert first.certificate.checker == CHECK_VERSION
    setup.adapters.close()
    newer = RegistrySetup(tmp_path, checker=CHECK_VERSION + 1)
    assert await newer.request(first.digest) is None
    checked = await newer.ensure(1)
    assert (newer.checks, checked.certificate.checker) == (1, CHECK_VERSION + 1)
    newer.adapters.close()
    stricter = RegistrySetup(tmp_path, checker=CHECK_VERSION + 2, refuses="LORA")
    assert first.digest in stricter.cached()
    with pytest.raises(AdapterIncompatible):
        await stricter.ensure_digest(1, first.digest)
    assert await stricter.request(first.digest) is None
    assert not any(isinstance(command, LoadAdapter) for command in stricter.posted)
    stricter.adapters.close()


async def test_an_adapter_checked_for_another_dtype_or_rank_is_checked_again(setup, tmp_path):
    first = await setup.ensure(1)
    setup.adapters.close()
    other = RegistrySetup(tmp_path, engine="float16, rank 8", refuses="LORA")
    assert await other.request(first.digest) is None
    with pytest.raises(AdapterIncompatible):
        await other.ensure_digest(1, first.digest)
    other.adapters.close()


async def test_a_certificate_from_before_checkers_had_versions_counts_for_nothing(setup, tmp_path):
    first = await setup.ensure(1)
    setup.adapters.close()
    kept = first.held.folder / "certificate.json"
    kept.write_text(kept.read_text().replace('"checker"', '"mapped"'))
    again = RegistrySetup(tmp_path)
    assert await again.request(first.digest) is None
    again.adapters.close()


async def test_a_refused_adapter_is_not_in_the_registry(setup):
    with pytest.raises(AdapterIncompatible):
        await setup.ensure(1, refuse=True)
    assert not list(setup.adapters.residency.all())
    assert (await setup.ensure(2)).certificate is not None


async def test_all_requests_that_wait_for_an_adapter_continue(setup):
    digest = (await setup.ensure(1)).digest
    setup.adapters.drop(digest)
    waiting = [asyncio.create_task(setup.adapters.wait_for(digest)) for _ in range(3)]
    await asyncio.sleep(0)
    await setup.ensure(1)
    await asyncio.gather(*waiting)


async def test_at_stage_fetched_an_adapter_is_not_checked(setup):
    one = await setup.ensure(1, common_pb2.ADAPTER_STAGE_FETCHED)
    assert (one.stage, setup.checks) == (common_pb2.ADAPTER_STAGE_FETCHED, 0)
    assert not list(setup.adapters.residency.all())


async def test_the_tier_follows_the_engines_events(setup):
    one = await setup.ensure(1, common_pb2.ADAPTER_STAGE_DEVICE)
    assert setup.posted == [LoadAdapter(one.digest, one.checked.layout)]
    assert one.stage == common_pb2.ADAPTER_STAGE_CERTIFIED
    setup.adapters.on_loaded(AdapterLoaded(one.digest, 10, 0.1))
    assert one.stage == common_pb2.ADAPTER_STAGE_DEVICE
    assert next(setup.adapters.residency.all()).tier == common_pb2.MEMORY_TIER_DEVICE
    setup.adapters.on_failed(AdapterFailed(one.digest, AdapterIncompatible("no")))
    await setup.settled()  # its files are looked at again
    assert next(setup.adapters.residency.all()).tier == common_pb2.MEMORY_TIER_DISK


async def test_an_adapter_that_the_host_keeps_is_there_once_it_has_left_the_device(setup):
    one = await setup.ensure(1, common_pb2.ADAPTER_STAGE_DEVICE)
    setup.adapters.on_loaded(AdapterLoaded(one.digest, 10, 0.1, in_host=True))
    assert one.tier == common_pb2.MEMORY_TIER_DEVICE
    setup.adapters.on_evicted(AdapterEvicted(one.digest))
    assert (one.stage, one.tier) == (common_pb2.ADAPTER_STAGE_HOST, common_pb2.MEMORY_TIER_HOST)
    assert setup.adapters.for_request(one.digest) is one
    assert setup.posted[-1] == LoadAdapter(one.digest, one.checked.layout), "it is not on the device"
    setup.adapters.on_left_host(AdapterLeftHost(one.digest))
    assert (one.stage, one.tier) == (common_pb2.ADAPTER_STAGE_CERTIFIED, common_pb2.MEMORY_TIER_DISK)
    (changed,) = setup.adapters.residency.changes()
    assert [change.tier for change in changed.resident] == [common_pb2.MEMORY_TIER_DISK]


async def test_what_a_dropped_adapter_left_behind_is_not_said_of_the_next_one(setup):
    one = await setup.ensure(1, common_pb2.ADAPTER_STAGE_DEVICE)
    setup.adapters.on_loaded(AdapterLoaded(one.digest, 10, 0.1, in_host=True))
    setup.adapters.drop(one.digest)
    again = await setup.ensure_digest(1, one.digest)
    assert again.tier == common_pb2.MEMORY_TIER_DISK


async def test_an_evicted_adapter_is_on_disk_also_by_a_report_from_before_that_is_sent_again(setup):
    one = await setup.ensure(1, common_pb2.ADAPTER_STAGE_DEVICE)
    before = [EngineAdapterReport(one.digest, 10, 0, on_device=True)]
    setup.adapters.on_loaded(AdapterLoaded(one.digest, 10, 0.1))
    setup.adapters.on_report(before)
    assert setup.adapters.on_evicted(AdapterEvicted(one.digest)) is one
    assert next(setup.adapters.residency.all()).tier == common_pb2.MEMORY_TIER_DISK
    assert one.stage == common_pb2.ADAPTER_STAGE_CERTIFIED
    setup.adapters.on_report(before)  # a new report, of an adapter that was forgotten here meanwhile
    assert next(setup.adapters.residency.all()).tier == common_pb2.MEMORY_TIER_DEVICE


async def test_cached_bytes_that_changed_are_noticed_when_a_load_fails_and_fetched_again(setup):
    one = await setup.ensure(1)
    weights = one.held.folder / WEIGHTS_NAME
    with weights.open("r+b") as file:
        file.write(b"\xff")
    assert setup.adapters.on_failed(AdapterFailed(one.digest, AdapterFetchFailed("changed"))) is one
    assert setup.adapters.for_request(one.digest) is None
    with pytest.raises(AdapterFetchFailed, match="have changed"):
        await setup.ensure_digest(1, one.digest)
    assert one.digest not in setup.cached()
    again = await setup.ensure(1)
    assert setup.adapters.for_request(again.digest) is again


async def test_a_certificate_of_bytes_that_changed_meanwhile_counts_for_nothing(setup, tmp_path):
    one = await setup.ensure(1)
    setup.adapters.close()
    (one.held.folder / WEIGHTS_NAME).touch()
    again = RegistrySetup(tmp_path)
    assert await again.request(one.digest) is None
    assert (await again.ensure(1)).digest == one.digest
    assert again.checks == 1
    again.adapters.close()


@pytest.mark.parametrize(
    "kept",
    [
        b'{"rank": 4, "digest": "sha256:00", "mapped": 2}',  # from before certificates had the layout
        b'{"engine": "", "certificate": {}, "layout": {"stamp": [1], "rank": 4, "linears": []}}',
        b'{"engine": "", "certificate": {}, "layout": {"stamp": [1, 2, 3], "rank": 1e999, "size": 1}}',
        b'{"engine": "", "certificate": {"alpha": 1' + b"0" * 400 + b'}, "layout": {}}',
        b"[" * 100_000,
        b"[]",
        b"",
        b"\xff\xfe",
    ],
)
async def test_an_invalid_stored_certificate_is_replaced(setup, tmp_path, kept):
    first = await setup.ensure(1)
    setup.adapters.close()
    (first.held.folder / "certificate.json").write_bytes(kept)
    again = RegistrySetup(tmp_path)
    assert await again.request(first.digest) is None
    assert (await again.ensure(1)).checked is not None
    assert again.checks == 1
    again.adapters.close()


async def test_a_lookup_that_fails_keeps_no_lease(setup, monkeypatch):
    one = await setup.ensure(1)
    setup.adapters.drop(one.digest)
    await setup.settled()

    def fails(_):
        raise KeyError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(setup.files.checks, "earlier", fails)
        with pytest.raises(Internal):
            await setup.ensure_digest(1, one.digest)
    await setup.settled()
    lease = DigestLeases(setup.cache.folder).lease(one.digest)
    assert lease.become_exclusive()
    lease.release()


@pytest.mark.parametrize("kept", [None, b"", b"[]"])
async def test_an_adapter_whose_stored_layout_was_changed_is_checked_again(setup, tmp_path, kept):
    first = await setup.ensure(1)
    layout = first.checked.layout
    stored = layout.file.with_name(layout.linears_file)
    assert (setup.checks, layout.packed) == (1, b"")
    stored.unlink() if kept is None else stored.write_bytes(kept)
    setup.adapters.close()
    again = RegistrySetup(tmp_path)
    found = await again.ensure(1)
    assert (again.checks, found.checked.layout) == (int(kept != b"[]"), layout)
    assert found.checked.layout.is_stored()
    again.adapters.close()


async def test_a_layout_that_the_disk_does_not_take_is_served_from_memory(setup, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    one = await setup.ensure(1)
    assert one.checked.layout.packed == b"[]"
    assert setup.adapters.for_request(one.digest) is one
    assert setup.posted[-1].layout.linears == ()


async def test_changed_bytes_that_another_runner_has_removed_meanwhile_are_fetched_again(setup, monkeypatch):
    """Runners on one machine share the cache."""
    one = await setup.ensure(1)
    (one.held.folder / WEIGHTS_NAME).write_bytes(b"changed")
    setup.adapters.on_failed(AdapterFailed(one.digest, AdapterFetchFailed("changed")))

    def removed(folder):
        shutil.rmtree(folder)
        raise FileNotFoundError(folder)

    monkeypatch.setattr(cache, "adapter_digest", removed)
    with pytest.raises(AdapterFetchFailed, match="have changed"):
        await setup.ensure_digest(1, one.digest)
    monkeypatch.undo()
    assert setup.adapters.for_request((await setup.ensure(1)).digest) is not None
