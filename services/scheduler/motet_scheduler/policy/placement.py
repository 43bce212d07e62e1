"""Places queued requests: which are tried, in which order, and what is recorded. Also reports their positions."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from math import inf

from motet.domain import BASE
from motet.errors import ContextLengthExceeded
from motet.runner_info import Failure, Tier
from motet_scheduler.policy import effects
from motet_scheduler.policy.adapters.adapter import REVISION_REPLACED
from motet_scheduler.policy.adapters.cold_waits import ColdWaits
from motet_scheduler.policy.happenings import Happening
from motet_scheduler.policy.queue import Outcome, Queue
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.requests import Placement, Request, SomeOf, WaitsFor
from motet_scheduler.policy.runner_choice import Chosen, NeverFits, choose, nearest, never_fits
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import Promise
from motet_scheduler.policy.waiting_reasons import PASSING, explain

PLACED_AT_ONCE = 12
"""In one event, of all groups: when a scheduler has started, or runners get more pages, thousands may fit at once.
Placing all of them would delay everything else, so `TryMore` goes on."""

SEARCHED_AT_ONCE = 48
"""Runners, again for each placement: one event looks for those that fit on this number, and then it places no more.
With tens of thousands of heads one look takes up to 0.1 ms."""

EXACT_POSITIONS = 100
"""Positions up to this one are reported when they change, later ones when they change by a tenth."""

LOOKED_AT_ONCE = 300
"""At how many positions a tick looks: a round may take several. What finds out who is the first counts as well."""

EXPLAINED = 20
"""Up to this position, each report finds out anew why the request waits."""


class Placer:
    def __init__(self, state: SchedulerState, lifecycle: RequestLifecycle, cold_waits: ColdWaits) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._cold_waits = cold_waits
        self._may_place = PLACED_AT_ONCE
        """How many more in this event."""
        self._may_search = SEARCHED_AT_ONCE
        """On how many more runners in this event."""

    def place_all(self) -> None:
        for queue in self._state.queues.values():
            self.place_group(queue)
        self._may_place, self._may_search = PLACED_AT_ONCE, SEARCHED_AT_ONCE  # in the next event

    def place_group(self, queue: Queue) -> None:
        """Place some of the requests that fit, and refuse few that no runner could ever hold. There may be thousands of
        both, and `TryMore` goes on."""
        if queue.limit_changes.under_way:
            queue.limit_changes.go_on()
        may_refuse = self._state.config.tenants_examined if self._state.may_place and queue.changed else 0
        while may_refuse and self._may_go_on:
            may_refuse = self._scan(queue, may_refuse)

    @property
    def _may_go_on(self) -> bool:
        return self._may_place > 0 and self._may_search > 0

    def _scan(self, queue: Queue, may_refuse: int) -> int:
        """Try the requests that may fit now, and refuse at most `may_refuse`. Returns how many the scan may refuse that
        must follow at once: a runner must be reserved for another request first, or something was placed and untried
        ones are left. 0: none must follow."""
        self._reserve(queue)
        if not len(queue):  # mostly: each report and each end of a sequence asks for a scan
            queue.look_at_headroom()
            queue.scanned()
            return 0
        placed = False
        for outcome in queue.try_in_order(self._state.config, partial(self._place, queue)):
            self._may_search -= queue.take_looked()
            if outcome is Outcome.PLACED:
                placed = True
                self._may_place -= 1
            else:
                may_refuse -= 1  # this bounds how often runners are reserved again, too
            if outcome is Outcome.REPLACED or not (may_refuse and self._may_go_on and queue.overdue_are_considered):
                return may_refuse
        self._may_search -= queue.take_looked()
        if queue.untried:
            return may_refuse if placed else 0  # those behind them still have to be tried on the runners with room
        queue.scanned()
        return may_refuse if queue.last_places_have_others else 0  # `TryMore` goes on behind those looked at

    def _reserve(self, queue: Queue) -> None:
        """Reserve runners for overdue requests that room alone keeps back: of those that wait for the same, for one."""
        overdue = queue.overdue()
        reserved: dict[Runner, Request] = {}
        for runners_of, first in overdue.items():
            alike = queue.overdue_alike(runners_of, self._state.config.tenants_examined)
            for request in chain((first,), islice(alike, 1, None)):  # mostly the first has one
                runner = self._nearest(request, queue, reserved)
                if runner is not None:
                    reserved[runner] = request
                    break
        queue.reserve(overdue, reserved)
        queue.look_at_idle_pages(self._state.now)

    def _nearest(self, request: Request, queue: Queue, taken: Collection[Runner]) -> Runner | None:
        """The runner where an overdue request lacks least. In the next scan that may be another one."""
        state = self._state
        before = next((runner for runner, overdue in queue.reserved.items() if overdue is request), None)
        able: Sequence[Runner] = ()
        if before is not None and before.takes_work and not request.avoids(before.instance, state.now):
            able = state.runners_for(request, [*{before: None} | queue.freed])  # elsewhere it lacks more than there
        if before not in able or before in taken:
            able = state.runners_for(request)
        if taken:
            able = [runner for runner in able if runner not in taken]
        held = before if before is not None and not before.slot_for(request.digest) else None
        return nearest(request, able, state.config, state.now, held=held)

    def _place(self, queue: Queue, request: Request, runners: Sequence[Runner]) -> Outcome | None:
        """Place a request on one of these runners, or refuse it. None: it still waits."""
        state = self._state
        if request.forgotten:
            self._lifecycle.end(request)
            return Outcome.REFUSED
        near, kept = state.families.near(request), queue.kept_from(request)
        needs = request.page_needs if runners else state.page_needs(request)
        among: Sequence[Runner] = runners or queue.with_room(needs, kept)
        found: Chosen | NeverFits | None = None
        if among:
            able, reserved = state.runners_for(request, among), queue.reserved_from(request)
            found = choose(request, able, state.config, state.now, near=near, reserved=reserved, kept=kept)
        if isinstance(found, Chosen):
            if self._cannot_be_loaded(request, found.runner):
                queue.note_replaced(request)
                return Outcome.REPLACED
            queue.look_at_idle_pages(state.now)
            queue.remove_placed(request, found.runner, near=found.runner.instance == near)
            queue.departures.note(state.now)
            self.assign(request, found.runner, found.promise, found.because or "")
            return Outcome.PLACED
        if not runners and len(needs) < len(state.one_of_each_capacity(request.group)):
            found = never_fits(request, state.each_for(request), state.config)
        else:
            found = None  # none of these, but another could hold it
        if isinstance(found, NeverFits) and not runners and state.may_refuse(request.group):
            self._refuse(request, found)
            return Outcome.REFUSED
        if request.unable is not None and not runners and self._lifecycle.is_unable(request):
            self._lifecycle.refuse(request, request.unable)
            return Outcome.REFUSED
        if not runners and (refused := state.refused_by_all(request)) is not None:
            self._lifecycle.refuse(request, refused)
            return Outcome.REFUSED
        limited = state.limited_to(request)
        if limited is not None and not limited and state.may_refuse(request.group):
            self._lifecycle.refuse(request, Failure.of(REVISION_REPLACED))
            return Outcome.REFUSED
        # Of a replaced revision, those on disk count too, and what waits for an adapter is not tried there.
        runners_of: str = request.base if limited is None or request.replaced else request.digest
        without = state.refused_for_good(request)
        if without or len(needs) < len(state.one_of_each_capacity(request.group)):
            waits_for: WaitsFor = SomeOf(runners_of, frozenset(needs), frozenset(without))
        else:
            waits_for = runners_of
        if request.waits_for != waits_for:
            queue.wait_for(request, waits_for, needs if not runners else state.page_needs(request))
        if request.why is None:
            explain(state, request)
        return None

    def _cannot_be_loaded(self, request: Request, runner: Runner) -> bool:
        """Whether it wants a revision that is no longer served: it was enqueued before that was known."""
        state = self._state
        if request.digest == BASE or request.digest in runner.adapters.tiers or not state.catalog_known:
            return False
        return state.adapters.is_replaced(request.digest, request.adapter, request.group)

    def refuse_too_large(self, request: Request) -> bool:
        """Refuse an untried request that no runner could ever hold. Behind an older one of its tenant it would be
        tried much later, and many such requests would then delay all others."""
        state = self._state
        if request.waits_for is not None:
            return False
        outcome = never_fits(request, state.each_for(request), state.config)
        if outcome is None or not state.may_refuse(request.group):
            return False
        self._refuse(request, outcome)
        return True

    def _refuse(self, request: Request, outcome: NeverFits) -> None:
        self._lifecycle.refuse(request, Failure.of(ContextLengthExceeded(outcome.why)))

    def assign(self, request: Request, runner: Runner, promise: Promise, because: object = "") -> None:
        """`because`: for its timeline."""
        state = self._state
        source = state.adapters.source_of(request.digest, request.adapter)
        if source is not None and runner.adapters.tier_of(request.digest) is not Tier.DEVICE:
            promise = Promise(promise.pages, promise.tokens, source.bytes)
            if not runner.adapters.is_awaited(request.digest, source.ref, state.now, state.config.load_retry):
                state.emit(state.loads.load(runner, request.digest, source, state.now))
            self._cold_waits.placed(request, source)
        runner.emptied = False  # if it was, the others have no room, and the load has returned
        request.epoch += 1
        request.base = request.base or runner.base.digest
        request.placement = Placement(runner.instance, runner.identity.incarnation, request.epoch, state.now)
        state.of_gateways[request.gateway].placed(request)
        state.families.placed(request, runner.instance)
        request.why, request.waits_for_what, request.reported_position = None, "", (0, None)
        if request.draw is not None:
            request.draw.was_placed()
        self._lifecycle.placed(request.id, request.epoch)
        tokens = _to_compute(request, runner) if runner.limits is not None else 0  # else nobody asks
        runner.record_promise((request.id, request.epoch), promise.pages, request.digest, state.now, tokens=tokens)
        state.queue(request.group).promised(runner, request.digest)
        state.emit(
            effects.ExpectRequest(runner.instance, request.id, request.epoch, promise, request.digest, request.gateway)
        )
        state.emit(
            effects.SendPlaced(
                gateway=request.gateway,
                request=request.id,
                tenant=request.tenant,
                epoch=request.epoch,
                instance=runner.instance,
                incarnation=runner.identity.incarnation,
                address=runner.address,
                promise=promise,
                base=runner.base.digest,
                moved_reason=request.moved_reason,
                engine_hung=request.engine_hung,
                accounts=state.quotas.told(request, state.now) if request.draw is not None else (),
                weight=state.weights.of(request.group, request.tenant),
                claims=request.draw.used_up if request.draw is not None else (),
            )
        )
        request.moved_reason, request.engine_hung = "", False
        state.note_event(request, Happening.PLACED, runner.instance, request.epoch, promise.pages, because)


def _to_compute(request: Request, runner: Runner) -> int:
    """Tokens, before the next one of its answer."""
    cached = runner.cached_tokens(request.prefix_hints)
    return request.prompt_tokens + request.delivered - min(cached, request.prompt_tokens)


class Positions:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._round_at = state.now + state.config.positions_every
        """When the next round of reports of all positions begins."""
        self._next_at = self._round_at
        """When the round goes on, or the next one begins."""
        self.left: Iterator[tuple[int, Request | None]] = iter(())
        """Of this round, as the queues were when it came to them."""

    def tick(self) -> None:
        now, config = self._state.now, self._state.config
        if now < self._next_at:
            return
        looked = self._look(LOOKED_AT_ONCE)
        if looked < LOOKED_AT_ONCE and now >= self._round_at:
            self._round_at = now + config.positions_every
            queues = map(Queue.in_order, self._state.queues.values())
            lines: list[Iterable[Request | None]] = [*queues, *self._state.quotas.lines]
            self.left = chain.from_iterable(map(self._places, lines))
            looked += self._look(LOOKED_AT_ONCE - looked)
        self._next_at = now + config.look_again if looked == LOOKED_AT_ONCE else self._round_at
        if looked == LOOKED_AT_ONCE:
            self._state.many_told_at = now

    def next_due(self) -> float:
        waiting = self._state.quotas.waiting or any(len(queue) for queue in self._state.queues.values())
        return self._next_at if waiting else inf

    def _look(self, most: int) -> int:
        looked = 0
        for position, request in islice(self.left, most):
            looked += 1
            if request is not None:
                self.report(request, position)
        return looked

    def _places(self, line: Iterable[Request | None]) -> Iterator[tuple[int, Request | None]]:
        """Those of a line that still wait, with their positions. None for one that has left: it counts no more."""
        position = 0
        for request in line:
            waits = request is not None and request.waiting and self._state.requests.get(request.id) is request
            position += waits
            yield position, request if waits else None

    def report(self, request: Request, position: int) -> None:
        if request.forgotten:
            return
        previous, told = request.reported_position
        stale = position <= EXPLAINED or (position <= EXACT_POSITIONS and request.why in PASSING)
        if (request.why is None or stale) and not request.held:
            explain(self._state, request)
        moved = abs(position - previous) > (0 if position <= EXACT_POSITIONS else previous // 10)
        if moved or (request.why != told and position <= EXACT_POSITIONS):
            request.reported_position = (position, request.why)
            admitted = request.draw is None or request.draw.charged
            why = request.waiting_reason
            self._state.emit(effects.SendPosition(request.gateway, request.id, position, why, admitted))
