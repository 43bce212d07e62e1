"""Which runners the operator wants empty. The operator declares the whole set; a runner that is no longer in it takes
work.

The set may name runners that are not attached, for example just after the scheduler has started. A runner's own
shutdown is kept apart from the set, since it is never taken back."""

from math import inf

from motet.domain import InstanceName
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.parked_requests import on_capacity_freed
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.runners import Drain, Runner
from motet_scheduler.policy.state import SchedulerState


class Drains:
    def __init__(self, state: SchedulerState, lifecycle: RequestLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._declared: dict[InstanceName, Drain] = {}
        self._revision = 0

    def declared(self, event: events.DrainsDeclared) -> None:
        """A drain keeps its first deadline for as long as it stays in the set."""
        before, self._declared = self._declared, {}
        self._revision = event.revision
        for requested in event.drains:
            instance = InstanceName(requested.runner.instance)
            drain = before.get(instance)
            if drain is None or not drain.may_be(requested.runner.incarnation):
                drain = Drain(requested.runner, self._state.now + requested.deadline)
            drain.runner = requested.runner
            drain.over = False  # report again which of them are empty
            self._declared[instance] = drain
        for runner in self._state.runners.values():
            was = runner.requested_drain
            if was is not None and not runner.attached and runner.empty:
                continue  # it left because it was drained; if it attaches again, it gets a new order
            runner.requested_drain = self._drain_of(runner)
            if (was is None) != (runner.requested_drain is None):
                self._send(runner)
                self._state.runner_changed(runner)
                on_capacity_freed(self._state, runner)
        self._end()

    def attached(self, runner: Runner) -> None:
        runner.requested_drain = self._drain_of(runner)
        self._send(runner)

    def shutting_down(self, event: events.RunnerShuttingDown) -> None:
        runner = self._state.current(event.instance, event.incarnation)
        if runner is not None and runner.shutdown_drain is None:
            runner.shutdown_drain = Drain(runner.identity, self._state.now + event.deadline)
            self._state.runner_changed(runner)

    def send_all(self, _event: events.TermRaised) -> None:
        for runner in self._state.runners.values():
            self._send(runner)

    def look_from(self) -> float:
        """A runner that is to become empty may get requests meanwhile, from gateways that connect again."""
        waits = any(runner.drain is not None for runner in self._state.runners.values())
        return -inf if waits or any(not drain.over for drain in self._declared.values()) else inf

    def look(self) -> None:
        for runner in self._state.runners.values():
            drains = (drain for drain in (runner.requested_drain, runner.shutdown_drain) if drain is not None)
            if any(self._state.now >= drain.deadline_at for drain in drains):
                self._lifecycle.move_everything(runner, "its runner is being stopped")
        self._end()

    def _drain_of(self, runner: Runner) -> Drain | None:
        drain = self._declared.get(runner.instance)
        return drain if drain is not None and drain.may_be(runner.identity.incarnation) else None

    def _send(self, runner: Runner) -> None:
        if not runner.attached:
            return  # it gets the order when it attaches
        if runner.requested_drain is None:
            self._state.emit(effects.TakeWork(runner.instance))
        else:
            left = max(0.0, runner.requested_drain.deadline_at - self._state.now)
            self._state.emit(effects.DrainRunner(runner.instance, left))

    def _end(self) -> None:
        for instance, drain in self._declared.items():
            if not drain.over and self._holds_nothing(instance, drain):
                drain.over = True
                self._state.emit(effects.ReportDrained(drain.runner, self._revision))

    def _holds_nothing(self, instance: InstanceName, drain: Drain) -> bool:
        runner = self._state.runners.get(instance)
        if runner is None:
            # Unknown or forgotten. After a start, a runner of the previous scheduler has this long to attach.
            return self._state.now >= self._state.attached_by
        if not drain.may_be(runner.identity.incarnation):
            return True  # a new process has replaced it
        return runner.attached and runner.empty
