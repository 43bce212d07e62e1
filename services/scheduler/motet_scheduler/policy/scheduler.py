"""The scheduler's state, and what follows from each event.

`handle` is the only way in: it changes the state and returns what is to be done. It never looks at a clock; events are
handled in the order they are handed in, each with its time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

from motet.errors import (
    TABLE,
    AdapterError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineRestarted,
    InvalidRequest,
    ModelNotFound,
    MotetError,
    NoRunner,
    PoolSaturated,
)
from motet.fleet import BookEntry, Failure, Tier
from motet.model import BASE, Digest, RequestId
from motet_scheduler.policy import effects as do
from motet_scheduler.policy import events as on
from motet_scheduler.policy.adapters import Adapters, ensure
from motet_scheduler.policy.books import reconcile
from motet_scheduler.policy.memory import Remembered, RememberedAdapter, RememberedGroup
from motet_scheduler.policy.placement import Chosen, Never, choose
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.requests import Placement, Request
from motet_scheduler.policy.runners import Drain, Key, Parked, Runner
from motet_scheduler.policy.timeline import Timelines
from motet_scheduler.policy.values import (
    BaseModel,
    Catalog,
    CatalogGroup,
    GroupName,
    Instance,
    Policy,
    Pool,
    Promise,
)

TOLD_EXACTLY = 100
"""Positions up to this are told whenever they change, later ones when they changed by a tenth."""

_OTHERS_FIRST = "others wait before it"
_SETTLING = "the scheduler has just started and waits for its runners"


class Scheduler:
    def __init__(self, policy: Policy, *, now: float, remembered: Remembered | None = None) -> None:
        self.policy = policy
        self.requests: dict[RequestId, Request] = {}
        self.queues: dict[GroupName, Queue] = {}
        self.runners: dict[Instance, Runner] = {}
        self.gateways: set[str] = set()
        self.pools: dict[str, Pool] = {}
        self.adapters = Adapters(policy)
        self.timelines = Timelines(policy.timelines)
        self.catalog: Catalog | None = None
        """The last one published."""
        self._bases: dict[GroupName, tuple[BaseModel, int]] = {}
        self._by_group: dict[GroupName, list[Runner]] = {}
        self._overcommit: dict[str, float] = {}
        self._uses: Counter[Digest] = Counter()
        self._ended: dict[Key, float] = {}
        self._deadlines: list[tuple[float, RequestId]] = []
        self._wakeups: list[tuple[float, GroupName]] = []
        self._departed: set[str] = set()
        """Gateways that left work behind: forgotten once their runners no longer list it."""
        self._sequence = 0
        self._stated = False
        self._supervised = False
        self._awaited: set[Instance] = set()
        self._settle_until: float | None = None
        self._catalog_changed = True
        self._told_positions_at = now
        self._now = now
        self._effects: list[do.Effect] = []
        if remembered is not None:
            self._recall(remembered)
        if self._awaited:
            self._settle_until = now + policy.settle

    @property
    def settled(self) -> bool:
        """Whether placing is safe: those runners that were there before have said what they hold."""
        return self._settle_until is None

    def handle(self, event: on.Event, now: float) -> list[do.Effect]:
        self._now = now
        self._effects = []
        _HANDLERS[type(event)](self, event)
        self._place_where_there_is_room()
        self._let_go_of_unused()
        if self._catalog_changed and self.settled:
            self._publish()
        return self._effects

    def remembered(self) -> Remembered:
        return Remembered(
            pools=tuple(self.pools.values()),
            adapters=tuple(RememberedAdapter(spec=one.spec, serving=one.serving) for one in self.adapters),
            groups=tuple(
                RememberedGroup(group=group, base=base, max_model_length=length)
                for group, (base, length) in self._bases.items()
            ),
            runners=tuple(sorted(runner.instance for runner in self.runners.values() if runner.attached)),
        )

    def queued(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    def check(self) -> None:
        """Recount every book (tests, and when idle); raises AssertionError with the numbers."""
        waiting = {request.id for queue in self.queues.values() for request in queue}
        assert waiting == {r.id for r in self.requests.values() if r.waiting}, "queued and waiting differ"
        for runner in self.runners.values():
            runner.check()
        counted = Counter(r.digest for r in self.requests.values() if r.digest != BASE)
        assert counted == self._uses, "uses of adapters were miscounted"

    # ----------------------------------------------------------------------------------------------------- gateways

    def _gateway_connected(self, event: on.GatewayConnected) -> None:
        self.gateways.add(event.gateway)
        self._departed.discard(event.gateway)
        running = {live.request for live in event.live}
        for request in [r for r in self.requests.values() if r.gateway == event.gateway and r.id not in running]:
            # It ended while the stream was down, or its placement never arrived: the gateway enqueues that one again.
            self._end(request)
        for live in event.live:
            self._adopt(event.gateway, live)
        if self.settled and self.catalog is not None:
            self._do(do.Publish(self.catalog, event.gateway))

    def _adopt(self, gateway: str, live: on.LiveRequest) -> None:
        """Take over what already runs, as its gateway knows it."""
        request = self.requests.get(live.request)
        if request is None:
            request = self._new_request(
                live.request,
                gateway=gateway,
                tenant=live.tenant,
                group=live.group,
                digest=live.digest,
                request_class=live.request_class,
                prompt_tokens=live.prompt_tokens,
                max_tokens=live.max_tokens,
                estimate=live.estimate,
                asked_at=self._now - live.age,
                patience=live.deadline,
            )
        elif request.waiting:
            self.queues[request.group].remove(request)
        elif request.placement is not None and request.placement.epoch != live.epoch:
            self._strike(request)
        request.gateway = gateway
        request.delivered = live.delivered
        request.epoch = max(request.epoch, live.epoch)
        request.moved_because = ""
        request.placement = Placement(live.instance, live.incarnation, live.epoch, self._now)
        runner = self._runner_of(request.placement)
        if runner is None:
            return
        key = (request.id, live.epoch)
        if key not in runner.lines and request.id not in runner.parked:
            runner.write(key, live.promise.pages, live.digest, self._now)
        if runner.condemned:
            self._move(request, runner, runner.condemned)

    def _gateway_gone(self, event: on.GatewayGone) -> None:
        self.gateways.discard(event.gateway)
        self._departed.add(event.gateway)
        for request in [r for r in self.requests.values() if r.gateway == event.gateway and r.waiting]:
            self._end(request)

    def _enqueued(self, event: on.Enqueued) -> None:
        epoch = event.epoch
        known = self.requests.get(event.request)
        if known is not None:
            epoch = max(epoch, known.epoch)
            self._end(known)
        queue = self._queue(event.group)
        refusal = self._refusal(event, queue)
        if refusal is not None:
            self._note(event.request, "refused", refusal.message)
            self._do(do.Refuse(event.gateway, event.request, Failure.of(refusal), event.tenant))
            return
        request = self._new_request(
            event.request,
            gateway=event.gateway,
            tenant=event.tenant,
            group=event.group,
            digest=event.digest,
            request_class=event.request_class,
            prompt_tokens=event.prompt_tokens,
            max_tokens=event.max_tokens,
            estimate=event.estimate,
            asked_at=self._now - event.age,
            patience=event.deadline,
        )
        request.delivered = event.delivered
        request.epoch = epoch
        request.avoid = dict.fromkeys(event.avoid, self._now + self.policy.avoid)
        self._note(request.id, "queued", f"class {request.request_class.name.lower()}, epoch {epoch}")
        self._wait(request)
        if queue.stuck and queue.overdue() is None and queue.has_turn(request):
            # The rest has been tried; only this one is new.
            self._try(queue, request)
        elif not queue.stuck:
            self._fill(event.group, queue)
        if request.id in self.requests and request.waiting:
            request.why = request.why or (_OTHERS_FIRST if self.settled else _SETTLING)
            self._tell_position(request, len(queue))

    def _refusal(self, event: on.Enqueued, queue: Queue) -> MotetError | None:
        if len(queue) >= self.policy.queue_limit:
            return PoolSaturated(f"{len(queue)} requests wait for this model already; come back in a moment")
        if event.digest != BASE and self._stated and self.adapters.source_of(event.digest) is None:
            return ModelNotFound("this revision of the adapter is no longer served; ask again to use the current one")
        return None

    def _cancel_asked(self, event: on.CancelAsked) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        placement = request.placement
        self._note(request.id, "cancelled")
        self._end(request)
        if placement is not None:
            # The cancellation crossed the placement: nothing was submitted, and nothing will be.
            self._cancel_at_runner(placement, request.id, "cancelled by its client")

    def _request_finished(self, event: on.RequestFinished) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        self._note(request.id, "finished", f"{event.output_tokens} tokens, {event.reason}")
        placement = request.placement
        self._end(request)
        if placement is not None and placement.epoch != event.epoch:
            self._cancel_at_runner(placement, request.id, "finished under an earlier placement")

    def _request_lost(self, event: on.RequestLost) -> None:
        request = self.requests.get(event.request)
        if request is None:
            error = EngineRestarted("the scheduler no longer knows this request; send it again")
            self._do(do.Refuse(event.gateway, event.request, Failure.of(error)))
            return
        if request.epoch != event.epoch:
            return  # an old story: it has been placed again since
        request.delivered = max(request.delivered, event.delivered)
        placement = request.placement
        if placement is None:
            request.moved_because = ""  # its gateway gave the old place up before we found a new one
            return
        self._note(request.id, "lost", event.why)
        self._strike(request)
        self._avoid(request, placement.instance)
        request.placement = None
        self._wait(request)
        self._queue(request.group).stuck = False
        if isinstance(request.fatal, Failure):
            self._refuse(request, request.fatal)

    # ------------------------------------------------------------------------------------------------------ runners

    def _runner_attached(self, event: on.RunnerAttached) -> None:
        instance = Instance(event.identity.instance)
        runner = self.runners.get(instance)
        if runner is None or runner.identity.incarnation != event.identity.incarnation:
            # A runner begins with the factor 1 and hears of another from the supervisor, as we do.
            overcommit = self._overcommit.get(event.identity.pool, 1.0) if self._supervised else 1.0
            if runner is not None:
                self._by_group[runner.group].remove(runner)
            runner = Runner(event.identity, event.address, event.capacity, overcommit)
            self.runners[instance] = runner
            self._by_group.setdefault(runner.group, []).append(runner)
            self._do(do.Remember())
        runner.identity, runner.address, runner.base = event.identity, event.address, event.base
        runner.attached = True
        runner.condemned = ""
        self._apply_pool(runner)
        self._bases[runner.group] = (event.base, event.capacity.max_model_length)
        self._awaited.discard(instance)
        if not self._awaited:
            self._settle_until = None
        if runner.drain is not None:
            self._do(do.DrainRunner(instance, max(0.0, runner.drain.deadline_at - self._now)))
        self._hear_book(runner, event.live)
        self._hear_residents(runner, event.resident)
        self._catalog_changed = True
        self._tell_runner(runner)
        self._look_after_adapters()

    def _runner_detached(self, event: on.RunnerDetached) -> None:
        runner = self._current(event.instance, event.incarnation)
        if runner is None:
            return
        runner.attached = False
        runner.detached_at = self._now
        runner.ordered.clear()
        self._catalog_changed = True
        self._tell_runner(runner)
        self._tell_adapters()

    def _runner_reported(self, event: on.RunnerReported) -> None:
        runner = self._current(event.instance, event.incarnation)
        if runner is None:
            return
        runner.pages_free, runner.running, runner.waiting = event.pages_free, event.running, event.waiting
        if runner.condemned and (not runner.hung or event.steps > runner.steps or not event.live):
            runner.condemned = ""  # it speaks and moves again
            self._catalog_changed = True
        runner.steps = event.steps
        self._hear_book(runner, event.live)
        self._hear_residents(runner, event.resident)
        self._tell_runner(runner)
        self._look_after_adapters()

    def _hear_book(self, runner: Runner, live: tuple[BookEntry, ...]) -> None:
        self._effects += reconcile(
            runner,
            live,
            requests=self.requests,
            gateways=self.gateways,
            ended=self._ended,
            policy=self.policy,
            now=self._now,
        )
        for entry in live:
            request = self.requests.get(entry.request)
            if request is not None and request.placement is not None and request.placement.epoch == entry.epoch:
                request.delivered = max(request.delivered, entry.output_tokens)
        self._room_at(runner)

    def _hear_residents(self, runner: Runner, resident: Iterable[Any]) -> None:
        before = {digest: found.tier for digest, found in runner.resident.items()}
        runner.resident = {found.digest: found for found in resident}
        for digest, found in runner.resident.items():
            if found.tier is Tier.DEVICE:
                runner.ordered.pop(digest, None)
        if before != {digest: found.tier for digest, found in runner.resident.items()}:
            self._catalog_changed = True
            self._tell_adapters()
        if self._stated:
            in_use = self._digests_in_use()
            self._effects += self.adapters.strays(runner, in_use)

    def _runner_declined(self, event: on.RunnerDeclined) -> None:
        request = self.requests.get(event.request)
        if request is None or request.epoch != event.epoch:
            return
        self._note(request.id, "declined", f"{event.instance}: {event.failure.message}")
        self._avoid(request, event.instance)
        if _is_final(event.failure):
            request.fatal = event.failure
        if request.placement is not None:
            # The room is free again; the gateway, told by the runner too, says how far the request has come.
            self._strike(request)
        elif request.fatal is not None:
            self._refuse(request, event.failure)

    def _adapter_state_changed(self, event: on.AdapterStateChanged) -> None:
        runner = self.runners.get(event.instance)
        if runner is not None and event.failure is not None:
            runner.ordered.pop(event.digest, None)
        if self.adapters.heard(event, self._now):
            self._catalog_changed = True
            self._do(do.Remember())
            self._tell_adapters()
        self._look_after_adapters()

    # --------------------------------------------------------------------------------------------- operator, supervisor

    def _operator_connected(self, _event: on.OperatorConnected) -> None:
        for adapter in self.adapters:
            adapter.told = None
        self._tell_adapters()
        self._tell_desired()
        for runner in self.runners.values():
            self._tell_runner(runner)

    def _catalog_stated(self, event: on.CatalogStated) -> None:
        self._stated = True
        pools = {pool.pool: pool for pool in event.pools}
        changed = self.adapters.state(event.adapters) or pools != self.pools
        self.pools = pools
        if changed:
            self._do(do.Remember())
            self._catalog_changed = True
        for runner in self.runners.values():
            self._apply_pool(runner)
        self._tell_desired()
        self._look_after_adapters()
        self._tell_adapters()

    def _catalog_amended(self, event: on.CatalogAmended) -> None:
        gone = {ref.object for ref in event.removed_adapters}
        pools = self.pools | {pool.pool: pool for pool in event.pools}
        specs = {adapter.spec.ref.object: adapter.spec for adapter in self.adapters}
        specs |= {spec.ref.object: spec for spec in event.adapters}
        self._catalog_stated(
            on.CatalogStated(
                tuple(pool for name, pool in pools.items() if name not in event.removed_pools),
                tuple(spec for name, spec in specs.items() if name not in gone),
            )
        )

    def _drain_asked(self, event: on.DrainAsked) -> None:
        runner = self.runners.get(Instance(event.runner.instance))
        stale = runner is not None and event.runner.incarnation not in ("", runner.identity.incarnation)
        if runner is None or stale or not runner.attached:
            self._do(do.TellDrained(event.runner))
            return
        if runner.drain is None:
            runner.drain = Drain(self._now + event.deadline)
        self._do(do.DrainRunner(runner.instance, event.deadline))
        self._end_drain_of(runner)

    def _supervisor_connected(self, _event: on.SupervisorConnected) -> None:
        self._supervised = True
        for runner in self.runners.values():
            self._room_at(runner)

    def _supervisor_gone(self, _event: on.SupervisorGone) -> None:
        self._supervised = False

    def _promise_changed(self, event: on.PromiseChanged) -> None:
        runner = self.runners.get(event.instance)
        key = (event.request, event.epoch)
        if runner is None or key not in runner.lines:
            return
        runner.write(key, event.promise.pages, runner.lines[key].digest, self._now)
        self._note(event.request, "extended", f"to {event.promise.pages} pages")

    def _request_parked(self, event: on.RequestParked) -> None:
        runner = self.runners.get(event.instance)
        request = self.requests.get(event.request)
        if runner is None:
            return
        key = (event.request, event.epoch)
        line = runner.lines.get(key)
        if line is None and event.request not in runner.parked:
            return  # ended, or never heard of: the runner's next report tells
        digest = line.digest if line is not None else runner.parked[event.request].digest
        order = (int(request.request_class), request.asked_at) if request is not None else (0, self._now)
        runner.park(event.request, Parked(event.epoch, event.wanted, digest, order))
        self._note(event.request, "parked", f"comes back with {event.wanted.pages} pages")
        self._room_at(runner)

    def _request_resumed(self, event: on.RequestResumed) -> None:
        runner = self.runners.get(event.instance)
        if runner is None:
            return
        parked = runner.parked.pop(event.request, None)
        key = (event.request, event.epoch)
        if parked is not None:
            runner.write(key, event.promise.pages, parked.digest, self._now)
        elif key in runner.lines:
            runner.write(key, event.promise.pages, runner.lines[key].digest, self._now)
            runner.lines[key].readmitted = False
        self._note(event.request, "resumed", f"with {event.promise.pages} pages")
        self._room_at(runner)

    def _runner_condemned(self, event: on.RunnerCondemned) -> None:
        runner = self._current(Instance(event.runner.instance), event.runner.incarnation)
        if runner is None:
            return
        runner.condemned = event.why
        runner.hung = event.hung
        self._catalog_changed = True
        if event.hung:
            self._move_everything(runner, event.why)

    def _overcommit_set(self, event: on.OvercommitSet) -> None:
        self._overcommit[event.pool] = event.factor
        for runner in self.runners.values():
            if runner.identity.pool == event.pool:
                runner.ledger.overcommit = event.factor
                self._room_at(runner)

    # --------------------------------------------------------------------------------------------------------- time

    def _tick(self, _event: on.Tick) -> None:
        if self._settle_until is not None and self._now >= self._settle_until:
            self._settle_until = None
            self._awaited.clear()
            for queue in self.queues.values():
                queue.stuck = False
        self._expire_deadlines()
        while self._wakeups and self._wakeups[0][0] <= self._now:
            self._queue(heappop(self._wakeups)[1]).stuck = False
        for key in [key for key, at in self._ended.items() if self._now - at > self.policy.unsubmitted]:
            del self._ended[key]
        self._forget_departed()
        for runner in list(self.runners.values()):
            if runner.drain is not None and self._now >= runner.drain.deadline_at:
                self._move_everything(runner, "its runner is being stopped")
            self._end_drain_of(runner)
            if not runner.attached and self._now - runner.detached_at > self.policy.forget_runner:
                self._forget(runner)
        self._look_after_adapters()
        if self._now - self._told_positions_at >= 1.0:
            self._told_positions_at = self._now
            self._tell_positions()

    def _expire_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._now:
            at, name = heappop(self._deadlines)
            request = self.requests.get(name)
            if request is None or not request.waiting or request.deadline_at != at:
                continue
            waited = f"no place within {request.patience:.3g} seconds: {request.why or _SETTLING}"
            up = any(runner.takes_work for runner in self._by_group.get(request.group, ()))
            self._refuse(request, Failure.of(DeadlineExceeded(waited) if up else NoRunner(waited)))

    def _forget_departed(self) -> None:
        if not self._departed:
            return
        left = [request for request in self.requests.values() if request.gateway in self._departed]
        self._departed = set()
        for request in left:
            runner = self._runner_of(request.placement) if request.placement is not None else None
            if runner is not None and runner.holds(request.id, request.epoch):
                self._departed.add(request.gateway)
            else:
                self._end(request)

    # ------------------------------------------------------------------------------------------------------ placing

    def _place_where_there_is_room(self) -> None:
        if not self.settled:
            return
        for group, queue in self.queues.items():
            if len(queue) and not queue.stuck:
                self._fill(group, queue)

    def _fill(self, group: GroupName, queue: Queue) -> None:
        """Place all that fits, then call the queue stuck until room comes up somewhere."""
        if not self.settled:
            return None
        while (overdue := queue.overdue()) is not None:
            if not self._try(queue, overdue):
                queue.stuck = True
                return None
        for lane in queue.lanes():
            turn = 0
            while turn < self.policy.tenants_examined and (head := lane.head(turn)) is not None:
                if not self._try(queue, head):
                    turn += 1
                elif queue.overdue() is not None:
                    return self._fill(group, queue)
                if not self._any_room(group):
                    self._explain(queue, group)
                    queue.stuck = True
                    return None
        queue.stuck = True
        return None

    def _any_room(self, group: GroupName) -> bool:
        return any(runner.has_room for runner in self._by_group.get(group, ()))

    def _explain(self, queue: Queue, group: GroupName) -> None:
        """Say why the first in line waits, when a look at the runners was enough to know that nobody can go."""
        oldest = queue.oldest()
        if oldest is not None:
            outcome = choose(oldest, self._by_group.get(group, ()), self.policy, self._now)
            if not isinstance(outcome, Chosen):
                oldest.why = outcome.why

    def _try(self, queue: Queue, request: Request) -> bool:
        """Place a request, or refuse it, or note why it waits; False when it still waits."""
        if not self.settled:
            request.why = _SETTLING
            return False
        outcome = choose(request, self._by_group.get(request.group, ()), self.policy, self._now)
        if isinstance(outcome, Chosen):
            queue.went(request)
            self._put(request, outcome.runner, outcome.promise)
            return True
        if isinstance(outcome, Never):
            self._refuse(request, Failure.of(ContextLengthExceeded(outcome.why)))
            return True
        request.why = outcome.why
        return False

    def _put(self, request: Request, runner: Runner, promise: Promise) -> None:
        source = self.adapters.source_of(request.digest)
        if source is not None and runner.tier_of(request.digest) is not Tier.DEVICE:
            promise = Promise(promise.pages, promise.tokens, source.bytes)
            ordered = runner.ordered.get(request.digest)
            if ordered is None or self._now - ordered > self.policy.ensure_patience:
                runner.ordered[request.digest] = self._now
                self._do(ensure(runner, request.digest, source))
        request.epoch += 1
        request.placement = Placement(runner.instance, runner.identity.incarnation, request.epoch, self._now)
        request.deadline_at = None
        request.why, request.told = "", (0, "")
        runner.write((request.id, request.epoch), promise.pages, request.digest, self._now)
        self._do(do.Expect(runner.instance, request.id, request.epoch, promise, request.digest))
        self._do(
            do.Place(
                gateway=request.gateway,
                request=request.id,
                tenant=request.tenant,
                epoch=request.epoch,
                instance=runner.instance,
                incarnation=runner.identity.incarnation,
                address=runner.address,
                promise=promise,
                moved_because=request.moved_because,
            )
        )
        request.moved_because = ""
        self._note(request.id, "placed", f"{runner.instance}, epoch {request.epoch}, {promise.pages} pages")

    def _room_at(self, runner: Runner) -> None:
        """Something became free there: parked requests first, then the queue."""
        while self._supervised and runner.attached and (following := runner.next_parked()) is not None:
            name, parked = following
            if parked.wanted.pages > runner.ledger.free or not runner.slot_for(parked.digest):
                break
            del runner.parked[name]
            runner.write((name, parked.epoch), parked.wanted.pages, parked.digest, self._now, readmitted=True)
            self._do(do.Readmit(runner.instance, name, parked.epoch, parked.wanted))
        queue = self.queues.get(runner.group)
        if queue is not None:
            queue.stuck = False

    # -------------------------------------------------------------------------------------------- requests' life

    def _new_request(self, name: RequestId, **fields: Any) -> Request:
        self._sequence += 1
        request = Request(id=name, sequence=self._sequence, **fields)
        self.requests[name] = request
        if request.digest != BASE:
            self._uses[request.digest] += 1
        return request

    def _wait(self, request: Request) -> None:
        """Join the queue with the age it has, and with its patience whole."""
        request.deadline_at = self._now + request.patience if request.patience > 0 else None
        if request.deadline_at is not None:
            heappush(self._deadlines, (request.deadline_at, request.id))
        for until in request.avoid.values():
            heappush(self._wakeups, (until, request.group))
        self._queue(request.group).add(request)

    def _end(self, request: Request) -> None:
        """Forget a request: it is over, or its gateway will tell of it anew."""
        if request.waiting:
            self.queues[request.group].remove(request)
        else:
            self._strike(request)
        del self.requests[request.id]
        if request.digest != BASE:
            self._uses[request.digest] -= 1
            if not self._uses[request.digest]:
                del self._uses[request.digest]

    def _strike(self, request: Request) -> None:
        """Release what is promised to its placement."""
        placement = request.placement
        if placement is None:
            return
        key = (request.id, placement.epoch)
        self._ended[key] = self._now
        runner = self._runner_of(placement)
        if runner is None:
            return
        runner.strike(key)
        parked = runner.parked.get(request.id)
        if parked is not None and parked.epoch == placement.epoch:
            del runner.parked[request.id]
        self._room_at(runner)

    def _refuse(self, request: Request, failure: Failure) -> None:
        self._note(request.id, "refused", failure.message)
        self._do(do.Refuse(request.gateway, request.id, failure, request.tenant))
        self._end(request)

    def _avoid(self, request: Request, instance: str) -> None:
        pause = min(self.policy.avoid * 2**request.declines, self.policy.avoid_longest)
        request.declines = min(request.declines + 1, 16)
        request.avoid = {name: until for name, until in request.avoid.items() if until > self._now}
        request.avoid[instance] = self._now + pause
        heappush(self._wakeups, (self._now + pause, request.group))

    def _move_everything(self, runner: Runner, why: str) -> None:
        here = [r for r in self.requests.values() if r.placement is not None and self._runner_of(r.placement) is runner]
        for request in here:
            if request.gateway in self.gateways:
                self._move(request, runner, why)

    def _move(self, request: Request, runner: Runner, why: str) -> None:
        """Cancel there, then place elsewhere under a new epoch (PU-17)."""
        assert request.placement is not None
        self._note(request.id, "moving", why)
        self._cancel_at_runner(request.placement, request.id, why)
        self._strike(request)
        request.placement = None
        request.moved_because = why
        self._wait(request)
        self._queue(runner.group).stuck = False

    def _cancel_at_runner(self, placement: Placement, request: RequestId, reason: str) -> None:
        runner = self._runner_of(placement)
        if runner is not None and runner.attached:
            self._do(do.CancelAtRunner(runner.instance, request, placement.epoch, reason))

    # -------------------------------------------------------------------------------------------------- bookkeeping

    def _recall(self, remembered: Remembered) -> None:
        self.pools = {pool.pool: pool for pool in remembered.pools}
        for adapter in remembered.adapters:
            self.adapters.restore(adapter.spec, adapter.serving)
        self._bases = {one.group: (one.base, one.max_model_length) for one in remembered.groups}
        self._awaited = set(remembered.runners)

    def _queue(self, group: GroupName) -> Queue:
        queue = self.queues.get(group)
        if queue is None:
            queue = self.queues[group] = Queue(self.policy.max_passed_over)
        return queue

    def _current(self, instance: Instance, incarnation: str) -> Runner | None:
        runner = self.runners.get(instance)
        return runner if runner is not None and runner.identity.incarnation == incarnation else None

    def _runner_of(self, placement: Placement) -> Runner | None:
        return self._current(placement.instance, placement.incarnation)

    def _apply_pool(self, runner: Runner) -> None:
        pool = self.pools.get(runner.identity.pool)
        own = runner.capacity.max_sequences
        runner.max_sequences = min(own, pool.max_sequences) if pool is not None and pool.max_sequences else own

    def _forget(self, runner: Runner) -> None:
        del self.runners[runner.instance]
        self._by_group[runner.group].remove(runner)
        self._queue(runner.group).stuck = False
        self._catalog_changed = True
        self._do(do.Remember())

    def _end_drain_of(self, runner: Runner) -> None:
        if runner.drain is not None and not runner.drain.done and (runner.empty or not runner.attached):
            runner.drain.done = True
            self._do(do.TellDrained(runner.identity))

    def _digests_in_use(self) -> set[Digest]:
        return set(self._uses).union(*(runner.live() for runner in self.runners.values()))

    def _let_go_of_unused(self) -> None:
        if self.adapters.retired:
            self._effects += self.adapters.drops(self._digests_in_use(), self.runners.values())

    def _look_after_adapters(self) -> None:
        if not self.settled:
            return
        runners = self.runners.values()
        self._effects += self.adapters.checks(runners, self._now)
        self._effects += self.adapters.replicas(runners, self._now)

    # ------------------------------------------------------------------------------------------------------ telling

    def _do(self, effect: do.Effect) -> None:
        self._effects.append(effect)

    def _note(self, request: RequestId, event: str, detail: str = "") -> None:
        self.timelines.note(request, self._now, event, detail)

    def _publish(self) -> None:
        self._catalog_changed = False
        catalog = Catalog(
            groups=tuple(self._groups()),
            adapters=tuple(self.adapters.entry(adapter, self.runners.values()) for adapter in self.adapters),
        )
        if catalog != self.catalog:
            self.catalog = catalog
            self._do(do.Publish(catalog))

    def _groups(self) -> Iterator[CatalogGroup]:
        names: dict[GroupName, list[Pool]] = {}
        for pool in self.pools.values():
            names.setdefault(pool.group, []).append(pool)
        for group, pools in sorted(names.items()):
            base, length = self._bases.get(group, (BaseModel(), 0))
            yield CatalogGroup(
                group=group,
                served_name=pools[0].served_name,
                model_uri=pools[0].model_uri,
                pools=tuple(sorted(pool.pool for pool in pools)),
                base_digest=base.digest,
                asset_digest=base.asset_digest,
                max_model_length=length,
                runners=tuple(
                    sorted(
                        (runner.instance, runner.address)
                        for runner in self._by_group.get(group, ())
                        if runner.attached and not runner.condemned
                    )
                ),
            )

    def _tell_adapters(self) -> None:
        for adapter in self.adapters:
            report = self.adapters.report(adapter, self.runners.values())
            if report != adapter.told:
                adapter.told = report
                self._do(report)

    def _tell_desired(self) -> None:
        for pool in self.pools.values():
            self._do(do.TellDesired(pool.pool, pool.replicas, "as configured"))

    def _tell_runner(self, runner: Runner) -> None:
        self._do(
            do.TellRunner(
                identity=runner.identity,
                address=runner.address,
                attached=runner.attached,
                capacity=runner.capacity,
                running=runner.running,
                waiting=runner.waiting,
                pages_free=runner.pages_free,
            )
        )

    def _tell_positions(self) -> None:
        for queue in self.queues.values():
            for position, request in enumerate(queue, 1):
                self._tell_position(request, position)

    def _tell_position(self, request: Request, position: int) -> None:
        told, why = request.told
        request.why = request.why or _OTHERS_FIRST
        moved = abs(position - told) > (0 if position <= TOLD_EXACTLY else told // 10)
        if moved or (request.why != why and position <= TOLD_EXACTLY):
            request.told = (position, request.why)
            self._do(do.TellPosition(request.gateway, request.id, position, request.why))


def _is_final(failure: Failure) -> bool:
    """Whether no other runner will say anything else: the request or its adapter is at fault."""
    kind = TABLE.get(failure.code)
    return kind is not None and issubclass(kind, InvalidRequest | AdapterError)


_HANDLERS: dict[type, Callable[[Scheduler, Any], None]] = {
    on.Enqueued: Scheduler._enqueued,
    on.GatewayConnected: Scheduler._gateway_connected,
    on.GatewayGone: Scheduler._gateway_gone,
    on.CancelAsked: Scheduler._cancel_asked,
    on.RequestFinished: Scheduler._request_finished,
    on.RequestLost: Scheduler._request_lost,
    on.RunnerAttached: Scheduler._runner_attached,
    on.RunnerDetached: Scheduler._runner_detached,
    on.RunnerReported: Scheduler._runner_reported,
    on.RunnerDeclined: Scheduler._runner_declined,
    on.AdapterStateChanged: Scheduler._adapter_state_changed,
    on.OperatorConnected: Scheduler._operator_connected,
    on.CatalogStated: Scheduler._catalog_stated,
    on.CatalogAmended: Scheduler._catalog_amended,
    on.DrainAsked: Scheduler._drain_asked,
    on.SupervisorConnected: Scheduler._supervisor_connected,
    on.SupervisorGone: Scheduler._supervisor_gone,
    on.PromiseChanged: Scheduler._promise_changed,
    on.RequestParked: Scheduler._request_parked,
    on.RequestResumed: Scheduler._request_resumed,
    on.RunnerCondemned: Scheduler._runner_condemned,
    on.OvercommitSet: Scheduler._overcommit_set,
    on.Tick: Scheduler._tick,
}
