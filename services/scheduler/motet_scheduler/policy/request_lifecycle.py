"""Begins, queues, moves and ends requests, and keeps the ledgers in step. Also gives up at deadlines."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from itertools import chain, count, takewhile
from math import inf

from motet.domain import BASE, RequestId
from motet.errors import DeadlineExceeded, NoRunner
from motet.runner_info import Failure
from motet_scheduler.policy import effects
from motet_scheduler.policy.deadlines import Deadlines
from motet_scheduler.policy.gateway_requests import Asked
from motet_scheduler.policy.happenings import Happening
from motet_scheduler.policy.parked_requests import on_capacity_freed
from motet_scheduler.policy.quotas.accounts import AccountLevel
from motet_scheduler.policy.requests import Placement, Request
from motet_scheduler.policy.runner_choice import never_fits
from motet_scheduler.policy.runners import PlacementKey, Runner
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import GroupName
from motet_scheduler.policy.waiting_reasons import explain

ENDED_AT_ONCE = 32
"""In one event: ending ten thousand would delay everything else, so `TryMore` goes on."""

MOVED_AT_ONCE = 32
"""In one event, for the same reason."""

MAX_UNANSWERED_TIMES = 6
"""A gateway has this many times `unlisted_timeout` to say what came of a request that its runner said has ended. The
end is in the gateway's stream: it reads slowly. If that stream breaks, it says so at once."""


