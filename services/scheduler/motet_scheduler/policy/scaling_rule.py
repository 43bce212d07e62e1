"""How many runners a pool should have: the rule, on numbers alone.

The required number at one moment is the largest of these:

| for             | runners                                                                                |
|-----------------|----------------------------------------------------------------------------------------|
| requests        | placed, parked and waiting ones, divided by how many average requests a runner takes    |
| adapters        | those in use or to be kept resident, divided by the slots of one runner                 |
| the queue's age | one more than now, if a request has waited too long and no runner is starting           |
| held requests   | one, if a gateway holds requests until the model has a runner                           |

The rule counts the whole demand, not the unmet part, so that runners which are still starting do not change the result.
A pool grows at once, but at most doubles within half a minute. It shrinks only to the largest number that was required
at any time of its stabilization window.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from motet.plurals import counted

TARGET = 0.8
"""How full a runner should be. The rest takes new requests while another runner starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBounds:
    minimum: int = 0
    maximum: int | None = None
    stabilization: float = 300.0
    """Seconds for which fewer runners must have been enough."""

    def apply(self, replicas: int) -> int:
        return max(self.minimum, replicas if self.maximum is None else min(replicas, self.maximum))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSize:
    """What fits on one runner."""

    pages: int
    sequences: int
    adapter_slots: int

    def fits(self, mean_pages: float) -> int:
        """How many requests of this size fit on one runner at the target. A request can't be split between two
        runners."""
        by_batch = self.sequences * TARGET
        by_pages = self.pages * TARGET / mean_pages if mean_pages > 0 else by_batch
        return max(1, int(min(by_batch, by_pages)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """The load of a pool at one moment."""

    requests: int = 0
    """Placed, parked and waiting ones."""

    pages: int = 0
    """Promised to these requests, or needed by them."""

    waiting: int = 0
    waited: float = 0.0
    """Seconds that the oldest of them has waited."""

    held: int = 0
    """Requests that gateways hold until there is a runner."""

    adapters: int = 0
    """Slots in device memory that adapters need at once."""

    min_replicas_of_adapters: int = 0
    """The largest `minReplicas` of an adapter."""

    serving: int = 0
    starting: int = 0
    """Runners wanted so far, including those that are starting."""

    runner_size: RunnerSize | None = None
    """None: no runner has reported its size yet."""


@dataclass(frozen=True, slots=True)
class RequiredReplicas:
    replicas: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScaleDownBlock:
    """Why the pool must not shrink now."""

    code: str
    reason: str
    stale: bool = False
    """Because some input is missing."""


@dataclass(frozen=True, slots=True)
class DesiredReplicas:
    replicas: int
    code: str
    reason: str
    stale: bool = False


def required_replicas(load: PoolLoad, *, queue_patience: float) -> RequiredReplicas:
    """The runners that the load requires. A request may wait in the queue for `queue_patience` seconds."""
    return max(_requirements(load, queue_patience), key=lambda need: need.replicas)


def _requirements(load: PoolLoad, queue_patience: float) -> Sequence[RequiredReplicas]:
    requirements = [RequiredReplicas(0, "Idle", "no request runs or waits")]
    runner_size = load.runner_size
    if load.requests:
        runners, detail = 1, "no runner has reported its size yet"
        if runner_size is not None:
            fits = runner_size.fits(load.pages / load.requests)
            runners, detail = ceil(load.requests / fits), f"a runner takes {counted(fits, 'such request')} at 80% load"
        state = "runs or waits" if load.requests == 1 else "run or wait"
        requirements.append(
            RequiredReplicas(runners, "Requests", f"{counted(load.requests, 'request')} {state}; {detail}")
        )
    if load.adapters:
        slots = max(1, runner_size.adapter_slots) if runner_size is not None else load.adapters
        runners = max(ceil(load.adapters / slots), load.min_replicas_of_adapters)
        why = f"adapters need {counted(load.adapters, 'slot')}; a runner has {slots}"
        if runners > ceil(load.adapters / slots):
            why = f"an adapter must be resident on {counted(load.min_replicas_of_adapters, 'runner')}"
        requirements.append(RequiredReplicas(runners, "Adapters", why))
    if load.waiting and load.waited > queue_patience and load.serving and load.starting <= load.serving:
        why = f"the oldest of {counted(load.waiting, 'waiting request')} has waited {load.waited:.0f} s"
        requirements.append(RequiredReplicas(load.serving + 1, "Queue", why))
    if load.held:
        requirements.append(
            RequiredReplicas(
                1, "HeldRequests", f"gateways hold {counted(load.held, 'request')} until there is a runner"
            )
        )
    return requirements


class ReplicaStabilizer:
    """From the required to the advised number: grows soon, shrinks late, within the bounds."""

    def __init__(self, replicas: int, now: float, *, window: float = 30.0) -> None:
        self.replicas = replicas
        """The last advice."""
        self._window = window
        self._advised: deque[tuple[float, int]] = deque([(now, replicas)])
        """When each number was advised; the first entry covers the beginning of the window."""
        self._needed: deque[tuple[float, int]] = deque([(now, replicas)])
        """What was required and when, without entries that a later, larger one hides: the first is the largest."""

    def advise(
        self, need: RequiredReplicas, bounds: ReplicaBounds, now: float, block: ScaleDownBlock | None = None
    ) -> DesiredReplicas:
        """`now` must never go back."""
        self._record(max(need.replicas, self.replicas) if block is not None else need.replicas, bounds, now)
        while len(self._advised) > 1 and now - self._advised[1][0] >= self._window:
            self._advised.popleft()
        stabilized = self._grow(need.replicas) if need.replicas > self.replicas else self._shrink()
        advised = bounds.apply(stabilized)
        if advised != self.replicas:
            self.replicas = advised
            self._advised.append((now, advised))
        return DesiredReplicas(
            advised, *_explain(need, bounds, stabilized, advised, block), stale=block is not None and block.stale
        )

    def _record(self, needed: int, bounds: ReplicaBounds, now: float) -> None:
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


def _explain(
    need: RequiredReplicas, bounds: ReplicaBounds, stabilized: int, advised: int, block: ScaleDownBlock | None
) -> tuple[str, str]:
    if need.replicas > advised:
        runners = counted(need.replicas, "runner")
        if bounds.maximum is not None and advised >= bounds.maximum:
            return "AtMaximum", f"{need.reason}: that needs {runners}, and maxReplicas is {bounds.maximum}"
        return "Pacing", f"{need.reason}: that needs {runners}; their number at most doubles within half a minute"
    if block is not None and block.stale:
        return block.code, block.reason
    if need.replicas == advised:
        return need.code, need.reason
    if advised > stabilized or (advised == bounds.minimum and block is None):
        return "AtMinimum", f"{need.reason}; minReplicas is {bounds.minimum}"
    if block is not None:
        return block.code, block.reason
    return "Stabilizing", (
        f"{counted(need.replicas, 'runner')} would be enough; the others leave when that has been so for "
        f"{bounds.stabilization:g} s"
    )
