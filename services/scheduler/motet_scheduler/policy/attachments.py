"""What runners say, and what is asked of one as a whole: it comes, reports, declines, and goes."""

from collections.abc import Iterable

from motet.errors import TABLE, AdapterError, InvalidRequest
from motet.fleet import Failure, ResidentAdapter, RunnerRequest, SequenceState, Tier
from motet.model import InstanceName
from motet_scheduler.policy import effects as do
from motet_scheduler.policy import events as on
from motet_scheduler.policy.books import reconcile
from motet_scheduler.policy.drains import Drains
from motet_scheduler.policy.lives import Lives
from motet_scheduler.policy.offering import Offering
from motet_scheduler.policy.room import room_at
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import State
from motet_scheduler.policy.telling import report_of


class Attachments:
    def __init__(self, state: State, lives: Lives, offering: Offering, drains: Drains) -> None:
        self._state = state
        self._lives = lives
        self._offering = offering
        self._drains = drains
        self._overcommit: dict[str, float] = {}
        """The supervisor's factor for each pool."""

    def attached(self, event: on.RunnerAttached) -> None:
        instance = InstanceName(event.identity.instance)
        runner = self._state.runners.get(instance)
        if runner is None or runner.identity.incarnation != event.identity.incarnation:
            # A runner begins with the factor 1 and hears of another from the supervisor, as we do.
            overcommit = self._overcommit.get(event.identity.pool, 1.0) if self._state.supervised else 1.0
            if runner is not None:
                self._lives.runner_is_gone(runner)
                self._state.by_group[runner.group].remove(runner)
            # One object for all that are alike: what a request needs of them is then computed once.
            alike = (one.capacity for one in self._state.runners.values() if one.capacity == event.capacity)
            runner = Runner(event.identity, event.address, next(alike, event.capacity), overcommit)
            self._state.runners[instance] = runner
            self._state.by_group.setdefault(runner.group, []).append(runner)
            self._state.do(do.Remember())
        runner.identity, runner.address, runner.base = event.identity, event.address, event.base
        runner.attached = True
        runner.heard_at = self._state.now
        if not runner.hung:
            runner.condemned = ""
        self._offering.apply_pool(runner)
        self._state.bases[runner.group] = (event.base, event.capacity.max_model_length)
        self._state.settling.came(instance)
        self._drains.attached(runner)
        self._hear_book(runner, event.live)
        self._hear_residents(runner, event.resident)
        self._offering.tell_adapters()  # also what the process before this one held
        self._state.catalog_changed = True
        self._state.do(report_of(runner))
        self._offering.look_after_adapters()

    def detached(self, event: on.RunnerDetached) -> None:
        runner = self._state.current(event.instance, event.incarnation)
        if runner is None:
            return
        runner.attached = False
        runner.detached_at = self._state.now
        runner.ordered.clear()
        self._state.catalog_changed = True
        self._state.do(report_of(runner))

    def reported(self, event: on.RunnerReported) -> None:
        runner = self._state.current(event.instance, event.incarnation)
        if runner is None:
            return
        runner.heard_at = self._state.now
        runner.pages_free, runner.running, runner.waiting = event.pages_free, event.running, event.waiting
        # Speaking is not enough: after a silence, too, an engine with work must take a step.
        moves = event.steps > runner.steps if runner.steps is not None else not runner.hung
        idle = all(entry.state in (SequenceState.PARKED, SequenceState.LOADING) for entry in event.live)
        if runner.condemned and (moves or idle):
            runner.condemned, runner.hung = "", False
            self._state.catalog_changed = True
        runner.steps = event.steps
        self._hear_book(runner, event.live)
        self._hear_residents(runner, event.resident)
        self._state.do(report_of(runner))
        self._offering.look_after_adapters()

    def _hear_book(self, runner: Runner, live: tuple[RunnerRequest, ...]) -> None:
        self._state.effects += reconcile(
            runner,
            live,
            requests=self._state.requests,
            gateways=self._state.gateways,
            ended=self._lives.ended,
            unlisted=self._lives.unlisted,
            policy=self._state.policy,
            now=self._state.now,
        )
        for entry in live:
            request = self._state.requests.get(entry.request)
            if request is not None and request.placement is not None and request.placement.epoch == entry.epoch:
                request.delivered = max(request.delivered, entry.output_tokens)
        room_at(self._state, runner)

    def _hear_residents(self, runner: Runner, resident: Iterable[ResidentAdapter]) -> None:
        before = {digest: found.tier for digest, found in runner.resident.items()}
        runner.resident = {found.digest: found for found in resident}
        for digest, found in runner.resident.items():
            if found.tier is Tier.DEVICE:
                runner.ordered.pop(digest, None)
        if before != {digest: found.tier for digest, found in runner.resident.items()}:
            self._state.catalog_changed = True
            self._offering.tell_adapters()
        if self._state.stated:
            in_use = self._state.digests_in_use()
            self._state.effects += self._state.adapters.strays(runner, in_use)

    def declined(self, event: on.RunnerDeclined) -> None:
        request = self._state.requests.get(event.request)
        if request is None or event.epoch != (request.placement.epoch if request.placement else request.epoch):
            return
        self._state.note(request.id, "declined", f"{event.instance}: {event.failure.message}")
        self._lives.avoid(request, event.instance)
        if _is_final(event.failure):
            request.fatal = event.failure
        if request.placement is not None:
            # The room is free again; the gateway, told by the runner too, says how far the request has come.
            self._lives.strike(request)
            self._lives.unlisted[request.id, event.epoch] = self._state.now
        elif request.fatal is not None:
            self._lives.refuse(request, event.failure)

    def adapter_changed(self, event: on.AdapterStateChanged) -> None:
        runner = self._state.runners.get(event.instance)
        if runner is not None and event.failure is not None:
            runner.ordered.pop(event.digest, None)
        if self._state.adapters.heard(event, self._state.now):
            self._state.catalog_changed = True
            self._state.do(do.Remember())
            self._offering.tell_adapters()
        self._offering.look_after_adapters()

    def overcommit_set(self, event: on.OvercommitSet) -> None:
        self._overcommit[event.pool] = event.factor
        for runner in self._state.runners.values():
            if runner.identity.pool == event.pool:
                runner.ledger.overcommit = event.factor
                room_at(self._state, runner)

    def tick(self) -> None:
        for runner in list(self._state.runners.values()):
            if not runner.attached and self._state.now - runner.detached_at > self._state.policy.forget_runner:
                self._forget(runner)

    def _forget(self, runner: Runner) -> None:
        self._lives.runner_is_gone(runner)
        del self._state.runners[runner.instance]
        self._state.by_group[runner.group].remove(runner)
        self._state.queue(runner.group).look_everywhere()
        self._state.catalog_changed = True
        self._state.do(do.Remember())
        self._offering.tell_adapters()


def _is_final(failure: Failure) -> bool:
    """Whether no other runner will say anything else: the request or its adapter is at fault."""
    kind = TABLE.get(failure.code)
    return kind is not None and issubclass(kind, InvalidRequest | AdapterError)
