"""Which versions of Motet may use a database.

Two tables say so, each in one row. `schema_version` is the newest migration that has been done. `alembic_version` is
the oldest one whose programs can still use what there is: versions of before look at that table alone, and find what
they know. So a version goes back to the one before without the database, and both may run at once.
"""

from sqlalchemy import Connection, inspect, text

DONE, READERS = "schema_version", "alembic_version"

OLDEST_READER = "0001"
"""A migration that takes something away from the version before, as no migration should, raises it to itself."""


def split_version_table(connection: Connection) -> None:
    """Of a database in which one table said both."""
    tables = inspect(connection).get_table_names()
    if READERS in tables and DONE not in tables:
        _say(connection, DONE, only(connection, READERS))


def record_readable_versions(connection: Connection) -> None:
    """Say who may use what this version has made."""
    if only(connection, READERS) != OLDEST_READER:
        _say(connection, READERS, OLDEST_READER)


def _say(connection: Connection, table: str, version: str) -> None:
    # As Alembic makes it.
    connection.execute(
        text(
            f"CREATE TABLE IF NOT EXISTS {table} "
            f"(version_num VARCHAR(32) NOT NULL, CONSTRAINT {table}_pkc PRIMARY KEY (version_num))"
        )
    )
    connection.execute(text(f"DELETE FROM {table}"))  # noqa: S608
    connection.execute(text(f"INSERT INTO {table} VALUES (:version)"), {"version": version})  # noqa: S608


def only(connection: Connection, table: str) -> str:
    """The version in a table; empty: there is none."""
    if table not in inspect(connection).get_table_names():
        return ""
    found: str | None = connection.scalar(text(f"SELECT version_num FROM {table}"))  # noqa: S608
    return found or ""
