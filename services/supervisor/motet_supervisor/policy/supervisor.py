"""The supervisor's state, and what follows from each event.

Everything is decided again from the runners' reports: an order that was lost or late costs time, but no request gets
stuck."""

from collections.abc import Callable, Iterable
from math import inf, nextafter
from typing import Any, ClassVar

from motet.domain import InstanceName, RequestId
from motet.runner_info import RunnerIdentity, RunnerRequest, SequenceState
from motet_supervisor.policy import effects, events
from motet_supervisor.policy.overcommit import OvercommitControl
from motet_supervisor.policy.overflow import ExtendTo, ParkVictim, cheapest, decide
from motet_supervisor.policy.runners import TrackedRequest, WatchedRunner
from motet_supervisor.policy.values import SupervisorConfig


class Supervisor:
    def __init__(self, config: SupervisorConfig) -> None:
        self.config = config
        self.runners: dict[InstanceName, WatchedRunner] = {}
        self._schedulers: dict[int, int] = {}
        """Terms of the connected schedulers."""
        self.highest_term = 0
        self._no_leader_since: float | None = None
        self._now = self._ticked_at = 0.0
        self.tick_by = inf
        """A tick that comes later shows that this process runs late."""
        self._lateness = 0.0
        """How late ticks were recently."""
        self._effects: list[effects.Effect] = []
        self._overcommit: dict[str, OvercommitControl] = {}
        """By pool, of those with runners"""

    @property
    def has_leader(self) -> bool:
        """Whether the scheduler with the highest term is connected."""
        return self.highest_term in self._schedulers.values()

    @property
    def term(self) -> int:
        """The term of our orders: the leader's, or 0 while no leader is connected."""
        return self.highest_term if self.has_leader else 0

    def handle(self, event: events.Event, now: float) -> list[effects.Effect]:
        self._now = now
        self._effects = []
        self._handlers[type(event)](self, event)
        if self.has_leader:
            self._no_leader_since = None
        elif self._no_leader_since is None:
            self._no_leader_since = now
        self.tick_by = min(self.tick_by, now + self.config.max_sleep) if self.runners else inf
        return self._effects

    def next_due(self) -> float:
        """When to send the next Tick, if no other event makes it earlier. What has no time of its own, such as orders
        without effect, is looked at with each. Never in the past: a runner that was long silent may disconnect after it
        should have been forgotten."""
        due = min(self.tick_by, *map(self._due_of, self.runners.values())) if self.runners else inf
        return max(due, self._now)

    # ------------------------------------------------------------------------------------------------------- runners

    def _runner_connected(self, event: events.RunnerConnected) -> None:
        instance = InstanceName(event.identity.instance)
        control = self.overcommit_of(event.identity.pool)
        if control.begin_at(event.overcommit):
            self._change_overcommit(event.identity.pool, control, rises=False)
        runner = self.runners.get(instance)
        if runner is None or runner.identity.incarnation != event.identity.incarnation:
            runner = self.runners[instance] = WatchedRunner(
                event.identity, event.capacity, self._now, overcommit=control.factor
            )
        runner.connected, runner.heartbeats = True, event.heartbeats
        runner.pages_free = runner.no_scheduler_since = None  # until its first report on this stream
        runner.note_message(self._now, again=True)
        for sequence in runner.sequences.values():
            sequence.order_done()  # orders on the old stream are lost
        self._report_overcommit(event.identity)
        self._apply_requests(runner, event.live)

    def _report_overcommit(self, runner: RunnerIdentity) -> None:
        """The runner first: it would decline requests of a scheduler that knows a larger factor earlier."""
        factor = self.overcommit_of(runner.pool).factor
        self._effects.append(effects.SetOvercommit(InstanceName(runner.instance), runner.pool, factor))
        self._effects.append(effects.ReportOvercommit(runner.pool, factor))

    def overcommit_of(self, pool: str) -> OvercommitControl:
        if pool not in self._overcommit:
            config = self.config
            self._overcommit[pool] = OvercommitControl(config.overcommit, config.overcommit_window, self._now)
        return self._overcommit[pool]

    def _control_overcommit(self) -> None:
        pools = {runner.identity.pool for runner in self.runners.values()}
        self._overcommit = {pool: control for pool, control in self._overcommit.items() if pool in pools}
        for pool, control in self._overcommit.items():
            before = control.factor
            if control.look(self._now):
                self._change_overcommit(pool, control, rises=control.factor > before)

    def _change_overcommit(self, pool: str, control: OvercommitControl, *, rises: bool) -> None:
        news: list[effects.Effect] = []
        for runner in self.runners.values():
            if runner.identity.pool == pool:
                runner.ledger.overcommit = control.factor
                news.append(effects.SetOvercommit(runner.instance, pool, control.factor))
        # Whoever accepts hears of a larger factor first, whoever asks of a smaller one.
        news.insert(len(news) if rises else 0, effects.ReportOvercommit(pool, control.factor))
        self._effects += news

    def _runner_disconnected(self, event: events.RunnerDisconnected) -> None:
        runner = self.runners.get(event.instance)
        if runner is not None and runner.identity.incarnation == event.incarnation:
            runner.connected = False

    def _memory_reported(self, event: events.MemoryReported) -> None:
        runner = self.runners.get(event.instance)
        if runner is None:
            return
        runner.note_message(self._now)
        runner.ledger.capacity = runner.capacity.kv_pages(event.pages)
        runner.pages_free, runner.host_bytes_free = event.pages_free, event.host_bytes_free
        runner.prefill_seconds_per_token = event.prefill_seconds_per_token
        runner.swap_seconds_per_page = event.swap_seconds_per_page
        if event.has_scheduler is not False:
            runner.no_scheduler_since = None
        elif runner.no_scheduler_since is None:
            runner.no_scheduler_since = self._now
        hung, slowest = bool(runner.hung_reason), self.config.slowest_step * self.config.hang
        done = event.steps, event.load_parts
        if runner.progress.see(*done, pending=event.work_pending, now=self._now, hung=hung, slowest=slowest):
            runner.hung_reason = ""
        again = 0 < event.sequence == runner.last_sequence
        runner.last_sequence = event.sequence
        self._apply_requests(runner, event.live, again=again)

    def _apply_requests(self, runner: WatchedRunner, live: tuple[RunnerRequest, ...], *, again: bool = False) -> None:
        """Find requests that need more pages soon also in the report: an announcement may be lost. `again`: it is the
        one before."""
        self._report_parked(runner, runner.apply_report(live, self._now, self.config.order_timeout, again=again))
        for sequence in runner.sequences.values():
            if not runner.is_near_promise(sequence.entry):
                sequence.overflowing_since = None
            elif sequence.overflowing_since is None:
                sequence.overflowing_since = self._now
        self._answer_overflows(runner)

    def _heartbeat_received(self, event: events.HeartbeatReceived) -> None:
        if (runner := self.runners.get(event.instance)) is not None:
            runner.note_message(self._now)

    def _overflow_announced(self, event: events.OverflowAnnounced) -> None:
        runner = self.runners.get(event.instance)
        if runner is None:
            return
        runner.note_message(self._now)
        entry = event.entry
        known = runner.sequences.get(entry.request)
        if known is None or known.entry.epoch != entry.epoch:
            known = runner.add(entry, self._now)
        elif known.is_past(entry.promise_number):
            return
        elif known.entry.pages > entry.pages and known.order_pending(self._now, self.config.order_timeout):
            return  # it has been extended already; announcement and order crossed
        else:
            known.order_done()
            runner.change(known, entry._replace(max_tokens=entry.max_tokens or known.entry.max_tokens))
        known.overflowing_since = self._now
        self._answer_overflows(runner)

    def _parked(self, event: events.RequestParked) -> None:
        runner, sequence = self._find(event.instance, event.request, event.epoch)
        if runner is None or sequence is None:
            return
        if sequence.is_past(event.number):
            return
        entry = sequence.entry
        if entry.parked and event.number and event.number == entry.promise_number:
            sequence.method = event.method  # a report came before its event: it has been counted, and told
            return
        times = entry.parked_times if sequence.freeing else entry.parked_times + 1
        runner.change(
            sequence,
            entry._replace(
                pages=event.wanted,
                pages_used=0,
                state=SequenceState.PARKED,
                parked_times=times,
                promise_number=event.number,
            ),
        )
        sequence.parked_at = self._now
        sequence.method = event.method
        sequence.order_done()
        sequence.overflowing_since = None
        self._report_parked(runner, [sequence])
        self._answer_overflows(runner)

    def _resumed(self, event: events.RequestResumed) -> None:
        runner, sequence = self._find(event.instance, event.request, event.epoch)
        if runner is None or sequence is None:
            return
        if sequence.is_past(event.number):
            return
        pages = event.pages
        back = sequence.entry._replace(
            pages=pages, pages_used=pages, state=SequenceState.WAITING, promise_number=event.number
        )
        if sequence.parked and runner.pages_free is not None:
            runner.pages_free -= pages
        runner.change(sequence, back)
        sequence.order_done()
        self._effects.append(effects.ReportResumed(event.instance, event.request, event.epoch, pages))

    def _order_refused(self, event: events.OrderRefused) -> None:
        """The next report decides anew, no earlier: what the order was decided on is not true any more."""
        runner, sequence = self._find(event.instance, event.request, event.epoch)
        if runner is None:
            return
        runner.note_message(self._now)
        if sequence is not None and event.number == sequence.entry.promise_number:
            sequence.order_refused = sequence.ordered_at is not None

    def _ended(self, event: events.RequestEnded) -> None:
        runner, sequence = self._find(event.instance, event.request, event.epoch)
        if runner is None:
            return
        control = self.overcommit_of(runner.identity.pool)
        if sequence is None:
            control.note_end(parked=False)  # it was too short for a report
            return
        runner.remove(event.request)
        parks = sequence.entry.parked_times - bool(sequence.freeing)  # a park that was only ordered is none
        control.note_end(parked=parks > 0)
        self._answer_overflows(runner)

    # ----------------------------------------------------------------------------------------------------- scheduler

    def _scheduler_connected(self, event: events.SchedulerConnected) -> None:
        self._note_term(event.scheduler, event.term)
        parked = [
            _parked_report(runner, one)
            for runner in self.runners.values()
            for one in runner.sequences.values()
            if one.parked
        ]
        pools = sorted({runner.identity.pool for runner in self.runners.values()})
        self._effects += [effects.ReportOvercommit(pool, self.overcommit_of(pool).factor) for pool in pools]
        self._effects.append(effects.ReportAllParked(tuple(parked)))
        for runner in self.runners.values():
            if runner.unhealthy:
                self._report_again(runner)

    def _term_raised(self, event: events.TermRaised) -> None:
        self._note_term(event.scheduler, event.term)

    def _scheduler_disconnected(self, event: events.SchedulerDisconnected) -> None:
        self._schedulers.pop(event.scheduler, None)

    def _note_term(self, scheduler: int, term: int) -> None:
        self._schedulers[scheduler] = term
        self.highest_term = max(self.highest_term, term)

    def _resumable(self, event: events.Resumable) -> None:
        if event.term < self.highest_term:
            return  # a scheduler that no longer leads
        runner, sequence = self._find(event.instance, event.request, event.epoch)
        if runner is None or sequence is None:
            return  # its runner's report will show it to the scheduler
        entry = sequence.entry
        if not sequence.parked:
            self._effects.append(effects.ReportResumed(event.instance, entry.request, entry.epoch, entry.pages))
        elif event.pages != entry.pages or (event.number and event.number != entry.promise_number):
            # The scheduler has another promise for it: report it again.
            self._report_parked(runner, [sequence])
        else:
            self._resume(runner, sequence)

    # ---------------------------------------------------------------------------------------------------------- time

    def _tick(self, event: events.Tick) -> None:
        self.tick_by = inf  # begins again
        self._note_lateness(event.late)
        for runner in list(self.runners.values()):
            runner.excuse(event.late, self._now)
            self._watch_health(runner)
            if runner.connected:
                self._answer_overflows(runner)
                self._resume_without_scheduler(runner)
        self._control_overcommit()

    def _due_of(self, runner: WatchedRunner) -> float:
        """When it is reported or forgotten if it sends nothing: just after its time, as it has all of that."""
        forgotten = inf if runner.connected else self._forgotten_after(runner)
        if runner.unhealthy:
            return nextafter(min(forgotten, self._reminded_after(runner)), inf)
        return nextafter(min(forgotten, self._silent_after(runner), self._hung_after(runner)), inf)

    def _forgotten_after(self, runner: WatchedRunner) -> float:
        return runner.last_message_at + self.config.forget

    def _reminded_after(self, runner: WatchedRunner) -> float:
        return runner.unhealthy_reported_at + self.config.remind

    def _silent_after(self, runner: WatchedRunner) -> float:
        return runner.last_message_at + self._longest_silence(runner)

    def _hung_after(self, runner: WatchedRunner) -> float:
        progress = runner.progress
        return progress.moved_at + max(self.config.hang, self.config.hang_steps * progress.slowest_step)

    def _watch_health(self, runner: WatchedRunner) -> None:
        if not runner.connected and self._now > self._forgotten_after(runner):
            del self.runners[runner.instance]
        elif runner.unhealthy:
            if self._now > self._reminded_after(runner):
                self._report_again(runner)
        elif self._now > self._silent_after(runner):
            self._report_silent(runner)
        elif self._now > self._hung_after(runner):
            without_step = self._now - runner.progress.moved_at
            self._mark_unhealthy(
                runner, f"its engine has work and took no step for {without_step:.1f} seconds", hung=True
            )

    def _longest_silence(self, runner: WatchedRunner) -> float:
        config = self.config
        most = config.most_heartbeats * config.heartbeat
        return min(most, config.heartbeat + config.lateness_factor * self._lateness) if runner.heartbeats else most

    def _note_lateness(self, late: float) -> None:
        """The most of the last seconds: it halves with each heartbeat's time."""
        halved = self._lateness * 0.5 ** ((self._now - self._ticked_at) / self.config.heartbeat)
        self._lateness, self._ticked_at = max(halved, min(late, self.config.heartbeat)), self._now

    def _report_again(self, runner: WatchedRunner) -> None:
        """For a scheduler that was away, or knew no other runner for its requests then."""
        if runner.hung_reason:
            self._mark_unhealthy(runner, runner.hung_reason, hung=True)
        else:
            self._report_silent(runner)

    def _report_silent(self, runner: WatchedRunner) -> None:
        silent = self._now - runner.last_message_at
        why = f"it has sent nothing for {silent:.1f} seconds"
        self._mark_unhealthy(runner, why, hung=False, silent_seconds=silent)

    def _mark_unhealthy(self, runner: WatchedRunner, why: str, *, hung: bool, silent_seconds: float = 0.0) -> None:
        lost = effects.ReportRunnerLost(runner.identity, why, hung, silent_seconds, runner.unhealthy)
        self._effects.append(lost)
        runner.unhealthy_reported_at = self._now
        if hung:
            runner.hung_reason = why
        else:
            runner.silent = True

    # ------------------------------------------------------------------------------------------------------- deciding

    def _answer_overflows(self, runner: WatchedRunner) -> None:
        """Answer all requests that are about to reach their promise, the longest waiting first."""
        if not runner.connected or runner.unhealthy:
            return
        waiting = [
            one
            for one in runner.sequences.values()
            if one.overflowing_since is not None
            and not one.parked
            and not one.order_pending(self._now, self.config.order_timeout)
        ]
        for one in sorted(waiting, key=lambda one: (one.overflowing_since, one.arrival)):
            if one.parked or one.order_pending(self._now, self.config.order_timeout):
                continue  # chosen as the victim of an earlier one
            if one.entry.pages >= runner.max_pages(one.entry):
                one.overflowing_since = None
                continue
            match decide(runner, one, self._now, self.config.order_timeout):
                case ExtendTo(pages):
                    self._extend(runner, one, pages)
                case ParkVictim(victim, doubled):
                    self._park(runner, victim, doubled)

    def _extend(self, runner: WatchedRunner, sequence: TrackedRequest, pages: int) -> None:
        entry = sequence.entry
        number = entry.promise_number
        self._effects.append(effects.Extend(runner.instance, entry.request, entry.epoch, entry.pages, pages, number))
        self._effects.append(effects.ReportPromise(runner.instance, entry.request, entry.epoch, pages))
        runner.change(sequence, entry._replace(pages=pages))
        sequence.order(self._now)
        sequence.overflowing_since = None

    def _park(self, runner: WatchedRunner, sequence: TrackedRequest, doubled: int) -> None:
        entry = sequence.entry
        method = cheapest(runner, sequence, self.config.park_method)
        self._effects.append(
            effects.Park(
                runner.instance, entry.request, entry.epoch, entry.pages, doubled, method, entry.promise_number
            )
        )
        if method == "swap":
            runner.host_bytes_free -= runner.pages_of_kv(entry) * runner.capacity.page_bytes
        sequence.entry = entry._replace(parked_times=entry.parked_times + 1)
        sequence.order(self._now, freeing=runner.ledger.promise_of(entry.request))

    def _resume(self, runner: WatchedRunner, sequence: TrackedRequest) -> None:
        entry = sequence.entry
        self._effects.append(
            effects.Resume(runner.instance, entry.request, entry.epoch, entry.pages, entry.promise_number)
        )
        sequence.order(self._now)

    def _resume_without_scheduler(self, runner: WatchedRunner) -> None:
        """If no scheduler leads, or this runner has lost its stream to it, resume parked requests when enough pages are
        free, so that none waits for ever."""
        if not any(
            since is not None and self._now - since >= self.config.resume_without_scheduler
            for since in (self._no_leader_since, runner.no_scheduler_since)
        ):
            return
        parked = sorted(
            (one for one in runner.sequences.values() if one.parked),
            key=lambda one: (one.entry.request_class, one.arrival),
        )
        spare = min(runner.ledger.free, runner.pages_unused) - sum(
            one.entry.pages for one in parked if one.order_pending(self._now, self.config.order_timeout)
        )
        margin = max(1, int(self.config.resume_margin * runner.ledger.capacity))
        for one in parked:
            if one.order_pending(self._now, self.config.order_timeout):
                continue
            if self._now - one.parked_at < self.config.resume_without_scheduler:
                return
            idle = runner.ledger.promised == 0
            if one.entry.pages + (0 if idle else margin) > spare:
                return  # strictly in order: the first waits until it fits
            spare -= one.entry.pages
            self._resume(runner, one)

    # ---------------------------------------------------------------------------------------------------- bookkeeping

    def _report_parked(self, runner: WatchedRunner, sequences: Iterable[TrackedRequest]) -> None:
        self._effects += [_parked_report(runner, one) for one in sequences]

    def _find(
        self, instance: InstanceName, request: RequestId, epoch: int
    ) -> tuple[WatchedRunner | None, TrackedRequest | None]:
        runner = self.runners.get(instance)
        if runner is None:
            return None, None
        sequence = runner.sequences.get(request)
        return runner, sequence if sequence is not None and sequence.entry.epoch == epoch else None

    _handlers: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        events.RunnerConnected: _runner_connected,
        events.RunnerDisconnected: _runner_disconnected,
        events.MemoryReported: _memory_reported,
        events.HeartbeatReceived: _heartbeat_received,
        events.OverflowAnnounced: _overflow_announced,
        events.RequestParked: _parked,
        events.RequestResumed: _resumed,
        events.OrderRefused: _order_refused,
        events.RequestEnded: _ended,
        events.SchedulerConnected: _scheduler_connected,
        events.TermRaised: _term_raised,
        events.SchedulerDisconnected: _scheduler_disconnected,
        events.Resumable: _resumable,
        events.Tick: _tick,
    }


def _parked_report(runner: WatchedRunner, one: TrackedRequest) -> effects.ReportParked:
    entry = one.entry
    return effects.ReportParked(
        runner.instance, entry.request, entry.epoch, entry.pages, one.method, entry.promise_number
    )
