"""Runs a probe repeatedly. Its result counts after it was the same several times, as the manifest says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from math import ceil

from testbed.cluster.api import Object

RARER = 3
"""A container that is ready is asked after this multiple of the shortened period."""

Ask = Callable[[], Awaitable[bool]]


async def verdicts(
    probe: Object, ask: Ask, *, initially: bool | None, time_scale: float, patience: float = 1.0
) -> AsyncIterator[bool]:
    """Yields the probe's result each time it changes, and each further failure: a container that was not stopped after
    the first failure is stopped after the next. `patience` multiplies the number of failures that it takes.
    """
    believed, run, last = initially, 0, None
    wanted = {True: probe.get("successThreshold", 1), False: ceil(probe.get("failureThreshold", 3) * patience)}
    await asyncio.sleep(probe.get("initialDelaySeconds", 0) * time_scale)
    while True:
        well = await ask()
        run = run + 1 if well == last else 1
        last = well
        if run >= wanted[well] and (believed != well or not well):
            believed, run = well, 0
            yield well
        scale = min(1.0, RARER * time_scale) if believed and well else time_scale
        await asyncio.sleep(probe.get("periodSeconds", 10) * scale)


class RestartBackoff:
    """The wait before the next start: zero, then ten seconds, then doubled each time up to five minutes. A run of ten
    minutes resets it."""

    FIRST_S, LAST_S, FORGIVEN_S = 10.0, 300.0, 600.0

    def __init__(self, time_scale: float, *, at_once_first: bool) -> None:
        self._scale, self._at_once = time_scale, at_once_first
        self._failures = 0

    def next(self, ran_s: float) -> float:
        if ran_s >= self.FORGIVEN_S * self._scale:
            self._failures = 0
        self._failures += 1
        doublings = self._failures - (2 if self._at_once else 1)
        return 0.0 if doublings < 0 else min(self.FIRST_S * 2.0 ** min(doublings, 10), self.LAST_S) * self._scale