class RequestLifecycle:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.ended: dict[PlacementKey, float] = {}
        """Placements that ended recently: a report that was sent before may still list them."""
        self.unlisted: dict[PlacementKey, float] = {}
        """Placements that their runner does not list, and since when; the oldest first."""
        self.unanswered: dict[PlacementKey, float] = {}
        """Placements that have ended at their runner, as it said, and since when; the oldest first. Their gateway has
        not said what came of them: it may still read."""
        self.deadlines = Deadlines(_stands)
        self._over: deque[Asked] = deque()
        """What is left of those that were over together."""
        self._moving: dict[Runner, tuple[str, list[Request]]] = {}
        """Why all requests of a runner move, and which are left."""
        self.retry_times: list[tuple[float, int, Request]] = []
        """When a request may try a runner again that it avoids."""
        self._retry_numbers = count()
        self._unable: dict[RequestId, Request] = {}
        """Those that some runners can never take."""
        self._sequence = 0

    def begin(self, request: Request) -> None:
        self._sequence += 1
        request.sequence = self._sequence
        self._state.requests[request.id] = request
        self._state.of_gateways[request.gateway].begin(request)
        self._state.families.begin(request, self._state.requests)
        request.story = self._state.timelines.begin(request.id, request.tenant, self._state.now)
        if request.digest != BASE:
            self._state.adapter_uses[request.digest] += 1

    def enqueue(self, request: Request, *, timeout: float | None = None) -> None:
        """Add the request to its queue with its own age. `timeout`: how long it may wait this time, if not as usual."""
        if timeout is None:
            timeout = request.queue_timeout
        request.deadline_at = self._state.now + timeout if timeout > 0 else None
        self.deadlines.add(request.deadline_at, request)
        self._forget_avoided(request)
        if request.unable_on:
            _avoid_unable(request, self._state.runners_of(request.group))
        for until in request.avoid.values():
            self._retry_at(until, request)
        weight = self._state.weights.of(request.group, request.tenant)
        queue = self._state.queue(request.group)
        if not len(queue):
            queue.departures.begin(self._state.now)
        queue.add(request, weight)

    def go_on_waiting(self, request: Request) -> None:
        """What its gateway lost was declined: without a token it waits no longer than if it had not been placed."""
        if not request.delivered:
            request.deadline_at = request.first_deadline_at
            self.deadlines.add(request.deadline_at, request)

    def wait_anew(self, request: Request) -> None:
        """It waits, and its client has read on meanwhile: the runner that it has left was not gone."""
        if request.waiting and not request.held and request.queue_timeout > 0:
            request.deadline_at = self._state.now + request.queue_timeout
            self.deadlines.add(request.deadline_at, request)

    def end(self, request: Request) -> None:
        """Forget a request: it has ended, or its gateway will send it again."""
        state, forgotten = self._state, request.forgotten
        if request.waiting:
            self.leave_queue(request)
        else:
            self.release_promise(request)
        if request.share is not None:
            # What ran of one whose gateway has gone is not known: its tenant stays charged for what was expected.
            state.queues[request.group].end(request, known=not forgotten)
        if request.draw is not None:
            state.quotas.end(request, state.now)
        del state.requests[request.id]
        self._unable.pop(request.id, None)
        if forgotten:
            state.note_event(request, Happening.GATEWAY_GONE)
            request.asked.requests.pop(request.id, None)
        else:
            state.of_gateways[request.gateway].leave(request)
        state.families.end(request)
        state.timelines.end(request)
        if request.digest != BASE:
            state.adapter_uses[request.digest] -= 1
            if not state.adapter_uses[request.digest]:
                state.adapter_uses.pop(request.digest)  # `del` of a Counter is slow

    def leave_queue(self, request: Request) -> None:
        if request.held:
            request.deadline_at = None
            self._state.quotas.leave(request)
        else:
            queue = self._state.queues[request.group]
            queue.look_at_idle_pages(self._state.now)
            queue.remove(request)
            queue.departures.note(self._state.now)

    def forget(self, requests: Collection[Request]) -> None:
        """End these, some in each event. Nothing is placed or said for them any more."""
        over = Asked(over=True)
        for request in requests:
            self._state.of_gateways[request.gateway].leave(request)
            request.asked = over
            over.requests[request.id] = request
        self._over.append(over)

    def forget_what_waits(self, gateway: str) -> None:
        """It enqueues again what had no place yet, or has gone."""
        self._over.append(self._state.of_gateways[gateway].let_go())

    def end_forgotten(self) -> None:
        left = ENDED_AT_ONCE
        while self._over and left:
            requests = self._over[0].requests
            if not requests:
                self._over.popleft()
                continue
            self.end(requests.popitem()[1])
            left -= 1

    def check(self) -> None:
        """Recount what belongs to each gateway, and what is over. Raises AssertionError if it differs."""
        of_each: defaultdict[str, list[Request]] = defaultdict(list)
        over = 0
        for request in self._state.requests.values():
            if request.forgotten:
                over += 1
                assert request.asked.requests.get(request.id) is request, f"{request.id} would never end"
                assert request.asked in self._over, f"{request.id} would never end"
            else:
                of_each[request.gateway].append(request)
        assert over == sum(len(one.requests) for one in self._over), "requests that are over have ended"
        for gateway, known in self._state.of_gateways.items():
            known.check(of_each.pop(gateway, []))
        assert not of_each, "requests belong to no gateway"

    def known(self, name: RequestId) -> Request | None:
        """The request that a gateway names. A forgotten one ends first."""
        request = self._state.requests.get(name)
        if request is not None and request.forgotten:
            self.end(request)
            return None
        return request

    def release_promise(self, request: Request) -> None:
        """Release the promise of its placement."""
        placement = request.placement
        if placement is None:
            return
        key = (request.id, placement.epoch)
        self.ended[key] = self._state.now
        self.unlisted.pop(key, None)
        self.unanswered.pop(key, None)
        runner = self._state.runner_of(placement)
        if runner is None:
            return
        runner.release_promise(key)
        parked = runner.parked.get(request.id)
        if parked is not None and parked.epoch == placement.epoch:
            runner.unpark(request.id)
        on_capacity_freed(self._state, runner)

    def leave(self, request: Request) -> None:
        """It has its placement no more, and gets another one."""
        self.release_promise(request)
        request.left, request.placement = request.placement, None

    def ended_at_runner(self, runner: Runner, key: PlacementKey) -> None:
        """Its runner says so, before its gateway says what came of it. Only its pages are free: the request ends when
        its gateway says so. If that never does, it is placed again."""
        name, epoch = key
        parked = runner.parked.get(name)
        if parked is not None and parked.epoch == epoch:
            runner.unpark(name)
        elif not runner.release_promise(key):
            return
        request = self._state.requests.get(name)
        if request is not None and request.runs_on(runner.identity, epoch):
            self.unlisted.pop(key, None)
            self.unanswered.setdefault(key, self._state.now)

    def is_unanswered(self, request: Request) -> bool:
        """Whether its gateway may soon say what came of it, as its runner said not long ago that it has ended."""
        key = (request.id, request.placement.epoch if request.placement is not None else 0)
        return self._state.now < self.unanswered.get(key, -inf) + self._state.config.unlisted_timeout

    def placed(self, request: RequestId, epoch: int) -> None:
        """Expect the runner to list this placement soon."""
        key = request, epoch
        self.ended.pop(key, None)
        self.unlisted.pop(key, None)
        self.unlisted[key] = self._state.now

    def runner_lost(self, runner: Runner) -> None:
        """The runner is gone. Gateways report what they lost; placements that they don't report are placed again."""
        for request in self._placed_on(runner):
            assert request.placement is not None
            self.unlisted.setdefault((request.id, request.placement.epoch), self._state.now)

    def refuse(self, request: Request, failure: Failure, accounts: tuple[AccountLevel, ...] = ()) -> None:
        """`accounts`: that it may not draw from."""
        if request.forgotten:
            self.end(request)
            return
        self._state.note_event(request, Happening.REFUSED, failure.message)
        claim = request.draw.claimed if request.draw is not None else None
        self._state.emit(
            effects.SendRefused(request.gateway, request.id, request.epoch, failure, request.tenant, accounts, claim)
        )
        self.end(request)

    def avoid(self, request: Request, instance: str, least: float = 0.0) -> None:
        pause = min(self._state.config.avoid_after_decline * 2**request.declines, self._state.config.max_avoid)
        pause = max(pause, least)
        request.declines = min(request.declines + 1, 16)
        request.avoid[instance] = max(self._state.now + pause, request.avoid.get(instance, 0.0))
        self._retry_at(request.avoid[instance], request)

    def avoid_for_good(self, request: Request, runner: Runner, failure: Failure) -> None:
        """This runner can never take it, and neither can those of its pool that were made alike."""
        request.unable = failure
        request.unable_on |= {_template(runner)}
        self._unable[request.id] = request
        _avoid_unable(request, self._state.runners_of(runner.group))

    def has_come(self, runner: Runner) -> None:
        """The one that had its name before may have been made otherwise."""
        of_group = self.unable_in(runner.group)
        for request in of_group:
            _avoid_unable(request, [runner])
        if of_group:
            self._state.queue(runner.group).try_again(of_group)  # they wait for others than before

    def unable_in(self, group: GroupName) -> list[Request]:
        """Those that some runners of a group can never take."""
        return [request for request in self._unable.values() if request.group == group]

    def is_unable(self, request: Request) -> bool:
        """Whether runners can never take it, and there is no other one that may, not even one that is away."""
        if request.unable is None:
            return False
        others = [one for one in self._state.runners_for(request) if request.avoid.get(one.instance) != inf]
        if others and never_fits(request, others, self._state.config) is None:
            return False
        return self._state.may_refuse(request.group)

    def _forget_avoided(self, request: Request) -> None:
        """Runners that it need not avoid any more. The queue offers it only room elsewhere than on the others."""
        if request.avoid:
            request.avoid = {name: until for name, until in request.avoid.items() if until > self._state.now}

    def _retry_at(self, at: float, request: Request) -> None:
        if at < inf:
            heappush(self.retry_times, (at, next(self._retry_numbers), request))

    def move_everything(self, runner: Runner, why: str) -> None:
        """Move what this runner has now, some in each event, the oldest first."""
        if runner not in self._moving:
            left = [request for request in self._placed_on(runner) if request.gateway in self._state.gateways]
            self._moving[runner] = (why, sorted(left, key=lambda request: request.key, reverse=True))

    def move_some(self) -> None:
        if not self._moving:  # mostly, and each event asks
            return
        may_move = MOVED_AT_ONCE
        for runner, (why, left) in list(self._moving.items()):
            if runner.takes_work:
                left.clear()  # it may keep the others: it is healthy again, or its drain was taken back
            while left and may_move:
                request = left.pop()
                if self._is_on(request, runner) and request.gateway in self._state.gateways:
                    self.move(request, why)
                    may_move -= 1
            if not left:
                del self._moving[runner]

    def _placed_on(self, runner: Runner) -> list[Request]:
        had_place = chain.from_iterable(one.had_place.values() for one in self._state.of_gateways.values())
        return [request for request in had_place if self._is_on(request, runner)]

    def _is_on(self, request: Request, runner: Runner) -> bool:
        """Whether it is placed there. Not if it has ended: its placement stays as it was."""
        placement = request.placement
        if placement is None or self._state.runner_of(placement) is not runner:
            return False
        return self._state.requests.get(request.id) is request

    def move(self, request: Request, why: str) -> None:
        """Cancel the request on its runner and place it again under a new epoch (PU-17)."""
        if request.forgotten:
            self.end(request)
            return
        self.take_away(request, why)
        self.enqueue(request)

    def take_away(self, request: Request, why: str) -> None:
        """From its runner. It has to be placed again, or queued."""
        assert request.placement is not None
        runner = self._state.runner_of(request.placement)
        self._state.note_event(request, Happening.MOVED, request.placement.instance, why)
        self.cancel_at_runner(request.placement, request.id, why)
        self.leave(request)
        request.moved_reason, request.engine_hung = why, runner is not None and runner.hung

    def cancel_at_runner(self, placement: Placement, request: RequestId, reason: str) -> None:
        runner = self._state.runner_of(placement)
        if runner is not None and runner.attached:
            self._state.emit(effects.CancelAtRunner(runner.instance, request, placement.epoch, reason))

    @property
    def more_to_end(self) -> bool:
        return bool(self._over or self._moving) or self.deadlines.next_due() <= self._state.now

    def tick(self) -> None:
        self.deadlines.sweep(sum(len(queue) for queue in self._state.queues.values()) + self._state.quotas.waiting)
        self.expire_deadlines()
        again: defaultdict[GroupName, list[Request]] = defaultdict(list)
        while self.retry_times and self.retry_times[0][0] <= self._state.now:
            request = heappop(self.retry_times)[2]
            self._forget_avoided(request)
            again[request.group].append(request)
        for group, requests in again.items():
            self._state.queue(group).try_again(requests)
        for key in [
            key for key, at in self.ended.items() if self._state.now - at > self._state.config.unsubmitted_timeout
        ]:
            del self.ended[key]

    def next_due(self) -> float:
        """When a request gives up, or may try a runner again."""
        return min(self.retry_times[0][0] if self.retry_times else inf, self.deadlines.next_due())

    def look_from(self) -> float:
        """When a placement has not been listed, or an end not answered, for too long. It may have to stay
        nevertheless."""
        return min(next(iter(since.values()), inf) + timeout for since, timeout, _ in self._overdue_after())

    def look(self) -> None:
        """Place requests again that their runner has not listed for too long, or whose end is not answered."""
        for times, timeout, why in self._overdue_after():
            self._place_overdue_again(times, timeout, why)

    def _overdue_after(self) -> tuple[tuple[dict[PlacementKey, float], float, str], ...]:
        """Since when placements wait, how long they may, and why they are placed again then."""
        timeout = self._state.config.unlisted_timeout
        return (
            (self.unlisted, timeout, "its runner has not listed it"),
            (self.unanswered, MAX_UNANSWERED_TIMES * timeout, "its gateway has not answered its end"),
        )

    def _place_overdue_again(self, times: dict[PlacementKey, float], timeout: float, why: str) -> None:
        overdue = takewhile(lambda one: self._state.now >= one[1] + timeout, times.items())
        for (name, _), since in list(overdue):
            request = self._state.requests[name]
            assert request.placement is not None
            runner = self._state.runner_of(request.placement)
            # A runner that has not reported since then may still serve the request: its stream is down, or this
            # process was paused and has not read its reports. Its gateway knows.
            silent = runner is not None and (not runner.attached or runner.last_report_at < since + timeout)
            if silent or request.gateway not in self._state.gateways:
                continue
            if isinstance(request.final_failure, Failure):
                self.refuse(request, request.final_failure)
                continue
            self.avoid(request, request.placement.instance)
            self.move(request, f"{why} for {timeout:.3g} seconds")

    def expire_deadlines(self) -> None:
        for request in self.deadlines.expired(self._state.now, ENDED_AT_ONCE):
            if not request.held:
                explain(self._state, request)
            what = "for its quota" if request.held else "and no runner could take it"
            seconds = min(request.queue_timeout, self._state.now - request.waits_since)
            waited = f"The request waited {seconds:.3g} seconds {what}: {request.waiting_reason}. Send it again later."
            up = request.held or any(runner.takes_work for runner in self._state.runners_of(request.group))
            self.refuse(request, Failure.of(DeadlineExceeded(waited) if up else NoRunner(waited)))


def _template(runner: Runner) -> tuple[str, str]:
    return runner.identity.pool, runner.identity.revision


def _avoid_unable(request: Request, runners: Iterable[Runner]) -> None:
    """Those of these runners that were made like one that can never take it."""
    for runner in runners:
        if _template(runner) in request.unable_on:
            request.avoid[runner.instance] = inf
        elif request.avoid.get(runner.instance) == inf:
            del request.avoid[runner.instance]


def _stands(at: float, request: Request) -> bool:
    return request.deadline_at == at
