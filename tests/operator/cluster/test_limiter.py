import asyncio

import pytest

from motet.clock import FakeClock
from motet_operator.cluster.api import RequestLimiter


def test_a_burst_goes_at_once_and_the_rest_at_the_rate() -> None:
    limiter = RequestLimiter(rate=10, burst=5, clock=FakeClock())
    assert [limiter.reserve() for _ in range(5)] == [0.0] * 5
    assert [limiter.reserve() for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_a_quiet_time_fills_the_bucket_and_no_more() -> None:
    clock = FakeClock()
    limiter = RequestLimiter(rate=10, burst=5, clock=clock)
    for _ in range(5):
        limiter.reserve()
    clock.advance(0.2)
    assert [limiter.reserve() for _ in range(3)] == pytest.approx([0.0, 0.0, 0.1])
    clock.advance(1000)
    assert sum(limiter.reserve() == 0 for _ in range(20)) == 5


def test_everybody_waits_as_long_as_the_server_asks() -> None:
    clock = FakeClock()
    limiter = RequestLimiter(rate=10, burst=5, clock=clock)
    limiter.pause(7)
    limiter.pause(3)
    assert limiter.reserve() == 7
    clock.advance(7)
    assert limiter.reserve() == 0


async def test_a_pause_also_delays_requests_that_already_wait() -> None:
    limiter = RequestLimiter(rate=1000, burst=1)
    limiter.reserve()
    waiting = asyncio.create_task(limiter.take())
    await asyncio.sleep(0)
    limiter.pause(0.05)
    began = asyncio.get_running_loop().time()
    await waiting
    assert asyncio.get_running_loop().time() - began >= 0.045
