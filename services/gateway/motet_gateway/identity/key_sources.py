"""Where a gateway reads API keys: the database, or a file or folder such as a mounted Secret.

Each returns None if nothing has changed since the last reading, and raises StoreUnavailable if it can't be read. A
change is returned by each reading until the gateway says that it has applied it.
"""

import asyncio
import math
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import structlog

from motet import keys
from motet.clock import Clock
from motet.errors import StoreUnavailable
from motet.keys import ApiKey
from motet.own_thread import OwnThread

if TYPE_CHECKING:
    from motet.store import Store

log = structlog.get_logger(__name__)

MAX_BYTES = 4 * 1024 * 1024
"""Of all key files together. A Secret holds one MiB; more keys belong in a database."""
COMMAND_SECONDS = 5.0
FULL_READ_SECONDS = 60.0
"""All keys are read again within this time, even if no change is seen."""
PARTS_AT_ONCE = 16
"""How many of the 256 parts of the keys are read together"""


class Change(NamedTuple):
    """What has changed since the last reading."""

    keys: Sequence[ApiKey]
    """New and changed keys."""
    gone: Collection[str]
    """Ids of removed keys."""


class KeySource(Protocol):
    async def read(self) -> list[ApiKey] | Change | None:
        """All keys, or what has changed; None: nothing. Raises StoreUnavailable."""

    def applied(self) -> None:
        """What the last reading returned counts now, so the next one need not return it."""

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        """Raises StoreUnavailable."""

    async def close(self) -> None: ...


_Inode = tuple[int, int]


class NoKeys:
    """No keys."""

    async def read(self) -> list[ApiKey]:
        return []

    def applied(self) -> None:
        pass

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        pass

    async def close(self) -> None:
        pass


class DatabaseKeys:
    """Keys in the database."""

    def __init__(self, url: str, *, clock: Clock) -> None:
        """Raises SetupError if `url` isn't valid."""
        # Imported only here, since SQLAlchemy costs time and memory.
        from motet.store import keys as stored
        from motet.store.database import open_store, parse

        parsed = parse(url)
        self._file = Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None
        self._stored, self._stack = stored, AsyncExitStack()
        self._thread = OwnThread("keys")
        self._open_store = partial(open_store, url, busy_seconds=COMMAND_SECONDS, command_seconds=COMMAND_SECONDS)
        self._store: Store | None = None
        self._opened_file: _Inode | None = None
        """The file that the store has open. Another file may replace it."""
        self._mark: object = None
        """The change mark of the last reading."""
        self._marks: dict[str, tuple[Any, ...]] = {}
        """The marks of each part when it was read."""
        self._found: dict[str, dict[str, ApiKey]] = {}
        """The keys of each part, by id."""
        self._unreported: dict[str, ApiKey | None] = {}
        """New and changed keys by id, and None for removed ones, that the gateway has not applied yet."""
        self._reported = False
        """Whether the gateway has applied all keys once."""
        self._complete = False
        """Whether a reading has found the table of keys."""
        self._clock = clock
        self._checked_at = clock()
        self._read_at: dict[str, float] = {}
        """When each part was read."""

    async def read(self) -> list[ApiKey] | Change | None:
        if self._file is not None and not await self._is_there(self._file):
            if not self._reported and not self._found:
                return []
            raise StoreUnavailable(f"the database {self._file}, which held API keys, is gone")
        store = await self._opened()
        # Before the table exists there are no keys.
        if not self._reported and not await self._stored.table_exists(store):
            return []
        mark, at = await self._stored.change_mark(store), self._clock()
        if mark != self._mark:
            # Parts that were read stay, even if a time limit ends this reading: the next one continues.
            marks = await self._stored.marks(store)
            # A part without keys has no mark, but one that was never read from this file must be read, too.
            parts = marks.keys() | self._found.keys()
            changed = (part for part in parts if marks.get(part, ()) != self._marks.get(part))
            await self._read_parts(store, sorted(changed), marks, at)
        await self._read_parts(store, self._due(at), self._marks, at)
        self._mark, self._checked_at = mark, at  # from before the reading: what was written meanwhile is read again
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # the caller was cancelled: keep the changes for the next reading
        return self._changes()

    async def _read_parts(
        self, store: "Store", parts: Sequence[str], marks: Mapping[str, tuple[Any, ...]], at: float
    ) -> None:
        for some in (parts[first : first + PARTS_AT_ONCE] for first in range(0, len(parts), PARTS_AT_ONCE)):
            found: dict[str, dict[str, ApiKey]] = {part: {} for part in some}
            for key in await self._stored.keys_in(store, some):
                found[self._stored.part_of(key.id)][key.id] = key
            for part, new in found.items():
                before = self._found.pop(part, {})
                self._unreported |= {id_: key for id_, key in new.items() if before.get(id_) != key}
                self._unreported |= dict.fromkeys(before.keys() - new.keys())
                if new:
                    self._found[part], self._read_at[part] = new, at
                self._marks[part] = marks.get(part, ())

    def _due(self, at: float) -> list[str]:
        """The parts that were read longest ago: as many as it takes to read all of them in `FULL_READ_SECONDS`. Never
        more than `PARTS_AT_ONCE`, so that a slow reading does not become slower."""
        many = min(PARTS_AT_ONCE, math.ceil(len(self._found) * (at - self._checked_at) / FULL_READ_SECONDS))
        return sorted(self._found, key=lambda part: self._read_at[part])[:many]

    def _changes(self) -> list[ApiKey] | Change | None:
        self._complete = True
        if not self._reported:
            return [key for keys_ in self._found.values() for key in keys_.values()]
        if not self._unreported:
            return None
        changed = [key for key in self._unreported.values() if key is not None]
        return Change(changed, [id_ for id_, key in self._unreported.items() if key is None])

    def applied(self) -> None:
        self._unreported, self._reported = {}, self._complete

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        await self._stored.note_use(await self._opened(), ids, at=at)

    async def close(self) -> None:
        self._thread.close()
        await self._stack.aclose()

    async def _is_there(self, file: Path) -> bool:
        """Whether the file exists; does not create it. If another file has replaced it, reads all again. Raises
        StoreUnavailable."""
        try:
            found = await self._thread.run(file.stat)
        except FileNotFoundError:
            return False
        except OSError as error:  # not known
            raise StoreUnavailable(f"the database {file} cannot be read: {error.strerror or error}") from error
        inode = (found.st_dev, found.st_ino)
        if self._opened_file not in (None, inode):
            log.warning("database_file_replaced", file=str(file))
            self._store, self._mark, self._marks = None, None, {}
            await self._stack.aclose()
        self._opened_file = inode
        return True

    async def _opened(self) -> "Store":
        if self._store is None:
            self._store = await self._stack.enter_async_context(self._open_store())
        return self._store


