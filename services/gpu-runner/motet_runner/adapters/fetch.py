"""Adapter bytes from their source into the disk cache, under the name of what they are.

DATA/cache/adapters/<hex digest>/ holds adapter_config.json, adapter_model.safetensors and certificate.json. A folder
appears there whole or not at all: bytes are copied beside it, digested as they pass, flushed, and renamed. Runners on
one machine may share the cache: who uses a folder holds a shared lock on it, and only an unlocked one is ever removed.
"""

import asyncio
import errno
import fcntl
import itertools
import os
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

from motet.digest import ADAPTER_FILES, CHUNK_BYTES, ContentDigest, from_hex, hex_of
from motet.errors import AdapterError, AdapterFetchFailed
from motet.model import Digest
from motet_runner.adapters.header import read_header

log = structlog.get_logger(__name__)

CONFIG, WEIGHTS = ADAPTER_FILES
CERTIFICATE = "certificate.json"
MAX_CONFIG_BYTES = 1 << 20

ATTEMPTS = 3
"""Somebody may be writing the files just now; so often it is read again."""

_counter = itertools.count()
Signature = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    digest: Digest
    folder: Path
    bytes: int


class Lease:
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

    def path_of(self, digest: Digest) -> Path:
        return self.folder / hex_of(digest)

    def find(self, digest: Digest) -> Fetched | None:
        folder = self.path_of(digest)
        try:
            return Fetched(digest, folder, sum((folder / name).stat().st_size for name in ADAPTER_FILES))
        except FileNotFoundError:
            return None

    def fetch(self, source: Path, expected: str) -> Fetched:
        """Copy an adapter in. Raises AdapterFetchFailed with what is wrong and where."""
        before = look_at(source, self.max_adapter_bytes)
        for _ in range(ATTEMPTS):
            fetched = self._copy(source, expected, before)
            after = look_at(source, self.max_adapter_bytes)
            if after == before:
                return fetched
            before = after
        raise AdapterFetchFailed(f"{source} changes while it is read: apply the adapter when its files are complete.")

    def by_last_use(self) -> list[Digest]:
        """All that is cached, the longest unused first."""
        found = []
        for path in self.folder.iterdir():
            with suppress(ValueError, FileNotFoundError):
                found.append((path.stat().st_mtime_ns, from_hex(path.name)))
        return [digest for _, digest in sorted(found)]

    def remove(self, digest: Digest) -> bool:
        """Remove a cached adapter unless some process uses it."""
        return _remove_unlocked(self.path_of(digest))

    def _copy(self, source: Path, expected: str, signature: Signature) -> Fetched:
        size = sum(entry[2] for entry in signature)
        target = self.folder / f".fetch-{os.getpid()}-{next(_counter)}"
        lock: Lease | None = None
        try:
            target.mkdir(mode=0o755)
            lock = Lease(target)
            content = ContentDigest()
            for name in ADAPTER_FILES:
                _copy_file(source / name, target / name, content)
            digest = content.digest()
            if expected and digest != expected:
                raise AdapterFetchFailed(f"{source} has the digest {digest}, not {expected} as the adapter asks for.")
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
            raise AdapterFetchFailed(_explain(error, source, self.folder, size)) from error
        except AdapterError:
            _remove(target)
            raise
        finally:
            if lock is not None:
                lock.release()

    def write_certificate(self, folder: Path, text: str) -> None:
        draft = folder / f".{CERTIFICATE}-{os.getpid()}-{next(_counter)}"
        try:
            draft.write_text(text)
            draft.chmod(0o644)
            draft.replace(folder / CERTIFICATE)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise AdapterFetchFailed(_explain(error, folder, self.folder, len(text))) from error

    def read_certificate(self, folder: Path) -> str | None:
        try:
            return (folder / CERTIFICATE).read_text()
        except FileNotFoundError:
            return None


class Fetcher:
    """Fetches, one at a time for the same bytes: whoever asks meanwhile gets the same answer."""

    def __init__(self, cache: DiskCache) -> None:
        self._cache = cache
        self._under_way: dict[tuple[Path, Signature, str], asyncio.Task[Fetched]] = {}
        self.copies = 0

    async def fetch(self, source: str, expected: str = "") -> Fetched:
        """Safe to cancel: the fetch goes on for the others."""
        if expected:
            cached = await asyncio.to_thread(self._cache.find, _digest(expected))
            if cached is not None:
                return cached
        folder = folder_of(source)
        key = (folder, await asyncio.to_thread(look_at, folder, self._cache.max_adapter_bytes), expected)
        task = self._under_way.get(key)
        if task is None:
            self.copies += 1
            task = asyncio.create_task(asyncio.to_thread(self._cache.fetch, folder, expected), name=f"fetch {folder}")
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(task)


def folder_of(source: str) -> Path:
    parts = urlsplit(source)
    if parts.scheme != "file":
        raise AdapterFetchFailed(f"not yet: {parts.scheme or source}:// as an adapter's source; use file:///folder.")
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise AdapterFetchFailed(f"{source} names no folder of this machine: write file:///absolute/path.")
    return Path(unquote(parts.path))


def look_at(folder: Path, max_bytes: int) -> Signature:
    """What an adapter's files look like from outside; raises AdapterFetchFailed if they cannot be an adapter."""
    if not folder.is_dir():
        raise AdapterFetchFailed(f"there is no folder {folder}.")
    entries = []
    for name, limit in ((CONFIG, MAX_CONFIG_BYTES), (WEIGHTS, max_bytes)):
        path = folder / name
        try:
            status = path.stat()
        except FileNotFoundError:
            raise AdapterFetchFailed(_missing(folder, name)) from None
        except OSError as error:
            raise AdapterFetchFailed(f"{path} cannot be read: {error.strerror}.") from error
        if not stat.S_ISREG(status.st_mode):
            raise AdapterFetchFailed(f"{path} is not a file.")
        if status.st_size > limit:
            raise AdapterFetchFailed(f"{path} is {status.st_size} bytes; at most {limit} are read.")
        entries.append((status.st_ino, status.st_mtime_ns, status.st_size, status.st_ctime_ns))
    return tuple(entries)


def _missing(folder: Path, name: str) -> str:
    if name == CONFIG:
        return f"{folder} has no {CONFIG}: an adapter folder is what PEFT's save_pretrained() writes."
    others = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    if others:
        return (
            f"{folder} has {others[0]} but no {WEIGHTS}: only safetensors are read, since the other formats can run "
            "code. Load the adapter with PEFT and save it with save_pretrained(safe_serialization=True)."
        )
    return f"{folder} has no {WEIGHTS}: an adapter folder is what PEFT's save_pretrained() writes."


def _copy_file(source: Path, target: Path, content: ContentDigest) -> None:
    with source.open("rb") as file, target.open("xb") as copy:
        size = os.fstat(file.fileno()).st_size
        content.begin(target.name, size)
        left = size  # no more than was looked at, however fast the file grows
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            content.update(chunk)
            copy.write(chunk)
            left -= len(chunk)
        copy.flush()
        os.fchmod(copy.fileno(), 0o644)
        os.fsync(copy.fileno())


def _explain(error: OSError, source: Path, cache: Path, size: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(cache).free
        return (
            f"no space left in {cache}: the adapter at {source} needs {size} bytes, {free} are free. Free some space, "
            "then apply the adapter again."
        )
    return f"the adapter at {source} cannot be copied to {cache}: {error.strerror or error} ({error.filename})."


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
        trash = path.with_name(f".trash-{os.getpid()}-{next(_counter)}")
        path.rename(trash)
        _remove(trash)
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(file)
    return True


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
