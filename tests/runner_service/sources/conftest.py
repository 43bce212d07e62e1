import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from motet.settings import ProcessSettings
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.policy.values import FetchRequest
from motet_runner.settings import Settings
from motet_runner.sources import process_pool
from motet_runner.sources.source_access import Sources
from tests.support.adapter_fetches import Fetcher
from tests.support.forked_fetches import forking_asyncio
from tests.support.given_settings import given
from tests.support.in_process_runner import write_adapter
from tests.support.registry_server import registry_server
from tests.support.s3_server import s3_server
from tests.support.source_servers import hub_server, web_server

SCALE = 0.1
HUB_SCALE = 0.2
"""The hub's library sleeps a second between two attempts, at any time scale."""


class FetchSetup:
    """A runner's fetcher with its own cache. A test may add settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: dict[str, object] = {}
        self.scale = SCALE
        self.cache = DiskCache(folder / "data/cache/adapters", max_adapter_bytes=1 << 20)
        self.cache.prepare()
        self._fetcher: Fetcher | None = None
        self.limits = CacheLimits(1000)
        self.registry = CollectorRegistry()

    @property
    def sources(self) -> Sources:
        process = given(ProcessSettings)(data_dir=self.folder / "data", time_scale=self.scale)
        self.registry = CollectorRegistry()
        return Sources(given(Settings)(**self.settings), process, self.registry)

    @property
    def fetcher(self) -> Fetcher:
        if self._fetcher is None:
            self._fetcher = Fetcher(self.cache, self.sources, self.limits)
        return self._fetcher

    async def fetch(self, source: str, *, proven: bool = False, manifest: str = "a", **how: object):
        """Fetch as for the check of a new revision, unless its digest is known."""
        request = FetchRequest(source=source, namespace="tenant-a", digest_verified=proven, **how)
        return await self.fetcher.fetch(request, manifest=manifest)

    def cached(self) -> list[str]:
        return sorted(path.name for path in self.cache.folder.iterdir())

    def partial(self) -> list[Path]:
        """Also while folders are removed."""
        folders = os.walk(self.folder / "data/cache/partial")
        return [Path(folder) / name for folder, _, names in folders for name in names]


@pytest.fixture(autouse=True)
def forked_fetches(monkeypatch):
    monkeypatch.setattr(process_pool, "asyncio", forking_asyncio)


@pytest.fixture
def fetch_setup(tmp_path):
    return FetchSetup(tmp_path)


@pytest.fixture
async def web(tmp_path, fetch_setup):
    async with web_server(tmp_path) as server:
        fetch_setup.settings |= {"fetch_ca_file": str(server.ca_file), "fetch_allowed_hosts": ["127.0.0.1"]}
        yield server


@pytest.fixture
async def hub(tmp_path, fetch_setup):
    async with hub_server(tmp_path) as server:
        fetch_setup.settings |= {"fetch_ca_file": str(server.ca_file), "hub_endpoint": server.base}
        fetch_setup.scale = HUB_SCALE
        yield server


@pytest.fixture
async def store(tmp_path, fetch_setup):
    async with s3_server(tmp_path) as server:
        fetch_setup.settings |= {"fetch_ca_file": str(server.ca_file), "s3_endpoint": server.base}
        yield server


@pytest.fixture
async def registry(tmp_path, fetch_setup):
    async with registry_server(tmp_path) as server:
        fetch_setup.settings |= {"fetch_ca_file": str(server.ca_file), "fetch_allowed_hosts": ["127.0.0.1"]}
        yield server


@pytest.fixture
def adapter(tmp_path):
    """An adapter with weights of a few hundred KiB, so that a connection can break in the middle."""
    return write_adapter(tmp_path / "source", rank=512)
