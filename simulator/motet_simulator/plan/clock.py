"""What happens when, in virtual time. Of two things at the same time, what was sent comes before iterations end, and
then what was planned first."""

import heapq
from collections.abc import Callable
from typing import Any

_MESSAGE, _ITERATION = 0, 1


class Alarm:
    """Something that will happen, unless it is called off."""

    __slots__ = ("off",)

    def __init__(self) -> None:
        self.off = False


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, int, Alarm | None, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def at(self, when: float, call: Callable[..., None], *given: Any) -> None:
        self._push(when, _MESSAGE, None, call, given)

    def after(self, seconds: float, call: Callable[..., None], *given: Any) -> None:
        self.at(self.now + seconds, call, *given)

    def every(
        self,
        seconds: float,
        call: Callable[[], None],
        *,
        first: float = 0.0,
        idle_until: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`idle_until`: until when nobody needs it. Those times are left out."""

        def again() -> None:
            call()
            idle = idle_until() - self.now
            self.after(max(seconds, idle // seconds * seconds), again)

        self.at(first, again)

    def iteration_at(self, when: float, call: Callable[..., None], *given: Any) -> Alarm:
        alarm = Alarm()
        self._push(when, _ITERATION, alarm, call, given)
        return alarm

    def run(self, until: Callable[[], bool]) -> None:
        """Let things happen until there is nothing left, or `until`, which is asked before each of them."""
        due = self._due
        while due and not until():
            when, _, _, alarm, call, given = heapq.heappop(due)
            if alarm is not None and alarm.off:
                continue
            assert when >= self.now, (when, self.now)
            self.now = when
            call(*given)

    def _push(
        self, when: float, kind: int, alarm: Alarm | None, call: Callable[..., None], given: tuple[Any, ...]
    ) -> None:
        self._planned += 1
        heapq.heappush(self._due, (when, kind, self._planned, alarm, call, given))
