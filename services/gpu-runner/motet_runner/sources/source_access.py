"""How the service uses sources: which ones it may reach, and how it fetches their files into a folder."""

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
        self.bounds = VolumeBounds(settings.adapter_volumes)
        self.time_scale = process.time_scale
        self.partial = process.cache_dir.absolute() / "partial"
        self._processes = FetchProcessPool(self.metrics, max_processes=settings.fetches_at_once)
        self._stall_seconds = settings.fetch_stall_seconds * process.time_scale
        self._min_average_bytes_per_second = settings.fetch_kib_per_second << 10
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
    async def partial_folder(self, remote: RemoteFiles, *, namespace: str = "") -> AsyncIterator[Path]:
        """A folder for the files of an adapter. It is removed at the end.

        If a fetch was interrupted, the folder stays, and the next fetch continues there. If the files were wrong, it is
        removed.
        """
        folder = self.partial / key_of(remote.uri, remote.revision, remote.credentials, namespace)
        async with locked(folder):
            try:
                yield folder
            except AdapterFetchFailed as failure:
                if not may_continue(failure):
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            else:
                shutil.rmtree(folder, ignore_errors=True)

    async def fetch_into(
        self,
        what: Literal["adapter", "model"],
        remote: RemoteFiles,
        into: Path,
        on_progress: OnProgress,
        *,
        namespace: str = "",
    ) -> None:
        """Fetch the files in a process of its own. Raises AdapterFetchFailed. One namespace can't use all processes."""
        order = FetchOrder(
            what=what,
            uri=remote.uri,
            revision=remote.revision,
            credentials=remote.credentials,
            max_bytes=remote.max_bytes,
            into=str(into),
            stall_seconds=self._stall_seconds,
            min_average_bytes_per_second=self._min_average_bytes_per_second,
            parallel=self._parallel,
            access=self._access,
        )
        await self._processes.fetch(order, on_progress, namespace=namespace)


def may_continue(failure: AdapterFetchFailed) -> bool:
    return 0 < failure.retry_after < RETRY_LATER_SECONDS and failure.reason != "NoSpace"
