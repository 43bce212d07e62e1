"""A policy is woken when something is due."""

import asyncio
from contextlib import asynccontextmanager
from math import inf

import pytest

from motet.due_timer import CATCH_UP_SECONDS, DueTimer
from tests.common.virtual_time import in_virtual_time


class Policy:
    """Does something at each of the times, and notes when it was called."""

    def __init__(self, *times, pause=0.0, fails=0, unknown_until=0.0):
        self.stood_still = 0.0
        """So long its process was paused."""
        self.times = list(times)
        self.calls = []
        self.fails = fails
        self.unknown_until = unknown_until
        self.timer = DueTimer(self.next_due, self.ring, clock=self.clock, pause=pause)

    def clock(self):
        return asyncio.get_running_loop().time() + self.stood_still

    def next_due(self):
        if self.clock() < self.unknown_until:
            raise ValueError
        return min(self.times, default=inf)

    def ring(self):
        self.calls.append(self.clock())
        if len(self.calls) <= self.fails:
            raise ValueError
        self.times = [at for at in self.times if at > self.clock()]


@asynccontextmanager
async def running(policy):
    task = asyncio.create_task(policy.timer.run())
    await asyncio.sleep(0)
    yield policy
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@in_virtual_time
async def test_it_rings_at_each_time_and_at_no_other():
    async with running(Policy(1.0, 2.5, 7.0)) as policy:
        await asyncio.sleep(100)
    assert policy.calls == [1.0, 2.5, 7.0]


@in_virtual_time
@pytest.mark.parametrize("changed", [False, True])
async def test_what_came_while_the_process_was_paused_is_heard_before_anything_is_due(changed):
    async with running(Policy(30.0, 90.0)) as policy:
        await asyncio.sleep(1)
        policy.stood_still = 40.0
        if changed:
            policy.timer.changed()
        else:
            await asyncio.sleep(29)
        await asyncio.sleep(CATCH_UP_SECONDS / 2)
        policy.times.remove(30.0)
        await asyncio.sleep(100)
    assert policy.calls == [90.0]


@in_virtual_time
async def test_what_came_is_heard_first_also_if_the_process_was_paused_soon_after_it_rang():
    """Where something is due again and again, that is mostly so."""
    async with running(Policy(1.0, 30.0, pause=0.5)) as policy:
        await asyncio.sleep(1.25)
        policy.stood_still = 40.0
        await asyncio.sleep(0.25 + CATCH_UP_SECONDS / 2)
        policy.times.remove(30.0)
        await asyncio.sleep(100)
    assert policy.calls == [1.0]


@in_virtual_time
async def test_however_late_each_wake_is_it_rings():
    async with running(Policy(*range(1, 100), pause=0.5)) as policy:
        for _ in range(20):
            await asyncio.sleep(0.5)
            policy.stood_still += 1.0
    assert len(policy.calls) >= 6


@in_virtual_time
async def test_what_is_due_all_the_same_comes_soon_after_a_pause():
    async with running(Policy(30.0)) as policy:
        await asyncio.sleep(1)
        policy.stood_still = 40.0
        await asyncio.sleep(100)
    assert policy.calls == [70.0 + CATCH_UP_SECONDS]


@in_virtual_time
async def test_a_time_that_comes_earlier_than_the_known_one_is_kept():
    async with running(Policy(50.0)) as policy:
        await asyncio.sleep(1)
        policy.times.append(2.0)
        policy.timer.changed()
        await asyncio.sleep(9)
    assert policy.calls == [2.0]


@in_virtual_time
async def test_a_change_is_looked_at_at_once_and_those_soon_after_it_together():
    policy, looks = Policy(50.0, pause=0.5), []
    policy.timer = DueTimer(lambda: looks.append(policy.clock()) or 50.0, policy.ring, clock=policy.clock, pause=0.5)
    async with running(policy):
        for seconds in (1.0, 0.125, 0.125, 3.0):
            await asyncio.sleep(seconds)
            policy.timer.changed()
        await asyncio.sleep(1)
    assert looks == [0.0, 1.0, 1.5, 4.25]


@in_virtual_time
async def test_a_time_that_moves_to_later_rings_only_then():
    async with running(Policy(5.0)) as policy:
        policy.times = [8.0]
        await asyncio.sleep(20)
    assert policy.calls == [8.0]


@in_virtual_time
async def test_it_rings_not_more_often_than_it_should():
    async with running(Policy(1.0, 1.125, 1.25, 1.75, pause=0.5)) as policy:
        await asyncio.sleep(20)
    assert policy.calls == [1.0, 1.5, 2.0]


@in_virtual_time
async def test_an_error_ends_nothing():
    async with running(Policy(1.0, 2.0, fails=1)) as policy:
        await asyncio.sleep(20)
    assert policy.calls == [1.0, 2.0]


@in_virtual_time
async def test_while_nobody_can_say_what_is_due_it_rings_once_a_second():
    async with running(Policy(1.5, 7.0, unknown_until=2.5)) as policy:
        await asyncio.sleep(20)
    assert policy.calls == [0.0, 1.0, 2.0, 7.0]


@in_virtual_time
async def test_a_lasting_error_is_logged_once_a_second():
    async with running(Policy(1.0, pause=0.25, fails=100)) as policy:
        await asyncio.sleep(4.5)
    assert policy.calls == [1.0, 2.0, 3.0, 4.0]


@in_virtual_time
async def test_after_its_end_it_is_silent():
    async with running(Policy(5.0)) as policy:
        pass
    policy.timer.changed()
    await asyncio.sleep(20)
    assert policy.calls == []
