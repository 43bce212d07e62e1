"""No request waits beside room: what a scheduler can place, it places within a second.

Room is looked for in two books. One is the scheduler's copy: what that has room for, is placed. The other is the
runner's own: a copy that stays full although its runner is empty would hide that. The copy may differ from it for a
while: by placements that have not come to the runner, and by requests whose end the scheduler hears of later.

A request may wait although it fits: while the scheduler waits for the runners of the one before it, behind an older
request of its flow, and where a runner is reserved for another one. Runners that are away, drain, are silent or hang
take no work, one with parked requests takes no other, and one that declined a request is left alone for a moment.
"""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Protocol

from motet.domain import BASE
from motet_runner.interface import State
from motet_runner.loaded_runner import LoadedRunner
from motet_scheduler.policy.headroom import NOTHING, KeptFrom, kept_on
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runner_choice import Chosen, choose
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.scheduler import Scheduler
from motet_simulator.trials.engine_process import EngineProcess
from motet_simulator.world import Process

MAX_WAIT_SECONDS = 1.0
MAX_LAG_SECONDS = 3.5
"""How long the scheduler's copy may differ from the runner's own book: two seconds until a placement that never came to
the runner, or one that the runner no longer lists, is given up, a second to the next report, and its way."""
MAX_SILENT_SECONDS = 2.0
"""A runner is silent whose last report is older."""

Fit = tuple[str, int, str, str]
"""A request, how often it was placed before, the runner if it is by the runner's own book, and by which book. By the
scheduler's copy, another runner with room does not let the time begin anew."""

BY_COPY, BY_OWN_BOOK = "", " by its own book"


class Parts(Protocol):
    @property
    def runner(self) -> LoadedRunner: ...

    @property
    def engine(self) -> EngineProcess: ...


class WaitingChecks:
    """Of the scheduler that leads."""

    def __init__(self) -> None:
        self._since: dict[Fit, float] = {}
        """By the clock of this loop. A scheduler that leads from now on has another one."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, scheduler: Scheduler, process: Process, runners: Mapping[str, Parts]) -> None:
        """`runners`: those that tell the truth about their books. Raises AssertionError."""
        now = process.loop.time()
        if process.loop is not self._loop:
            self._loop, self._since = process.loop, {}
        fits = {} if process.loop.pauses else dict(_fits(scheduler, runners, now))
        self._since = {fit: self._since.get(fit, now) for fit in fits}
        for fit, runner in fits.items():
            request, *_, book = fit
            most = MAX_WAIT_SECONDS + (MAX_LAG_SECONDS if book is BY_OWN_BOOK else 0)
            assert now - self._since[fit] <= most, f"{request} waits although there is room on {runner}{book}"


def _fits(scheduler: Scheduler, runners: Mapping[str, Parts], now: float) -> Iterator[tuple[Fit, str]]:
    """With the runner that has the room, or the account whose limits would let it in."""
    state = scheduler.state
    for queue in scheduler.queues.values() if scheduler.may_place else ():
        for request in queue.heads():
            if request.forgotten:
                continue
            able, reserved = state.runners_for(request), queue.reserved_from(request)
            kept = queue.kept_from(request)
            found = choose(request, able, scheduler.config, now, reserved=reserved, kept=kept)
            if isinstance(found, Chosen):
                yield (request.id, request.epoch, "", BY_COPY), found.runner.instance
            for known in able:
                if known in reserved or _keeps(known, kept) or not _takes_work(known, request, now):
                    continue  # it keeps its last places for others
                parts = runners.get(known.instance)
                if parts is not None and _has_room(parts, known, request, scheduler, now):
                    yield (request.id, request.epoch, known.instance, BY_OWN_BOOK), known.instance
    for account in state.quotas.lines if scheduler.may_place else ():
        request = next(iter(account))
        draw = request.draw
        assert draw is not None
        owing = draw.owing(now, patient=True) if not draw.charged else None
        if not request.forgotten and owing is None and draw.crowded() is None:
            yield (request.id, request.epoch, "", BY_COPY), f"{account.id}, for which it waits"


def _keeps(known: Runner, kept: KeptFrom) -> bool:
    """Whether it keeps anything from the request."""
    return known is not kept.own and kept.one_in > 0 and (kept.lacking or kept_on(known, kept.one_in) != NOTHING)


def _takes_work(known: Runner, request: Request, now: float) -> bool:
    silent = now - known.last_report_at > MAX_SILENT_SECONDS
    return known.takes_work and not silent and not request.avoids(known.instance, now)


def _has_room(parts: Parts, known: Runner, request: Request, scheduler: Scheduler, now: float) -> bool:
    """Whether the runner could take a request beside those that it has accepted, of which some may not be in its engine
    yet, and those that were placed there lately and may come."""
    engine, accepted = parts.engine.engine, list(parts.runner.accepted)
    if parts.runner.facts.identity.incarnation != known.identity.incarnation:
        return False
    if parts.engine.hangs:
        return False  # so nobody has been told what its book says now, and for a while nobody knows that it hangs
    sequences = list(engine.planner.sequences)
    if any(sequence.state is State.PARKED for sequence in sequences):
        return False
    there = {(one.request, one.epoch) for one in accepted}
    under_way = {
        key: entry for key, entry in known.entries.items() if key not in there and now - entry.since <= MAX_LAG_SECONDS
    }
    if len(accepted) + len(under_way) >= engine.max_sequences:
        return False
    computed = {sequence.new.adapter for sequence in sequences} - {BASE}
    used = {request.digest, *(one.adapter for one in accepted), *(entry.digest for entry in under_way.values())} - {
        BASE
    }
    if len(used) > engine.adapter_slots:
        return False
    need = request.requirement_on(known.capacity, scheduler.config, known.adapter_pages(request.digest))
    known_to_engine = {sequence.request for sequence in sequences}
    to_come = sum(one.promise.pages for one in accepted if one.request not in known_to_engine)
    to_come += sum(map(known.ledger.promise_of, under_way))
    ledger = engine.ledger
    of_adapters = ledger.capacity - ledger.kv_pages + len(used - computed) * engine.adapter_pages  # also those to come
    return not need.never and need.room + to_come <= ledger.limit_beside(of_adapters) - ledger.promised
