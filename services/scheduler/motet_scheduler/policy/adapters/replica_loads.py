"""Loads of adapters that more requests use than one runner takes: replicas follow demand, from `minReplicas` up to
`maxReplicas`.

By the rule of `scaling_rule`, some places of a runner are left when it has as many requests as it takes at its target.
An adapter that more run with, or wait for, is wanted on another runner before the first one is full. It is loaded there
into an empty slot, on the runner that the next request would get. Such replicas are not pinned: they leave a device
like any adapter that no request uses, and none leaves for them. Those of `minReplicas` are pinned, whatever the demand
(`adapter_loads.py`).
"""

from collections.abc import Iterable
from math import inf

from motet.domain import Digest
from motet_scheduler.policy.adapters.adapter import Adapter
from motet_scheduler.policy.adapters.prefetches import has_empty_slot, takes_loads
from motet_scheduler.policy.adapters.replica_demand import ReplicaDemand, wanted_replicas
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.scaling_rule import RunnerSize
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import GroupName

MAX_ORDERED = 8
"""Adapters of a group that get one more replica at one look."""

MAX_WANTED = 64
"""Adapters of a group that are wanted on several runners."""

MAX_ADAPTERS_TRIED = 16
"""At one look, of those with the same bytes."""

HOLDS_FOR = 4.0
"""In times of `growth_window`: until as many replicas are wanted as were needed since."""


class ReplicaLoads:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._next_at = state.now
        self._demand: dict[GroupName, dict[Digest, ReplicaDemand]] = {}
        """Of those that are wanted on more than one runner."""

    def next_due(self) -> float:
        return self._next_at if self._state.may_place and (self._state.adapter_uses or self._demand) else inf

    def tick(self) -> None:
        state = self._state
        if not state.may_place or state.now < self._next_at:
            return
        self._next_at = state.now + state.config.capacity_every
        before, self._demand = self._demand, {}
        for group in list(state.by_group):
            if demand := self._look(group, before.get(group, {})):
                self._demand[group] = demand

    def _look(self, group: GroupName, before: dict[Digest, ReplicaDemand]) -> dict[Digest, ReplicaDemand]:
        """`before`: what was wanted on more than one runner at the last look. → what is now"""
        state, runners = self._state, self._state.runners_of(group)
        fits, ordered = size_of(runners), 0
        now: dict[Digest, ReplicaDemand] = {}
        many = [digest for digest, uses in state.adapter_uses.items() if uses > fits] if len(runners) > 1 else []
        for digest in dict.fromkeys((*before, *many)):
            if len(now) == MAX_WANTED:
                break
            demand = before.get(digest) or ReplicaDemand(HOLDS_FOR * state.config.growth_window)
            if (wanted := demand.note(self._needed(group, digest, fits), state.now)) <= 1:
                continue
            now[digest] = demand
            having = [one for one in state.having(digest, group) if one.takes_work]
            if len(having) < wanted and ordered < MAX_ORDERED:
                ordered += self._load(group, digest, runners, demand)
        return now

    def _needed(self, group: GroupName, digest: Digest, fits: int) -> int:
        state = self._state
        running = sum(one.using(digest) for one in state.having(digest, group))
        waiting = state.queue(group).adapters[digest]
        requests = min(running + waiting, state.adapter_uses[digest])  # a runner may invent some
        specs = [one.spec for one in state.adapters.that_serve(digest) if one.spec.group == group]
        most = max((one.max_replicas or len(state.runners_of(group)) for one in specs), default=1)
        return wanted_replicas(requests, fits, maximum=most)

    def _load(self, group: GroupName, digest: Digest, runners: Iterable[Runner], demand: ReplicaDemand) -> bool:
        """On one more runner. False: on none. Several adapters may have the same bytes, and the source of one may be
        gone, so each has its turn."""
        state = self._state
        adapters = [one for one in state.adapters.that_serve(digest) if one.spec.group == group]
        for _ in adapters[:MAX_ADAPTERS_TRIED]:
            demand.turn = (demand.turn + 1) % len(adapters)
            adapter = adapters[demand.turn]
            runner = self._runner_for(adapter, digest, runners)
            source = state.adapters.source_of(digest, str(adapter.spec.ref.object))
            if runner is not None and source is not None:
                state.emit(state.loads.load(runner, digest, source, state.now))
                return True
        return False

    def _runner_for(self, adapter: Adapter, digest: Digest, runners: Iterable[Runner]) -> Runner | None:
        """The fullest with room: there the next request goes that finds none where the adapter is."""
        if (serving := self._state.adapters.usable(adapter)) is None:
            return None
        ref = adapter.spec.ref
        able = [
            one
            for one in runners
            if takes_loads(one)
            and has_empty_slot(one)
            and digest not in one.adapters.having
            and one.serves(serving.key.base)
            and one.may_serve(digest, str(ref.object))
            and one.adapters.may_be_retried(digest, ref, self._state.now)
        ]
        return max(
            able,
            key=lambda one: (one.has_capacity, one.sequences, -len(one.adapters.loading), one.instance),
            default=None,
        )


def size_of(runners: Iterable[Runner]) -> int:
    """How many usual requests one of these takes at its target."""
    places = pages = sequences = promised = count = 0
    for one in runners:
        count += 1
        places, pages = places + one.max_sequences, pages + one.ledger.limit
        sequences, promised = sequences + one.sequences, promised + one.ledger.promised
    if not count:
        return 1
    size = RunnerSize(pages=pages // count, sequences=places // count, adapter_slots=0)
    return size.fits(promised / sequences if sequences else 0.0)
