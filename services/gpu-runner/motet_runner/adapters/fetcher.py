"""Adapter bytes from their source into the disk cache, under the name of what they are.

DATA/cache/adapters/<hex digest>/ holds adapter_config.json, adapter_model.safetensors, those optional files that belong
to the digest, and certificate.json. A folder appears there whole or not at all: bytes are copied beside it, digested as
they pass, flushed, and renamed. Runners on one machine may share the cache: who uses a folder holds a shared lock on
it, and only an unlocked one is ever removed.
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

ATTEMPTS = 3
"""Somebody may be writing the files just now; so often it is read again."""

MAX_FAILURES_REMEMBERED = 10_000

_counter = itertools.count()
Fill = Callable[[Path, ContentDigest], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    digest: Digest
    folder: Path
    bytes: int


class FolderLock:
    """A shared lock on a cached folder: while it lasts, no process removes the folder. Ends with the process.

    Raises FileNotFoundError when the folder is not there (any more).
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
        """Whether nobody else uses the folder."""
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
    """Note the use of a cached folder, for the order of eviction; finer than the kernel's own clock ticks."""
    now = time.time_ns()
    os.utime(folder, ns=(now, now))


class DiskCache:
    """The cache on disk. Blocking; every call belongs in a thread."""

    def __init__(self, folder: Path, *, max_adapter_bytes: int) -> None:
        self.folder = folder
        self.max_adapter_bytes = max_adapter_bytes

    def prepare(self) -> None:
        """Make the folder, and clear what a process that died in the middle of a fetch has left."""
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
        """Copy an adapter in. Raises AdapterFetchFailed with what is wrong and where."""
        limit = self.bound(max_bytes)
        before = source.stat_files(limit)
        for _ in range(ATTEMPTS):
            names, size = [file.name for file in before], sum(file.size for file in before)
            fetched = self._enter(partial(_copy_files, source, names), expected, str(source.path), size)
            after = source.stat_files(limit)
            if after == before:
                return fetched
            before = after
        raise temporary(f"{source.path} changes while it is read; it is tried again by itself.")

    def adopt(self, brought: Path, expected: str, name: str) -> Fetched:
        """Take in what a child has brought into a folder of this file system, for a source of this name."""
        size = sum((brought / file).stat().st_size for file in adapter_files(brought))
        return self._enter(partial(_move_files, brought), expected, name, size)

    def bound(self, max_bytes: int | None) -> int:
        return min(self.max_adapter_bytes, max_bytes or self.max_adapter_bytes)

    def remember_origin(self, folder: Path, key: str) -> None:
        """These bytes have come from there: who may take them from there may have them from here."""
        with suppress(OSError):
            (folder / f".origin-{key}").touch()

    def is_origin(self, folder: Path, key: str) -> bool:
        return (folder / f".origin-{key}").exists()

    def by_last_use(self) -> list[Digest]:
        """All that is cached, the longest unused first."""
        found = []
        for path in self.folder.iterdir():
            with suppress(ValueError, FileNotFoundError):
                found.append((path.stat().st_mtime_ns, digest_from_hex(path.name)))
        return [digest for _, digest in sorted(found)]

    def remove(self, digest: Digest) -> bool:
        """Remove a cached adapter unless some process uses it."""
        return _remove_unlocked(self.path_of(digest))

    def verify(self, digest: Digest) -> None:
        """Before bytes that lie here since some other day are checked again: they are what their name says.

        What is not goes, whoever holds it, and AdapterFetchFailed is raised: it is fetched again.
        """
        folder = self.path_of(digest)
        if not (folder / CERTIFICATE).exists():
            return  # they came just now, and were digested as they passed
        trash = _trash_of(folder)
        try:
            if adapter_digest(folder) == digest:
                return
            log.warning("cached_adapter_corrupt", adapter=digest)
            folder.rename(trash)
        except FileNotFoundError:
            pass  # another runner has seen it first
        _remove(trash)
        raise temporary(f"the cached bytes of {digest} have changed; they are removed and will be fetched again.")

    def _enter(self, fill: Fill, expected: str, name: str, size: int) -> Fetched:
        try:
            target, lock = self._new_folder()
        except OSError as error:
            raise _explain(error, name, self.folder, size) from error
        try:
            content = ContentDigest()
            fill(target, content)
            digest = content.digest()
            if expected and digest != expected:
                raise another_digest(f"{name} has the digest {digest}, not {expected} as the adapter asks for.")
            read_header(target / WEIGHTS)  # complete, and really safetensors
            final = self.path_of(digest)
            try:
                target.rename(final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                _remove(target)  # it is there already, from another name or another runner
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
        """To be filled. A runner that starts clears what nobody holds, also what another one is about to hold."""
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
    """An adapter as it is ordered."""

    source: str
    revision: str = ""
    expected: str = ""
    credentials: str = ""
    """namespace/name of the Secret that opens the source."""

    namespace: str = ""
    """Whose adapter it is."""

    volume: str = ""
    """URI of the volume that the source lies on; empty: on none."""

    folder: str = ""
    """Of the volume: nothing outside of it is read; empty: all of it may be."""

    max_bytes: int = 0
    digest_verified: bool = True
    """That the source gives the expected digest is known: what is cached under it may be used."""

    @property
    def origin(self) -> str:
        bounds = [self.folder] if self.folder else []  # what was read without them is read again
        return key_of(self.namespace, self.source, self.revision, self.credentials, *bounds)


@dataclass(frozen=True, slots=True)
class _Failed:
    times: int
    until: float
    error: AdapterError


class Fetcher:
    """Fetches, one at a time for the same bytes: whoever asks meanwhile gets the same answer."""

    def __init__(self, cache: DiskCache, sources: Sources | None = None) -> None:
        self._cache = cache
        self._sources = sources
        self._confines = sources.confines if sources is not None else VolumeBounds()
        self._scale = sources.time_scale if sources is not None else 1.0
        self._under_way: dict[object, asyncio.Task[Fetched]] = {}
        self._bytes: dict[str, int] = {}
        self._failures: dict[tuple[str, str], _Failed] = {}
        self.copies = 0

    async def fetch(self, wanted: FetchRequest) -> Fetched:
        """Safe to cancel: the fetch goes on for the others."""
        cached = await asyncio.to_thread(self._cached, wanted)
        if cached is not None:
            return cached
        failed = self._failures.get((wanted.origin, wanted.expected))
        if wanted.digest_verified and failed is not None and time.monotonic() < failed.until:
            raise failed.error  # each request for it orders it again, and the source must not hear of all of them
        try:
            task = await self._task(wanted)
        except AdapterError as error:
            raise self._retry_later(error, wanted) from None
        return await asyncio.shield(task)

    def bytes_of(self, wanted: FetchRequest) -> int:
        """How many have come of a remote adapter that is under way."""
        return self._bytes.get(wanted.origin, 0)

    def _cached(self, wanted: FetchRequest) -> Fetched | None:
        """Bytes of the expected digest, if it is known that this source gives them.

        Else a tenant who has got hold of a digest could name it, and have another's adapter without its credentials.
        """
        found = self._cache.find(_digest(wanted.expected)) if wanted.expected else None
        if found is None or not (wanted.digest_verified or self._cache.is_origin(found.folder, wanted.origin)):
            return None
        weights = (found.folder / WEIGHTS).stat().st_size
        return found if weights <= self._cache.bound(wanted.max_bytes) else None

    async def _task(self, wanted: FetchRequest) -> asyncio.Task[Fetched]:
        """The one task that fetches this."""
        source = parse(wanted.source, wanted.revision)
        work: Coroutine[Any, Any, Fetched]
        key: object = (wanted.origin, wanted.expected, wanted.max_bytes)
        if isinstance(source, FolderUri):
            folder = await asyncio.to_thread(self._folder, source.path, wanted)
            looks = await asyncio.to_thread(folder.stat_files, self._cache.bound(wanted.max_bytes))
            key = (key, looks)
            work = self._copy(folder, wanted)
        else:
            work = self._bring(wanted)
        task = self._under_way.get(key)
        if task is None:
            self.copies += 1
            task = asyncio.create_task(self._tried(work, wanted), name=f"fetch {wanted.source}")
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        else:
            work.close()
        return task

    def _folder(self, path: Path, wanted: FetchRequest) -> AdapterFolder:
        volume = parse(wanted.volume) if wanted.volume else None
        mounted = volume.path if isinstance(volume, FolderUri) else None
        return adapter_folder(path, self._confines.of(path, mounted, wanted.folder), wanted.revision)

    async def _tried(self, work: Coroutine[Any, Any, Fetched], wanted: FetchRequest) -> Fetched:
        try:
            fetched = await work
        except AdapterError as error:
            raise self._retry_later(error, wanted) from None
        self._failures.pop((wanted.origin, wanted.expected), None)
        return fetched

    async def _copy(self, folder: AdapterFolder, wanted: FetchRequest) -> Fetched:
        fetched = await asyncio.to_thread(
            self._cache.fetch, folder, wanted.expected, max_bytes=wanted.max_bytes or None
        )
        await asyncio.to_thread(self._cache.remember_origin, fetched.folder, wanted.origin)
        return fetched

    async def _bring(self, wanted: FetchRequest) -> Fetched:
        if self._sources is None:
            raise AdapterFetchFailed(f"{wanted.source} cannot be fetched here: nothing fetches from hubs or the web.")
        remote = RemoteFiles(
            uri=wanted.source,
            revision=wanted.revision,
            credentials=wanted.credentials,
            max_bytes=self._cache.bound(wanted.max_bytes),
        )
        try:
            async with self._sources.place_for(remote, apart=wanted.namespace) as folder:
                fetched = await asyncio.to_thread(self._cached, wanted)
                if fetched is None:  # else another runner of this machine has brought it meanwhile
                    heard = partial(self._note_progress, wanted)
                    await self._sources.bring("adapter", remote, folder, heard, whose=wanted.namespace)
                    fetched = await asyncio.to_thread(self._cache.adopt, folder, wanted.expected, wanted.source)
                    await asyncio.to_thread(self._cache.remember_origin, fetched.folder, wanted.origin)
        finally:
            self._bytes.pop(wanted.origin, None)
        return fetched

    def _note_progress(self, wanted: FetchRequest, here: int, _: int) -> None:
        self._bytes[wanted.origin] = here

    def _retry_later(self, error: AdapterError, wanted: FetchRequest) -> AdapterError:
        """The same error, to be tried again a little later each time, and not by all at the same moment."""
        if len(self._failures) > MAX_FAILURES_REMEMBERED:
            self._failures.clear()
        key = (wanted.origin, wanted.expected)
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
            left = size  # no more than was looked at, however fast the file grows
            while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                content.update(chunk)
                copy.write(chunk)
                left -= len(chunk)
            copy.flush()
            os.fchmod(copy.fileno(), 0o644)
            os.fsync(copy.fileno())


def _move_files(brought: Path, target: Path, content: ContentDigest) -> None:
    for name in adapter_files(brought):
        (brought / name).rename(target / name)
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
            f"no space left in {cache}: the adapter at {name} needs {size} bytes, {free} are free. Free some space; it "
            "is tried again by itself."
        )
    return temporary(
        f"the adapter at {name} cannot be copied to {cache}: {error.strerror or error} ({error.filename})."
    )


def _digest(text: str) -> Digest:
    try:
        hex_of(Digest(text))
    except ValueError:
        raise AdapterFetchFailed(f"{text!r} is no digest: it is `sha256:` and 64 hexadecimal digits.") from None
    return Digest(text)


def _remove_unlocked(path: Path) -> bool:
    """Remove a folder unless some process holds it. It leaves its name first, so that nobody finds half of it."""
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
