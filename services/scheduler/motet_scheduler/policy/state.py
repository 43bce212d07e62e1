"""What the scheduler knows, and what is to be done about the event at hand: shared by all who decide.

Each part of the policy changes its own share of it and adds its effects; nobody but `Scheduler.handle` begins or ends a
decision.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from motet.domain import Digest, InstanceName, RequestId
from motet_scheduler.policy.adapters import Adapters
from motet_scheduler.policy.effects import Effect
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.requests import Placement, Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.timeline import Timelines
from motet_scheduler.policy.values import BaseModel, Catalog, GroupName, PoolSpec, SchedulerConfig


class StartupWait:
    """Just after a start: placing is safe once the runners that were there before have said what they hold."""

    def __init__(self, awaited: Iterable[InstanceName], until: float) -> None:
        self._awaited = set(awaited)
        self._until: float | None = until if self._awaited else None

    @property
    def over(self) -> bool:
        return self._until is None

    def runner_attached(self, instance: InstanceName) -> None:
        self._awaited.discard(instance)
        if not self._awaited:
            self._until = None

    def expires(self, now: float) -> bool:
        """Whether the wait ends now, with some of them still missing."""
        if self._until is None or now < self._until:
            return False
        self._awaited.clear()
        self._until = None
        return True


class SchedulerState:
    def __init__(self, policy: SchedulerConfig, now: float, settling: StartupWait) -> None:
        self.policy = policy
        self.now = now
        """Of the event at hand."""
        self.effects: list[Effect] = []
        """Of the event at hand."""
        self.requests: dict[RequestId, Request] = {}
        self.adapter_uses: Counter[Digest] = Counter()
        """Requests that name an adapter."""
        self.queues: dict[GroupName, Queue] = {}
        self.runners: dict[InstanceName, Runner] = {}
        self.by_group: dict[GroupName, list[Runner]] = {}
        self.gateways: set[str] = set()
        self.held: dict[str, dict[GroupName, int]] = {}
        """By gateway: requests that it cannot even read before its model has a runner."""
        self.pools: dict[str, PoolSpec] = {}
        self.adapters = Adapters(policy)
        self.bases: dict[GroupName, tuple[BaseModel, int]] = {}
        """What each group's runners hold, and how long its context is."""
        self.catalog: Catalog | None = None
        """The last one published."""
        self.catalog_changed = True
        self.catalog_known = False
        """The operator has said what should exist."""
        self.supervised = False
        self.settling = settling
        self.timelines = Timelines(policy.timelines)

    @property
    def settled(self) -> bool:
        return self.settling.over

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def note_event(self, request: RequestId, event: str, detail: str = "") -> None:
        self.timelines.note(request, self.now, event, detail)

    def queue(self, group: GroupName) -> Queue:
        queue = self.queues.get(group)
        if queue is None:
            queue = self.queues[group] = Queue(self.policy.max_passed_over)
        return queue

    def runners_of(self, group: GroupName) -> Sequence[Runner]:
        return self.by_group.get(group, ())

    def current(self, instance: InstanceName, incarnation: str) -> Runner | None:
        runner = self.runners.get(instance)
        return runner if runner is not None and runner.identity.incarnation == incarnation else None

    def runner_of(self, placement: Placement) -> Runner | None:
        return self.current(placement.instance, placement.incarnation)

    def digests_in_use(self) -> set[Digest]:
        return set(self.adapter_uses).union(*(runner.adapters_in_use() for runner in self.runners.values()))
