"""Surroundings of a process of which a test sets some parts."""

from dataclasses import replace
from typing import Any

from motet.clock import Clock
from motet.surroundings import Surroundings, real_surroundings
from motet.watchdog import ThreadWatchdog

REAL = real_surroundings()


def with_clock(clock: Clock, **others: Any) -> Surroundings:
    """The real ones with another clock, by which its watchdog goes, too."""
    return replace(REAL, clock=clock, watchdog=lambda end, late: ThreadWatchdog(end, late, clock=clock), **others)
