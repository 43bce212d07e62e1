"""When the collector of garbage looks at all objects: while few requests are known.

It stops the process for five milliseconds for each thousand requests, or two thousand registered adapters, and finds
next to nothing. What nobody uses any more is freed without it, but for cycles: the lives of requests leave none
(tests/scheduler/test_garbage.py). Those among young objects are still found as they come.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from motet_scheduler.policy.scheduler import Scheduler

MAX_KNOWN = 1_000
"""Requests, with which a collection of everything takes a few milliseconds."""

ADAPTERS_LIKE_ONE = 2
"""A collection takes as long for this number of registered adapters as for one request."""

EVERY_SECONDS = 10.0

MAX_PUT_OFF = int(24 * 3600 / EVERY_SECONDS)
"""How often in a row it is put off: for a day. Then it comes nevertheless, so cycles never use up the memory."""

YOUNG_FOR = 2
"""How many collections look at the youngest objects only, before one looks at the next older ones, too. Python's own
number is ten: with a hundred thousand requests known, that one took 5 ms, and it found hardly more."""

NEVER = 1 << 30


@contextmanager
def full_collections_put_off() -> Iterator[None]:
    """No collection of everything comes by itself."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], YOUNG_FOR, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def known_to(scheduler: Scheduler) -> int:
    """Requests, and adapters that take as long."""
    return len(scheduler.requests) + len(scheduler.adapters.by_name) // ADAPTERS_LIKE_ONE


async def collect_garbage(known: Callable[[], int], *, every: float = EVERY_SECONDS) -> None:
    """Until cancelled. `known`: how many requests are known now, or what takes as long."""
    put_off = 0
    with full_collections_put_off():
        while True:
            await asyncio.sleep(every)
            if known() > MAX_KNOWN and put_off < MAX_PUT_OFF:
                put_off += 1
            else:
                gc.collect()
                put_off = 0
