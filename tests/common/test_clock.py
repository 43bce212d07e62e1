"""Clocks that are passed in, and periodic work."""

import asyncio

from motet.clock import FakeClock, every
from tests.common.waiting import until


def test_a_fake_clock_moves_only_when_it_is_set() -> None:
    clock = FakeClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    assert clock.advance(2.5) == 7.5
    assert clock() == 7.5


async def test_periodic_work_runs_again_after_a_failure() -> None:
    turns: list[int] = []

    async def work() -> None:
        turns.append(len(turns))
        if len(turns) == 2:
            raise ValueError("a bad turn")

    running = asyncio.create_task(every(0.001, work, name="test"))
    await until(lambda: len(turns) >= 4)
    running.cancel()
    (outcome,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError)


async def test_work_may_be_a_plain_function() -> None:
    turns: list[int] = []
    running = asyncio.create_task(every(0.001, lambda: turns.append(1), name="test"))
    await until(lambda: len(turns) >= 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
