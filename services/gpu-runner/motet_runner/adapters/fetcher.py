"""Fetches adapters from their source into the disk cache, into folders that are named by their digest.

DATA/cache/adapters/<hex digest>/ holds adapter_config.json, adapter_model.safetensors, those optional files that belong
to the digest, and certificate.json. A folder appears there complete or not at all: the files are copied into a folder
beside it and digested meanwhile, then flushed, and the folder is renamed. Runners on one machine may share the cache. A
runner that uses a folder holds a shared lock on it. No runner evicts a folder that another one has locked.
"""

import asyncio
import errno
import fcntl
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from motet.digest import CHUNK_BYTES, ContentDigest, adapter_digest, adapter_files, digest_from_hex, hex_of
from motet.domain import Digest
from motet.errors import AdapterError, AdapterFetchFailed
from motet_runner.adapters.safetensors_header import read_header
from motet_runner.sources.fetch_errors import RETRY_LATER_SECONDS, another_digest, no_space, temporary
from motet_runner.sources.file_selection import WEIGHTS
from motet_runner.sources.folder import AdapterFolder, VolumeBounds, adapter_folder
from motet_runner.sources.partial_fetch import clear_old, key_of
from motet_runner.sources.source_access import RemoteFiles, Sources
from motet_runner.sources.uri import FolderUri, parse

log = structlog.get_logger(__name__)

CERTIFICATE = "certificate.json"

MAX_ATTEMPTS = 3
"""How often a folder is read: if its files change meanwhile, it is read again."""

MAX_FAILURES_REMEMBERED = 10_000

