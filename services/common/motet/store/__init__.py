"""Everything Motet keeps in SQL: one schema, SQLite on a laptop, PostgreSQL in production.

Other packages see `migrate`, `open_store` and the functions of `lengths`; no SQL is written anywhere else. Whatever a
database can do wrong comes out as `StoreUnavailable` (or `StateDirectoryError` while migrating), with the fix in it;
`StoreRefused` is a value that it will never take.
"""

from motet.store.database import Store, open_store
from motet.store.migrate import migrate

__all__ = ["Store", "migrate", "open_store"]
