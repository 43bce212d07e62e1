"""The supervisor's state, and what follows from each event.

Everything is decided again from the runners' reports: an order that was lost, or came too late, costs time and never a
stuck sequence.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from motet.domain import InstanceName, RequestId
from motet.runner_info import RunnerIdentity, RunnerRequest, SequenceState
from motet_supervisor.policy import effects, events
from motet_supervisor.policy.overflow import ExtendTo, ParkVictim, cheapest, decide
from motet_supervisor.policy.runners import TrackedRequest, WatchedRunner
from motet_supervisor.policy.values import SupervisorConfig


class Supervisor:
    def __init__(self, policy: SupervisorConfig) -> None:
        self.policy = policy
        self.runners: dict[InstanceName, WatchedRunner] = {}
        self._schedulers: dict[int, int] = {}
        """The terms of those that are connected."""
        self.highest_term = 0
        self._alone_since: float | None = None
        self._now = 0.0
        self._effects: list[effects.Effect] = []

    @property
    def has_leader(self) -> bool:
        """Whether the leader is connected, and not only one that it has succeeded."""
        return self.highest_term in self._schedulers.values()

    @property
    def term(self) -> int:
        """In whose name orders are given; 0 for those that are nobody's but ours, while no leader is connected."""
        return self.highest_term if self.has_leader else 0

    def handle(self, event: events.Event, now: float) -> list[effects.Effect]:
        self._now = now
        self._effects = []
        _HANDLERS[type(event)](self, event)
        return self._effects

    # ------------------------------------------------------------------------------------------------------- runners

    def _runner_connected(self, event: events.RunnerConnected) -> None:
        instance = InstanceName(event.identity.instance)
        runner = self.runners.get(instance)
        if runner is None or runner.identity.incarnation != event.identity.incarnation:
            runner = self.runners[instance] = WatchedRunner(
                event.identity, event.capacity, self._now, overcommit=self.policy.overcommit
            )
        runner.connected = True
        runner.note_message(self._now, again=True)
        for sequence in runner.sequences.values():
            sequence.order_done()  # what was on its way went down with the stream
        self._tell_overcommit(event.identity)
        self._apply_requests(runner, event.live)

    def _tell_overcommit(self, runner: RunnerIdentity) -> None:
        """The runner first: a scheduler that knows a larger factor before it does would be declined."""
        factor = self.policy.overcommit
        self._effects.append(effects.SetOvercommit(InstanceName(runner.instance), runner.pool, factor))
        self._effects.append(effects.ReportOvercommit(runner.pool, factor))

    def _runner_disconnected(self, event: events.RunnerDisconnected) -> None:
        runner = self.runners.get(event.instance)
        if runner is not None and runner.identity.incarnation == event.incarnation:
            runner.connected = False

    def _memory_reported(self, event: events.MemoryReported) -> None:
        runner = self.runners.get(event.instance)
        if runner is None:
            return
        runner.note_message(self._now)
        runner.host_bytes_free = event.host_bytes_free
        runner.prefill_seconds_per_token = event.prefill_seconds_per_token
        runner.swap_seconds_per_page = event.swap_seconds_per_page
        if runner.progress.see(event.steps, event.work_pending, self._now):
            runner.hung_because = ""
        self._apply_requests(runner, event.live)

    def _apply_requests(self, runner: WatchedRunner, live: tuple[RunnerRequest, ...]) -> None:
        """Besides what is announced, the book itself shows who is about to run out: an announcement may be lost."""
        self._tell_parked(runner, runner.apply_report(live, self._now, self.policy.order_timeout))
        for sequence in runner.sequences.values():
            if not runner.is_near_promise(sequence.entry):
                sequence.overflowing_since = None
            elif sequence.overflowing_since is None:
                sequence.overflowing_since = self._now
        self._answer_overflows(runner)

    def _overflow_ahead(self, event: events.OverflowAnnounced) -> None:
        runner = self.runners.get(event.instance)
        if runner is None:
            return
        runner.note_message(self._now)
        entry = event.entry
        known = runner.sequences.get(entry.request)
        if known is None or known.entry.epoch != entry.epoch:
            known = runner.sequences[entry.request] = runner.newest(entry)
        elif known.entry.pages > entry.pages and known.order_pending(self._now, self.policy.order_timeout):
            return  # it has been extended already; the announcement crossed the order
        else:
            known.order_done()
            known.entry = replace(entry, max_tokens=entry.max_tokens or known.entry.max_tokens)
        known.overflowing_since = self._now
        self._answer_overflows(runner)

    def _parked(self, event: events.RequestParked) -> None:
        runner, sequence = self._find(event.instance, event.request, event.epoch)
        if runner is None or sequence is None:
            return
        entry = sequence.entry
        times = entry.parked_times if sequence.freeing else entry.parked_times + 1
        sequence.entry = replace(
            entry, pages=event.wanted, pages_used=0, state=SequenceState.PARKED, parked_times=times
        )
        sequence.parked_at = self._now
        sequence.method = event.method
        sequence.order_done()
        sequence.overflowing_since = None
        self._tell_parked(runner, [sequence])
        self._answer_overflows(runner)

    def _resumed(self, event: events.RequestResumed) -> None:
        runner, sequence = self._find(event.instance, event.request, event.epoch)
        if runner is None or sequence is None:
            return
        sequence.entry = replace(sequence.entry, pages=event.pages, state=SequenceState.WAITING)
        sequence.order_done()
        self._effects.append(effects.ReportResumed(event.instance, event.request, event.epoch, event.pages))

    def _ended(self, event: events.RequestEnded) -> None:
        runner, sequence = self._find(event.instance, event.request, event.epoch)
        if runner is None or sequence is None:
            return
        del runner.sequences[event.request]
        self._answer_overflows(runner)

    # ----------------------------------------------------------------------------------------------------- scheduler

    def _scheduler_connected(self, event: events.SchedulerConnected) -> None:
        self._hear_term(event.scheduler, event.term)
        parked = [
            effects.ReportParked(runner.instance, one.entry.request, one.entry.epoch, one.entry.pages, one.method)
            for runner in self.runners.values()
            for one in runner.sequences.values()
            if one.parked
        ]
        pools = sorted({runner.identity.pool for runner in self.runners.values()})
        self._effects += [effects.ReportOvercommit(pool, self.policy.overcommit) for pool in pools]
        self._effects.append(effects.ReportAllParked(tuple(parked)))

    def _term_raised(self, event: events.TermRaised) -> None:
        self._hear_term(event.scheduler, event.term)

    def _scheduler_gone(self, event: events.SchedulerDisconnected) -> None:
        self._schedulers.pop(event.scheduler, None)
        if not self.has_leader and self._alone_since is None:
            self._alone_since = self._now

    def _hear_term(self, scheduler: int, term: int) -> None:
        self._schedulers[scheduler] = term
        self.highest_term = max(self.highest_term, term)
        if self.has_leader:
            self._alone_since = None

    def _resumable(self, event: events.Resumable) -> None:
        if event.term < self.highest_term:
            return  # of a ledger that no longer counts
        runner, sequence = self._find(event.instance, event.request, event.epoch)
        if runner is None or sequence is None:
            return  # its runner's report will tell the scheduler
        entry = sequence.entry
        if not sequence.parked:
            self._effects.append(effects.ReportResumed(event.instance, entry.request, entry.epoch, entry.pages))
        elif event.pages != entry.pages:
            # It asks for another promise than the scheduler wrote down: let it look again.
            self._tell_parked(runner, [sequence])
        else:
            self._resume(runner, sequence)

    # ---------------------------------------------------------------------------------------------------------- time

    def _tick(self, _event: events.Tick) -> None:
        if not self.has_leader and self._alone_since is None:
            self._alone_since = self._now
        for runner in list(self.runners.values()):
            self._watch_health(runner)
            if runner.connected:
                self._answer_overflows(runner)
                self._resume_without_scheduler(runner)

    def _watch_health(self, runner: WatchedRunner) -> None:
        silent = self._now - runner.heard_at
        if not runner.connected and silent > 10 * self.policy.heartbeat:
            del self.runners[runner.instance]
            return
        if runner.hung_because:
            if self._now - runner.condemned_at > 2 * self.policy.heartbeat:
                self._mark_unhealthy(runner, runner.hung_because, hung=True)
            return
        if runner.silent:
            return
        if silent > self.policy.heartbeat:
            self._mark_unhealthy(runner, f"no word for {silent:.1f} seconds", hung=False)
            return
        still = self._now - runner.progress.moved_at
        patience = max(self.policy.hang, self.policy.hang_steps * runner.progress.slowest_step)
        if still > patience:
            self._mark_unhealthy(runner, f"its engine has work and took no step for {still:.1f} seconds", hung=True)

    def _mark_unhealthy(self, runner: WatchedRunner, why: str, *, hung: bool) -> None:
        self._effects.append(effects.ReportRunnerLost(runner.identity, why, hung, again=runner.unhealthy))
        runner.condemned_at = self._now
        if hung:
            runner.hung_because = why
        else:
            runner.silent = True

    # ------------------------------------------------------------------------------------------------------- deciding

    def _answer_overflows(self, runner: WatchedRunner) -> None:
        """Answer every sequence that is about to reach its promise, the longest waiting first."""
        if not runner.connected or runner.unhealthy:
            return
        waiting = [
            one
            for one in runner.sequences.values()
            if one.overflowing_since is not None
            and not one.parked
            and not one.order_pending(self._now, self.policy.order_timeout)
        ]
        for one in sorted(waiting, key=lambda one: (one.overflowing_since, one.arrival)):
            if one.parked or one.order_pending(self._now, self.policy.order_timeout):
                continue  # chosen as the victim of one before it
            if one.entry.pages >= runner.max_pages(one.entry):
                one.overflowing_since = None
                continue
            match decide(runner, one, self._now, self.policy.order_timeout):
                case ExtendTo(pages):
                    self._extend(runner, one, pages)
                case ParkVictim(victim, doubled):
                    self._park(runner, victim, doubled)

    def _extend(self, runner: WatchedRunner, sequence: TrackedRequest, pages: int) -> None:
        entry = sequence.entry
        self._effects.append(effects.Extend(runner.instance, entry.request, entry.epoch, entry.pages, pages))
        self._effects.append(effects.ReportPromise(runner.instance, entry.request, entry.epoch, pages))
        sequence.entry = replace(entry, pages=pages)
        sequence.order(self._now)
        sequence.overflowing_since = None

    def _park(self, runner: WatchedRunner, sequence: TrackedRequest, doubled: int) -> None:
        entry = sequence.entry
        method = cheapest(runner, sequence, self.policy.park_method)
        self._effects.append(effects.Park(runner.instance, entry.request, entry.epoch, entry.pages, doubled, method))
        if method == "swap":
            runner.host_bytes_free -= entry.pages_used * runner.capacity.page_bytes
        sequence.entry = replace(entry, parked_times=entry.parked_times + 1)
        sequence.order(self._now, freeing=entry.pages)

    def _resume(self, runner: WatchedRunner, sequence: TrackedRequest) -> None:
        entry = sequence.entry
        self._effects.append(effects.Resume(runner.instance, entry.request, entry.epoch, entry.pages))
        sequence.order(self._now)

    def _resume_without_scheduler(self, runner: WatchedRunner) -> None:
        """No scheduler: nothing may hang, so parked requests come back when there is room to spare."""
        if self._alone_since is None or self._now - self._alone_since < self.policy.resume_without_scheduler:
            return
        parked = sorted(
            (one for one in runner.sequences.values() if one.parked),
            key=lambda one: (one.entry.request_class, one.arrival),
        )
        spare = runner.free - sum(
            one.entry.pages for one in parked if one.order_pending(self._now, self.policy.order_timeout)
        )
        margin = max(1, int(self.policy.resume_margin * runner.capacity.pages))
        for one in parked:
            if one.order_pending(self._now, self.policy.order_timeout):
                continue
            if self._now - one.parked_at < self.policy.resume_without_scheduler:
                return
            idle = runner.promised == 0
            if one.entry.pages + (0 if idle else margin) > spare:
                return  # the first in line goes first, however long that takes
            spare -= one.entry.pages
            self._resume(runner, one)

    # ---------------------------------------------------------------------------------------------------- bookkeeping

    def _tell_parked(self, runner: WatchedRunner, sequences: Iterable[TrackedRequest]) -> None:
        self._effects += [
            effects.ReportParked(runner.instance, one.entry.request, one.entry.epoch, one.entry.pages, one.method)
            for one in sequences
        ]

    def _find(
        self, instance: InstanceName, request: RequestId, epoch: int
    ) -> tuple[WatchedRunner | None, TrackedRequest | None]:
        runner = self.runners.get(instance)
        if runner is None:
            return None, None
        sequence = runner.sequences.get(request)
        return runner, sequence if sequence is not None and sequence.entry.epoch == epoch else None


_HANDLERS: dict[type, Callable[[Supervisor, Any], None]] = {
    events.RunnerConnected: Supervisor._runner_connected,
    events.RunnerDisconnected: Supervisor._runner_disconnected,
    events.MemoryReported: Supervisor._memory_reported,
    events.OverflowAnnounced: Supervisor._overflow_ahead,
    events.RequestParked: Supervisor._parked,
    events.RequestResumed: Supervisor._resumed,
    events.RequestEnded: Supervisor._ended,
    events.SchedulerConnected: Supervisor._scheduler_connected,
    events.TermRaised: Supervisor._term_raised,
    events.SchedulerDisconnected: Supervisor._scheduler_gone,
    events.Resumable: Supervisor._resumable,
    events.Tick: Supervisor._tick,
}
