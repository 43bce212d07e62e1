"""Which adapters a runner keeps on its disk: a bound, the longest unused goes first, what is in use stays."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import FakeClock
from motet.errors import AdapterIncompatible
from motet.model import Digest
from motet_runner.adapters.fetch import DiskCache
from motet_runner.adapters.shelf import Shelf
from motet_runner.interface import AdapterFailed, AdapterLoaded
from motet_runner.metrics import Metrics
from motet_runner.protocol import DropAdapter, LoadAdapter
from tests.support.runners import write_adapter

BASE_DIGEST = Digest("sha256:" + "b" * 64)


class Bench:
    def __init__(self, folder, *, capacity=2, base=BASE_DIGEST):
        self.folder = folder
        self.posted = []
        self.users = {}
        self.checks = 0
        self.clock = FakeClock()
        cache = DiskCache(folder / "cache", max_adapter_bytes=1 << 20)
        cache.prepare()
        self.cache = cache
        self.shelf = Shelf(
            cache,
            check=self.check,
            base_digest=base,
            capacity=capacity,
            users_of=lambda digest: self.users.get(digest, 0),
            post=self.posted.append,
            metrics=Metrics(CollectorRegistry()),
            clock=self.clock,
        )

    def check(self, folder):
        self.checks += 1
        if "refuse" in (folder / "adapter_config.json").read_text():
            raise AdapterIncompatible("it says refuse")
        return scheduler_pb2.Certificate(rank=4)

    async def ensure(self, n, stage=common_pb2.ADAPTER_STAGE_CERTIFIED, **config):
        source = write_adapter(self.folder / f"a{n}", seed=n, **config)
        ref = common_pb2.AdapterRef(namespace="default", name=f"a{n}")
        return await self.shelf.ensure(scheduler_pb2.EnsureAdapter(adapter=ref, source=source.as_uri(), stage=stage))

    def cached(self):
        return set(self.cache.by_last_use())


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.shelf.close()


async def test_the_longest_unused_leaves_the_disk_first(bench):
    first, second = await bench.ensure(1), await bench.ensure(2)
    bench.shelf.take(first.digest)
    third = await bench.ensure(3)
    assert bench.cached() == {first.digest, third.digest}
    assert DropAdapter(second.digest) in bench.posted
    assert bench.shelf.get(second.digest) is None


async def test_an_adapter_with_requests_never_leaves(bench):
    kept = [await bench.ensure(n) for n in (1, 2)]
    for one in kept:
        bench.users[one.digest] = 1
    third = await bench.ensure(3)
    assert bench.cached() == {one.digest for one in kept} | {third.digest}
    fourth = await bench.ensure(4)
    assert bench.cached() == {one.digest for one in kept} | {fourth.digest}


async def test_an_expected_adapter_stays_until_the_hint_lapses(bench):
    first = await bench.ensure(1)
    bench.shelf.expect(first.digest, 2.0)
    await bench.ensure(2)
    await bench.ensure(3)
    assert first.digest in bench.cached()
    bench.clock.advance(3.0)
    await bench.ensure(4)
    assert first.digest not in bench.cached()


async def test_a_certificate_is_kept_and_not_made_twice(bench, tmp_path):
    first = await bench.ensure(1)
    bench.shelf.close()
    again = Bench(tmp_path)
    found = again.shelf.take(first.digest)
    assert found is not None
    assert found.certificate == first.certificate
    assert again.checks == 0
    assert LoadAdapter(first.digest, first.folder) in again.posted
    again.shelf.close()


async def test_a_certificate_for_another_base_model_counts_for_nothing(bench, tmp_path):
    first = await bench.ensure(1)
    other = Bench(tmp_path, base=Digest("sha256:" + "c" * 64))
    assert other.shelf.take(first.digest) is None
    checked = await other.ensure(1)
    assert other.checks == 1
    assert checked.certificate.base_digest.endswith("c")
    other.shelf.close()


async def test_a_refused_adapter_is_not_on_the_shelf(bench):
    with pytest.raises(AdapterIncompatible):
        await bench.ensure(1, refuse=True)
    assert not bench.shelf.resident([])
    assert (await bench.ensure(2)).certificate is not None


async def test_all_who_wait_for_an_adapter_hear_of_it(bench):
    digest = (await bench.ensure(1)).digest
    bench.shelf.drop(digest)
    waiting = [asyncio.create_task(bench.shelf.arrival(digest)) for _ in range(3)]
    await asyncio.sleep(0)
    await bench.ensure(1)
    await asyncio.gather(*waiting)


async def test_at_stage_fetched_nothing_is_checked(bench):
    one = await bench.ensure(1, common_pb2.ADAPTER_STAGE_FETCHED)
    assert (one.stage, bench.checks) == (common_pb2.ADAPTER_STAGE_FETCHED, 0)
    assert not bench.shelf.resident([])


async def test_the_tier_follows_the_engines_events(bench):
    one = await bench.ensure(1, common_pb2.ADAPTER_STAGE_DEVICE)
    assert bench.posted == [LoadAdapter(one.digest, one.folder)]
    assert one.stage == common_pb2.ADAPTER_STAGE_CERTIFIED
    bench.shelf.on_loaded(AdapterLoaded(one.digest, 10, 0.1))
    assert one.stage == common_pb2.ADAPTER_STAGE_DEVICE
    assert bench.shelf.resident([])[0].tier == common_pb2.MEMORY_TIER_DEVICE
    bench.shelf.on_failed(AdapterFailed(one.digest, AdapterIncompatible("no")))
    assert bench.shelf.resident([])[0].tier == common_pb2.MEMORY_TIER_DISK