class FileKeys:
    """Keys in a file or in every file of a folder: one per line, as `motet key hash` prints them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = OwnThread("keys")
        self._content: list[tuple[str, bytes]] | None = None
        """What was applied last."""
        self._read_content: list[tuple[str, bytes]] | None = None

    async def read(self) -> list[ApiKey] | Change | None:
        try:
            content = await self._thread.run(self._read)
        except OSError as error:
            raise StoreUnavailable(f"the API keys in {self._path} cannot be read: {error.strerror or error}") from error
        if content == self._content:
            return None
        found: dict[str, ApiKey] = {}
        for name, said in content:
            for key in _keys_in(name, said):
                other = found.get(key.id, key)
                if other != key:
                    log.error("api_key_duplicate", file=name, key=key.id, hint="The stricter entry counts.")
                found[key.id] = _stricter(other, key)
        self._read_content = content
        return list(found.values())

    def applied(self) -> None:
        self._content = self._read_content

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        """Does nothing: Motet does not write to a Secret."""

    async def close(self) -> None:
        self._thread.close()

    def _read(self) -> list[tuple[str, bytes]]:
        folder, names = self._path, [""]
        if stat.S_ISDIR(folder.stat().st_mode):
            # In a mounted Secret, `..data` is a link to the folder with the files; the kubelet changes it to update all
            # files at once. It is followed once, so that all files are of one version.
            with suppress(FileNotFoundError):
                folder = Path(os.path.realpath(folder / "..data", strict=True))
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_file())
        content, left = [], MAX_BYTES
        for name in names:
            with (folder / name).open("rb") as opened:
                said = opened.read(left + 1)
            left -= len(said)
            if left < 0:
                raise OSError(f"there are more than {MAX_BYTES} bytes")
            content.append((str(self._path / name), said))
        return content


def _stricter(one: ApiKey, other: ApiKey) -> ApiKey:
    """Of two entries with one id: what both allow."""
    limits = (min(filter(None, both), default=0) for both in zip(one.limits, other.limits, strict=True))
    return replace(min(one, other, key=_end_of), scopes=one.scopes & other.scopes, limits=keys.KeyLimits._make(limits))


def _end_of(key: ApiKey) -> tuple[bool, bool, datetime]:
    """Sort key: the smaller one is stricter."""
    return key.revoked is None, not key.tenant_uid, key.expires or datetime.max.replace(tzinfo=UTC)


def _keys_in(name: str, content: bytes) -> Iterator[ApiKey]:
    """Skip and log a wrong line, so that the other keys still count."""
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            yield keys.from_line(line)
        except ValueError as error:
            log.error("api_key_line_invalid", file=name, line=number, reason=str(error))
