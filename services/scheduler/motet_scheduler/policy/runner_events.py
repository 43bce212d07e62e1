"""Handles what runners say: they attach, report, decline and detach."""

from collections.abc import Mapping
from itertools import chain
from math import inf

from motet.domain import Digest, InstanceName
from motet.errors import (
    NEVER_HERE,
    TABLE,
    TOO_FEW_PAGES,
    AdapterError,
    AdapterFetchFailed,
    AdapterUnproved,
    InvalidRequest,
)
from motet.runner_info import Capacity, Failure, RunnerRequest, SequenceState
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.catalog import CatalogPublisher
from motet_scheduler.policy.drains import Drains
from motet_scheduler.policy.happenings import Happening
from motet_scheduler.policy.ledger_sync import sync_ledger
from motet_scheduler.policy.parked_requests import on_capacity_freed
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Listing, Runner, runner_report
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.step_profile import StepProfile
from motet_scheduler.policy.values import GroupName

IDLE = frozenset({SequenceState.PARKED, SequenceState.LOADING})
"""What computes nothing."""


class RunnerEvents:
    def __init__(
        self, state: SchedulerState, lifecycle: RequestLifecycle, publisher: CatalogPublisher, drains: Drains
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._publisher = publisher
        self._drains = drains
        self._overcommit: dict[str, float] = {}
        """The supervisor's factor for each pool."""

    def attached(self, event: events.RunnerAttached) -> None:
        instance = InstanceName(event.identity.instance)
        runner = self._state.runners.get(instance)
        kinds = self._kinds(GroupName(event.identity.group))
        if new := runner is None or runner.identity.incarnation != event.identity.incarnation:
            # A runner starts with factor 1; the supervisor sends another factor to the runner and to us.
            overcommit = self._overcommit.get(event.identity.pool, 1.0) if self._state.supervised else 1.0
            if runner is not None:
                self._remove(runner)
            # Runners of equal capacity share one object, so that a request's requirement is computed once for all.
            alike = (one.capacity for one in self._state.runners.values() if one.capacity == event.capacity)
            runner = Runner(
                event.identity,
                event.address,
                next(alike, event.capacity),
                overcommit,
                table=self._state.table,
                rank_of=self._state.adapters.rank_of,
                adapter_moved=self._state.adapter_moved,
            )
            runner.attached = False
            self._state.runners[instance] = runner
            self._state.by_group.setdefault(runner.group, []).append(runner)
            self._state.emit(effects.SaveCatalog())
        runner.identity, runner.address, runner.base = event.identity, event.address, event.base
        if new:
            self._lifecycle.has_come(runner)
        runner.tell_by = min(runner.tell_by, self._state.now + self._state.config.forget_runner)
        runner.telling, runner.forget_at, runner.kernels = True, runner.tell_by, event.kernels
        if self._kinds(runner.group) - kinds:
            self._state.queue(runner.group).try_all_again()  # it may be too small for some that wait: they are refused
        self._publisher.apply_pool(runner)
        self._state.away_since_start.discard(instance)
        self._state.residency.reported(runner, event.resident)
        if event.refused_is_all:
            self._state.verdicts.refuses_only(runner, event.refused)
        self._refused(runner, event.refused)
        runner.listing = Listing(whole=True)
        self._apply_requests(runner, runner.listing, event.live, more=event.more)
        if event.more:
            self._state.runner_changed(runner)

    def _has_told_all(self, runner: Runner) -> None:
        """Its hello is whole: from now on it counts."""
        runner.attached, runner.telling, runner.pinned = True, False, None
        runner.tell_by = runner.forget_at = inf
        if not runner.hung:
            runner.unhealthy = ""
        self._state.waiting_for_runners.runner_attached(runner.instance)
        self._drains.attached(runner)
        self._state.runner_changed(runner)
        self._state.residency.connection_changed(runner)
        self._state.emit(runner_report(runner))
        self._publisher.order_adapter_loads()

    def _kinds(self, group: GroupName) -> set[tuple[str, Capacity]]:
        """The base models of the group's runners, and their capacities."""
        return {(runner.base.digest, runner.capacity) for runner in self._state.runners_of(group)}

    def detached(self, event: events.RunnerDetached) -> None:
        runner = self._state.current(event.instance, event.incarnation)
        if runner is None:
            return
        runner.attached, runner.telling, runner.listing = False, False, None
        runner.forget_at = min(runner.tell_by, self._state.now + self._state.config.forget_runner)
        runner.adapters.forget_loads()
        self._state.residency.connection_changed(runner)
        self._state.runner_changed(runner)
        self._state.emit(runner_report(runner))

    def reported(self, event: events.RunnerReported) -> None:
        runner = self._state.current(event.instance, event.incarnation)
        if runner is None:
            return
        runner.note_kv_pages(event.pages)
        runner.pages_free, runner.running, runner.waiting = event.pages_free, event.running, event.waiting
        runner.pages_to_resume = event.pages_free
        runner.cached_prefixes, runner.kernels = event.cached_prefixes, event.kernels
        runner.batch_cap = event.batch_cap
        runner.step_seconds, runner.prompt_token_seconds = event.step_seconds, event.prompt_token_seconds
        runner.profile = StepProfile(event.fixed_seconds, event.sequence_seconds, event.prompt_token_seconds)
        self._publisher.apply_pool(runner)
        self._state.queue(runner.group).token_costs.look(self._state.runners_of(runner.group), self._state.now)
        moves = event.steps > runner.steps if runner.steps is not None else not runner.hung
        runner.steps = event.steps
        if event.resident is not None:
            self._state.residency.reported(runner, event.resident)
        runner.listing = Listing(moves=moves, prompt_tokens=event.pending_prompt_tokens)
        self._apply_requests(runner, runner.listing, event.live, more=event.more)
        self._state.emit(runner_report(runner))

    def listed(self, event: events.RunnerListed) -> None:
        runner = self._state.current(event.instance, event.incarnation)
        if runner is not None and runner.listing is not None:  # else it had listed all
            self._apply_requests(runner, runner.listing, event.live, more=event.more)

    def residency_changed(self, event: events.ResidencyChanged) -> None:
        runner = self._state.current(event.instance, event.incarnation)
        if runner is not None:
            self._state.residency.changed(runner, event.gone, event.resident)

    def _apply_requests(self, runner: Runner, listing: Listing, live: tuple[RunnerRequest, ...], *, more: bool) -> None:
        """The next part of what it lists. `more`: others follow."""
        listing.context_tokens += sum(map(_context, live))
        listing.idle = listing.idle and all(entry.state in IDLE for entry in live)
        self._state.effects += sync_ledger(
            runner,
            listing,
            live,
            more=more,
            requests=self._state.requests,
            gateways=self._state.gateways,
            ended=self._lifecycle.ended,
            unlisted=self._lifecycle.unlisted,
            config=self._state.config,
            now=self._state.now,
        )
        for entry in live:
            request = self._state.requests.get(entry.request)
            if request is not None and request.runs_on(runner.identity, entry.epoch):
                self._state.note_delivered(request, entry.output_tokens)
        if not more:
            self._all_listed(runner, listing)
        on_capacity_freed(self._state, runner)

    def _all_listed(self, runner: Runner, listing: Listing) -> None:
        runner.listing, runner.last_report_at = None, self._state.now
        if listing.prompt_tokens is not None:
            runner.note_work(listing.context_tokens, listing.prompt_tokens)
            # A report is not enough to be healthy again: an engine with work must also take a step.
            if runner.unhealthy and (listing.moves or listing.idle):
                runner.unhealthy, runner.hung = "", False
                self._state.runner_changed(runner)
        if runner.telling:
            self._has_told_all(runner)
        if self._state.catalog_known:
            self._state.effects += self._state.drops.unneeded_on(runner, self._state.is_in_use)

    def declined(self, event: events.RunnerDeclined) -> None:
        request, runner = self._state.requests.get(event.request), self._state.runners.get(event.instance)
        if request is None or runner is None:
            return
        here = request.runs_on(runner.identity, event.epoch)
        # Its gateway, which is told too, may have said before that it lost this placement.
        if not (here or request.has_left(runner.identity, event.epoch)) or event.epoch == request.declined_epoch:
            return
        if TABLE.get(event.failure.code) in NEVER_HERE:
            self._lifecycle.avoid_for_good(request, runner, event.failure)
        if not (here or request.waiting):
            return
        self._state.note_event(request, Happening.DECLINED, event.instance, event.failure.message)
        self._lifecycle.avoid(request, event.instance)
        request.declined_epoch = event.epoch
        if event.failure.reason == TOO_FEW_PAGES:
            request.room_lacked += 1
        elsewhere = False
        if event.failure.code == AdapterUnproved.mapping.code:  # the runner may be at fault: others may serve it
            self._refused(runner, {request.digest: event.failure}, request.adapter)
            elsewhere = bool(self._state.runners_for(request))
        elif event.failure.code == AdapterFetchFailed.mapping.code:  # its source may have lost what others still have
            elsewhere = self._may_go_where_it_is(request, runner)
            self._lifecycle.avoid(request, event.instance, event.failure.retry_after or self._state.config.load_retry)
        if (_is_final(event.failure) and not elsewhere) or self._lifecycle.is_unable(request):
            request.final_failure = event.failure
        if request.placement is not None:
            # The promise is released. The runner tells the gateway too, which reports how many tokens it delivered.
            self._lifecycle.release_promise(request)
            self._lifecycle.unlisted[request.id, event.epoch] = self._state.now
        elif request.final_failure is not None:
            self._lifecycle.refuse(request, event.failure)
        else:
            self._lifecycle.go_on_waiting(request)
            self._state.queue(request.group).try_again([request])  # it may need more pages than it was filed with

    def _may_go_where_it_is(self, request: Request, runner: Runner) -> bool:
        """Whether another runner than this one has its adapter, and may take it before it has waited too long for
        that. Each wait has a deadline of its own: without an end for all together, it would go round for ever."""
        now = self._state.now
        if request.unfetched_since is None:
            request.unfetched_since = now
        if request.queue_timeout and now >= request.unfetched_since + request.queue_timeout:
            return False
        return any(
            one is not runner and one.takes_work and request.digest in one.adapters.tiers
            for one in self._state.runners_for(request)
            if request.avoid.get(one.instance) != inf
        )

    def sequences_ended(self, event: events.SequencesEnded) -> None:
        runner = self._state.current(event.instance, event.incarnation)
        if runner is None:
            return
        for key in event.ended:
            self._lifecycle.ended_at_runner(runner, key)
        on_capacity_freed(self._state, runner)

    def adapter_changed(self, event: events.AdapterStateChanged) -> None:
        state, runner, now = self._state, self._state.runners.get(event.instance), self._state.now
        state.orders.look_at(now + state.config.load_retry)
        if event.failure is not None and event.failure.retry_after > 0:
            state.orders.look_at(now + event.failure.retry_after)
        checked = state.checks.answered_by(event)
        if checked is not None:
            one = checked.adapter
            before, returns = one.serving, state.some_may_return(one.spec.group)
            if state.checks.reported(checked, event, state.runners.values(), now, some_may_return=returns):
                state.catalog_changed = True
            # Else the former revision serves on, and failures are not saved; or it was withdrawn, and that is saved.
            if one.serving is not None and one.serving is not before:
                state.emit(effects.SaveCatalog(outdates=True))
        else:
            known = runner is not None and runner.adapters.load_reported(event, now, state.config.load_retry)
            if event.order and not known:
                state.emit(effects.IgnoreAnswer(event.instance, event.ref, event.order))
            elif runner is not None:
                state.residency.load_reported(runner, event)
                state.verdicts.checked_anew(event)
        if runner is not None and not event.order:
            self._news_of_adapter(runner, event)
        self._refusals_changed()
        self._publisher.order_adapter_loads()

    def _news_of_adapter(self, runner: Runner, event: events.AdapterStateChanged) -> None:
        """That nobody asked for"""
        state, failure = self._state, event.failure
        if failure is None:
            state.residency.stage_told(runner, event.digest, event.stage)
            state.verdicts.proved(runner, event)
        elif failure.code == AdapterUnproved.mapping.code:
            adapter = str(event.ref.object)
            if state.adapters.source_of(event.digest, adapter) is not None:
                self._refused(runner, {event.digest: failure}, adapter)

    def _refused(self, runner: Runner, failures: Mapping[Digest, Failure], adapter: str = "") -> None:
        """What the runner computes with these bytes is wrong, as it has found by itself. `adapter`: under which name;
        empty: it does not say."""
        runners, returns = self._state.runners.values(), self._state.some_may_return(runner.group)
        for digest, failure in failures.items():
            self._state.verdicts.refused_on(runner, digest, adapter, failure, runners, some_may_return=returns)
        self._refusals_changed()

    def _refusals_changed(self) -> None:
        """Other runners may serve some adapters than before, or none may."""
        self._publisher.save_withdrawn()
        for group in self._state.verdicts.take_moved():
            self._state.queue(group).try_all_again()

    def overcommit_set(self, event: events.OvercommitSet) -> None:
        self._overcommit[event.pool] = event.factor
        for runner in self._state.runners.values():
            if runner.identity.pool == event.pool:
                runner.ledger.overcommit = event.factor
                on_capacity_freed(self._state, runner)

    def tick(self) -> None:
        for runner in list(self._state.runners.values()):
            runner.adapters.end_loads(self._state.now, self._state.config.load_retry)
            if self._state.now >= runner.forget_at:
                self._forget(runner)

    def next_due(self) -> float:
        """When a runner that is away, or does not end its hello, is forgotten."""
        return min((runner.forget_at for runner in self._state.runners.values()), default=inf)

    def _forget(self, runner: Runner) -> None:
        if runner.telling:
            self._state.emit(effects.EndRunnerStream(runner.instance))
        self._remove(runner)
        self._state.emit(effects.SaveCatalog())

    def _remove(self, runner: Runner) -> None:
        """It is gone: for the queue too, which may have reserved it."""
        runner.attached = False
        self._lifecycle.runner_lost(runner)
        self._state.residency.reported(runner, {})
        self._state.verdicts.runner_gone(runner)
        self._state.adapters.places_changed(None)
        runner.adapters.runner_gone()
        del self._state.runners[runner.instance]
        of_group = self._state.by_group[runner.group]
        of_group.remove(runner)
        if not of_group:
            del self._state.by_group[runner.group]
        queue = self._state.queue(runner.group)
        if any(one.capacity is runner.capacity and one.base.digest == runner.base.digest for one in of_group):
            # Others are like it. So only these may have to be refused now, or may go where they might not before.
            refused = dict.fromkeys(chain.from_iterable(one.refused.failures for one in of_group))
            unable = self._lifecycle.unable_in(runner.group)
            queue.try_again([*queue.replaced, *queue.with_adapters(refused), *queue.not_taken_by(runner), *unable])
        else:
            queue.try_all_again()
        queue.retry_on(runner)
        self._state.runner_changed(runner)


def _is_final(failure: Failure) -> bool:
    """Whether every runner would answer the same: the request or its adapter causes the failure."""
    kind = TABLE.get(failure.code)
    return kind is not None and issubclass(kind, InvalidRequest | AdapterError)


def _context(entry: RunnerRequest) -> int:
    """Tokens to which its next one attends."""
    return 0 if entry.parked else entry.prompt_tokens + entry.output_tokens
