"""How long requests wait for an adapter that is on no runner's device. Then they are refused, with the time after which
another attempt may succeed.

The wait begins when a request is placed, and its adapter loads for it: before, it waits for room, as all others do. It
goes on if that runner declines, and ends when any runner of the group has the adapter on its device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from motet.domain import Digest, RequestId
from motet.errors import AdapterLoading
from motet.runner_info import Failure, Tier
from motet_scheduler.policy.adapters.adapter import DigestSource
from motet_scheduler.policy.deadlines import Deadlines
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import USUAL_COLD_WAIT, GroupName, PoolSpec

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
UNKNOWN_SECONDS = 1.0
"""After which a request is looked at again whose runner is not connected."""

LOOKED_AT_ONCE = 32
"""In one event: thousands may wait for adapters that do not come, so `TryMore` goes on."""


@dataclass(slots=True, eq=False)
class ColdWait:
    """It names its request: one that has ended needs no memory until this wait is over."""

    request: RequestId
    sequence: int
    """The request's: its id may come again."""
    group: GroupName
    source: DigestSource
    digest: Digest
    seconds: float
    """How long it may wait."""


class ColdWaits:
    def __init__(self, state: SchedulerState, lifecycle: RequestLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._of_digest: dict[tuple[GroupName, Digest], dict[RequestId, ColdWait]] = {}
        self._due = Deadlines(self._waits)
        self._pools: Mapping[str, PoolSpec] = {}
        self._longest_of: dict[GroupName, float] = {}
        """By these pools."""

    def placed(self, request: Request, source: DigestSource) -> None:
        """A request has a place on a runner that does not have its adapter on its device."""
        if request.delivered:
            return  # its client reads already, and is not sent away
        of_digest = self._of_digest.setdefault((request.group, request.digest), {})
        before = of_digest.get(request.id)
        if (before is None or before.sequence != request.sequence) and not self._is_on_a_device(request):
            seconds = self._longest(request.group)
            wait = ColdWait(request.id, request.sequence, request.group, source, request.digest, seconds)
            of_digest[request.id] = wait
            self._due.add(self._state.now + seconds, wait)

    def _longest(self, group: GroupName) -> float:
        if self._pools is not self._state.pools:  # each catalog has others
            self._pools = self._state.pools
            self._longest_of = {pool.group: pool.cold_wait for pool in reversed(self._pools.values())}
        return self._longest_of.get(group, USUAL_COLD_WAIT)

    def end_of_loaded(self) -> None:
        """Adapters have come to a device: nobody waits for that any more."""
        for loaded in self._state.residency.take_loaded():
            self._of_digest.pop(loaded, None)

    def next_due(self) -> float:
        return self._due.next_due()

    @property
    def more_to_end(self) -> bool:
        return self._due.next_due() <= self._state.now

    def tick(self) -> None:
        self._due.sweep(len(self._state.requests))
        self.end_some()

    def end_some(self) -> None:
        """Of those that have lasted too long."""
        for wait in self._due.expired(self._state.now, LOOKED_AT_ONCE):
            request = self._state.requests[wait.request]
            if self._may_run_unseen(request):
                self._due.add(self._state.now + UNKNOWN_SECONDS, wait)
                continue
            self._end(wait)
            if not request.delivered:
                self._refuse(wait, request)

    def _waits(self, _at: float, wait: ColdWait) -> bool:
        """False if its adapter has come, or its request has ended."""
        if self._of_digest.get((wait.group, wait.digest), {}).get(wait.request) is not wait:
            return False
        request = self._state.requests.get(wait.request)
        if request is not None and request.sequence == wait.sequence and not request.forgotten:
            return True
        self._end(wait)
        return False

    def _end(self, wait: ColdWait) -> None:
        key = wait.group, wait.digest
        of_digest = self._of_digest[key]
        del of_digest[wait.request]
        if not of_digest:
            del self._of_digest[key]

    def _may_run_unseen(self, request: Request) -> bool:
        """Its runner is not connected: it may have loaded the adapter, and its client may read already."""
        placement = request.placement
        runner = self._state.runners.get(placement.instance) if placement is not None else None
        return runner is not None and not runner.attached

    def _refuse(self, wait: ColdWait, request: Request) -> None:
        if request.placement is not None:
            self._lifecycle.cancel_at_runner(request.placement, request.id, "its adapter loads for too long")
        again = self._retry_after(wait)
        text = (
            f"The adapter was not loaded after {wait.seconds:.3g} seconds, which is the longest wait that the pool "
            f"allows (admission.coldWaitSeconds). It goes on loading: send the request again in {again:.0f} seconds."
        )
        self._lifecycle.refuse(request, Failure.of(AdapterLoading(text, retry_after=again)))

    def _retry_after(self, wait: ColdWait) -> float:
        """When the bytes that lack will have come, at the rate at which bytes come now, or have come to the group last.
        Without a rate: after as long as it has waited."""
        having = [*self._state.having(wait.digest, wait.group)]
        fetches = [fetch for one in having if (fetch := one.adapters.fetches.get(wait.digest)) is not None]
        most = max(fetches, key=attrgetter("fetched"), default=None)
        rate = (most.rate if most is not None else 0.0) or self._state.residency.rates.get(wait.group, 0.0)
        fetched = most.fetched if most is not None else 0
        seconds = max(0, wait.source.bytes - fetched) / rate if rate and wait.source.bytes else wait.seconds
        return min(max(MIN_RETRY_SECONDS, seconds), MAX_RETRY_SECONDS)

    def _is_on_a_device(self, request: Request) -> bool:
        for instance, tier in self._state.table.tiers.get(request.digest, {}).items():
            runner = self._state.runners[instance]
            if tier is Tier.DEVICE and runner.attached and runner.group == request.group:
                return True
        return False
