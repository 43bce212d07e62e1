"""Upgrades a database to the schema of this version. The migrations are in the package, so a wheel has them, too."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from sqlalchemy import Connection

from motet.errors import MotetError, StateDirectoryError, StoreUnavailable
from motet.store.database import BUSY_SECONDS, may_be_starting, open_store, parse, use_write_ahead_log
from motet.store.schema_versions import (
    APPLIED_TABLE,
    OLDEST_READER_TABLE,
    record_readable_versions,
    split_version_table,
    version_in,
)

if TYPE_CHECKING:  # most processes that open a store migrate nothing, and start sooner without alembic
    from alembic.config import Config

log = structlog.get_logger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"


RETRY_SECONDS = 0.5


async def migrate(url: str, *, busy_seconds: float = BUSY_SECONDS, wait_seconds: float = 0.0) -> None:
    """Create or upgrade the schema. Does nothing if it is up to date, or newer but usable by this version. If two
    processes do this at once, one waits for the other.

    Waits up to `wait_seconds` for a server that does not answer yet.

    Raises StateDirectoryError, which says why it failed and what to do. The database is then unchanged.
    """
    from alembic.util import CommandError

    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        folder = Path(parsed.database).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateDirectoryError(
                f"cannot create the folder {folder}: {error.strerror}. Use another --data-dir."
            ) from None
    give_up = time.monotonic() + wait_seconds
    try:
        while True:
            try:
                await _migrate(url, busy_seconds)
            except StoreUnavailable as error:
                if not may_be_starting(error) or time.monotonic() > give_up:
                    raise
                log.info("waiting_for_database", reason=error.message)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return
    except MotetError as error:
        raise StateDirectoryError(error.message) from error
    except CommandError as error:
        raise StateDirectoryError(
            f"the database {parsed.render_as_string(hide_password=True)} was written by a newer version of Motet "
            f"({error}). Use that version, or another database."
        ) from None


async def _migrate(url: str, busy_seconds: float) -> None:
    async with open_store(url, busy_seconds=busy_seconds, command_seconds=None) as store:
        if store.dialect == "sqlite":
            await use_write_ahead_log(store, busy_seconds=busy_seconds)
        async with store.write() as connection:
            if store.dialect == "postgresql":
                # A lock until the transaction ends. Its number is arbitrary; all versions of Motet use it.
                await connection.exec_driver_sql("SELECT pg_advisory_xact_lock(77616974)")
            await connection.run_sync(_upgrade)


def configuration(connection: Connection) -> "Config":
    """Alembic's configuration, without a file, for a connection that is already in a transaction."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.script import ScriptDirectory

    split_version_table(connection)
    config = configuration(connection)
    known = {each.revision for each in ScriptDirectory.from_config(config).walk_revisions()}
    done = version_in(connection, APPLIED_TABLE)
    if done and done not in known and version_in(connection, OLDEST_READER_TABLE) in known:
        log.info("schema_is_newer", schema=done, hint="It was made so that this version can use it.")
        return
    command.upgrade(config, "head")
    record_readable_versions(connection)
