"""The disk cache: fetched adapters in folders that are named by their digest.

DATA/cache/adapters/<hex digest>/ holds adapter_config.json, adapter_model.safetensors, the optional files that belong
to the digest, certificate.json, the layout that the check has found, and slabs (`slab.py`), which leave first. Only
complete folders appear there: the files are digested and flushed while they are written into a temporary folder, which
is then renamed. Runners on one machine may share the cache. A runner that uses an adapter holds a lease of it. No
runner evicts an adapter that another runner has leased.

All calls block: make them in a thread. A disk that is read-only, or full, still serves the files that it has.
"""

import errno
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

import structlog

from motet.adapter_template import MAX_ADAPTER_TEMPLATE_BYTES, digest_of_template
from motet.digest import ContentDigest, adapter_digest, adapter_files, digest_from_hex
from motet.disk import sync_folder
from motet.domain import Digest
from motet.errors import AdapterFetchFailed
from motet_runner.adapters.digest_lease import DigestLease, DigestLeases
from motet_runner.adapters.folder_lease import FolderLease
from motet_runner.adapters.policy.values import CacheContents, Cached, FetchRequest, Held
from motet_runner.adapters.safetensors_header import check_whole
from motet_runner.adapters.slab import remove_drafts, remove_slabs, size_of_slabs
from motet_runner.adapters.wishes import Wishes
from motet_runner.sources.fetch_errors import another_digest, no_space, temporary
from motet_runner.sources.file_selection import WEIGHTS
from motet_runner.sources.partial_fetch import key_of

log = structlog.get_logger(__name__)

CERTIFICATE = "certificate.json"
TEMPLATE = "template.json"
"""The adapter's own chat template, as the check has resolved it"""

RECENT_NS = 2_000_000_000
"""The times of files are so coarse on some disks that a second change soon after the first one does not show."""

DRAFT = ".draft-"
DRAFT_SECONDS = 60.0
"""A draft that is older was left by a process that was killed: to write one takes milliseconds."""

RECOUNT_SECONDS = 30.0
"""After this time the bytes of all folders are counted again: other runners write slabs, too."""

