"""Which runners the operator wants empty. It declares the whole set, so a drain ends by no longer being in it.

The set is about runners that are here and about runners that are not: one may be on its way back to a scheduler that
has just started. What a runner says about its own end is kept apart: nobody takes that back.
"""

from motet.domain import InstanceName
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.request_lifecycle import RequestLifecycle, on_capacity_freed
from motet_scheduler.policy.runners import Drain, Runner
from motet_scheduler.policy.state import SchedulerState


class Drains:
    def __init__(self, state: SchedulerState, lives: RequestLifecycle) -> None:
        self._state = state
        self._lives = lives
        self._began_at = state.now
        self._declared: dict[InstanceName, Drain] = {}
        self._revision = 0

    def declared(self, event: events.DrainsDeclared) -> None:
        """A drain keeps its first deadline for as long as it stays in the set."""
        before, self._declared = self._declared, {}
        self._revision = event.revision
        for asked in event.drains:
            instance = InstanceName(asked.runner.instance)
            drain = before.get(instance)
            if drain is None or not drain.may_be(asked.runner.incarnation):
                drain = Drain(asked.runner, self._state.now + asked.deadline)
            drain.runner = asked.runner
            drain.over = False  # whoever says the whole set is told again what is empty
            self._declared[instance] = drain
        for runner in self._state.runners.values():
            was = runner.requested_drain
            if was is not None and not runner.attached and runner.empty:
                continue  # it went as it was told to, which is no failure; if it comes back, it is told anew
            runner.requested_drain = self._drain_of(runner)
            if (was is None) != (runner.requested_drain is None):
                self._tell(runner)
                on_capacity_freed(self._state, runner)
        self._end()

    def attached(self, runner: Runner) -> None:
        runner.requested_drain = self._drain_of(runner)
        self._tell(runner)

    def ending(self, event: events.RunnerShuttingDown) -> None:
        runner = self._state.current(event.instance, event.incarnation)
        if runner is not None and runner.shutdown_drain is None:
            runner.shutdown_drain = Drain(runner.identity, self._state.now + event.deadline)

    def tell_all(self, _event: events.TermRaised) -> None:
        for runner in self._state.runners.values():
            self._tell(runner)

    def tick(self) -> None:
        for runner in self._state.runners.values():
            drains = (drain for drain in (runner.requested_drain, runner.shutdown_drain) if drain is not None)
            if any(self._state.now >= drain.deadline_at for drain in drains):
                self._lives.move_everything(runner, "its runner is being stopped")
        self._end()

    def _drain_of(self, runner: Runner) -> Drain | None:
        drain = self._declared.get(runner.instance)
        return drain if drain is not None and drain.may_be(runner.identity.incarnation) else None

    def _tell(self, runner: Runner) -> None:
        if not runner.attached:
            return  # it is told when it comes
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
            # Never seen, or forgotten. One that an earlier scheduler knew is given as long to come back.
            return self._state.now - self._began_at > self._state.policy.forget_runner
        if not drain.may_be(runner.identity.incarnation):
            return True  # its successor has come
        return runner.attached and runner.empty
