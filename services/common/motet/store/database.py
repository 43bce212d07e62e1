"""Connections to SQLite and PostgreSQL: the only module that knows how they differ and how they fail."""

import asyncio
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiosqlite
from sqlalchemy import Connection, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from motet.errors import SetupError, StoreRefused, StoreUnavailable

BUSY_SECONDS = 5.0
"""How long a writer waits for a transaction of another process on the same SQLite file. Ours take milliseconds."""

CONNECT_SECONDS = 5.0
COMMAND_SECONDS = 30.0
"""A PostgreSQL server that answers nothing for this long counts as unreachable. Migrations have no such limit."""

_WRITES = "motet_writes"


class Store:
    """A pool of connections. `read` and `write` are transactions: either all of a write is stored, or nothing."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    @property
    def dialect(self) -> str:
        return self.engine.dialect.name

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        with explaining_errors(self.engine.url):
            async with self.engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        with explaining_errors(self.engine.url):
            async with self.engine.execution_options(**{_WRITES: True}).begin() as connection:
                yield connection


@asynccontextmanager
async def open_store(
    url: str, *, busy_seconds: float = BUSY_SECONDS, command_seconds: float | None = COMMAND_SECONDS
) -> AsyncIterator[Store]:
    """Raises SetupError if `url` is not a database URL. It connects only at the first use."""
    engine = _create_engine(url, busy_seconds, command_seconds)
    try:
        yield Store(engine)
    finally:
        await engine.dispose()


def _create_engine(url: str, busy_seconds: float, command_seconds: float | None) -> AsyncEngine:
    parsed = parse(url)
    if parsed.get_backend_name() != "sqlite":
        try:
            # A restart of the server breaks the connections of the pool. `pool_pre_ping` tests each before its use.
            return create_async_engine(
                parsed,
                pool_pre_ping=True,
                pool_size=4,
                max_overflow=4,
                connect_args={"timeout": CONNECT_SECONDS, "command_timeout": command_seconds},
            )
        except ModuleNotFoundError as error:
            raise SetupError(f"PostgreSQL needs {error.name}: pip install 'motet[postgres]'.") from None
    engine = create_async_engine(parsed, connect_args={"timeout": busy_seconds, "async_creator_fn": _open_sqlite})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


async def _open_sqlite(*args: Any, **kwargs: Any) -> aiosqlite.Connection:
    """Connect, and if that fails, wait for the thread of aiosqlite. It does not do so itself, and the thread would then
    answer to an event loop that may be closed."""
    connection = aiosqlite.connect(*args, **kwargs)
    thread = connection._thread  # noqa: SLF001 - nothing public names it
    thread.daemon = True
    try:
        return await connection
    except Exception:
        thread.join()  # it has nothing else to do, so it ends at once
        raise


async def use_write_ahead_log(store: Store, *, busy_seconds: float) -> None:
    """Switch to the write-ahead log, so that processes can read while another one writes. The file stores this mode, so
    only `migrate` does it.

    Two connections that switch at the same time may block each other until one gives up. So each wait is short, and
    repeated.
    """
    give_up = time.monotonic() + busy_seconds
    while True:
        try:
            with explaining_errors(store.engine.url):
                async with store.engine.connect() as connection:
                    await connection.run_sync(_switch, busy_seconds)
                    return
        except StoreUnavailable as error:
            if not _is_busy(error) or time.monotonic() > give_up:
                raise
            await asyncio.sleep(random.uniform(0.005, 0.05))  # noqa: S311 - spreads the tries, guards nothing


def _switch(connection: Connection, busy_seconds: float) -> None:
    cursor = connection.connection.cursor()  # below SQLAlchemy's transactions: the mode cannot change inside one
    try:
        cursor.execute("PRAGMA busy_timeout = 20")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(f"PRAGMA busy_timeout = {int(busy_seconds * 1000)}")
    finally:
        cursor.close()


def _is_busy(error: StoreUnavailable) -> bool:
    return _sqlite_code(_original(error.__cause__)) == sqlite3.SQLITE_BUSY


def parse(url: str) -> URL:
    hint = "Use sqlite+aiosqlite:///path or postgresql+asyncpg://user@host/name in MOTET_DATABASE_URL."
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise SetupError(f"{url!r} is not a database URL. {hint}") from None
    if parsed.drivername not in ("sqlite+aiosqlite", "postgresql+asyncpg"):
        raise SetupError(f"databases of kind {parsed.drivername!r} are not supported. {hint}")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise SetupError(f"{url!r} names no file: each connection would have an empty database of its own. {hint}")
    return parsed


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver would begin transactions late, and commit before DDL. With our own BEGIN, a migration or a batch of
    # writes is stored completely or not at all.
    connection.isolation_level = None
    cursor = connection.cursor()
    # With the write-ahead log, a power failure may then lose the last transaction, but does not damage the file.
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that begins with reads and then writes cannot wait for another writer: it would fail at once.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def explaining_errors(url: URL) -> Iterator[None]:
    """Turn errors of a driver into one message: which database, what is wrong, what to do.

    StoreRefused means that trying again does not help; StoreUnavailable that it may.
    """
    where = url.database if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
    try:
        yield
    except (DBAPIError, sqlite3.Error, OverflowError) as error:
        if _is_about_a_value(_original(error)):
            raise StoreRefused(f"the database {where} cannot store this value: {_original(error)}") from error
        raise StoreUnavailable(f"the database {where} {_reason(_original(error))}") from error
    except (SQLAlchemyError, OSError) as error:
        raise StoreUnavailable(
            f"the database {where} cannot be used: {error or type(error).__name__}. Is it running and reachable, and "
            "is MOTET_DATABASE_URL right?"
        ) from error


def _is_about_a_value(error: BaseException | None) -> bool:
    """Whether the value itself is wrong: too long, too large, or with characters that the database does not accept."""
    if isinstance(error, OverflowError) or _sqlite_code(error) in (sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH):
        return True
    return (getattr(error, "sqlstate", None) or "").startswith("22")  # SQL's class "data exception"


def may_be_starting(error: StoreUnavailable) -> bool:
    """Whether the server may still be starting. False if it answers and refuses."""
    cause = _original(error.__cause__)
    return isinstance(cause, OSError) or getattr(cause, "sqlstate", "") in _STARTING_OR_BUSY


_STARTING_OR_BUSY = {"57P03", "57P01", "53300"}  # starting up, going down, no connection left


def _original(error: BaseException | None) -> BaseException | None:
    return error.orig if isinstance(error, DBAPIError) else error


def _sqlite_code(error: BaseException | None) -> int:
    """SQLite's primary error code; the higher bytes (the details) are dropped. 0 if it is not an error of SQLite."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _reason(error: BaseException | None) -> str:
    by_sqlite_code = {
        sqlite3.SQLITE_FULL: "cannot grow because the disk is full. Free some space. Everything stored before is safe.",
        sqlite3.SQLITE_BUSY: "was locked by another process for too long. Does another stack use it?",
        sqlite3.SQLITE_READONLY: "is read-only. Give this user the right to write the file and its folder.",
        sqlite3.SQLITE_CANTOPEN: "cannot be opened. Does its folder exist, and may this user write there?",
        sqlite3.SQLITE_NOTADB: "is not a database. Move the file away, or use another --data-dir.",
        sqlite3.SQLITE_CORRUPT: "is damaged. Restore a copy, or move the file away to begin with an empty database.",
        sqlite3.SQLITE_IOERR: "cannot be read or written: the disk reports an error, or is full.",
    }
    by_sqlstate = {
        "28P01": "refuses this user or password. Correct them in MOTET_DATABASE_URL.",
        "28000": "refuses this user. Correct MOTET_DATABASE_URL, or the server's pg_hba.conf.",
        "3D000": "does not exist on that server. Create it, or correct MOTET_DATABASE_URL.",
        "3F000": "has no schema that this user may use. Make the user of MOTET_DATABASE_URL the database's owner.",
        "42501": "refuses a permission that Motet needs. Make the user of MOTET_DATABASE_URL the database's owner.",
    }
    explanation = by_sqlite_code.get(_sqlite_code(error)) or by_sqlstate.get(getattr(error, "sqlstate", None) or "")
    return explanation or f"answered: {error}"
