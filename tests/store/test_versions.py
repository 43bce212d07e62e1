"""A database between two versions: what one of them has written the other reads, and either may be started last."""

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from sqlalchemy import text

from motet.errors import StateDirectoryError
from motet.store import length_samples, migrate, open_store
from motet.store.schema_versions import OLDEST_READER
from tests.store.test_store import sample
from tests.support.older_schema import take_back
from tests.support.previous_version import run_before, version_before

Before = Callable[..., CompletedProcess[str]]

READS_AND_WRITES = """
import asyncio, sys
from motet.store import lengths, open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        (read,) = await lengths.newest_samples(store, 9)
        assert (read.request, read.output_tokens, read.features) == ("r5", 5, b"\\1\\0\\0\\0"), read
        found = await lengths.load_states(store, "v1", limit=9)
        values = {name: getattr(read, name) for name in read.__slots__}
        own = lengths.Sample(**values | {"request": "of the one before"})
        await lengths.save(store, "v1", found, [own], keep_samples=10)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Before:
    installed = version_before(tmp_path_factory.mktemp("before"))
    asked = run_before(installed, "-c", "import motet; print(motet.__file__)")
    assert asked.stdout.startswith(str(installed)), asked
    return lambda *arguments, **more: run_before(installed, *arguments, **more)


def brought(before: Before, url: str) -> CompletedProcess[str]:
    """As the Job of its chart does before an upgrade, also of one to an older chart."""
    return before("-m", "motet.store", env={"MOTET_DATABASE_URL": url})


async def test_the_version_before_migrates_reads_and_writes_what_this_one_wrote(url: str, before: Before) -> None:
    await migrate(url)
    async with open_store(url) as store:
        await length_samples.save(store, "v1", [], [sample(5)], keep_samples=10)
    done = brought(before, url)
    assert done.returncode == 0, done.stderr
    done = before("-c", READS_AND_WRITES, url)
    assert done.returncode == 0, done.stderr
    await migrate(url)
    async with open_store(url) as store:
        assert [one.request for one in await length_samples.newest_samples(store, 9)] == ["of the one before", "r5"]


async def test_a_database_of_the_previous_version_is_migrated(url: str, before: Before) -> None:
    done = brought(before, url)
    assert done.returncode == 0, done.stderr
    await migrate(url)
    async with open_store(url) as store:
        await length_samples.save(store, "v1", [], [sample(5, output_tokens=2**32 - 1)], keep_samples=10)
        assert await length_samples.count_samples(store) == 1


async def of_another_version(url: str, done: str, reader: str) -> None:
    """A database as some other version leaves it."""
    await migrate(url)
    async with open_store(url) as store, store.write() as connection:
        await connection.execute(text("UPDATE schema_version SET version_num = :done"), {"done": done})
        await connection.execute(text("UPDATE alembic_version SET version_num = :reader"), {"reader": reader})


async def test_a_compatible_newer_database_is_read_and_not_changed(url: str) -> None:
    await of_another_version(url, done="9999", reader=OLDEST_READER)
    await migrate(url)
    async with open_store(url) as store:
        await length_samples.save(store, "v1", [], [sample(5)], keep_samples=10)
        async with store.read() as connection:
            found = [
                (await connection.execute(text(f"SELECT version_num FROM {table}"))).scalar_one()
                for table in ("schema_version", "alembic_version")
            ]
    assert found == ["9999", OLDEST_READER]


async def test_an_incompatible_newer_database_is_not_read(url: str) -> None:
    await of_another_version(url, done="9999", reader="9998")
    with pytest.raises(StateDirectoryError, match="newer version of Motet"):
        await migrate(url)


async def test_a_database_of_a_time_with_one_table_of_versions_is_taken_over(url: str) -> None:
    await migrate(url)
    async with open_store(url) as store:
        await take_back(store, "0002")
        async with store.write() as connection:
            await connection.execute(text("UPDATE alembic_version SET version_num = '0002'"))
            await connection.execute(text("DROP TABLE schema_version"))
        await migrate(url)
        async with store.read() as connection:
            assert (await connection.execute(text("SELECT version_num FROM schema_version"))).scalar_one() >= "0002"
            reader = (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar_one()
    assert reader == OLDEST_READER
