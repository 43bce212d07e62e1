"""Loads of adapters for requests that wait, before these are placed.

A request that waits behind full batches may need an adapter that is on no runner's device. While requests wait, the
next ones are looked at now and then, not with each decision. If no runner that may serve one of them has its adapter on
its device, or soon will, one is ordered to load it: the one that is reserved for it, else one with an empty slot for
it, and of several the one to which fewest adapters are on their way.

A runner loads what no request there waits for only into an empty slot and empty pages, so such a load evicts nothing.
It is evicted itself as soon as a request needs its room. Without an empty slot, the adapter comes to the runner's disk.
So one that is not used after all, because its request was placed elsewhere, costs the load, and a slot that was empty.
"""

from heapq import merge
from itertools import chain, islice, zip_longest
from math import inf

from motet.domain import Digest
from motet_scheduler.policy.adapters.adapter import DigestSource
from motet_scheduler.policy.happenings import Happening
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import GroupName

MAX_AHEAD = 16
"""Requests of a group, the next ones to be placed, whose adapters are loaded."""

MAX_LOADS_AHEAD = 4
"""Of a runner: while as many adapters are on their way to it, none is loaded ahead."""

AGAIN_AFTER = 3.0
"""In times of `load_retry`: what was loaded ahead, and has left since, is not loaded ahead sooner."""

MAX_LINES = 64
"""Of a class: requests that wait for the same runners are a line, and those of more lines are not looked at."""

MAX_COMPARED = 2048
"""Runners at one look, before another request is looked at for which they have to be compared again."""

MANY_RUNNERS = 256
"""Groups with more are looked at less often, so that this takes no larger part of the time."""


class Prefetches:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._next_at = state.now
        self._ordered: dict[tuple[GroupName, Digest], float] = {}
        """When adapters were loaded ahead, the last ones last. Those of which that is long ago are forgotten."""

    def next_due(self) -> float:
        waits = any(len(queue) for queue in self._state.queues.values())
        return self._next_at if waits and self._state.may_place else inf

    def tick(self) -> None:
        state = self._state
        if state.now < self._next_at:
            return
        self._forget_old()
        runners = 0
        for group, queue in state.queues.items():
            if len(queue):
                runners += len(state.runners_of(group))
                self._look(queue)
        self._next_at = state.now + state.config.look_again * (1 + runners / MANY_RUNNERS)

    def _forget_old(self) -> None:
        since = self._state.now - AGAIN_AFTER * self._state.config.load_retry
        for key, at in list(self._ordered.items()):
            if at > since:
                return
            del self._ordered[key]

    def _look(self, queue: Queue) -> None:
        compared = 0
        for request in next_requests(queue, MAX_AHEAD):
            source = self._source_of(request)
            if source is None or compared > MAX_COMPARED:
                continue
            compared += len(self._state.runners_of(request.group))
            if (runner := self._runner_for(request, source, queue)) is not None:
                self._load(request, source, runner)

    def _source_of(self, request: Request) -> DigestSource | None:
        """None: it needs no load, or its adapter has none."""
        return self._state.adapters.source_of(request.digest, request.adapter) if self._is_cold(request) else None

    def _is_cold(self, request: Request) -> bool:
        """Whether no runner that may serve it has its adapter, or soon will."""
        digest, group = request.digest, request.group
        if (group, digest) in self._ordered:
            return False
        having = (one for one in self._state.having(digest, group) if one.takes_work)
        return not any(self._state.runners_for(request, [one]) for one in having)

    def _runner_for(self, request: Request, source: DigestSource, queue: Queue) -> Runner | None:
        state, config = self._state, self._state.config
        able = [one for one in state.runners_for(request) if takes_loads(one)]
        if len(able) > 1 and not state.limits.more_than_one(request.adapter):
            return None  # it would have to wait for that one, and others may have room sooner
        left_to_others, own = queue.reserved_from(request), queue.reserved

        def rank(one: Runner) -> tuple[bool, bool, int, int, str]:
            return (
                own.get(one) is not request,
                not has_empty_slot(one),
                len(one.adapters.loading),
                len(one.adapters.tiers),
                one.instance,
            )

        for runner in sorted(able, key=rank):
            if runner in left_to_others or request.avoids(runner.instance, state.now):
                continue
            if not runner.adapters.may_be_retried(request.digest, source.ref, state.now):
                continue
            if not request.requirement_on(runner.capacity, config, runner.adapter_pages(request.digest)).never:
                return runner
        return None

    def _load(self, request: Request, source: DigestSource, runner: Runner) -> None:
        state, digest = self._state, request.digest
        if digest in runner.adapters.tiers and not has_empty_slot(runner):
            return  # it is on its disk, from where it comes soon when a request waits for it
        self._ordered[request.group, digest] = state.now
        state.emit(state.loads.load(runner, digest, source, state.now))
        state.note_event(request, Happening.LOADS_AHEAD, runner.instance)


def next_requests(queue: Queue, most: int) -> list[Request]:
    """About the next ones to be placed: by class, the first of each flow, then the second ones. However many wait."""
    found: list[Request] = []
    for class_queue in queue.class_queues.values():
        waiting = class_queue.waiting
        names = dict.fromkeys(chain(queue.bases, islice(waiting, MAX_LINES)))
        lines = (waiting[name].heads for name in names if name in waiting)
        heads = [head[3] for head in islice(merge(*lines), most)]
        flows = [one.share.flows[one.flow][:most] for one in heads if one.share is not None]
        by_turn = (aged[3] for turn in zip_longest(*flows) for aged in turn if aged is not None)
        found += islice(by_turn, most - len(found))
    return found


def takes_loads(runner: Runner) -> bool:
    """Whether it may get another load, for a request that it may get soon."""
    return (
        runner.takes_work and not (runner.emptied or runner.parked) and len(runner.adapters.loading) < MAX_LOADS_AHEAD
    )


def has_empty_slot(runner: Runner) -> bool:
    return len(runner.adapters.having) < runner.capacity.adapter_slots
