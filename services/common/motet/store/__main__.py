"""`python -m motet.store`: upgrade the schema of the database, and end. In a cluster it runs before all services."""

import asyncio

from motet.imports import without_collections

with without_collections():
    import structlog
    from prometheus_client import CollectorRegistry

    from motet.health import Health
    from motet.read_settings import read
    from motet.service_main import run
    from motet.settings import Database, ProcessSettings
    from motet.store import migrate

log = structlog.get_logger(__name__)


def main() -> None:
    process, database = read(ProcessSettings), read(Database)

    async def upgrade(_stop: asyncio.Event, _registry: CollectorRegistry, _health: Health) -> None:
        await migrate(database.url(process), wait_seconds=database.database_wait_seconds)
        log.info("database_up_to_date")

    run("store", process, upgrade)


if __name__ == "__main__":
    main()
