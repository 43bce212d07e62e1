"""The predictor's process on PostgreSQL: what it has learned outlives it, and it outlives the server."""

import signal
from pathlib import Path

from motet.rpc import is_healthy
from motet.store import lengths, migrate, open_store
from tests.predictor.test_service import observe, predict, process, until
from tests.support.postgresql import PostgreSQL


async def test_what_was_learned_outlives_the_process_and_a_restart_of_the_server(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    url, address = await postgresql.new_database(), f"unix:{tmp_path}/p.sock"
    await migrate(url)
    async with open_store(url) as store:

        async def written(count: int) -> bool:
            return await lengths.count_samples(store) == count

        async with process(tmp_path, MOTET_DATABASE_URL=url) as child:
            await until(lambda: is_healthy(address))
            await observe(address, *[25] * 20)
            await until(lambda: written(20))
            postgresql.stop()
            try:
                await observe(address, *[25] * 5)
                assert (await predict(address, "acme/pirate")).estimates[0].q95 <= 26
            finally:
                postgresql.start()
            await until(lambda: written(25))
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        async with process(tmp_path, MOTET_DATABASE_URL=url):
            await until(lambda: is_healthy(address))
            assert (await predict(address, "acme/pirate")).estimates[0].q95 <= 26
