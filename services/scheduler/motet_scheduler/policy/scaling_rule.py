"""How many runners a pool should have: the rule, on numbers alone.

What is needed at one moment is the most that any of these asks for:

| asks            | runners                                                                                |
|-----------------|----------------------------------------------------------------------------------------|
| requests        | those placed, parked and waiting, by how many of their mean size one runner takes       |
| adapters        | those in use or to be kept resident, by the slots of one runner                         |
| the queue's age | one more than serve, when somebody has waited too long and no runner is on its way       |
| held requests   | one, when a gateway cannot even read them before there is a runner                      |

Demand is counted, not the lack of it, so that runners which are still starting change nothing: they are not capacity
yet, and what they were ordered for orders no more. A pool then grows at once, but at most doubles within half a
minute, and shrinks only to the most that was needed at any time of its stabilisation window.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

TARGET = 0.8
"""How full a runner should be: what is left takes in what comes next while another one starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBounds:
    minimum: int = 0
    maximum: int | None = None
    stabilization: float = 300.0
    """Seconds for which fewer must have been enough."""

    def apply(self, replicas: int) -> int:
        return max(self.minimum, replicas if self.maximum is None else min(replicas, self.maximum))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSize:
    """What one runner takes."""

    pages: int
    sequences: int
    adapter_slots: int

    def fits(self, mean_pages: float) -> int:
        """Requests of this size on one runner, at the target. Whole ones: two halves on two runners are no place."""
        by_batch = self.sequences * TARGET
        by_pages = self.pages * TARGET / mean_pages if mean_pages > 0 else by_batch
        return max(1, int(min(by_batch, by_pages)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """What a pool has to carry at one moment."""

    requests: int = 0
    """Placed, parked and waiting ones."""

    pages: int = 0
    """Promised to them, or wanted by them."""

    waiting: int = 0
    waited: float = 0.0
    """Seconds that the first of them has waited."""

    held: int = 0
    """Requests that gateways hold until there is a runner."""

    adapters: int = 0
    """Places in device memory that adapters need at once."""

    min_replicas_of_adapters: int = 0
    """Runners that one adapter must lie on: the largest `minReplicas`."""

    serving: int = 0
    starting: int = 0
    """Runners wanted so far, those that start included."""

    room: RunnerSize | None = None
    """None: no runner has ever said."""


@dataclass(frozen=True, slots=True)
class RequiredReplicas:
    replicas: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScaleDownBlock:
    """Why nothing may leave for now."""

    code: str
    reason: str
    stale: bool = False
    """Because something is not known."""


@dataclass(frozen=True, slots=True)
class DesiredReplicas:
    replicas: int
    code: str
    reason: str
    stale: bool = False


def required_replicas(load: PoolLoad, *, patience: float) -> RequiredReplicas:
    """What the load asks for, whatever there is. `patience` is how long a request may wait for a place."""
    return max(_needs(load, patience), key=lambda need: need.replicas)


def _needs(load: PoolLoad, patience: float) -> Sequence[RequiredReplicas]:
    needs = [RequiredReplicas(0, "Idle", "nothing runs or waits")]
    room = load.room
    if load.requests:
        runners, how = 1, "no runner has said yet how many it takes"
        if room is not None:
            fits = room.fits(load.pages / load.requests)
            runners, how = ceil(load.requests / fits), f"a runner takes {fits} of their size"
        needs.append(
            RequiredReplicas(runners, "Requests", f"{_count(load.requests, 'request')} under way or waiting; {how}")
        )
    if load.adapters:
        slots = max(1, room.adapter_slots) if room is not None else load.adapters
        runners = max(ceil(load.adapters / slots), load.min_replicas_of_adapters)
        why = f"adapters need {_count(load.adapters, 'slot')}; a runner has {slots}"
        if runners > ceil(load.adapters / slots):
            why = f"an adapter is to be resident on {_count(load.min_replicas_of_adapters, 'runner')}"
        needs.append(RequiredReplicas(runners, "Adapters", why))
    if load.waiting and load.waited > patience and load.serving and load.starting <= load.serving:
        why = f"the first of {_count(load.waiting, 'waiting request')} has found no place for {load.waited:.0f} s"
        needs.append(RequiredReplicas(load.serving + 1, "Queue", why))
    if load.held:
        needs.append(
            RequiredReplicas(1, "HeldRequests", f"{_count(load.held, 'request')} held until there is a runner")
        )
    return needs


class ReplicaStabilizer:
    """From what is needed to what is advised: soon more, late fewer, within the bounds."""

    def __init__(self, replicas: int, now: float, *, window: float = 30.0) -> None:
        self.replicas = replicas
        """As advised last."""
        self._window = window
        self._advised: deque[tuple[float, int]] = deque([(now, replicas)])
        """From when on how many were advised; the first reaches back to the beginning of the window."""
        self._needed: deque[tuple[float, int]] = deque([(now, replicas)])
        """What was needed and when, without what something later and larger hides: the first is the largest."""

    def advise(
        self, need: RequiredReplicas, bounds: ReplicaBounds, now: float, hold: ScaleDownBlock | None = None
    ) -> DesiredReplicas:
        """Call it with a time that never goes back."""
        self._hear(max(need.replicas, self.replicas) if hold is not None else need.replicas, bounds, now)
        while len(self._advised) > 1 and now - self._advised[1][0] >= self._window:
            self._advised.popleft()
        paced = self._grow(need.replicas) if need.replicas > self.replicas else self._shrink()
        advised = bounds.apply(paced)
        if advised != self.replicas:
            self.replicas = advised
            self._advised.append((now, advised))
        return DesiredReplicas(
            advised, *_why(need, bounds, paced, advised, hold), stale=hold is not None and hold.stale
        )

    def _hear(self, needed: int, bounds: ReplicaBounds, now: float) -> None:
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now, needed))
        while len(self._needed) > 1 and now - self._needed[0][0] >= bounds.stabilization:
            self._needed.popleft()

    def _grow(self, needed: int) -> int:
        least = min(replicas for _, replicas in self._advised)
        return max(self.replicas, min(needed, max(1, 2 * least)))

    def _shrink(self) -> int:
        return min(self.replicas, self._needed[0][1])


def _why(
    need: RequiredReplicas, bounds: ReplicaBounds, paced: int, advised: int, hold: ScaleDownBlock | None
) -> tuple[str, str]:
    if need.replicas > advised:
        runners = _count(need.replicas, "runner")
        if bounds.maximum is not None and advised >= bounds.maximum:
            return "AtMaximum", f"{need.reason}: that needs {runners}, and maxReplicas is {bounds.maximum}"
        return "Pacing", f"{need.reason}: that needs {runners}; they at most double within half a minute"
    if hold is not None and hold.stale:
        return hold.code, hold.reason
    if need.replicas == advised:
        return need.code, need.reason
    if advised > paced or (advised == bounds.minimum and hold is None):
        return "AtMinimum", f"{need.reason}; minReplicas is {bounds.minimum}"
    if hold is not None:
        return hold.code, hold.reason
    return "Stabilizing", (
        f"{_count(need.replicas, 'runner')} would do; the others leave once that was so for {bounds.stabilization:g} s"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
