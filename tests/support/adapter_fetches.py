"""A runner's adapters without an engine: for tests of what is fetched."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2
from motet.domain import Digest
from motet.settings import ProcessSettings
from motet_runner.adapters.adapter_files import DiskAdapterFiles
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.checks import Checks
from motet_runner.adapters.policy.effects import Fetch
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.policy.values import FetchRequest, Held
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.metrics import Metrics
from motet_runner.settings import Settings
from motet_runner.sources.process_pool import Room
from motet_runner.sources.source_access import Sources
from tests.support.surroundings import REAL


class Fetcher:
    def __init__(self, cache: DiskCache, sources: Sources | None = None, limits: CacheLimits | None = None) -> None:
        sources = sources or usual_sources(cache.folder.parent)
        self.files = DiskAdapterFiles(cache, Checks(cache, _no_check, base_digest=Digest("")), sources)
        self.registry = AdapterRegistry(
            self.files,
            limits=limits or CacheLimits(1000),
            users_of=lambda _: 0,
            post=lambda _: None,
            metrics=Metrics(CollectorRegistry(), wall=REAL.wall),
            surroundings=REAL,
            time_scale=sources.time_scale,
        )
        self.copies = 0
        """How many fetches have brought files."""
        self._fetch = self.files.fetch
        self.files.fetch = self._count  # type: ignore[method-assign]

    async def _count(self, fetch: Fetch, room: Room | None = None) -> Held:
        held = await self._fetch(fetch, room)
        self.copies += fetch.before is None or fetch.before.inode != held.inode
        return held

    async def fetch(self, request: FetchRequest, *, manifest: str = "a") -> Held:
        ref = common_pb2.AdapterRef(namespace=request.namespace, name=manifest)
        life = await self.registry.order(request, ref, check=False)
        assert life.held is not None
        return replace(life.held, stamp=None)


def usual_sources(folder: Path, **settings: Any) -> Sources:
    """Sources as a runner's settings make them, without a shorter time scale."""
    process = ProcessSettings(data_dir=folder / "data", time_scale=1.0)
    return Sources(Settings(**settings), process, CollectorRegistry())


async def settle(registry: AdapterRegistry) -> None:
    """Wait until everything that was begun has ended, and all that was let go is released."""
    while registry.tasks:
        await asyncio.sleep(0.005)
    assert isinstance(registry.files, DiskAdapterFiles)
    await asyncio.wrap_future(registry.files.folders.submit(lambda: None))


def _no_check(folder: Path) -> Certification:
    raise AssertionError(f"nobody has ordered a check of {folder}")