_counter = itertools.count()
Fill = Callable[[Path, ContentDigest], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    digest: Digest
    folder: Path
    bytes: int


class FolderLock:
    """A shared lock on a cached folder: while it is held, no process evicts the folder. It ends with the process.

    Raises FileNotFoundError if the folder does not exist, or has just been removed.
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        try:
            if not os.path.samestat(os.fstat(self._file), folder.stat()):
                raise FileNotFoundError(errno.ENOENT, "removed a moment ago", str(folder))
            touch(folder)
        except OSError:
            self.release()
            raise

    def is_alone(self) -> bool:
        """Whether no other process uses the folder."""
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            fcntl.flock(self._file, fcntl.LOCK_SH)
        return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def touch(folder: Path) -> None:
    """Record that a cached folder is used, for the order of eviction. This clock is finer than the kernel's ticks."""
    now = time.time_ns()
    os.utime(folder, ns=(now, now))


class DiskCache:
    """The disk cache. Its methods block: call them in a thread."""

    def __init__(self, folder: Path, *, max_adapter_bytes: int) -> None:
        self.folder = folder
        self.max_adapter_bytes = max_adapter_bytes

    def prepare(self) -> None:
        """Make the folder, and remove what processes that died during a fetch have left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*-*"):
            _remove_unlocked(left)
        clear_old(self.folder.with_name("partial"))

    def path_of(self, digest: Digest) -> Path:
        return self.folder / hex_of(digest)

    def find(self, digest: Digest) -> Fetched | None:
        folder = self.path_of(digest)
        try:
            return Fetched(digest, folder, sum((folder / name).stat().st_size for name in adapter_files(folder)))
        except FileNotFoundError:
            return None

    def fetch(self, source: AdapterFolder, expected: str, *, max_bytes: int | None = None) -> Fetched:
        """Copy an adapter into the cache. Raises AdapterFetchFailed, which says what is wrong and where."""
        limit = self.bound(max_bytes)
        before = source.stat_files(limit)
        for _ in range(MAX_ATTEMPTS):
            names, size = [file.name for file in before], sum(file.size for file in before)
            fetched = self._store(partial(_copy_files, source, names), expected, str(source.path), size)
            after = source.stat_files(limit)
            if after == before:
                return fetched
            before = after
        raise temporary(f"{source.path} changes while Motet reads it. Motet tries again automatically.")

    def store_fetched(self, fetched_files: Path, expected: str, name: str) -> Fetched:
        """Move the files that a fetch process has fetched into the cache. `name` is that of their source."""
        size = sum((fetched_files / file).stat().st_size for file in adapter_files(fetched_files))
        return self._store(partial(_move_files, fetched_files), expected, name, size)

    def bound(self, max_bytes: int | None) -> int:
        return min(self.max_adapter_bytes, max_bytes or self.max_adapter_bytes)

    def remember_origin(self, folder: Path, key: str) -> None:
        """Record that these files come from this origin. A tenant who may read that origin may use the cached files."""
        with suppress(OSError):
            (folder / f".origin-{key}").touch()

    def is_origin(self, folder: Path, key: str) -> bool:
        return (folder / f".origin-{key}").exists()

    def by_last_use(self) -> list[Digest]:
        """All cached adapters. The one that was not used for longest comes first."""
        found = []
        for path in self.folder.iterdir():
            with suppress(ValueError, FileNotFoundError):
                found.append((path.stat().st_mtime_ns, digest_from_hex(path.name)))
        return [digest for _, digest in sorted(found)]

    def remove(self, digest: Digest) -> bool:
        """Remove a cached adapter unless some process uses it."""
        return _remove_unlocked(self.path_of(digest))

    def verify(self, digest: Digest) -> None:
        """Compare the files of an adapter that has been in the cache for a while with its digest, before a new check.

        If they differ, they are removed even if a process uses them, and AdapterFetchFailed is raised. The adapter is
        then fetched again.
        """
        folder = self.path_of(digest)
        if not (folder / CERTIFICATE).exists():
            return  # they were fetched just now, and their digest was compared
        trash = _trash_of(folder)
        try:
            if adapter_digest(folder) == digest:
                return
            log.warning("cached_adapter_corrupt", adapter=digest)
            folder.rename(trash)
        except FileNotFoundError:
            pass  # another runner has removed it first
        _remove(trash)
        raise temporary(
            f"The cached files of {digest} have changed. Motet removes them and fetches them again automatically."
        )

    def _store(self, fill: Fill, expected: str, name: str, size: int) -> Fetched:
        try:
            target, lock = self._new_folder()
        except OSError as error:
            raise _explain(error, name, self.folder, size) from error
        try:
            content = ContentDigest()
            fill(target, content)
            digest = content.digest()
            if expected and digest != expected:
                raise another_digest(
                    f"{name} has the digest {digest}, but the adapter asks for {expected}. Correct source.digest or "
                    "the files."
                )
            read_header(target / WEIGHTS)  # raises if the file is cut short or isn't safetensors
            final = self.path_of(digest)
            try:
                target.rename(final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                _remove(target)  # another source or another runner has stored it already
            else:
                _sync(self.folder)
            return Fetched(digest, final, size)
        except OSError as error:
            _remove(target)
            raise _explain(error, name, self.folder, size) from error
        except AdapterError:
            _remove(target)
            raise
        finally:
            lock.release()

    def _new_folder(self) -> tuple[Path, FolderLock]:
        """A folder to fill, and its lock. A runner that starts removes unlocked folders, so this one may vanish before
        it is locked: then try again."""
        while True:
            folder = self.folder / f".fetch-{os.getpid()}-{next(_counter)}"
            folder.mkdir(mode=0o755)
            try:
                return folder, FolderLock(folder)
            except FileNotFoundError:
                continue
            except OSError:
                _remove(folder)
                raise

    def write_certificate(self, folder: Path, text: str) -> None:
        draft = folder / f".{CERTIFICATE}-{os.getpid()}-{next(_counter)}"
        try:
            draft.write_text(text)
            draft.chmod(0o644)
            draft.replace(folder / CERTIFICATE)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise _explain(error, str(folder), self.folder, len(text)) from error

    def read_certificate(self, folder: Path) -> str | None:
        try:
            return (folder / CERTIFICATE).read_text()
        except FileNotFoundError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """An adapter that is to be fetched."""

    source: str
    revision: str = ""
    expected: str = ""
    credentials: str = ""
    """namespace/name of the Secret that opens the source."""

    namespace: str = ""
    """The namespace of the adapter."""

    volume: str = ""
    """URI of the volume that the source is on. Empty: the source is on no volume."""

    folder: str = ""
    """A folder of the volume: nothing outside of it is read. Empty: the whole volume may be read."""

    max_bytes: int = 0
    digest_verified: bool = True
    """It is known that the source has the expected digest, so cached files with this digest may be used."""

    @property
    def origin(self) -> str:
        bounds = [self.folder] if self.folder else []  # another origin, so that other bounds mean another fetch
        return key_of(self.namespace, self.source, self.revision, self.credentials, *bounds)


@dataclass(frozen=True, slots=True)
class _Failed:
    times: int
    until: float
    error: AdapterError


class Fetcher:
    """Fetches adapters. Callers that ask for the same files at the same time share one fetch and its result."""

    def __init__(self, cache: DiskCache, sources: Sources | None = None) -> None:
        self._cache = cache
        self._sources = sources
        self._bounds = sources.bounds if sources is not None else VolumeBounds()
        self._scale = sources.time_scale if sources is not None else 1.0
        self._under_way: dict[object, asyncio.Task[Fetched]] = {}
        self._bytes: dict[str, int] = {}
        self._failures: dict[tuple[str, str], _Failed] = {}
        self.copies = 0

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Fetch an adapter, or find it in the cache. If one caller is cancelled, the fetch goes on for the others."""
        cached = await asyncio.to_thread(self._cached, request)
        if cached is not None:
            return cached
        failed = self._failures.get((request.origin, request.expected))
        if request.digest_verified and failed is not None and time.monotonic() < failed.until:
            raise failed.error  # each request orders the adapter again; do not ask the source each time
        try:
            task = await self._join_fetch(request)
        except AdapterError as error:
            raise self._retry_later(error, request) from None
        return await asyncio.shield(task)

    def bytes_of(self, request: FetchRequest) -> int:
        """How many bytes of a remote adapter have been fetched, while the fetch runs."""
        return self._bytes.get(request.origin, 0)

    def _cached(self, request: FetchRequest) -> Fetched | None:
        """The cached adapter of the expected digest, if it is known that this source has this digest.

        Without this condition, a tenant who knows the digest of another tenant's adapter could use that adapter without
        its credentials.
        """
        found = self._cache.find(_digest(request.expected)) if request.expected else None
        if found is None or not (request.digest_verified or self._cache.is_origin(found.folder, request.origin)):
            return None
        weights = (found.folder / WEIGHTS).stat().st_size
        return found if weights <= self._cache.bound(request.max_bytes) else None

    async def _join_fetch(self, request: FetchRequest) -> asyncio.Task[Fetched]:
        """Start to fetch this adapter, or join the fetch of an equal request. Returns the task that fetches it."""
        source = parse(request.source, request.revision)
        work: Coroutine[Any, Any, Fetched]
        key: object = (request.origin, request.expected, request.max_bytes)
        if isinstance(source, FolderUri):
            folder = await asyncio.to_thread(self._folder, source.path, request)
            files = await asyncio.to_thread(folder.stat_files, self._cache.bound(request.max_bytes))
            key = (key, files)
            work = self._copy(folder, request)
        else:
            work = self._fetch_remote(request)
        task = self._under_way.get(key)
        if task is None:
            self.copies += 1
            task = asyncio.create_task(self._with_retry_time(work, request), name=f"fetch {request.source}")
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        else:
            work.close()
        return task

    def _folder(self, path: Path, request: FetchRequest) -> AdapterFolder:
        volume = parse(request.volume) if request.volume else None
        mounted = volume.path if isinstance(volume, FolderUri) else None
        return adapter_folder(path, self._bounds.of(path, mounted, request.folder), request.revision)

    async def _with_retry_time(self, work: Coroutine[Any, Any, Fetched], request: FetchRequest) -> Fetched:
        try:
            fetched = await work
        except AdapterError as error:
            raise self._retry_later(error, request) from None
        self._failures.pop((request.origin, request.expected), None)
        return fetched

    async def _copy(self, folder: AdapterFolder, request: FetchRequest) -> Fetched:
        fetched = await asyncio.to_thread(
            self._cache.fetch, folder, request.expected, max_bytes=request.max_bytes or None
        )
        await asyncio.to_thread(self._cache.remember_origin, fetched.folder, request.origin)
        return fetched

    async def _fetch_remote(self, request: FetchRequest) -> Fetched:
        if self._sources is None:
            raise AdapterFetchFailed(
                f"This runner cannot fetch {request.source}: it was started without access to hubs and the web."
            )
        remote = RemoteFiles(
            uri=request.source,
            revision=request.revision,
            credentials=request.credentials,
            max_bytes=self._cache.bound(request.max_bytes),
        )
        try:
            async with self._sources.partial_folder(remote, namespace=request.namespace) as folder:
                fetched = await asyncio.to_thread(self._cached, request)
                if fetched is None:  # else another runner of this machine has fetched it meanwhile
                    on_progress = partial(self._note_progress, request)
                    await self._sources.fetch_into("adapter", remote, folder, on_progress, namespace=request.namespace)
                    fetched = await asyncio.to_thread(
                        self._cache.store_fetched, folder, request.expected, request.source
                    )
                    await asyncio.to_thread(self._cache.remember_origin, fetched.folder, request.origin)
        finally:
            self._bytes.pop(request.origin, None)
        return fetched

    def _note_progress(self, request: FetchRequest, fetched_bytes: int, _: int) -> None:
        self._bytes[request.origin] = fetched_bytes

    def _retry_later(self, error: AdapterError, request: FetchRequest) -> AdapterError:
        """The same error, with a longer wait after each failure. A random part keeps runners from retrying together."""
        if len(self._failures) > MAX_FAILURES_REMEMBERED:
            self._failures.clear()
        key = (request.origin, request.expected)
        before = self._failures.get(key)
        times = before.times + 1 if before is not None else 1
        after = min(error.retry_after * 2 ** min(times - 1, 10), max(RETRY_LATER_SECONDS, error.retry_after))
        error.retry_after = after * random.uniform(0.8, 1.2) * self._scale  # noqa: S311
        until = time.monotonic() + (error.retry_after or RETRY_LATER_SECONDS * self._scale)
        self._failures[key] = _Failed(times, until, error)
        return error


def _copy_files(source: AdapterFolder, names: Iterable[str], target: Path, content: ContentDigest) -> None:
    for name in sorted(names):
        with os.fdopen(source.open(name), "rb") as file, (target / name).open("xb") as copy:
            size = os.fstat(file.fileno()).st_size
            content.begin(name, size)
            left = size  # the file may grow: copy no more than this
            while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                content.update(chunk)
                copy.write(chunk)
                left -= len(chunk)
            copy.flush()
            os.fchmod(copy.fileno(), 0o644)
            os.fsync(copy.fileno())


def _move_files(fetched_files: Path, target: Path, content: ContentDigest) -> None:
    for name in adapter_files(fetched_files):
        (fetched_files / name).rename(target / name)
        with (target / name).open("rb") as file:
            content.begin(name, os.fstat(file.fileno()).st_size)
            while chunk := file.read(CHUNK_BYTES):
                content.update(chunk)
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())


def _explain(error: OSError, name: str, cache: Path, size: int) -> AdapterFetchFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(cache).free
        return no_space(
            f"There is no space left in {cache}: the adapter at {name} needs {size} bytes, and {free} are free. Free "
            "some space. Motet tries again automatically."
        )
    return temporary(
        f"Motet cannot copy the adapter at {name} to {cache}: {error.strerror or error} ({error.filename}). Motet "
        "tries again automatically."
    )


def _digest(text: str) -> Digest:
    try:
        hex_of(Digest(text))
    except ValueError:
        raise AdapterFetchFailed(
            f"source.digest {text!r} is not a digest. Write `sha256:` and 64 hexadecimal digits."
        ) from None
    return Digest(text)


def _remove_unlocked(path: Path) -> bool:
    """Remove a folder unless some process has locked it. It is renamed first, so that nobody finds half of it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        trash = _trash_of(path)
        path.rename(trash)
        _remove(trash)
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(file)
    return True


def _trash_of(path: Path) -> Path:
    return path.with_name(f".trash-{os.getpid()}-{next(_counter)}")


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