MAX_ORIGINS = 64
"""How many origins of an adapter are known in each namespace, those that were used last. From another one it is fetched
again."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_process = secrets.token_hex(8)
"""In containers, the processes of two runners may have the same number."""
_counter = itertools.count()
Fill = Callable[[Path, ContentDigest], None]


def kept_template(folder: Path, digest: str) -> bytes:
    """Empty: it is not there any more, or not what the check has written."""
    with suppress(OSError), (folder / TEMPLATE).open("rb") as file:
        content = file.read(MAX_ADAPTER_TEMPLATE_BYTES)
        return content if digest_of_template(content) == digest else b""
    return b""


def _check_whole(folder: Path) -> None:
    check_whole(folder / WEIGHTS)


class DiskCache:
    def __init__(
        self, folder: Path, *, max_adapter_bytes: int, check_whole: Callable[[Path], object] = _check_whole
    ) -> None:
        """`check_whole` raises AdapterIncompatible if the weights in a folder are cut short or aren't safetensors."""
        self.folder = folder
        self._check_whole = check_whole
        self.max_adapter_bytes = max_adapter_bytes
        self._leases = DigestLeases(folder)
        self._wishes = Wishes(folder)
        self._noted: set[str] = set()
        self._sizes: dict[str, _Size] = {}
        """The bytes of the folders that were read."""
        self._recount_at = 0.0

    def prepare(self) -> None:
        """Make the folder, and remove the files of processes that ended during a fetch."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.renew_leases()
        for left in self.folder.glob(".*-*"):
            self._remove_unlocked(left)
        for folder in self._folders():
            with suppress(OSError):  # another runner may remove it meanwhile
                remove_drafts(folder)
                for name in names_in(folder, DRAFT):
                    if (draft := folder / name).stat().st_mtime < time.time() - DRAFT_SECONDS:
                        draft.unlink(missing_ok=True)

    def renew_leases(self) -> None:
        """Called at intervals: if the lock files are removed, or could not be made before, the leases get locks."""
        with self._noting("other runners may evict what is in use"):
            self._leases.renew()

    def path_of(self, digest: Digest) -> Path:
        """Raises ValueError if this is not a digest."""
        return self._leases.path_of(digest)

    def bound(self, max_bytes: int) -> int:
        return min(self.max_adapter_bytes, max_bytes or self.max_adapter_bytes)

    # -------------------------------------------------------------------------------------------------------- reading

    def find(self, digest: Digest, request: FetchRequest | None = None) -> Held | None:
        """A lease of the cached adapter, if this request may use the adapter.

        A request may use it if the request's source is known to have this digest, or has had it when the request's
        namespace read it, in whatever revision. Without this condition, a tenant who knows the digest of another
        tenant's adapter could use that adapter without its credentials.
        """
        try:
            lease = self._leases.lease(digest)
        except (FileNotFoundError, NotADirectoryError, TimeoutError, ValueError):  # ValueError: not a digest
            return None
        try:
            held = self.held(digest, lease)
            if request is None or self._may_use(held, request):
                self.touch(held)
                return held
        except FileNotFoundError:
            pass  # files are missing: the adapter is fetched again
        except BaseException:
            lease.release()
            raise
        lease.release()
        return None

    def wish(self, size: int) -> None:
        """Ask other runners for room: they let go of what they do not use."""
        with self._noting("other runners are not asked for room"):
            self._wishes.make(size)

    def wished(self) -> int:
        """The bytes for which other runners ask."""
        try:
            return self._wishes.of_others()
        except OSError as error:
            self._note(error, "other runners get no room")
            return 0

    def touch(self, held: Held) -> None:
        with self._noting("the order of use is not recorded"):
            held.lease.touch()

    def contents(self, capacity: int = 0, room: float = inf, changed: Collection[Digest] = ()) -> CacheContents:
        """All cached adapters, and with a finite `room` their bytes and those of other processes' fetches. No adapters
        are listed if there are no more than `capacity`, and they have no more bytes than `room`: to count thousands
        takes a tenth of the time. Then only the folders are read that are new, or whose adapters have `changed` in this
        runner, but all of them after RECOUNT_SECONDS."""
        names = os.listdir(self.folder)  # noqa: PTH208 - no paths are needed
        adapters = [name for name in names if not name.startswith(".")]
        if room == inf:
            return CacheContents() if len(names) <= capacity else CacheContents(self._by_last_use(adapters))
        own = f".fetch-{_process}-"
        others = (name for name in names if name.startswith(".") and not name.startswith(own))
        # What no process fills any more goes at once: its runner was killed, and perhaps none starts in its place.
        unfinished = sum(_bytes_of(one) for name in others if not self._remove_unlocked(one := self.folder / name))
        now = time.monotonic()
        if len(adapters) > capacity or now >= self._recount_at:
            total = self._count(adapters, counted={})
        else:
            counted = dict(self._sizes)
            for digest in changed:
                counted.pop(self.path_of(digest).name, None)
            if (total := self._count(adapters, counted)) + unfinished <= room:
                return CacheContents(unfinished=total + unfinished)
            total = self._count(adapters, counted={})
        self._recount_at = now + RECOUNT_SECONDS
        if len(adapters) <= capacity and total + unfinished <= room:
            return CacheContents(unfinished=total + unfinished)
        return CacheContents(self._by_last_use(adapters), unfinished)

    def _count(self, names: Iterable[str], counted: Mapping[str, "_Size"]) -> int:
        """The bytes of these folders. Those that are `counted` are not read."""
        self._sizes = {
            name: known if (known := counted.get(name)) is not None and known.files else self._size_of(name)
            for name in names
        }
        return sum(size.bytes for size in self._sizes.values())

    def _by_last_use(self, names: Iterable[str]) -> tuple[Cached, ...]:
        found = []
        for name in names:
            with suppress(ValueError, FileNotFoundError):
                used = (self.folder / name).stat().st_mtime_ns
                found.append((used, digest_from_hex(name), self._sizes.get(name, _NO_SIZE)))
        return tuple(Cached(digest, size.bytes, size.slabs) for _, digest, size in sorted(found))

    def _size_of(self, name: str) -> "_Size":
        """Counted again when the folder has changed: other runners write and remove slabs, too."""
        with suppress(FileNotFoundError, NotADirectoryError):
            folder = self.folder / name
            changed = folder.stat().st_ctime_ns
            if (size := self._sizes.get(name)) is not None and size.changed == changed:
                return size
            if time.time_ns() - changed < RECENT_NS:
                changed = 0
            return _Size(_size_of_adapter(folder), sum(size_of_slabs(folder).values()), changed)
        return _NO_SIZE  # it has just gone

    def _folders(self) -> list[Path]:
        return [self.folder / name for name in os.listdir(self.folder) if not name.startswith(".")]  # noqa: PTH208

    def remove_slabs(self, surplus: float = inf) -> int:
        """Remove slabs, those of the adapters first that were used longest ago, until `surplus` bytes are free. Without
        them an adapter loads more slowly; without its files it would be fetched again. Returns the bytes."""
        gone = 0
        for cached in self._by_last_use(folder.name for folder in self._folders()):
            if gone >= surplus:
                break
            with self._noting("slabs stay"), suppress(FileNotFoundError, NotADirectoryError):
                gone += remove_slabs(self.path_of(cached.digest))
        if gone:
            log.warning("slabs_removed", bytes=gone, reason="the disk is full" if surplus == inf else "adapters come")
        return gone

    # -------------------------------------------------------------------------------------------------------- writing

    def store(self, fill: Fill, request: FetchRequest, name: str, size: int) -> Held:
        """Write an adapter into the cache, and take a lease of it. `name`: the source's name; `size`: the adapter's
        bytes. Raises AdapterFetchFailed, which says what is wrong and where."""
        try:
            return self._store(fill, request, name)
        except OSError as error:
            raise self.explain(error, name, size) from error

    def keep(self, folder: Path, contents: Mapping[str, bytes]) -> bool:
        """Write what a check has found beside the adapter's files, in this order. False: the disk takes no more."""
        try:
            try:
                self._keep(folder, contents)
            except OSError as error:
                if error.errno not in _NO_SPACE or not self.remove_slabs():
                    raise
                self._keep(folder, contents)
        except OSError as error:
            self._note(error, "adapters are checked again after the next start")
            return False
        return True

    def verify(self, held: Held) -> None:
        """Before a new check of an adapter that was checked before: compare its files with its digest.

        If the digest differs, the files are removed even if a process uses them, and AdapterFetchFailed is raised. Then
        the adapter is fetched again.
        """
        if not (held.folder / CERTIFICATE).exists():
            return  # no check since the fetch, which has digested the files
        with suppress(FileNotFoundError):
            if adapter_digest(held.folder) == held.digest:
                return
        if held.lease.is_live():  # else another runner has removed the folder, and may have fetched the files again
            log.warning("cached_adapter_corrupt", adapter=held.digest)
            self._discard(held.folder)
        raise temporary(
            f"The cached files of {held.digest} have changed. Motet removes them and fetches them again automatically."
        )

    def evict(self, digest: Digest, held: Held | None) -> bool:
        """Remove an adapter unless another process uses it. True: the adapter is removed, and `held`'s lease has ended.
        False: both stay."""
        if held is not None:
            return self._remove(held.lease)
        try:
            lease = self._leases.lease(digest)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except TimeoutError:  # another process has begun to
            return False
        try:
            return self._remove(lease)
        finally:
            lease.release()

    def _remove(self, lease: DigestLease) -> bool:
        try:
            if lease.become_exclusive():
                if lease.is_live() and not self._remove_unlocked(lease.folder):
                    lease.become_shared()  # a runner of an earlier version has locked the folder
                    return False
            elif lease.is_live():
                return False
        except OSError as error:
            self._note(error, "nothing is evicted")
            lease.become_shared()
            return False
        lease.release()
        return True

    def explain(self, error: OSError, name: str, size: int) -> AdapterFetchFailed:
        if error.errno in _NO_SPACE:
            free = shutil.disk_usage(self.folder).free
            return no_space(
                f"There is no space left in {self.folder}: the adapter at {name} needs {size} bytes, and {free} are "
                "free. Free some space. Motet tries again automatically."
            )
        return temporary(
            f"Motet cannot copy the adapter at {name} to {self.folder}: {error.strerror or error} ({error.filename}). "
            "Motet tries again automatically."
        )

    # --------------------------------------------------------------------------------------------------------- inside

    def held(self, digest: Digest, lease: DigestLease) -> Held:
        return Held(digest, _size_of_adapter(lease.folder), lease.inode, lease)

    def _keep(self, folder: Path, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            draft = folder / f"{DRAFT}{_process}-{next(_counter)}"
            try:
                draft.write_bytes(content)
                draft.chmod(0o644)
                draft.replace(folder / name)
            except OSError:
                with suppress(OSError):
                    draft.unlink()
                raise

    def _may_use(self, held: Held, request: FetchRequest) -> bool:
        origin = held.folder / _origin(request)
        known = request.digest_verified or origin.exists() or _has_earlier_mark(held.folder, request)
        if known:
            with suppress(OSError):
                os.utime(origin)
        return known and (held.folder / WEIGHTS).stat().st_size <= self.bound(request.max_bytes)

    def _store(self, fill: Fill, request: FetchRequest, name: str) -> Held:
        target, lease = self._new_folder()
        try:
            content = ContentDigest()
            fill(target, content)
            digest = content.digest()
            if request.expected and digest != request.expected:
                raise another_digest(
                    f"{name} has the digest {digest}, but the adapter asks for {request.expected}. Correct "
                    "source.digest or the files."
                )
            self._check_whole(target)
            held = None
            while held is None:
                try:
                    target.rename(self.path_of(digest))
                    sync_folder(self.folder)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another source has stored it before
                        raise
                held = self._earlier(digest)
        finally:
            _remove(target)  # which has gone if it was renamed
            lease.release()  # not before the adapter has its lease
        with suppress(OSError):
            # Records the origin beside the files: a tenant who has read this place may use the files.
            (held.folder / _origin(request)).touch()
            remove_oldest(held.folder, _origins_of(request), most=MAX_ORIGINS)
        return held

    def _earlier(self, digest: Digest) -> Held | None:
        """The existing folder. An incomplete folder is removed."""
        try:
            lease = self._leases.lease(digest)
        except (FileNotFoundError, NotADirectoryError):
            return None
        held = None
        try:
            with suppress(FileNotFoundError):
                held = self.held(digest, lease)
                self.touch(held)
                return held
            if lease.is_live():  # else another runner has replaced the folder
                self._discard(lease.folder)
            return None
        finally:
            if held is None:
                lease.release()

    def _new_folder(self) -> tuple[Path, FolderLease]:
        """A folder to fill, and its lease. A starting runner removes unlocked folders. If it removes this folder before
        the folder is locked, try again."""
        while True:
            folder = self.folder / f".fetch-{_process}-{next(_counter)}"
            folder.mkdir(mode=0o755, parents=True)
            try:
                return folder, FolderLease(folder)
            except FileNotFoundError:
                continue
            except OSError:
                _remove(folder)
                raise

    def _remove_unlocked(self, path: Path) -> bool:
        """True if the folder is gone. It stays if some process has locked it."""
        try:
            lease = FolderLease(path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            self._note(error, "what another process has left stays")
            return False
        try:
            if lease.become_exclusive():
                self._discard(path)
                return True
        except OSError as error:  # some network file systems give no exclusive lock on files open only for reading
            self._note(error, "nothing is evicted")
        finally:
            lease.release()
        return False

    def _discard(self, path: Path) -> None:
        """Rename a folder, so that nobody finds it half-removed, and remove it."""
        trash = path.with_name(f".trash-{_process}-{next(_counter)}")
        with suppress(FileNotFoundError):
            path.rename(trash)
        _remove(trash)

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """For writes that may fail: the cache works without them."""
        try:
            yield
        except OSError as error:
            self._note(error, what)

    def _note(self, error: OSError, what: str) -> None:
        """Log once that the disk takes no writes. Its files are still served."""
        if what not in self._noted:
            self._noted.add(what)
            log.warning("disk_cache_not_writable", folder=str(self.folder), reason=error.strerror, so=what)


def _origin(request: FetchRequest) -> str:
    return f"{_origins_of(request)}{key_of(*request.place)}"


def _origins_of(request: FetchRequest) -> str:
    return f".origin-{key_of(request.namespace)}-"


def _has_earlier_mark(folder: Path, request: FetchRequest) -> bool:
    """Whether the origin is recorded as by builds of 0.1 before December: with the revision and the Secret, and before
    November 28 without the namespace in the name. The mark gets its name of now, if the disk takes writes. This can go
    after 0.1: then such an adapter is fetched again."""
    key = key_of(*request.origin)
    for mark in (folder / f"{_origins_of(request)}{key}", folder / f".origin-{key}"):
        if mark.exists():
            with suppress(OSError):
                mark.rename(folder / _origin(request))
            return True
    return False


def names_in(folder: Path, beginning: str) -> list[str]:
    """Of the files that begin so. Raises OSError."""
    return [name for name in os.listdir(folder) if name.startswith(beginning)]  # noqa: PTH208 - no paths are needed


def remove_oldest(folder: Path, beginning: str, end: str = "", *, most: int) -> None:
    """Of the files that begin and end so. Raises OSError."""
    names = [name for name in names_in(folder, beginning) if name.endswith(end)]
    if len(names) > most:  # else their times are not looked at
        for old in sorted((folder / name for name in names), key=lambda one: one.stat().st_mtime_ns)[:-most]:
            old.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


class _Size(NamedTuple):
    files: int
    slabs: int
    changed: int
    """When the folder changed last. 0: it is to be counted again."""

    @property
    def bytes(self) -> int:
        return self.files + self.slabs


_NO_SIZE = _Size(0, 0, 0)


def _size_of_adapter(folder: Path) -> int:
    return sum(os.stat(f"{folder}/{name}").st_size for name in adapter_files(folder))  # noqa: PTH116 - thousands


def _bytes_of(folder: Path) -> int:
    """Of a folder that another process may fill or remove."""
    total = 0
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            total += entry.stat().st_size if entry.is_file(follow_symlinks=False) else 0
    return total
