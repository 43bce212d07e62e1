"""What carries out the effects of `AdapterPolicy`: on a runner's disk, and on the disk of a simulated runner."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from motet.api.v1 import scheduler_pb2
from motet.domain import Digest
from motet.errors import AdapterFetchFailed, AdapterIncompatible
from motet_runner.adapters.adapter_files import AdapterFiles, DiskAdapterFiles
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.checks import Checks
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.peft_config import WEIGHTS_NAME
from motet_runner.adapters.policy import effects
from motet_runner.adapters.policy.values import FetchRequest
from motet_simulator.trials.adapters import AdapterCache, AdapterSources, SimulatedAdapterFiles
from motet_simulator.trials.plan import AdapterChange
from motet_simulator.world import Process, Wires, World
from tests.support.adapter_fetches import usual_sources
from tests.support.in_process_runner import write_adapter

BASE = Digest("sha256:" + "b" * 64)
UNKNOWN = Digest("sha256:" + "9" * 64)
BROKEN = 2
"""The number of an adapter that the check refuses."""

Test = Callable[[AdapterFiles, Callable[[int], FetchRequest]], Coroutine[Any, Any, None]]
"""Gets the files, and a function that says where the adapter with a number is."""


def on_a_disk(test: Test, folder: Path) -> None:
    cache = DiskCache(folder / "cache", max_adapter_bytes=1 << 20)
    cache.prepare()

    def check(adapter: Path) -> Certification:
        if '"refuse"' in (adapter / "adapter_config.json").read_text():
            raise AdapterIncompatible("it says refuse")
        layout = AdapterLayout.of(adapter / WEIGHTS_NAME, FileStamp.of(adapter / WEIGHTS_NAME), 4, ())
        return Certification.of(scheduler_pb2.Certificate(rank=4), layout)

    def request(number: int) -> FetchRequest:
        path = folder / f"a{number}"
        if number < 3 and not path.exists():
            write_adapter(path, seed=number, **({"revision": "refuse"} if number == BROKEN else {}))
        return FetchRequest(source=path.as_uri(), digest_verified=False)

    files = DiskAdapterFiles(cache, Checks(cache, check, base_digest=BASE), usual_sources(folder))
    asyncio.run(test(files, request))


def simulated(test: Test, _folder: Path) -> None:
    world = World(seed=0)
    failures: list[str] = []
    sources = AdapterSources(world)
    changes = [AdapterChange(at=0, name=f"a{n}", number=0, content=n) for n in (0, 1)]
    changes.append(AdapterChange(at=0, name="a2", number=0, content=AdapterChange.BROKEN))
    for change in changes:
        sources.put(change)

    def request(number: int) -> FetchRequest:
        source = changes[number].source if number < 3 else "hf://adapters/nothing"
        return FetchRequest(source=source, digest_verified=False)

    async def main(process: Process) -> None:
        files = SimulatedAdapterFiles(process, AdapterCache(), sources, base=BASE, adapter_bytes=4096)
        await test(files, request)

    process = Process(world, Wires(world), "runner", 0, main, failed=failures.append)
    try:
        world.run(until=60)
        process.raise_failure()
    finally:
        process.close()
    assert failures == []


async def listed(files: AdapterFiles, capacity: int = 0) -> tuple[Digest, ...]:
    return tuple(one.digest for one in (await files.contents(effects.ListCache(0, capacity))).by_last_use)


@pytest.fixture(params=[on_a_disk, simulated], ids=["disk", "simulated"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Test], None]:
    return lambda test: request.param(test, tmp_path)


def test_what_was_fetched_is_found_by_anyone_but_only_by_its_origin_if_its_digest_is_not_verified(run):
    async def test(files: AdapterFiles, request: Callable[[int], FetchRequest]) -> None:
        held = await files.fetch(effects.Fetch(1, request(0)))
        assert held.certification is None
        found = await files.find(effects.Find(2, held.digest))
        assert found is not None
        assert (found.digest, found.inode) == (held.digest, held.inode)
        assert await files.find(effects.Find(3, held.digest, request(0))) is not None
        assert await files.find(effects.Find(4, held.digest, request(1))) is None
        verified = FetchRequest(source=request(1).source)
        assert await files.find(effects.Find(5, held.digest, verified)) is not None
        assert await files.find(effects.Find(6, UNKNOWN)) is None

    run(test)


def test_a_fetch_fails_without_files_or_with_another_digest(run):
    async def test(files: AdapterFiles, request: Callable[[int], FetchRequest]) -> None:
        with pytest.raises(AdapterFetchFailed):
            await files.fetch(effects.Fetch(1, request(3)))
        with pytest.raises(AdapterFetchFailed) as failed:
            await files.fetch(effects.Fetch(2, FetchRequest(source=request(0).source, expected=UNKNOWN)))
        assert failed.value.reason == "DigestMismatch"
        assert await listed(files) == ()

    run(test)


def test_a_check_is_kept_beside_the_files_and_refuses_what_does_not_fit(run):
    async def test(files: AdapterFiles, request: Callable[[int], FetchRequest]) -> None:
        held = await files.fetch(effects.Fetch(1, request(0)))
        checked = await files.check(held)
        assert (checked.certificate.digest, checked.certificate.base_digest) == (held.digest, BASE)
        again = await files.find(effects.Find(2, held.digest))
        assert again is not None
        assert again.certification is not None
        assert again.certification.certificate == checked.certificate
        broken = await files.fetch(effects.Fetch(3, request(BROKEN)))
        with pytest.raises(AdapterIncompatible):
            await files.check(broken)

    run(test)


def test_what_is_evicted_has_gone_and_the_least_recently_used_is_listed_first(run):
    async def test(files: AdapterFiles, request: Callable[[int], FetchRequest]) -> None:
        first, second = [await files.fetch(effects.Fetch(number, request(number))) for number in (0, 1)]
        assert await listed(files) == await listed(files, 1) == (first.digest, second.digest)
        assert await listed(files, 2) == ()
        roomy = await files.contents(effects.ListCache(0, 2, room=1 << 30))
        assert (roomy.by_last_use, roomy.bytes) == ((), first.bytes + second.bytes)
        narrow = await files.contents(effects.ListCache(0, 2, room=first.bytes))
        assert [one.digest for one in narrow.by_last_use] == [first.digest, second.digest]
        assert [one.bytes for one in narrow.by_last_use] == [first.bytes, second.bytes]
        assert narrow.bytes == roomy.bytes
        assert await files.look(first, begins=lambda: None)
        assert await listed(files) == (second.digest, first.digest)
        assert await files.evict(effects.Evict(3, first.digest, first)) is None
        assert not await files.look(first, begins=lambda: None)
        assert await files.vanished([first, second]) == [first]
        assert await listed(files) == (second.digest,)
        files.release(second)
        assert await files.evict(effects.Evict(4, second.digest)) is None
        assert await listed(files) == ()
        again = await files.fetch(effects.Fetch(5, request(0)))
        assert again.digest == first.digest
        assert await files.vanished([first, again]) == [first], "it is another folder"

    run(test)
