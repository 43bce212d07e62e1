"""Hostile clients, one after the other in each of several lanes, in a process of their own.

python -m tests.gateway.hostile.fuzz PORT SECONDS SEED [KEY]
"""

import asyncio
import random
import sys
import time

from tests.gateway.hostile.clients import CLIENTS, Target, mutated

LANES = 6
PAUSE_SECONDS = 0.05


async def lane(target: Target, drawn: random.Random, until: float) -> int:
    attacks = 0
    while time.monotonic() < until:
        client = drawn.choice([*CLIENTS.values(), *[mutated] * len(CLIENTS)])
        await client(target, drawn)
        attacks += 1
        await asyncio.sleep(PAUSE_SECONDS)
    return attacks


async def fuzz(port: int, seconds: float, seed: int, key: str = "") -> int:
    """Returns how many clients there were. Every second lane has the key."""
    until = time.monotonic() + seconds
    lanes = (
        lane(Target(port, key if number % 2 else ""), random.Random(seed + number), until) for number in range(LANES)
    )
    return sum(await asyncio.gather(*lanes))


if __name__ == "__main__":
    at, length, first, *given = sys.argv[1:]
    print(asyncio.run(fuzz(int(at), float(length), int(first), *given)))
