"""The order in which the waiting requests of one group are tried, and when each is tried again.

Class first, but a class that waits gets its floor of all placements (`class_turns.py`); then what the tenant was given
by its weight (`shares.py`), then age. A flow is the requests of one tenant and class for one adapter, or for the base
model alone: one that lacks an adapter slot, or pages, keeps none for another adapter. Each size of class Batch is a
flow of its own, too, where the larger ones count as older than they are (`Request.turn_at`), and so is a replaced
revision, which waits for other runners. A request never passes an older one of its own flow, unless it had a place
before (`Request.turn`). So only the first of each flow, its head, is tried.

Later requests of the same class and less urgent requests may pass a request that does not fit, at most
`max_passed_over` times. Then it is overdue, and one runner is reserved for it: there, nothing of its class and nothing
less urgent is placed before it, but for what takes nothing that it needs while it lacks an adapter slot alone
(`reserved_runners.py`). What has its turn before it and what is more urgent does not count, nor does what is placed
where it can't run. Of the overdue requests that wait for the same runners, one at a time has a reservation.

A request that was tried and fits nowhere knows whose runners it waits for: those of its base model, or, as long as
`maxReplicas` allows no more, those that have its adapter. When one of these has room again, the first that need no
more pages than are free there are looked at, of each base model and each adapter `FOUND_AT_ONCE` at most; where all
adapter slots are in use, only those for an adapter in one of them, or for none. So whoever waits for something else, or
for more, is in nobody's way. When other runners than before may take a request, it counts as untried (`try_again`). Of
untried ones that get no place, too, each scan tries `tenants_examined` at most, and nothing later or less urgent
before the others; `TryMore` goes on.

So nobody waits whom a runner that may take him has room for, once nothing is left for `TryMore` (`Queue.changed`). That
few are looked at does not break this: among those that are found for a runner nobody who does not fit there hides
another one who does (`Waiting.that_fit`), and where those given least are tried on any runner, the next scan goes on
behind the last of them (`ClassQueue.first_for`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum, auto
from itertools import chain, islice
from math import inf

from motet.domain import Digest, Tenant
from motet.runner_info import RequestClass
from motet_scheduler.policy.class_queue import ClassQueue
from motet_scheduler.policy.class_turns import ClassTurns
from motet_scheduler.policy.departures import Departures
from motet_scheduler.policy.headroom import NOTHING_KEPT, Headroom, KeptFrom
from motet_scheduler.policy.limit_changes import LimitChanges
from motet_scheduler.policy.order import Head, order_of
from motet_scheduler.policy.requests import CapacityId, PageNeed, Request, WaitsFor
from motet_scheduler.policy.reserved_runners import IdlePages, leaving_first, left_on
from motet_scheduler.policy.rooms import Room, Rooms
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.shares import CHARGED_BEFORE, Aged
from motet_scheduler.policy.token_costs import TokenCosts
from motet_scheduler.policy.values import SchedulerConfig

FOUND_AT_ONCE = 2
"""For each runner, of those that fit there: mostly the first of all is placed, and then it is looked again."""


MAX_FREED = 48
"""Of the runners that may have room: on this number requests are tried again at once, and `TryMore` goes on. All of a
pool may have when the supervisor sets another factor."""


class Outcome(Enum):
    """How a request has left the queue."""

    PLACED = auto()
    REFUSED = auto()
    """Or it ended otherwise, without a place."""
    OVERDUE = auto()
    """It has not left: it was tried for the first time, is overdue, and may need a reservation before others go on."""
    REPLACED = auto()
    """It has not left: its revision was replaced, and the next of its flow has to be tried, too."""


Place = Callable[[Request, list[Runner]], Outcome | None]
"""Places a request on one of these runners, or of none: on any. None: it still waits."""


class Queue:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.token_costs = TokenCosts(config.output_token_cost)
        self.class_queues = {one: ClassQueue(config.max_passed_over, self.token_costs) for one in RequestClass}
        self._turns = ClassTurns({RequestClass.STANDARD: config.standard_floor, RequestClass.BATCH: config.batch_floor})
        self.early: RequestClass | None = None
        """The class that is tried before more urgent ones now."""
        self.bases: Counter[str] = Counter()
        """How many requests wait for each base model."""
        self.adapters: Counter[Digest] = Counter()
        """How many requests wait for each adapter."""
        self.replaced: dict[Request, None] = {}
        """Those that only runners may take that hold their revision. In order, as a set would differ from process to
        process."""
        self._size = 0
        self.limit_changes = LimitChanges([*self.class_queues.values()])
        self.departures = Departures()
        self.headroom = Headroom(
            config.headroom_one_in,
            {one: class_queue.shares for one, class_queue in self.class_queues.items()},
            self._turns.late,
        )
        self._kept = KeptFrom(config.headroom_one_in)
        """From most requests: made once, as it is asked very often."""
        self._kept_if_lacking = self._kept._replace(lacking=True)
        self.rooms = Rooms(config.headroom_one_in)
        self.freed: dict[Runner, None] = {}
        """Runners that may have room, and on which nobody was tried since. In order, as a set would differ from process
        to process."""
        self._behind = False
        """Whether those that were given least may have last places that others had before."""
        self._behind_from: dict[RequestClass, Head | None] = {}
        """The last of these that was tried, while those behind it still have to be. None: all have to."""
        self._once_more: set[RequestClass] = set()
        """Classes of which all have to be tried once more behind these: for whom the last places are has changed
        meanwhile. If the first were tried again at once, the last would never be while that changes often."""
        self._with_room: dict[Runner, Room] | None = None
        """Of those that may have room, those that have it in this scan. None: not known since something changed."""
        self.reserved: dict[Runner, Request] = {}
        """Runners that are reserved, and for which overdue request."""
        self._idle = IdlePages(config, self.token_costs)
        self._leaving: dict[Runner, Digest | None] = {}
        """`leaving_first` of each reserved one, by which others were tried there last."""
        self._overdue: dict[WaitsFor, Request] = {}
        """As long as each class knows its own ones."""
        self._considered: dict[WaitsFor, Request] | None = None
        """The `overdue` ones when runners were reserved last. None: one that had a reservation has left."""

    def __len__(self) -> int:
        return self._size

    def in_order(self) -> Iterator[Request | None]:
        """As they would be placed. None: see `expected_order`."""
        return chain.from_iterable(map(ClassQueue.in_order, self.class_queues.values()))

    def unordered(self) -> Iterator[Aged]:
        """All requests behind their turns, for sums: fast, as ten thousand may wait."""
        return chain.from_iterable(map(ClassQueue.unordered, self.class_queues.values()))

    def one_in(self, every: int) -> list[Request]:
        """One in `every` of `unordered`, the first included: without a look at the others, and without a call for each
        flow, as each tenant may have one request."""
        found: list[Aged] = []
        flows = [*chain.from_iterable(map(ClassQueue.flows, self.class_queues.values()))]
        skipped = 0
        for flow, size in zip(flows, map(len, flows), strict=True):
            if skipped < size:
                found += flow[skipped::every]
            skipped = (skipped - size) % every
        return [request for *_, request in found]

    def heads(self) -> list[Request]:
        """The oldest request of each flow, in the order of their turns."""
        return [request for class_queue in self.class_queues.values() for request in class_queue.heads()]

    def size_of(self, request_class: RequestClass) -> int:
        return len(self.class_queues[request_class])

    @property
    def active(self) -> bool:
        """Whether a request waits, or runs."""
        return any(len(class_queue.shares) for class_queue in self.class_queues.values())

    def is_full_for(self, tenant: Tenant, limit: int) -> bool:
        """Whether no further request of this tenant may wait. One that has less than an equal part of the limit still
        may: else who fills the queue would keep all others out. With those at most twice the limit waits."""
        waiting = len(self)
        if not limit <= waiting < 2 * limit:
            return waiting >= limit
        active = sum(len(class_queue.shares) for class_queue in self.class_queues.values())
        return self._waiting_of(tenant) * max(2, active) >= limit

    def _waiting_of(self, tenant: Tenant) -> int:
        """How many requests of this tenant wait."""
        return sum(class_queue.shares.waiting(tenant) for class_queue in self.class_queues.values())

    def add(self, request: Request, weight: float = 1.0) -> None:
        """`weight` is that of its tenant."""
        self.class_queues[request.request_class].add(request, weight)
        self.bases[request.base] += 1
        self.adapters[request.digest] += 1
        if request.replaced:
            self.replaced[request] = None
        self._size += 1
        if request.share is not None and request.share.active == 1:
            self.headroom.shares_changed()  # its tenant has come

    def adopt(self, request: Request, weight: float) -> None:
        """It runs already. Its tenant was charged for it by a scheduler before."""
        if request.share is None:
            request.share = self.class_queues[request.request_class].shares.begin(request.tenant, weight)
            request.charge = request.charge or CHARGED_BEFORE
            self.headroom.shares_changed()

    def weigh(self, weight_of: Callable[[Tenant], float]) -> None:
        """Weights have changed: what comes is charged by the new ones."""
        for class_queue in self.class_queues.values():
            for share in class_queue.shares:
                share.weight = weight_of(share.tenant)

    def end(self, request: Request, *, known: bool) -> None:
        """It has ended, and is in the queue no more. `known`: how much of its answer was computed."""
        if (share := request.share) is None:
            return
        shares = self.class_queues[request.request_class].shares
        if known:
            shares.settle(request, share)
        shares.end(share)
        request.share = None
        if not share.active:
            self.headroom.shares_changed()

    @property
    def changed(self) -> bool:
        """Whether a request may fit now that did not before, or a runner must be reserved for another one."""
        if self.freed or self.limit_changes.under_way:
            return True
        overdue: dict[WaitsFor, Request] | None = self._overdue
        for class_queue in self.class_queues.values():  # `untried` and `overdue`, but each event asks twice
            if class_queue.untried_heads.of:
                return True
            if class_queue.known_overdue is None:
                overdue = None
        if (self.overdue() if overdue is None else overdue) != self._considered:
            return True
        return self._size > 0 and (self.last_places_moved or bool(self.rooms.grown))

    @property
    def last_places_moved(self) -> bool:
        """Whether somebody waits who may have last places that he might not have before."""
        if not ((self._behind or self.headroom.moved) and self.rooms.any_keeps):
            return False
        standing = self.headroom.standing()
        if any(self.class_queues[one].size for one in self.headroom.opened_since(self.headroom.stood)):
            return True
        one = standing.request_class
        return one is not None and bool(self.class_queues[one].up_to(standing.lowest, self.bases))

    @property
    def last_places_have_others(self) -> bool:
        """Whether that is so since the last look, and not as more of the same are left to look at."""
        return self.headroom.moved and self.last_places_moved

    @property
    def overdue_are_considered(self) -> bool:
        return self.overdue() == self._considered

    @property
    def untried(self) -> bool:
        return bool(
            [one for one in self.class_queues.values() if one.untried_heads.of]
        )  # `any` is slow: each event asks

    def retry_on(self, runner: Runner) -> None:
        """This runner may have room."""
        self.freed[runner] = None
        self.rooms.freed(runner)

    def promised(self, runner: Runner, digest: Digest) -> None:
        """This runner has promised more, to a request that uses this adapter. Requests of the adapter that left first
        there may go on, if now another one does."""
        overdue = self.reserved.get(runner)
        if overdue is not None and (leaving := leaving_first(runner, overdue)) != self._leaving.get(runner):
            self._leaving[runner] = leaving
            self.retry_on(runner)
        elif runner.using(digest) == 1 and digest in self.adapters and runner.adapter_pages(digest):
            self.rooms.cheaper(runner)  # the others that wait for this adapter no longer need its pages there
        else:
            self.rooms.changed(runner)

    def with_room(self, needs: Mapping[CapacityId, PageNeed], kept: KeptFrom) -> list[Runner]:
        """The runners that may have room for a request of these needs, if they keep this from it."""
        found = self.rooms.that_fit(needs, beside=bool(kept.one_in))
        return found if kept.own is None else list(dict.fromkeys((*found, kept.own)))

    def kept_from(self, request: Request) -> KeptFrom:
        """What runners keep from this request for tenants that were given less. One that is reserved for it keeps
        nothing."""
        one_in = self.headroom.kept_from(request)
        if not one_in:
            return NOTHING_KEPT
        lacking = self.rooms.lacks()
        for runner, reserved_for in self.reserved.items():
            if reserved_for is request:
                return KeptFrom(one_in, runner, lacking)
        return self._kept_if_lacking if lacking else self._kept

    def take_looked(self) -> int:
        """On how many runners those that fit were looked for, since this was last asked."""
        looked = 0
        for class_queue in self.class_queues.values():
            looked += class_queue.looked
            class_queue.looked = 0
        return looked

    def scanned(self) -> None:
        """All that may fit were tried on the runners that have room."""
        if not self._size:
            self.rooms.forget_grown()
            self.freed.clear()
        for runner in self._first_freed():
            del self.freed[runner]
        self._behind = bool(self._behind_from) and self.headroom.standing().request_class in self._behind_from

    def try_again(self, requests: Collection[Request]) -> None:
        """Other runners may take these requests than before, if they wait."""
        for request_class, class_queue in self.class_queues.items() if requests else ():
            class_queue.try_again(request for request in requests if request.request_class is request_class)

    def with_adapters(self, digests: Iterable[Digest]) -> list[Request]:
        """Requests that wait and were tried, of the oldest of each flow."""
        return [
            request
            for digest in digests
            if digest in self.adapters  # mostly not: a runner may hold thousands
            for class_queue in self.class_queues.values()
            for request in class_queue.with_adapter(digest, self.bases)
        ]

    def not_taken_by(self, runner: Runner) -> list[Request]:
        """Those that it has refused for good, of those that were tried."""
        return [one for class_queue in self.class_queues.values() for one in class_queue.not_taken_by(runner)]

    def limits_changed(self, adapters: Collection[str]) -> None:
        """`maxReplicas` of these adapters has changed: other runners may take their requests."""
        self.limit_changes.note(adapters)

    def try_all_again(self) -> None:
        for class_queue in self.class_queues.values():
            class_queue.try_all_again()

    def wait_for(self, request: Request, runners_of: WaitsFor, page_needs: Mapping[CapacityId, PageNeed]) -> None:
        """It was tried, and waits for runners that have this base model, or this adapter."""
        self.class_queues[request.request_class].wait_for(request, runners_of, page_needs)

    def note_replaced(self, request: Request) -> None:
        """From now on only runners that hold its revision may take it, and those behind it pass it."""
        self.class_queues[request.request_class].note_replaced(request)
        self.replaced[request] = None

    def reserve(self, overdue: dict[WaitsFor, Request], reserved: dict[Runner, Request]) -> None:
        """Reserve these runners for overdue requests, instead of those that were reserved."""
        before, self.reserved, self._considered = self.reserved, reserved, overdue
        self._leaving = {runner: leaving_first(runner, overdue) for runner, overdue in reserved.items()}
        for runner in dict.fromkeys((*before, *reserved)) if reserved != before else ():
            if reserved.get(runner) is not before.get(runner):
                self.retry_on(runner)  # what it has kept for others may be enough for the one that it is reserved for

    def look_at_idle_pages(self, now: float) -> None:
        """Before what they are reserved for leaves, and after other runners may have been reserved."""
        self._idle.look(self.reserved, now, self._others_wait)

    def _others_wait(self, request: Request) -> bool:
        """Whether a request of another tenant does."""
        share = request.share
        if share is not None and share.waiting < self.class_queues[request.request_class].size:  # mostly
            return True
        return self._waiting_of(request.tenant) < self._size

    def reserved_from(self, request: Request) -> Collection[Runner]:
        """The runners that this request has to leave to overdue ones."""
        if not self.reserved:
            return ()
        return [runner for runner, overdue in self.reserved.items() if self._leaves(request, runner, overdue)]

    def _leaves(self, request: Request, runner: Runner, overdue: Request) -> bool:
        """Whether it has to leave this runner to the overdue one."""
        if request is overdue or request.request_class < overdue.request_class:
            return False
        left = left_on(runner, overdue, self._config)
        return left is None or not left.allows(request, runner, self._config)

    def try_in_order(self, config: SchedulerConfig, place: Place) -> Iterator[Outcome]:
        """Have the requests placed that may fit now, the most urgent first, on the runners that have room; untried
        ones: on any. Yields the outcome of each that has left: the caller may stop after it.

        Skips those that wait for runners with too little room. These are nearly all, so this must be fast. Ends before
        anything that is later or less urgent than an untried one that is left.
        """
        self.look_at_headroom()
        self._with_room = None
        self._turns.came = False
        for request_class in self._turns.early():
            self.early = request_class
            for outcome in self.try_class(request_class, config, place):
                self._with_room = None
                yield outcome
                if request_class not in self._turns.early():
                    break
        self.early = None
        for request_class, class_queue in self.class_queues.items():
            for outcome in self.try_class(request_class, config, place):
                self._with_room = None
                yield outcome
                if self._turns.came or self._others_may_fit(request_class):
                    yield from self.try_in_order(config, place)
                    return
            if class_queue.untried_heads.of:
                return

    def try_class(self, request_class: RequestClass, config: SchedulerConfig, place: Place) -> Iterator[Outcome]:
        """The requests of one class."""
        class_queue = self.class_queues[request_class]
        for runner, overdue in self.reserved.items():
            if request_class is overdue.request_class and runner in self.freed and runner.has_capacity:
                need = overdue.requirement_on(runner.capacity, config, runner.adapter_pages(overdue.digest))
                if need.room <= runner.ledger.free and (outcome := place(overdue, [runner])) is not None:
                    yield outcome
        last: Head | None = None
        untried = config.tenants_examined
        while True:
            rooms = self._rooms(request_class)
            fit, behind = self._that_fit(request_class, rooms, config) if rooms or self._behind else ((), None)
            if not (fit or class_queue.untried_heads.of or self._behind):
                return  # mostly
            for head in class_queue.to_try(fit, last, untried):
                request = head[3]
                first = request.waits_for is None
                anywhere = first or (self._behind and self.headroom.is_for_lowest(request))
                outcome = place(request, [] if anywhere else [*rooms])
                if outcome is None:
                    untried -= first
                    if first and class_queue.is_overdue(request):
                        yield Outcome.OVERDUE
                    continue
                yield outcome
                if outcome is Outcome.REFUSED:
                    untried -= first  # a tenant may have many to refuse
                # Less may be free now, and the next of its flow is untried.
                last = head
                break
            else:
                tried = self._behind and not class_queue.untried_heads.of
                if tried and request_class is self.headroom.standing().request_class:
                    self._note_tried(request_class, behind)
                return

    def _note_tried(self, request_class: RequestClass, last: Head | None) -> None:
        """Of this class, those given least were tried up to `last`. None: up to the end."""
        if last is not None:
            self._behind_from[request_class] = last
        elif request_class in self._once_more:
            self._once_more.remove(request_class)
            self._behind_from[request_class] = None
        else:
            self._behind_from.pop(request_class, None)

    def _rooms(self, request_class: RequestClass) -> dict[Runner, Room]:
        """Of the runners that may have room, but for what this class leaves to overdue requests."""
        if self._with_room is None:
            self.look_at_headroom()
            if self.rooms.grown:
                self.freed.update(dict.fromkeys(self.rooms.take_grown()))
            self._with_room = self.rooms.of(self._first_freed())
        found = self._with_room
        if not (found and self.reserved):
            return found
        for runner, overdue in self.reserved.items():
            if runner in found and request_class >= overdue.request_class:
                if found is self._with_room:
                    found = dict(found)
                if (left := left_on(runner, overdue, self._config)) is not None:
                    found[runner] = left.of(found[runner])
                else:
                    del found[runner]
        return found

    def _first_freed(self) -> list[Runner]:
        """The same ones until they were `scanned`: what is freed meanwhile comes last."""
        return list(islice(self.freed, MAX_FREED))

    def _others_may_fit(self, request_class: RequestClass) -> bool:
        """Whether those that were tried before what was placed of this class may fit now: that has changed for whom the
        last places are, or how many there are."""
        if self.rooms.grown:
            return True
        if not (self.headroom.moved and self.rooms.any_keeps):
            return False
        standing = self.headroom.standing().request_class
        return standing is None or standing < request_class

    def look_at_headroom(self) -> None:
        """Whether the last places are for others now than at the last scan."""
        stood = self.headroom.stood
        if not self.headroom.look():
            return
        if self.rooms.any_keeps:
            self._behind, one = True, self.headroom.stood.request_class
            if one is not None and self._behind_from.get(one) is not None:
                self._once_more.add(one)
            if self.headroom.opened_since(stood):  # however many they are: those that fit are found by what they need
                self.freed.update(dict.fromkeys(self.rooms))

    def _that_fit(
        self, request_class: RequestClass, rooms: Mapping[Runner, Room], config: SchedulerConfig
    ) -> tuple[Collection[Head], Head | None]:
        """Those that were tried and fit on these runners: for their last places, only those who may have them. If these
        have to be tried anywhere, few are, and the last of these is returned, too."""
        class_queue, examined = self.class_queues[request_class], config.tenants_examined
        if not class_queue.waiting:
            return (), None
        highest = self.headroom.standing().highest(request_class)
        fit = class_queue.that_fit(rooms, min(examined, FOUND_AT_ONCE), highest, lacking=self.rooms.lacking)
        if not self._behind or highest is None or highest == inf:
            return fit, None
        after = self._behind_from.get(request_class)
        fits = self.rooms.may_hold
        first, behind = class_queue.first_for(self.bases, highest, after, fits=fits, examined=examined)
        return {*fit, *first}, behind

    def remove(self, request: Request) -> None:
        """Remove a request that was not placed."""
        self._remove(request)
        if not self.class_queues[request.request_class].size:
            self._turns.left(request.request_class)
            self.headroom.shares_changed()

    def remove_placed(self, request: Request, runner: Runner, *, near: bool = False) -> None:
        """Remove a request that is placed on this runner, charge its tenant, and count it for the waiting requests that
        it passed. `near`: another choice of its call was placed there, so its prompt is free."""
        order, early = order_of(request), request.request_class is self.early
        self._remove(request)
        self._turns.placed(request.request_class, [one for one, others in self.class_queues.items() if others.size])
        for request_class, class_queue in self.class_queues.items():
            if request_class is request.request_class:
                class_queue.passed(runner, order)
                break
            if not early:
                class_queue.passed(runner)
        cached = request.prompt_tokens if near else runner.cached_tokens(request.prefix_hints)
        given = self.class_queues[request.request_class].charge(request, cached)
        for request_class, class_queue in self.class_queues.items() if given else ():
            if request_class is not request.request_class:
                class_queue.charged_elsewhere(request.tenant, given)
        self.headroom.shares_changed()

    def _remove(self, request: Request) -> None:
        self.class_queues[request.request_class].remove(request)
        if request in self.reserved.values():
            self._considered = None
        self.replaced.pop(request, None)
        self._size -= 1
        self.bases[request.base] -= 1
        if not self.bases[request.base]:
            self.bases.pop(request.base)  # `del` of a Counter is slow
        self.adapters[request.digest] -= 1
        if not self.adapters[request.digest]:
            self.adapters.pop(request.digest)

    def overdue(self) -> dict[WaitsFor, Request]:
        """The first overdue request of the most urgent class, of those that wait for the same: in the order in which
        runners are reserved."""
        for class_queue in self.class_queues.values():  # no generator: each event asks
            if class_queue.known_overdue is None:
                break
        else:
            return self._overdue
        found = self._overdue = {}
        for class_queue in self.class_queues.values():
            for request in class_queue.overdue():
                assert request.waits_for is not None
                found.setdefault(request.waits_for, request)
        return found

    def overdue_alike(self, runners_of: WaitsFor, most: int) -> Iterator[Request]:
        """The first `most` overdue ones of each class that wait for these runners, the most urgent class first."""
        for class_queue in self.class_queues.values():
            yield from class_queue.overdue_alike(runners_of, most)
