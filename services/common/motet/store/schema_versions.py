"""Which versions of Motet may use a database.

Two tables say it, with one row each. `schema_version` has the newest migration that was applied. `alembic_version` has
the oldest migration whose version of Motet can still use the schema. Older versions of Motet read only that table, and
find a migration that they know. So you can go back to the version before without a change of the database, and both
versions may run at once.
"""

from sqlalchemy import Connection, inspect, text

APPLIED_TABLE, OLDEST_READER_TABLE = "schema_version", "alembic_version"

OLDEST_READER = "0001"
"""A migration that removes something that the version before needs must set this to its own number. Avoid that."""


def split_version_table(connection: Connection) -> None:
    """Add `schema_version` to a database of an older Motet, which has only `alembic_version`."""
    tables = inspect(connection).get_table_names()
    if OLDEST_READER_TABLE in tables and APPLIED_TABLE not in tables:
        _write_version(connection, APPLIED_TABLE, version_in(connection, OLDEST_READER_TABLE))


def record_readable_versions(connection: Connection) -> None:
    """Store which versions may use the schema of this version."""
    if version_in(connection, OLDEST_READER_TABLE) != OLDEST_READER:
        _write_version(connection, OLDEST_READER_TABLE, OLDEST_READER)


def _write_version(connection: Connection, table: str, version: str) -> None:
    # The same statement as Alembic's.
    connection.execute(
        text(
            f"CREATE TABLE IF NOT EXISTS {table} "
            f"(version_num VARCHAR(32) NOT NULL, CONSTRAINT {table}_pkc PRIMARY KEY (version_num))"
        )
    )
    connection.execute(text(f"DELETE FROM {table}"))  # noqa: S608
    connection.execute(text(f"INSERT INTO {table} VALUES (:version)"), {"version": version})  # noqa: S608


def version_in(connection: Connection, table: str) -> str:
    """The version in a table; empty if there is none."""
    if table not in inspect(connection).get_table_names():
        return ""
    found: str | None = connection.scalar(text(f"SELECT version_num FROM {table}"))  # noqa: S608
    return found or ""
