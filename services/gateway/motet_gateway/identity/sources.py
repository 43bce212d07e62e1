"""Where a gateway reads keys: the database, or a file or folder such as a Secret that is mounted.

Each says None when nothing has changed since it was last read, and raises StoreUnavailable when it cannot be read.
"""

from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from motet import keys
from motet.clock import Clock, monotonic
from motet.errors import StoreUnavailable
from motet.keys import Key
from motet_gateway.identity.thread import OwnThread

if TYPE_CHECKING:
    from motet.store import Store

log = structlog.get_logger(__name__)

MOST_BYTES = 4 * 1024 * 1024
"""Of a file or folder of keys. A Secret holds one MiB; more keys than that belong into a database."""
COMMAND_SECONDS = 5.0
WHOLE_SECONDS = 60.0
"""After so long keys are read whole, also when no change is seen."""


class Source(Protocol):
    async def read(self) -> list[Key] | None:
        """All keys; None: the same as when it was last asked. Raises StoreUnavailable."""

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        """Raises StoreUnavailable."""

    async def close(self) -> None: ...


class NoKeys:
    """Where none are kept."""

    async def read(self) -> list[Key] | None:
        return []

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        pass

    async def close(self) -> None:
        pass


class StoredKeys:
    """Those in the database."""

    def __init__(self, url: str, *, clock: Clock = monotonic) -> None:
        """Raises SetupError when `url` is none."""
        # SQLAlchemy costs time and memory: only where it is used.
        from motet.store import keys as stored
        from motet.store.engine import open_store, parse

        parsed = parse(url)
        self._file = Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None
        self._stored, self._stack = stored, AsyncExitStack()
        self._thread = OwnThread("keys")
        self._opening = open_store(url, busy_seconds=COMMAND_SECONDS, command_seconds=COMMAND_SECONDS)
        self._store: Store | None = None
        self._mark: object = None
        """Of what was read last."""
        self._found: list[Key] = []
        self._clock, self._whole_at = clock, float("-inf")

    async def read(self) -> list[Key] | None:
        if self._mark is None and not await self._exists():
            return []
        if self._file is not None and not await self._thread.run(self._file.exists):
            raise StoreUnavailable(f"the database {self._file}, which held API keys, is gone")
        store = await self._opened()
        mark, at = await self._stored.mark(store), self._clock()
        if mark == self._mark and at - self._whole_at < WHOLE_SECONDS:
            return None
        found = [key for key, _ in await self._stored.all_keys(store)]
        changed = self._mark is None or found != self._found
        self._mark, self._found = mark, found  # of before: what is written in between is read again
        self._whole_at = at
        return found if changed else None

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        await self._stored.note_use(await self._opened(), ids, at=at)

    async def close(self) -> None:
        self._thread.close()
        await self._stack.aclose()

    async def _exists(self) -> bool:
        """Whether the table was made. Until then no key was, either; and a file is not made by looking for it."""
        if self._file is not None and not await self._thread.run(self._file.exists):
            return False
        return await self._stored.are_kept(await self._opened())

    async def _opened(self) -> "Store":
        if self._store is None:
            self._store = await self._stack.enter_async_context(self._opening)
        return self._store


class KeysInFiles:
    """Those in a file, or in every file of a folder: one a line, as `motet key hash` prints them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = OwnThread("keys")
        self._content: list[tuple[str, bytes]] | None = None

    async def read(self) -> list[Key] | None:
        try:
            content = await self._thread.run(self._read)
        except OSError as error:
            raise StoreUnavailable(f"the API keys in {self._path} cannot be read: {error.strerror or error}") from error
        if content == self._content:
            return None
        self._content = content
        return [key for name, said in content for key in _keys_in(name, said)]

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        """A Secret is not written to."""

    async def close(self) -> None:
        self._thread.close()

    def _read(self) -> list[tuple[str, bytes]]:
        # In a mounted Secret what begins with a dot is how the kubelet changes all files at once.
        folder = self._path.is_dir()
        files = sorted(f for f in self._path.iterdir() if f.name[0] != "." and f.is_file()) if folder else [self._path]
        content, left = [], MOST_BYTES
        for file in files:
            with file.open("rb") as opened:
                said = opened.read(left + 1)
            left -= len(said)
            if left < 0:
                raise OSError(f"there are more than {MOST_BYTES} bytes")
            content.append((str(file), said))
        return content


def _keys_in(name: str, content: bytes) -> Iterator[Key]:
    """A line that is wrong is left out, and logged: the other keys must go on."""
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            yield keys.from_line(line)
        except ValueError as error:
            log.error("a line is no API key", file=name, line=number, why=str(error))
