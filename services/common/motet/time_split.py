"""Where the time of a request goes (S3-20): queue, generation, penalty and overhead. Pure.

Each moment belongs to exactly one part, so the parts add up to the whole. Gateway and runner mark only changes of
state: a token costs nothing.
"""

from enum import StrEnum
from typing import NamedTuple

MAX_CLOCK_ERROR = 0.01
"""By how much a runner's seconds may exceed those that the gateway saw. Their clocks differ by far less. A runner that
says more is not believed."""


class TimePart(StrEnum):
    QUEUE = "queue"
    """It waits for a runner, for its adapter, or for a place in a batch."""
    GENERATION = "generation"
    """A runner computes it."""
    PENALTY = "penalty"
    """It was parked or has lost its runner after a token, and the next token has not come yet."""
    OVERHEAD = "overhead"
    """All other time: its prompt becomes tokens, its length is estimated, messages travel."""


class PartSeconds(NamedTuple):
    """The fields have the names of the parts."""

    queue: float = 0.0
    generation: float = 0.0
    penalty: float = 0.0
    overhead: float = 0.0


class TimeSplit:
    __slots__ = ("_before", "_entered", "_part", "_seconds", "_submitted")

    def __init__(self, part: TimePart, now: float) -> None:
        self._part: TimePart | None = part
        """None: it has ended."""
        self._entered = now
        self._seconds = PartSeconds()
        """Until `_entered`"""
        self._submitted = now
        """When it was sent to its present runner."""
        self._before = PartSeconds()
        """Until `_submitted`"""

    def enter(self, part: TimePart, at: float) -> None:
        """The part that the time from `at` on belongs to. A penalty lasts until the next token, whatever happens before
        it. `at` may be a little earlier than the latest mark: then that mark's time counts."""
        if self._part is not TimePart.PENALTY:
            self._switch(part, at)

    def got_token(self, at: float) -> None:
        """To be called for the first token after a penalty, and allowed for others."""
        if self._part is TimePart.PENALTY:
            self._switch(TimePart.GENERATION, at)

    def end(self, at: float) -> None:
        """No time after this counts."""
        self._switch(None, at)

    def until(self, now: float) -> PartSeconds:
        """The seconds of each part, with those of the present one."""
        if self._part is None:
            return self._seconds
        return _added(self._seconds, self._part, max(0.0, now - self._entered))

    def copy(self) -> "TimeSplit":
        other = TimeSplit(TimePart.OVERHEAD, self._entered)
        other._part, other._seconds = self._part, self._seconds
        return other

    def submitted(self, now: float) -> None:
        """It is sent to a runner, which measures from now on."""
        self._submitted, self._before = now, self.until(now)

    def told(self, by_runner: PartSeconds, now: float) -> None:
        """What its runner has measured since it was sent there. The rest of that time is overhead, because messages
        travel. The present part goes on."""
        elapsed = now - self._submitted
        measured = by_runner.queue + by_runner.generation + by_runner.penalty
        is_possible = min(by_runner) >= 0.0 and measured <= elapsed * (1.0 + MAX_CLOCK_ERROR)  # both false for a NaN
        if self._part is None or not is_possible:
            return
        queue, generation, penalty, overhead = self._before
        self._seconds = PartSeconds(
            queue + by_runner.queue,
            generation + by_runner.generation,
            penalty + by_runner.penalty,
            overhead + max(0.0, elapsed - measured),
        )
        self._entered = now

    def _switch(self, part: TimePart | None, at: float) -> None:
        self._seconds, self._entered, self._part = self.until(at), max(at, self._entered), part


def _added(seconds: PartSeconds, part: TimePart, more: float) -> PartSeconds:
    return seconds._replace(**{part.value: getattr(seconds, part.value) + more})
