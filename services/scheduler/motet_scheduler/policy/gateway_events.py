"""Handles what gateways say: requests arrive, are cancelled, get lost, and end."""

from math import inf

from motet.domain import NO_TENANT, RequestId, Tenant
from motet.errors import EngineRestarted, Internal, MotetError, PoolSaturated
from motet.runner_info import Failure
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.adapter import REVISION_REPLACED
from motet_scheduler.policy.happenings import Happening
from motet_scheduler.policy.placement import Placer, Positions
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.quota_gate import QuotaGate
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.requests import Placement, Request
from motet_scheduler.policy.shares import CHARGED_BEFORE
from motet_scheduler.policy.state import SchedulerState

_NOT_YOURS = Internal("a request with this id belongs to another gateway; send it again with another id")


class GatewayEvents:
    def __init__(
        self,
        state: SchedulerState,
        lifecycle: RequestLifecycle,
        quota_gate: QuotaGate,
        placer: Placer,
        positions: Positions,
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._quota_gate = quota_gate
        self._placer = placer
        self._positions = positions
        self._departed: set[str] = set()
        """Disconnected gateways whose requests may still run, or whose answers they may still read."""
        self._untold: dict[str, dict[RequestId, Request]] = {}
        """Of gateways that have not told everything since their hello: what was known as placed, and they may tell."""

    def connected(self, event: events.GatewayConnected) -> None:
        self._state.held.pop(event.gateway, None)
        self._state.template_loads.held(event.gateway, (), self._state.now)
        self._departed.discard(event.gateway)
        # What waits here is enqueued again: its placement never arrived.
        self._lifecycle.forget_what_waits(event.gateway)
        known = self._state.of_gateways[event.gateway].had_place.copy()
        for one in known.values():
            if one.waiting:  # it may say that it still runs there
                self._lifecycle.leave_queue(one)
                one.placement = one.left
        # Until it has told everything, nothing of it is moved: it may tell of the placement before.
        self._state.gateways.discard(event.gateway)
        self._untold[event.gateway] = known
        self._hear(event)
        if self._state.may_place and self._state.catalog is not None:
            self._state.emit(effects.PublishCatalog(self._state.catalog, event.gateway))

    def told(self, event: events.GatewayTold) -> None:
        if event.gateway in self._untold:  # else its hello said that nothing follows
            self._hear(event)

    def _hear(self, event: events.GatewayConnected | events.GatewayTold) -> None:
        untold = self._untold[event.gateway]
        for live in event.live:
            untold.pop(live.request, None)
            self._adopt(event.gateway, live)
        if not event.more:
            # Those not listed ended while the stream was down, or are enqueued again.
            del self._untold[event.gateway]
            self._state.gateways.add(event.gateway)
            requests = self._state.requests
            self._lifecycle.forget([one for name, one in untold.items() if requests.get(name) is one])

    def _adopt(self, gateway: str, live: events.LiveRequest) -> None:
        """Take over a running request as its gateway knows it."""
        request = self._lifecycle.known(live.request)
        if request is not None and request.gateway != gateway:
            self._refuse(gateway, live.request, live.epoch, _NOT_YOURS, live.tenant)
            return
        if request is None:
            request = Request(
                id=live.request,
                gateway=gateway,
                tenant=live.tenant,
                group=live.group,
                digest=live.digest,
                adapter=live.adapter,
                base=live.base,
                request_class=live.request_class,
                prompt_tokens=live.prompt_tokens,
                max_tokens=live.max_tokens,
                estimate=live.estimate,
                asked_at=self._state.now - live.age,
                queue_timeout=live.deadline,
                parent=live.parent,
                api_key=live.api_key,
            )
            self._lifecycle.begin(request)
            self._state.note_event(request, Happening.ADOPTED, live.instance, live.epoch)
            request.draw = self._state.quotas.draw(request, self._state.now)
        elif request.waiting:
            self._lifecycle.leave_queue(request)
        elif request.placement is not None and request.placement.epoch != live.epoch:
            self._lifecycle.release_promise(request)
        self._state.note_delivered(request, live.delivered)
        weight = self._state.weights.of(request.group, request.tenant)
        self._state.queue(request.group).adopt(request, weight)
        if request.draw is not None:
            request.draw.adopt()
        request.epoch = max(request.epoch, live.epoch)
        request.moved_reason, request.engine_hung = "", False
        request.placement = Placement(live.instance, live.incarnation, live.epoch, self._state.now)
        self._state.of_gateways[gateway].placed(request)
        key = (request.id, live.epoch)
        has_ended = key in self._lifecycle.unanswered
        if not has_ended:
            self._lifecycle.placed(request.id, live.epoch)
        self._state.families.placed(request, live.instance)
        runner = self._state.runner_of(request.placement)
        if runner is None:
            return
        request.base = request.base or runner.base.digest
        if not has_ended and key not in runner.entries and request.id not in runner.parked:
            runner.record_promise(key, live.promise.pages, live.digest, self._state.now)
            self._state.queue(runner.group).promised(runner, live.digest)
        if runner.unhealthy and runner.hung:
            self._lifecycle.move(request, runner.unhealthy)

    def disconnected(self, event: events.GatewayDisconnected) -> None:
        self._state.gateways.discard(event.gateway)
        self._untold.pop(event.gateway, None)
        self._state.held.pop(event.gateway, None)
        self._state.template_loads.held(event.gateway, (), self._state.now)
        self._departed.add(event.gateway)
        self._lifecycle.forget_what_waits(event.gateway)
        had_place = self._state.of_gateways[event.gateway].had_place
        self._lifecycle.forget([request for request in had_place.values() if request.waiting])

    def enqueued(self, event: events.Enqueued) -> None:
        epoch = event.epoch
        before = self._state.requests.get(event.request)
        charged = event.admitted or event.delivered > 0
        if before is not None and before.gateway == event.gateway:
            charged |= self._state.quotas.undo(before, self._state.now)
        known = self._lifecycle.known(event.request)
        if known is not None and known.gateway != event.gateway:
            self._refuse(event.gateway, event.request, epoch, _NOT_YOURS, event.tenant)
            return
        if known is not None:
            epoch = max(epoch, known.epoch)
            self._lifecycle.end(known)
        queue = self._state.queue(event.group)
        refusal = self._refusal(event, queue)
        if refusal is not None:
            self._state.timelines.note_refused(event.request, event.tenant, refusal.message, self._state.now)
            self._refuse(event.gateway, event.request, epoch, refusal, event.tenant)
            return
        request = Request(
            id=event.request,
            gateway=event.gateway,
            tenant=event.tenant,
            group=event.group,
            digest=event.digest,
            adapter=event.adapter,
            base=event.base,
            request_class=event.request_class,
            prompt_tokens=event.prompt_tokens,
            max_tokens=event.max_tokens,
            estimate=event.estimate,
            asked_at=self._state.now - event.age,
            queue_timeout=event.whole_deadline or event.deadline,
            parent=event.parent,
            choices=event.choices,
            prefix_hints=event.prefix_hints,
            api_key=event.api_key,
            avoid=dict.fromkeys(event.avoid, self._state.now + self._state.config.avoid_after_decline),
        )
        self._state.note_delivered(request, event.delivered)
        request.charge = CHARGED_BEFORE if event.delivered else None
        request.draw = self._state.quotas.draw(request, self._state.now)
        over = self._quota_gate.refusal(request) if not charged else None
        if over is not None:
            accounts = self._state.quotas.told(request, self._state.now)
            claim = request.draw.claimed if request.draw is not None else None
            self._state.quotas.end(request, self._state.now)
            self._state.timelines.note_refused(event.request, event.tenant, over.message, self._state.now)
            failure = Failure.of(over)
            self._state.emit(
                effects.SendRefused(event.gateway, event.request, epoch, failure, event.tenant, accounts, claim)
            )
            return
        self._lifecycle.begin(request)
        request.epoch = epoch
        kind = Happening.QUEUED_AGAIN if epoch else Happening.QUEUED
        self._state.note_event(request, kind, request.request_class.name.lower(), epoch)
        if not self._quota_gate.enter(request, event.deadline, charged=charged):
            return
        self._lifecycle.enqueue(request, timeout=event.deadline)
        self._placer.place_group(queue)
        if request.id in self._state.requests and request.waiting and not self._placer.refuse_too_large(request):
            self._positions.report(request, len(queue))

    def _refusal(self, event: events.Enqueued, queue: Queue) -> MotetError | None:
        # One with delivered tokens is a stream that a client reads: its runner was lost, or a scheduler started.
        if len(queue) >= self._state.config.queue_limit:
            self._lifecycle.end_forgotten()  # they count, too
        if event.delivered:
            return None
        if queue.is_full_for(event.tenant, self._state.config.queue_limit):
            seconds = queue.departures.retry_after(event.tenant, self._state.now)
            return PoolSaturated(
                f"Too many requests ({len(queue)}) wait for this model. Send yours again in {seconds:.0f} seconds.",
                retry_after=seconds,
            )
        replaced = self._state.adapters.is_replaced
        if self._state.catalog_known and replaced(event.digest, event.adapter, event.group):
            return REVISION_REPLACED
        return None

    def _refuse(
        self, gateway: str, request: RequestId, epoch: int, error: MotetError, tenant: Tenant = NO_TENANT
    ) -> None:
        """Refuse a request that is unknown, or that belongs to another gateway."""
        self._state.emit(effects.SendRefused(gateway, request, epoch, Failure.of(error), tenant))

    def _request_of(self, gateway: str, name: RequestId) -> Request | None:
        """The request, if it belongs to this gateway: no other gateway can end or move it."""
        request = self._lifecycle.known(name)
        return request if request is not None and request.gateway == gateway else None

    def cancel_requested(self, event: events.CancelRequested) -> None:
        request = self._request_of(event.gateway, event.request)
        if request is None:
            return
        placement = request.placement
        self._state.note_event(request, Happening.CANCELLED)
        self._lifecycle.end(request)
        if placement is not None:
            # The cancellation and the placement crossed: the request was not submitted, and never will be.
            self._lifecycle.cancel_at_runner(placement, request.id, "cancelled by its client")

    def finished(self, event: events.RequestFinished) -> None:
        request = self._request_of(event.gateway, event.request)
        if request is None:
            return
        self._state.note_event(request, Happening.FINISHED, event.output_tokens, event.reason)
        self._state.note_delivered(request, event.output_tokens)
        placement = request.placement
        self._lifecycle.end(request)
        if placement is not None and placement.epoch != event.epoch:
            self._lifecycle.cancel_at_runner(placement, request.id, "finished under an earlier placement")

    def requests_held(self, event: events.RequestsHeld) -> None:
        self._state.held[event.gateway] = dict(event.groups)
        self._state.template_loads.held(event.gateway, event.templates, self._state.now)

    def levels_told(self, event: events.LevelsTold) -> None:
        self._state.quotas.hear(event.levels, self._state.now)
        self._state.quotas.hear_claims(event.claims, self._state.now)

    def lost(self, event: events.RequestLost) -> None:
        request = self._request_of(event.gateway, event.request)
        if request is None:
            error = EngineRestarted("The scheduler no longer knows this request. Send it again.")
            self._refuse(event.gateway, event.request, event.epoch, error)
            return
        before = request.delivered
        self._state.note_delivered(request, event.delivered)
        placement = request.placement
        if placement is None:
            # Its gateway reported the old placement lost before there is a new one.
            request.moved_reason, request.engine_hung = "", False
            if request.delivered > before:
                self._lifecycle.wait_anew(request)
            return
        # If its gateway runs it under an earlier epoch, the last placement never arrived there.
        if event.epoch < placement.epoch:
            return  # it has been placed again since
        request.epoch = max(request.epoch, event.epoch)
        self._state.note_event(request, Happening.LOST, event.why)
        self._lifecycle.leave(request)
        self._lifecycle.avoid(request, placement.instance)
        self._lifecycle.enqueue(request)
        if request.declined_epoch == placement.epoch:
            self._lifecycle.go_on_waiting(request)
        if isinstance(request.final_failure, Failure):
            self._lifecycle.refuse(request, request.final_failure)

    def look_from(self) -> float:
        """Requests of a gateway that has gone may still run."""
        return -inf if self._departed else inf

    def look(self) -> None:
        """Forget disconnected gateways and their requests when none of these runs any more, and their gateway has had
        time to come back and say what came of them."""
        if not self._departed:
            return
        departed, self._departed = self._departed, set()
        for gateway in sorted(departed):
            over: list[Request] = []
            own = self._state.of_gateways[gateway]
            for request in own.had_place.values():
                runner = self._state.runner_of(request.placement) if request.placement is not None else None
                runs = runner is not None and request.placement and runner.holds(request.id, request.placement.epoch)
                if not (runs or self._lifecycle.is_unanswered(request)):
                    over.append(request)
            self._lifecycle.forget(over)
            if own:
                self._departed.add(gateway)
            else:
                del self._state.of_gateways[gateway]
