"""How the service uses sources: which ones it may reach, and how it fetches their files into a folder."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry

from motet.errors import AdapterFetchFailed
from motet.settings import ProcessSettings
from motet.sources import BUCKET
from motet_runner.daemon_threads import DaemonThreads
from motet_runner.settings import Settings
from motet_runner.sources.fetch_errors import NO_ROOM, NO_SPACE, RETRY_LATER_SECONDS
from motet_runner.sources.fetch_order import FetchOrder, NetworkAccess
from motet_runner.sources.folder import VolumeBounds
from motet_runner.sources.metrics import FetchMetrics
from motet_runner.sources.partial_fetch import PartialFetches, locked
from motet_runner.sources.process_pool import FetchProcessPool, OnProgress, Room

SLOWEST_BYTES_PER_SECOND = 16 << 20
"""The rate of a busy network disk. A slower disk counts as hanging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFiles:
    """The files to fetch, and the credentials for their source."""

    uri: str
    revision: str = ""
    credentials: str = ""
    namespace: str = ""
    """The adapter's namespace. Empty for a base model."""
    max_bytes: int = 0


class Sources:
    def __init__(self, settings: Settings, process: ProcessSettings, registry: CollectorRegistry) -> None:
        self.metrics = FetchMetrics(registry)
        self.bounds = VolumeBounds(settings.adapter_volumes)
        self.time_scale = process.time_scale
        self.stall_seconds = settings.fetch_stall_seconds * process.time_scale
        self.disk_stall_seconds = settings.disk_stall_seconds
        self.partial = PartialFetches(
            process.cache_dir.absolute() / "partial",
            max_count=settings.max_partial_fetches,
            max_bytes=settings.max_partial_mib << 20,
        )
        self._running: set[Path] = set()
        """The folders of this process's fetches that have asked for room: what is in them is a part of that."""
        self._files = DaemonThreads("partial fetches", 1, seconds=self.disk_stall_seconds)
        self._processes = FetchProcessPool(self.metrics, max_processes=settings.fetches_at_once)
        self._settings = settings
        self._access = NetworkAccess(
            hub_endpoint=settings.hub_endpoint,
            s3_endpoint=settings.s3_endpoint,
            s3_region=settings.s3_region,
            allowed_hosts=tuple(settings.fetch_allowed_hosts),
            ca_file=settings.fetch_ca_file,
            proxy=settings.fetch_proxy,
            proxy_guards=settings.fetch_proxy_guards,
            manifests=settings.manifests,
            api_server=settings.api_server,
            service_account=settings.service_account,
        )

    def store_of(self, uri: str, credentials: str) -> tuple[str, ...]:
        """What names the store of a bucket: another store may have a bucket of the same name. A Secret may name its
        store. Empty for other sources, whose URIs name it."""
        if not uri.startswith(BUCKET.prefix):
            return ()
        return (self._access.s3_endpoint, self._access.s3_region, credentials)

    def disk_seconds(self, size: int) -> float:
        """The limit of a call that reads or writes `size` bytes of an adapter on the runner's own disk."""
        return self.disk_stall_seconds + size / SLOWEST_BYTES_PER_SECOND

    @asynccontextmanager
    async def partial_folder(self, remote: RemoteFiles) -> AsyncIterator[Path]:
        """A folder for the files of an adapter. It is removed at the end, also if the files were wrong.

        If the fetch was interrupted, the folder stays, and the next fetch continues there.
        """
        folder = self.partial.folder_of(*self._words_of(remote))
        keep = True  # also if the fetch is stopped
        async with locked(folder, self._files):
            try:
                yield folder
                keep = False
            except AdapterFetchFailed as failure:
                keep = may_continue(failure)
                raise
            finally:
                self._running.discard(folder)
                if not keep:
                    await self._files.run(partial(shutil.rmtree, folder, ignore_errors=True))

    async def tidy_partial(self, namespace: str) -> None:
        """Keep interrupted fetches within the namespace's limits."""
        await self._files.run(partial(self.partial.make_room, namespace))

    async def clear_partial(self, *, all_of_them: bool = False) -> None:
        """Remove old interrupted fetches, or all of them if a disk is full."""
        await self._files.run(partial(self.partial.clear, all_of_them=all_of_them))

    async def partial_bytes(self) -> int:
        """The bytes of all unfinished fetches but those of this process that have asked for room."""
        return await self._files.run(partial(self.partial.total_bytes, but=frozenset(self._running)))

    async def forget_partial(self, remote: RemoteFiles) -> None:
        """Remove an interrupted fetch that will not be continued."""
        await self._files.run(partial(self.partial.forget, *self._words_of(remote)))

    def _words_of(self, remote: RemoteFiles) -> tuple[str, ...]:
        """The words that identify a set of files, its owner first."""
        store = self.store_of(remote.uri, remote.credentials)
        return (remote.namespace, remote.uri, remote.revision, remote.credentials, *store)

    async def fetch_into(
        self,
        what: Literal["adapter", "model"],
        remote: RemoteFiles,
        into: Path,
        on_progress: OnProgress,
        room: Room | None = None,
    ) -> None:
        """Fetch the files in a fetch process. Raises AdapterFetchFailed, and what `room` raises. One namespace can't
        use all fetch processes."""
        order = FetchOrder(
            what=what,
            uri=remote.uri,
            revision=remote.revision,
            credentials=remote.credentials,
            max_bytes=remote.max_bytes,
            into=str(into),
            stall_seconds=self.stall_seconds,
            min_average_bytes_per_second=self._settings.fetch_kib_per_second << 10,
            parallel=self._settings.fetches_at_once,
            parent=os.getpid(),
            asks_room=room is not None,
            access=self._access,
        )

        async def counted(size: int) -> None:
            assert room is not None
            self._running.add(into)
            await room(size)

        wanted = None if room is None else counted
        await self._processes.fetch(order, on_progress, namespace=remote.namespace, room=wanted)


def may_continue(failure: AdapterFetchFailed) -> bool:
    return 0 < failure.retry_after < RETRY_LATER_SECONDS and failure.reason not in (NO_SPACE, NO_ROOM)
