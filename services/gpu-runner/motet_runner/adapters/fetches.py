"""Carries out fetches: a folder is read by threads of its volume, a hub or the web by a fetch process."""

from functools import partial
from pathlib import Path

from motet.domain import Digest
from motet.errors import AdapterFetchFailed
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.folder_fetch import copy_folder, store_fetched
from motet_runner.adapters.policy.effects import Fetch
from motet_runner.adapters.policy.values import FetchRequest, Held
from motet_runner.daemon_threads import DaemonThreads
from motet_runner.sources.fetch_errors import NO_SPACE
from motet_runner.sources.folder import AdapterFolder, FolderUri, adapter_folder
from motet_runner.sources.process_pool import Room
from motet_runner.sources.source_access import RemoteFiles, Sources
from motet_runner.sources.uri import parse
from motet_runner.sources.volume_threads import Progress, VolumeThreads, mount_of


class Fetches:
    """`threads`: for long calls on the runner's own disk."""

    def __init__(self, cache: DiskCache, sources: Sources, threads: DaemonThreads) -> None:
        self.cache = cache
        self.sources = sources
        self.threads = threads
        self.volumes = VolumeThreads(stall_seconds=sources.stall_seconds)
        self._bytes: dict[int, int] = {}

    def bytes_of(self, number: int) -> int:
        """How many bytes have been fetched, while a fetch from a hub or the web runs."""
        return self._bytes.get(number, 0)

    async def fetch(self, fetch: Fetch, room: Room | None = None) -> Held:
        """`room`: awaited before files of this many bytes are written. None: there is room for all. Raises
        AdapterFetchFailed, and OSError or CallHangs if the runner's own disk fails or hangs."""
        try:
            try:
                return await self._fetch(fetch, room)
            except AdapterFetchFailed as failure:
                if failure.reason != NO_SPACE or not await self.threads.run(self.cache.remove_slabs):
                    raise
            return await self._fetch(fetch, room)
        except AdapterFetchFailed as failure:
            if failure.reason == NO_SPACE:
                await self.sources.clear_partial(all_of_them=True)
            raise

    async def _fetch(self, fetch: Fetch, room: Room | None) -> Held:
        source = parse(fetch.request.source, fetch.request.revision)
        if isinstance(source, FolderUri):
            return await self._from_folder(source.path, fetch, room)
        return await self._from_remote(fetch.number, fetch.request, room)

    async def forget_partial(self, request: FetchRequest) -> None:
        await self.sources.forget_partial(self._remote(request))

    async def _from_folder(self, path: Path, fetch: Fetch, room: Room | None) -> Held:
        request = fetch.request
        volume = parse(request.volume) if request.volume else None
        mounted = volume.path if isinstance(volume, FolderUri) else None
        most: int | None = None

        def source() -> AdapterFolder:
            return adapter_folder(path, self.sources.bounds.of(path, mounted, request.folder), request.revision)

        def measure(progress: Progress) -> int:
            with progress.reading():
                return sum(file.size for file in source().stat_files(self.cache.bound(request.max_bytes)))

        def read(progress: Progress) -> Held:
            with progress.reading():
                folder = source()
            return copy_folder(self.cache, folder, request, fetch.before, progress.reading, most=most)

        name = str(self.sources.bounds.volume_of(path, mounted) or mount_of(path))
        on_volume = partial(
            self.volumes.run,
            name,
            disk_seconds=self._disk_seconds_for(request),
            owner=request.namespace,
            urgent=fetch.awaited,
        )
        if room is not None:
            most = await on_volume(measure, discard=lambda _: None)
            await room(most)
        return await on_volume(read, discard=_discard)

    def _disk_seconds_for(self, request: FetchRequest) -> float:
        return self.sources.disk_seconds(self.cache.bound(request.max_bytes))

    async def _from_remote(self, number: int, request: FetchRequest, room: Room | None) -> Held:
        sources, remote = self.sources, self._remote(request)
        await sources.tidy_partial(request.namespace)
        held: Held | None = None
        try:
            try:
                async with sources.partial_folder(remote) as folder:
                    if request.expected:  # another runner of this machine may have fetched the adapter meanwhile
                        find = partial(self.cache.find, Digest(request.expected), request)
                        held = await self.threads.run(find, discard=_discard)
                    if held is None:
                        await sources.fetch_into("adapter", remote, folder, partial(self._note_bytes, number), room)
                        store = partial(store_fetched, self.cache, folder, request)
                        seconds = self._disk_seconds_for(request)
                        held = await self.threads.run(store, discard=_discard, seconds=seconds)
            finally:
                self._bytes.pop(number, None)
                await sources.tidy_partial(request.namespace)
        except BaseException:  # also if the fetch is stopped while a hanging disk delays the `finally`
            self.threads.submit(partial(_discard, held))  # closing a file may hang, too
            raise
        return held

    def _remote(self, request: FetchRequest) -> RemoteFiles:
        return RemoteFiles(
            uri=request.source,
            revision=request.revision,
            credentials=request.credentials,
            namespace=request.namespace,
            max_bytes=self.cache.bound(request.max_bytes),
        )

    def _note_bytes(self, number: int, fetched: int, _: int) -> None:
        self._bytes[number] = fetched


def _discard(held: Held | None) -> None:
    if held is not None:
        held.lease.release()
