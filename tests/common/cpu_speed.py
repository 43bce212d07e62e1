"""Measures how fast this machine is now. Limits of CPU time are multiples of it, so a slow machine keeps them, too."""

import time


def cpu_unit_seconds() -> float:
    """CPU seconds of a fixed piece of work in Python: the best of three, about 0.05 s on a common machine."""
    return min(_once() for _ in range(3))


def _once() -> float:
    began = time.thread_time()
    seen: dict[int, str] = {}
    for number in range(600_000):
        seen[number % 1000] = f"{number}"
    return time.thread_time() - began
