"""When a process takes the levels that it shows as metrics, such as how many requests wait."""

from collections.abc import Callable, Iterable
from math import inf

from prometheus_client import Gauge

LEVELS_SECONDS = 1.0
"""The least time between two: of a thousand runners, taking them costs milliseconds."""


class Levels:
    """Takes them in ticks, and not more often than `LEVELS_SECONDS` says. A change since the last time makes a tick
    due; a tick that comes for another reason takes them, too."""

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self._taken_at = -inf
        self._stale = True

    def changed(self) -> None:
        self._stale = True

    def next_due(self) -> float:
        return self._taken_at + LEVELS_SECONDS if self._stale else inf

    def tick(self, now: float) -> None:
        if now >= self._taken_at + LEVELS_SECONDS:
            self._taken_at, self._stale = now, False
            self._take()


class LevelsByInstance:
    """Gauges with a series for each runner. Mostly few runners have changed, and to find a series costs more than to
    compare, so each series is set only where its level is another one."""

    def __init__(self, *gauges: Gauge) -> None:
        self._gauges = gauges
        self._shown: dict[str, tuple[tuple[float, ...], tuple[Gauge, ...]]] = {}

    def show(self, levels: Iterable[tuple[str, tuple[float, ...]]]) -> None:
        """The levels of each runner, one for each gauge. Series of other runners go."""
        gone = set(self._shown)
        for instance, now in levels:
            before, series = self._shown.get(instance, ((), ()))
            gone.discard(instance)
            if now == before:
                continue
            series = series or tuple(gauge.labels(instance) for gauge in self._gauges)
            for gauge, level in zip(series, now, strict=True):
                gauge.set(level)
            self._shown[instance] = now, series
        for instance in gone:
            del self._shown[instance]
            for gauge in self._gauges:
                gauge.remove(instance)
