"""Where a gateway reads keys: the database, or a file or folder such as a Secret that is mounted.

Each says None when nothing has changed since it was last read, and raises StoreUnavailable when it cannot be read.
"""

import asyncio
import math
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import structlog

from motet import keys
from motet.clock import Clock, monotonic
from motet.errors import StoreUnavailable
from motet.keys import ApiKey
from motet_gateway.identity.own_thread import OwnThread

if TYPE_CHECKING:
    from motet.store import Store

log = structlog.get_logger(__name__)

MAX_BYTES = 4 * 1024 * 1024
"""Of a file or folder of keys. A Secret holds one MiB; more keys than that belong into a database."""
COMMAND_SECONDS = 5.0
FULL_READ_SECONDS = 60.0
"""In so long all keys are read again, also when no change is seen."""
PARTS_AT_ONCE = 16
"""Of 256 that many keys are in."""


class Change(NamedTuple):
    """What is not as it was when keys were last read."""

    keys: Sequence[ApiKey]
    """Those that are new or say something else."""
    gone: Collection[str]
    """The ids of those that are there no more."""


class KeySource(Protocol):
    async def read(self) -> list[ApiKey] | Change | None:
        """All keys, or what has changed; None: the same as when it was last asked. Raises StoreUnavailable."""

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        """Raises StoreUnavailable."""

    async def close(self) -> None: ...


_Inode = tuple[int, int]


class NoKeys:
    """Where none are kept."""

    async def read(self) -> list[ApiKey]:
        return []

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        pass

    async def close(self) -> None:
        pass


class DatabaseKeys:
    """Those in the database."""

    def __init__(self, url: str, *, clock: Clock = monotonic) -> None:
        """Raises SetupError when `url` is none."""
        # SQLAlchemy costs time and memory: only where it is used.
        from motet.store import keys as stored
        from motet.store.database import open_store, parse

        parsed = parse(url)
        self._file = Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None
        self._stored, self._stack = stored, AsyncExitStack()
        self._thread = OwnThread("keys")
        self._open_store = partial(open_store, url, busy_seconds=COMMAND_SECONDS, command_seconds=COMMAND_SECONDS)
        self._store: Store | None = None
        self._opened_file: _Inode | None = None
        """The one that the store reads: another may be put in its place."""
        self._mark: object = None
        """Of what was read last."""
        self._marks: dict[str, tuple[Any, ...]] = {}
        """Of each part, when that was read."""
        self._found: dict[str, dict[str, ApiKey]] = {}
        """Of each part, by id."""
        self._unreported: dict[str, ApiKey | None] = {}
        """Keys by id that are new or say something else, and None for those that are gone."""
        self._reported = False
        """Whoever asks knows all but these."""
        self._clock = clock
        self._checked_at = clock()
        self._read_at: dict[str, float] = {}
        """Each part."""

    async def read(self) -> list[ApiKey] | Change | None:
        if self._file is not None and not await self._is_there(self._file):
            if not self._reported and not self._found:
                return []
            raise StoreUnavailable(f"the database {self._file}, which held API keys, is gone")
        store = await self._opened()
        # Until the table is made no key is.
        if not self._reported and not await self._stored.table_exists(store):
            return []
        mark, at = await self._stored.change_mark(store), self._clock()
        if mark != self._mark:
            # What was read stays, should there be no time for the rest: so many keys are read in several turns.
            marks = await self._stored.marks(store)
            changed = (part for part in marks.keys() | self._found.keys() if marks.get(part) != self._marks.get(part))
            await self._read_parts(store, sorted(changed), marks, at)
        await self._read_parts(store, self._due(at), self._marks, at)
        self._mark, self._checked_at = mark, at  # of before: what is written in between is read again
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # whoever asked has gone: what is new must not be lost with this answer
        return self._take_changes()

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

    def _take_changes(self) -> list[ApiKey] | Change | None:
        unreported, self._unreported = self._unreported, {}
        if not self._reported:
            self._reported = True
            return [key for keys_ in self._found.values() for key in keys_.values()]
        if not unreported:
            return None
        changed = [key for key in unreported.values() if key is not None]
        return Change(changed, [id_ for id_, key in unreported.items() if key is None])

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        await self._stored.note_use(await self._opened(), ids, at=at)

    async def close(self) -> None:
        self._thread.close()
        await self._stack.aclose()

    async def _is_there(self, file: Path) -> bool:
        """It is not made by looking for it. Forgets what was read when another is in its place. Raises
        StoreUnavailable."""
        try:
            found = await self._thread.run(file.stat)
        except FileNotFoundError:
            return False
        except OSError as error:  # nobody can say
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
    """Those in a file, or in every file of a folder: one a line, as `motet key hash` prints them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = OwnThread("keys")
        self._content: list[tuple[str, bytes]] | None = None

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
                found[key.id] = min(other, key, key=_end_of)
        self._content = content  # only now: what cannot be read has not been
        return list(found.values())

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        """A Secret is not written to."""

    async def close(self) -> None:
        self._thread.close()

    def _read(self) -> list[tuple[str, bytes]]:
        folder, names = self._path, [""]
        if stat.S_ISDIR(folder.stat().st_mode):
            # In a mounted Secret what begins with a dot is how the kubelet changes all files at once: by `..data`, a
            # link to the folder that holds them. It is followed once, so that all are of one version.
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


def _end_of(key: ApiKey) -> tuple[bool, datetime]:
    """The smaller one is stricter."""
    return key.revoked is None, key.expires or datetime.max.replace(tzinfo=UTC)


def _keys_in(name: str, content: bytes) -> Iterator[ApiKey]:
    """A line that is wrong is left out, and logged: the other keys must go on."""
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            yield keys.from_line(line)
        except ValueError as error:
            log.error("api_key_line_invalid", file=name, line=number, reason=str(error))
