"""The predictor with PostgreSQL: statistics survive restarts of both, and a refused row does not block others."""

import asyncio
import signal
from pathlib import Path

from motet.store import length_samples, migrate, open_store
from motet.transport.over_grpc import is_healthy
from motet_predictor.length_model import VERSION
from tests.predictor.test_service import observe, predict, process, running, until
from tests.store.test_store import sample
from tests.support.postgresql import PostgreSQL


async def test_statistics_survive_a_restart_of_the_process_and_of_the_server(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    url, address = await postgresql.new_database(), f"unix:{tmp_path}/p.sock"
    await migrate(url)
    async with open_store(url) as store:

        async def written(count: int) -> bool:
            return await length_samples.count_samples(store) == count

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


async def test_counts_of_32_bits_are_written(postgresql: PostgreSQL, tmp_path: Path) -> None:
    url = await postgresql.new_database()
    await migrate(url)
    async with running(tmp_path, url=url) as predictor:
        await observe(predictor.address, 25, 2**32 - 1, prompt_tokens=2**32 - 1)
        assert await predictor.persistence.flush()


async def test_names_that_a_database_does_not_take_are_learned_and_kept_all_the_same(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    url = await postgresql.new_database()
    await migrate(url)
    odd = ("a\0b", "long" * 1000)
    async with running(tmp_path, url=url) as predictor:
        for adapter in odd:
            await observe(predictor.address, *[25] * 20, adapter=adapter)
        assert await predictor.persistence.flush()
    async with running(tmp_path, url=url) as predictor:
        for adapter in odd:
            assert (await predictor.estimate(adapter)).q95 <= 26


async def test_a_row_that_the_database_never_takes_is_put_aside_and_the_others_are_written(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    url = await postgresql.new_database()
    await migrate(url)
    async with running(tmp_path, url=url) as predictor, open_store(url) as store:
        for number in range(50):
            predictor.persistence.add(sample(number, request="\0" if number in (7, 33) else "r"))
        predictor.model.observe("acme", "a\0b", 25)
        predictor.model.observe("acme", "acme/pirate", 25)
        assert await predictor.persistence.flush()
        assert predictor.metric("rows_refused_total", table="length_samples") == 2
        assert predictor.metric("rows_refused_total", table="predictor_state") == 1
        assert await length_samples.count_samples(store) == 48
        assert len(await length_samples.load_states(store, VERSION, limit=10)) == 2
        postgresql.stop()
        try:
            predictor.persistence.add(sample(50))
            assert not await predictor.persistence.flush(), "away is away, and nothing is put aside"
        finally:
            await asyncio.to_thread(postgresql.start)
        assert await predictor.persistence.flush()
        assert await length_samples.count_samples(store) == 49
        assert predictor.metric("rows_refused_total", table="length_samples") == 2
