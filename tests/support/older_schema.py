"""A database as an older version of Motet leaves it."""

from alembic import command

from motet.store import Store, open_store
from motet.store.migrate import configuration


async def take_back(store: Store, revision: str) -> None:
    async with store.write() as connection:
        await connection.run_sync(lambda sync: command.downgrade(configuration(sync), revision))


async def take_back_at(url: str, revision: str) -> None:
    async with open_store(url) as store:
        await take_back(store, revision)
