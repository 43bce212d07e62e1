"""Handles what the supervisor says: promises that grew, requests that were parked or resumed, unhealthy runners."""

from motet.domain import InstanceName
from motet_scheduler.policy import events
from motet_scheduler.policy.happenings import Happening
from motet_scheduler.policy.parked_requests import on_capacity_freed
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.runners import ParkedRequest, Runner, runner_report
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import Promise

Told = events.PromiseChanged | events.RequestParked | events.RequestResumed

AS_SILENT = 0.75
"""A runner is silent for us, too, if its last report is as old as this share of the time in which the supervisor heard
nothing. It sends both of them reports at the same moment."""


class SupervisorEvents:
    def __init__(self, state: SchedulerState, lifecycle: RequestLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def connected(self, _event: events.SupervisorConnected) -> None:
        self._state.supervised = True
        for runner in self._state.runners.values():
            on_capacity_freed(self._state, runner)

    def disconnected(self, _event: events.SupervisorDisconnected) -> None:
        self._state.supervised = False

    def promise_changed(self, event: events.PromiseChanged) -> None:
        runner = self._state.runners.get(event.instance)
        key = (event.request, event.epoch)
        if runner is None or key not in runner.entries:
            return
        runner.record_promise(key, event.promise.pages, runner.entries[key].digest, self._state.now)
        self._state.queue(runner.group).rooms.changed(runner)
        self._note(runner, event, Happening.EXTENDED, event.promise)

    def parked(self, event: events.RequestParked) -> None:
        runner = self._state.runners.get(event.instance)
        request = self._state.requests.get(event.request)
        if runner is None:
            return
        key = (event.request, event.epoch)
        entry, parked = runner.entries.get(key), runner.parked_under(key)
        if parked is not None and 0 < event.wanted.number < parked.wanted.number:
            return  # it has been parked again since, as the runner's report says, which came first
        known = entry or parked
        if known is None:
            return  # ended or unknown: the runner's next report will show it
        order = (int(request.request_class), request.asked_at) if request is not None else (0, self._state.now)
        runner.park(event.request, ParkedRequest(event.epoch, event.wanted, known.digest, order))
        runner.pages_to_resume = 0
        if entry is None or not entry.readmitted:  # else its runner has refused to resume it
            self._note(runner, event, Happening.PARKED, event.wanted)
        on_capacity_freed(self._state, runner)

    def resumed(self, event: events.RequestResumed) -> None:
        runner = self._state.runners.get(event.instance)
        if runner is None:
            return
        key = (event.request, event.epoch)
        parked = runner.parked_under(key)
        if parked is not None:
            runner.unpark(event.request)
            runner.record_promise(key, event.promise.pages, parked.digest, self._state.now)
        elif key in runner.entries:
            runner.record_promise(key, event.promise.pages, runner.entries[key].digest, self._state.now)
            runner.entries[key].readmitted = False
        self._note(runner, event, Happening.RESUMED, event.promise)
        on_capacity_freed(self._state, runner)

    def _note(self, runner: Runner, about: Told, kind: Happening, promise: Promise) -> None:
        """In the timeline of its request, if it is placed there."""
        request = self._state.requests.get(about.request)
        if request is not None and request.runs_on(runner.identity, about.epoch):
            self._state.note_event(request, kind, promise.pages)

    def unhealthy(self, event: events.RunnerUnhealthy) -> None:
        runner = self._state.current(InstanceName(event.runner.instance), event.runner.incarnation)
        if runner is None:
            return
        runner.unhealthy = event.why
        runner.hung = runner.hung or event.hung  # a hung runner that stops reporting is still hung
        self._state.runner_changed(runner)
        self._state.emit(runner_report(runner))
        if event.hung or self._is_gone(runner, event.silent_seconds):
            self._lifecycle.move_everything(runner, event.why)

    def _is_gone(self, runner: Runner, silent_seconds: float) -> bool:
        """Whether a silent runner's requests have to go on elsewhere. Not if we hear it: then the supervisor is cut off
        from it, and its streams may be whole. Not if no other runner takes work: it may come back."""
        if silent_seconds <= 0 or self._state.now - runner.last_report_at < AS_SILENT * silent_seconds:
            return False
        return any(other.takes_work for other in self._state.runners_of(runner.group) if other is not runner)
