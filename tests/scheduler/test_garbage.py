"""The collector of garbage looks at everything while few requests are known."""

import asyncio
import gc
from contextlib import contextmanager, suppress

from motet_scheduler import garbage
from motet_scheduler.garbage import ADAPTERS_LIKE_ONE, MAX_KNOWN, collect_garbage, full_collections_put_off, known_to
from tests.scheduler.builders import adapter, entry, ready


@contextmanager
def counted():
    """How often everything was looked at."""
    full = []

    def collected(phase, info):
        if phase == "stop" and info["generation"] == 2:
            full.append(info)

    gc.callbacks.append(collected)
    try:
        yield full
    finally:
        gc.callbacks.remove(collected)


async def collections_with(known, looks):
    """How many there are in this many looks."""
    left = asyncio.Semaphore(0)

    def look():
        left.release()
        return known

    with counted() as full:
        task = asyncio.create_task(collect_garbage(look, every=0.0))
        for _ in range(looks):
            await left.acquire()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return len(full)


async def test_it_comes_at_each_look_while_few_requests_are_known(monkeypatch):
    monkeypatch.setattr(garbage, "MAX_PUT_OFF", 1000)
    assert await collections_with(MAX_KNOWN, 5) >= 4
    assert await collections_with(MAX_KNOWN + 1, 5) == 0


async def test_it_is_not_put_off_for_ever(monkeypatch):
    monkeypatch.setattr(garbage, "MAX_PUT_OFF", 3)
    assert await collections_with(MAX_KNOWN + 1, 9) == 2


def test_registered_adapters_count_too():
    driver = ready()
    driver.attach()
    driver.enqueue("r0")
    driver.state(*(adapter(f"a{number}") for number in range(3 * ADAPTERS_LIKE_ONE)))
    assert known_to(driver.scheduler) == 4


def test_a_life_of_a_request_leaves_no_cycle():
    """Under load nothing would find one for a day."""
    driver = ready()
    driver.attach()

    def life(number):
        driver.enqueue(f"r{number}")
        driver.report("r0", entry(f"r{number}", 2))
        driver.finish(f"r{number}")
        driver.enqueue(f"c{number}")
        driver.cancel(f"c{number}")

    for number in range(100):  # until what remembers a number of them is full
        life(number)
    gc.collect()
    for number in range(100, 200):
        life(number)
    assert gc.collect() < 100


def test_no_full_collection_comes_by_itself_meanwhile():
    before = gc.get_threshold()
    with counted() as full, full_collections_put_off():
        kept = [[n] for n in range(300_000)]
        assert not full
    assert gc.get_threshold() == before
    assert len(kept) == 300_000
