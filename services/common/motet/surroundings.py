"""What a process finds around it: time, chance, names, a disk, a network, and a watch over its own event loop.

Each process makes one object, in its `__main__`, and hands it to whatever needs a part of it. So nothing else takes the
time, a random number or a thread by itself, and a simulation runs the same code with surroundings of its own.

Timers are not here: they are the event loop's, and a simulation has an event loop of its own.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from motet.clock import Clock, monotonic
from motet.disk import Disk, RealDisk
from motet.transport import Network
from motet.transport.over_grpc import GrpcNetwork
from motet.watchdog import ThreadWatchdog, Watchdog


class WallClock(Protocol):
    """Seconds since 1970. It may jump, also back, and differs between machines: nothing is decided by it."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    clock: Clock
    wall: WallClock
    random: Random
    """For what spreads load or only has to differ. It guards nothing."""
    new_id: Callable[[int], str]
    """A name that nobody else has, from this number of random bytes, in hexadecimal digits. Nobody can guess it."""
    disk: Disk
    watchdog: Callable[[float, Callable[[], None]], Watchdog]
    """Starts a watchdog: `watchdog(end, late)` calls `late` when the clock reaches `end`."""
    network: Network


def real_surroundings() -> Surroundings:
    """Those of a process that serves."""
    return Surroundings(
        clock=monotonic,
        wall=time.time,
        random=Random(),  # noqa: S311 - guards nothing
        new_id=secrets.token_hex,
        disk=RealDisk(),
        watchdog=lambda end, late: ThreadWatchdog(end, late, clock=monotonic),
        network=GrpcNetwork(),
    )
