"""Everything that Motet stores in a database: one schema, in SQLite on a laptop, in PostgreSQL in production.

Other packages use `migrate`, `open_store` and the functions of `length_samples` and `keys`; no other code has SQL.
Errors of a database become `StoreUnavailable` (`StateDirectoryError` in `migrate`), with a message that says what to
do. `StoreRefused` means that the database will never accept a value.
"""

from motet.store.database import Store, open_store
from motet.store.migrate import migrate

__all__ = ["Store", "migrate", "open_store"]
