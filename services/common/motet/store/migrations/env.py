"""Alembic runs this module. It uses our tables, and the connection that `motet.store.migrate` opens."""

from alembic import context

from motet.store.schema_versions import APPLIED_TABLE, OLDEST_READER_TABLE
from motet.store.tables import Table

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Table.metadata,
    version_table=APPLIED_TABLE,
    include_name=lambda name, kind, _: (kind, name) != ("table", OLDEST_READER_TABLE),
    # SQLite cannot alter most things in place. In batch mode Alembic makes a new table and copies the rows.
    render_as_batch=connection.dialect.name == "sqlite",
    compare_type=True,
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
