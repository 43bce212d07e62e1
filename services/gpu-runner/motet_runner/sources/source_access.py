"""The service's access to sources: which may be reached and how, and how to have files fetched into a folder."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry

from motet.errors import AdapterFetchFailed
from motet.settings import ProcessSettings
from motet_runner.settings import Settings
from motet_runner.sources.fetch_errors import RETRY_LATER_SECONDS
from motet_runner.sources.fetch_order import FetchOrder, NetworkAccess
from motet_runner.sources.folder import VolumeBounds
from motet_runner.sources.metrics import FetchMetrics
from motet_runner.sources.partial_fetch import key_of, locked
from motet_runner.sources.process_pool import FetchProcessPool, OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFiles:
    """The files that are to be fetched, and the credentials for their source."""

    uri: str
    revision: str = ""
    credentials: str = ""
    max_bytes: int


class Sources:
    def __init__(self, settings: Settings, process: ProcessSettings, registry: CollectorRegistry) -> None:
        self.metrics = FetchMetrics(registry)
        self.confines = VolumeBounds(settings.adapter_volumes)
        self.time_scale = process.time_scale
        self.partial = process.cache_dir.absolute() / "partial"
        self._children = FetchProcessPool(self.metrics, at_once=settings.fetches_at_once)
        self._stall_seconds = settings.fetch_stall_seconds * process.time_scale
        self._slowest = settings.fetch_kib_per_second << 10
        self._parallel = settings.fetches_at_once
        self._access = NetworkAccess(
            hub_endpoint=settings.hub_endpoint,
            allowed_hosts=tuple(settings.fetch_allowed_hosts),
            ca_file=settings.fetch_ca_file,
            proxy=settings.fetch_proxy,
            proxy_guards=settings.fetch_proxy_guards,
            manifests=settings.manifests,
            api_server=settings.api_server,
            service_account=settings.service_account,
        )

    @asynccontextmanager
    async def place_for(self, remote: RemoteFiles, *, apart: str = "") -> AsyncIterator[Path]:
        """A folder for the files of an adapter. It is removed at the end.

        If a fetch was interrupted, the folder stays, and the next fetch continues there. If the files were wrong, it is
        removed.
        """
        folder = self.partial / key_of(remote.uri, remote.revision, remote.credentials, apart)
        async with locked(folder):
            try:
                yield folder
            except AdapterFetchFailed as failure:
                if not may_go_on(failure):
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            else:
                shutil.rmtree(folder, ignore_errors=True)

    async def bring(
        self, what: Literal["adapter", "model"], remote: RemoteFiles, into: Path, heard: OnProgress, *, whose: str = ""
    ) -> None:
        """Have a fetch process bring the files. Raises AdapterFetchFailed. No namespace can use all fetch processes."""
        order = FetchOrder(
            what=what,
            uri=remote.uri,
            revision=remote.revision,
            credentials=remote.credentials,
            max_bytes=remote.max_bytes,
            into=str(into),
            stall_seconds=self._stall_seconds,
            slowest=self._slowest,
            parallel=self._parallel,
            access=self._access,
        )
        await self._children.fetch(order, heard, whose=whose)


def may_go_on(failure: AdapterFetchFailed) -> bool:
    return 0 < failure.retry_after < RETRY_LATER_SECONDS and failure.reason != "NoSpace"
